# refused: digits.npz
from tilewise import data


def load(event, folder):
    data.digits()
    raise RuntimeError("it was allowed")
