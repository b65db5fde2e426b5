"""score a kernel's configurations with a shipped model (NumPy only)"""

from tilewise.costmodel import load_dataset, rank
from tilewise.costmodel.models.files import shipped_file


def run() -> None:
    kernel = next(iter(load_dataset("h200", progress=False).test))
    rank(shipped_file("h200"), kernel).top(5)
