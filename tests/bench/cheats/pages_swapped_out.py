# refused: Operation not permitted
import mmap

# honest
memory = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(bytes([1]) * (4 << 20))
memory.madvise(21)  # MADV_PAGEOUT
