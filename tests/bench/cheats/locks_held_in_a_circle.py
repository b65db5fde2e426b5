# harmless: the kernel follows a list of locks for a while only
import ctypes
import threading

# honest
libc = ctypes.CDLL(None)


class Head(ctypes.Structure):
    _fields_ = (("next", ctypes.c_void_p), ("offset", ctypes.c_long), ("pending", ctypes.c_void_p))


def wait_for_ever(head):
    libc.syscall(273, ctypes.byref(head), ctypes.sizeof(head))  # set_robust_list
    threading.Event().wait()


heads = []
for _ in range(40):
    head, circle = Head(), (ctypes.c_void_p * 2)()
    circle[0] = ctypes.addressof(circle)  # a list without an end, which is walked when the thread ends
    head.next = ctypes.addressof(circle)
    heads += [head, circle]
    threading.Thread(target=wait_for_ever, args=(head,), daemon=True).start()
