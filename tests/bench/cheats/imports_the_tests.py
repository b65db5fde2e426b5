# refused: No module named 'tests'
import tests.bench.site


def load(event, folder):
    raise RuntimeError("it was allowed")
