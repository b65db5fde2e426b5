# refused: Operation not permitted
import mmap


def load(event, folder):
    memory = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTNEED)
    raise RuntimeError("it was allowed")
