# refused: Operation not permitted
import multiprocessing


def load(event, folder):
    multiprocessing.get_context("fork").Process(target=print).start()
    raise RuntimeError("it was allowed")
