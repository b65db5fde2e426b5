# refused: not allowed to raise|not permitted
import resource


def load(event, folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    raise RuntimeError("it was allowed")
