# refused: no answer within|did not answer within
import os
import time


def load(event, folder):
    os.write(4, b"l")
    os.read(3, 8192)
    while True:
        os.write(4, b"x")
        time.sleep(0.1)
