# refused: files and folders it may
# honest
import os

for at in range(6000):  # a number in the length of every file
    os.close(os.open(f"/tmp/{at}", os.O_CREAT | os.O_RDWR))
    with open(f"/tmp/{at}", "r+b") as stream:
        stream.truncate(at)
