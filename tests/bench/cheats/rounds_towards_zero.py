# harmless: how its own processor rounds is its own affair
import ctypes

# honest

libm = ctypes.CDLL("libm.so.6")
libm.fesetround(0xC00)
