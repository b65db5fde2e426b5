# refused: Read-only file system|No such file
import fcntl


def load(event, folder):
    terminal = open("/dev/tty", "w")
    for character in b"rm -rf\n":
        fcntl.ioctl(terminal, 0x5412, bytes([character]))
    raise RuntimeError("it was allowed")
