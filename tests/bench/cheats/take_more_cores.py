# refused: Operation not permitted
import os


def load(event, folder):
    os.sched_setaffinity(0, range(os.cpu_count()))
    raise RuntimeError("it was allowed")
