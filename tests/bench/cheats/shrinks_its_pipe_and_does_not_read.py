# refused: no answer within|did not answer within
import fcntl
import time


def load(event, folder):
    for descriptor in range(3, 9):
        try:
            fcntl.fcntl(descriptor, 1031, 4096)  # F_SETPIPE_SZ
        except OSError:
            pass
    return lambda x: time.sleep(1000)
