"""What the course's commands are made of: flags, predictions, the download and its unpacking."""
