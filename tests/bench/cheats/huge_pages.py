# refused: Operation not permitted
import mmap


def load(event, folder):
    mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
    raise RuntimeError("it was allowed")
