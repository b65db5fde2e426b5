"""Runs tests with every array that a kernel is given fenced in: `python fenced.py end|start TESTS...`.

A kernel that reads a few floats past its input works as long as something lies there, and fails one day in another
process. Here each array is copied, before a native function sees it, to memory that ends (or starts) exactly at a page
nobody may touch, so that the first byte too far is a segmentation fault. What the kernel wrote goes back to the
caller's array.
"""

import ctypes
import faulthandler
import functools
import mmap
import os
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest

MOST_EXAMPLES = 30  # of a property: the plain run of the same tests draws them all
PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def span(array: np.ndarray) -> int:
    """The bytes from an array's first element to the end of its last; gaps between rows belong to it."""
    return sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize


def fenced(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy with the same strides between two pages without access, flush with one of them."""
    size = span(array)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (base, base + (pages + 1) * PAGE):
        assert protect(page, PAGE, NO_ACCESS) == 0
    offset = PAGE + (pages * PAGE - size if at_end else 0)
    copy = np.ndarray(array.shape, array.dtype, memory, offset, array.strides)
    copy[...] = array
    copy.flags.writeable = array.flags.writeable
    return copy


def can_be_fenced(value: object) -> bool:
    """Plain arrays with something in them, walked forwards, whose elements do not share memory."""
    return (
        type(value) is np.ndarray
        and value.size > 0
        and value.dtype.kind in "fiub"
        and all(stride >= value.itemsize for n, stride in zip(value.shape, value.strides, strict=True) if n > 1)
        and all(stride >= 0 for stride in value.strides)
    )


def fencing(function, at_end: bool, storage: deque | None = None):
    """The function with its arrays fenced in; `kept` holds the copies for objects that go on reading theirs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        copies: list[tuple[np.ndarray, np.ndarray]] = []

        def fence(value):
            if isinstance(value, tuple | list):
                return type(value)(fence(item) for item in value)
            if not can_be_fenced(value):
                return value
            copies.append((value, fenced(value, at_end)))
            return copies[-1][1]

        result = function(*[fence(a) for a in args], **{name: fence(a) for name, a in kwargs.items()})
        if storage is not None:
            storage.extend(copies)
        for original, copy in copies:
            if original.flags.writeable:
                original[...] = copy

        def back(value):
            if isinstance(value, tuple):
                return tuple(back(item) for item in value)
            return next((original for original, copy in copies if value is copy), value)

        return back(result)

    return call


def fence_in(native: ModuleType, at_end: bool) -> None:
    """Every function, and every method of the objects that keep weights."""
    for name, value in list(vars(native).items()):
        if isinstance(value, type):
            for method, function in list(vars(value).items()):
                if callable(function) and (method == "__init__" or not method.startswith("_")):
                    mappings = deque(maxlen=2000) if method == "__init__" else None  # a process may map 65,530 pieces
                    setattr(value, method, fencing(function, at_end, mappings))
        elif callable(value) and not name.startswith("_"):
            setattr(native, name, fencing(value, at_end))


class FewerExamples(hypothesis.settings):
    """Hypothesis' settings with a bound on how many examples a test may ask for."""

    def __init__(self, *parent, **arguments):
        if "max_examples" in arguments:
            arguments["max_examples"] = min(arguments["max_examples"], MOST_EXAMPLES)
        super().__init__(*parent, **arguments)


def main() -> int:
    place, *tests = sys.argv[1:]
    faulthandler.enable()
    sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest` does
    from tilewise import _native

    fence_in(_native, at_end=place == "end")
    hypothesis.settings = FewerExamples  # before a test imports it
    return pytest.main(["-n", "0", "-p", "no:cacheprovider", *tests])


if __name__ == "__main__":
    sys.exit(main())
