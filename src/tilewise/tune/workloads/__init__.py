"""The built-in programs, which are measured if no shapes are given, and the assignment of kernels to splits.

The programs are lists of kernels in data files of this package, written by `python -m tools.workloads`: operations of
real architectures, and random shapes similar to them. No shape is in two splits. Built-in GPU kernels are split by
program, so that whole architectures are held out. CPU kernels and users' kernels are split by a hash of their shape:
about a sixth each for validation and test. The splits of a list are therefore reproducible.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from importlib.resources import files

from tilewise._system import real_cores
from tilewise.errors import ConfigurationError
from tilewise.store.problem import OWN_PROGRAM, Kernel, Problem

HOW = ("auto", "shape", "program", "train")
# Architectures that are held out completely: none of their operations, at any batch size, is in the training set. The
# test programs never change, so that results of different collections are comparable.
VALID_ARCHITECTURES = (
    "bert_large", "efficientnet_b0", "whisper_small", "mistral_7b",
    "sweep_b", "rows_b", "narrow_b", "drawn_b", "uneven_b",
)  # fmt: skip
TEST_ARCHITECTURES = ("vit_large", "llama3_8b", "unet", "t5_base", "dlrm", "sweep_c")
_MIN_SHAPES_FOR_HASH = 24  # in shorter lists a random sixth might be empty


def built_in_kernels(kind: str, cores: int | None = None) -> list[Kernel]:
    """List the kernels of a device's built-in programs with at most `cores` threads (default: this machine's)."""
    content = files("tilewise.tune.workloads").joinpath(f"{kind}.json.gz").read_bytes()
    kernels = (Kernel(item.pop("program"), Problem(item)) for item in json.loads(gzip.decompress(content)))
    available = real_cores() if cores is None else cores
    return [kernel for kernel in kernels if kernel.problem.threads <= available]


def splits_of(kernels: Iterable[Kernel], how: str = "auto", kind: str = "cpu") -> dict[str, str]:
    """Assign train, valid or test to each kernel, by name.

    `how` is "shape" (by a hash of the shape), "program" (whole programs), "auto" (the rule of `kind`), or "train".
    """
    if how not in HOW:
        raise ConfigurationError(f"Kernels are split {', '.join(HOW[:-1])} or {HOW[-1]}; not {how!r}.")
    all_kernels = list(kernels)

    def goes_by_shape(kernel: Kernel) -> bool:
        """Tell whether a kernel's shape, not its program, decides its split."""
        return how == "shape" or (how == "auto" and (kind == "cpu" or kernel.program == OWN_PROGRAM))

    others = [kernel for kernel in all_kernels if not goes_by_shape(kernel)]
    split_by_name = {kernel.name: "train" if how == "train" else split_of(kernel.program) for kernel in others}
    split_by_shape_key = {kernel.problem.shape_key: split_by_name[kernel.name] for kernel in others}
    shapes = {kernel.problem.shape_key for kernel in all_kernels} - set(split_by_shape_key)
    split_by_shape_key |= split_by_shape(shapes)
    by_shape = [kernel for kernel in all_kernels if goes_by_shape(kernel)]
    return split_by_name | {kernel.name: split_by_shape_key[kernel.problem.shape_key] for kernel in by_shape}


def split_by_shape(shapes: Iterable[str]) -> dict[str, str]:
    """Assign train, valid or test to each shape by a hash: a sixth each to valid and test.

    In a short list the first few in the order of the hash become valid and test, and none in a list of fewer than
    three.
    """
    order = sorted((int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32, key) for key in set(shapes))
    if len(order) < _MIN_SHAPES_FOR_HASH:
        count = len(order) // 6 + 1 if len(order) >= 3 else 0
        order = [(0.0 if i < count else 0.2 if i < 2 * count else 1.0, key) for i, (_, key) in enumerate(order)]
    return {key: "test" if position < 1 / 6 else "valid" if position < 1 / 3 else "train" for position, key in order}


def split_of(program: str) -> str:
    """Return the split of a program (train, valid or test), by the architecture it belongs to."""
    for split, names in (("valid", VALID_ARCHITECTURES), ("test", TEST_ARCHITECTURES)):
        if any(program == name or program.startswith(f"{name}_") for name in names):
            return split
    return "train"
