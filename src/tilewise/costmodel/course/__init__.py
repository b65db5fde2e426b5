"""What the course's commands are made of: predictions, the download and its unpacking."""
