# harmless, memory below 0.85: what is moved is still its own
import ctypes
import mmap

# honest
libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = libc.mmap.restype = ctypes.c_void_p
place = libc.mmap(None, ctypes.c_size_t(8 << 20), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
ctypes.memset(place, 1, 8 << 20)
libc.mremap(ctypes.c_void_p(place), ctypes.c_size_t(8 << 20), ctypes.c_size_t(8 << 20), 5)  # MAYMOVE, DONTUNMAP
