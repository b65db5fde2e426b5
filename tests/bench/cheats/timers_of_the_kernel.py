# refused: Operation not permitted
import signal

# honest

signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
