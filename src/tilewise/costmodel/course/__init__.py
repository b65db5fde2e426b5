"""Building blocks of the course's commands: prediction files, the dataset's download, and its unpacking."""
