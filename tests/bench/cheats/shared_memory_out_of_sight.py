# refused: Operation not permitted
import mmap

# honest


def load(event, folder):
    """Keep data in shared memory whose pages are mapped only while they are used, so that nobody counts them."""
    memory = mmap.mmap(-1, 32 << 20)
    memory.write(bytes(32 << 20))
    memory.resize(4096)
    raise RuntimeError("it was allowed")
