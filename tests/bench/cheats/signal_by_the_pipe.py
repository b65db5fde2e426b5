# harmless: a signal with the question says no more than the question does
import fcntl
import os
import signal

signal.signal(signal.SIGIO, lambda *_: None)
fcntl.fcntl(3, fcntl.F_SETFL, fcntl.fcntl(3, fcntl.F_GETFL) | os.O_ASYNC)
# honest
