"""The built-in programs, whose kernels are measured where no shapes are given, and the split a kernel belongs to.

The programs are lists of kernels in files beside this one, written by `python -m tools.workloads`: operations of real
architectures, and shapes drawn around them. No shape is in two splits: kernels of a GPU's built-in programs go by
program, as their architectures are held out whole. A CPU's kernels, and kernels of one's own, go by shape, in an order
that only the shapes' names decide: about a sixth of them each become valid and test. Measured twice, the same list
gives the same splits.
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
# Held out whole: no operation of these architectures, at any batch size, is trained on. The test programs stay what
# they were, so that figures compare from one collection to the next; of what came since, a part is held out as valid.
VALID_ARCHITECTURES = (
    "bert_large", "efficientnet_b0", "whisper_small", "mistral_7b",
    "sweep_b", "rows_b", "narrow_b", "drawn_b", "uneven_b",
)  # fmt: skip
TEST_ARCHITECTURES = ("vit_large", "llama3_8b", "unet", "t5_base", "dlrm", "sweep_c")
_SHORT = 24  # shapes: a list in which a sixth by chance might be none


def built_in_kernels(kind: str, cores: int | None = None) -> list[Kernel]:
    """Every kernel of the collection of a kind of machine, in the order of the programs, on as many threads as `cores`
    (this machine's) allow."""
    content = files("tilewise.tune.workloads").joinpath(f"{kind}.json.gz").read_bytes()
    kernels = (Kernel(item.pop("program"), Problem(item)) for item in json.loads(gzip.decompress(content)))
    available = real_cores() if cores is None else cores
    return [kernel for kernel in kernels if kernel.problem.threads <= available]


def splits_of(kernels: Iterable[Kernel], how: str = "auto", kind: str = "cpu") -> dict[str, str]:
    """The split of each kernel, by name: "auto" as above, all by "shape", all by "program", or all "train"."""
    if how not in HOW:
        raise ConfigurationError(f"Kernels are split {', '.join(HOW[:-1])} or {HOW[-1]}; not {how!r}.")
    given = list(kernels)

    def goes_by_shape(kernel: Kernel) -> bool:
        return how == "shape" or (how == "auto" and (kind == "cpu" or kernel.program == OWN_PROGRAM))

    others = [kernel for kernel in given if not goes_by_shape(kernel)]
    found = {kernel.name: "train" if how == "train" else split_of(kernel.program) for kernel in others}
    known = {kernel.problem.shape_key: found[kernel.name] for kernel in others}
    shapes = {kernel.problem.shape_key for kernel in given} - set(known)
    known |= split_by_shape(shapes)
    return found | {kernel.name: known[kernel.problem.shape_key] for kernel in given if goes_by_shape(kernel)}


def split_by_shape(shapes: Iterable[str]) -> dict[str, str]:
    """train, valid or test for each shape, by its key alone: a sixth each for the last two, the same in every list of
    some size. Of a short list the first few in that order are taken, and of fewer than three shapes none."""
    order = sorted((int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32, key) for key in set(shapes))
    if len(order) < _SHORT:
        count = len(order) // 6 + 1 if len(order) >= 3 else 0
        order = [(0.0 if i < count else 0.2 if i < 2 * count else 1.0, key) for i, (_, key) in enumerate(order)]
    return {key: "test" if place < 1 / 6 else "valid" if place < 1 / 3 else "train" for place, key in order}


def split_of(program: str) -> str:
    """train, valid or test, by the architecture a program belongs to."""
    for split, names in (("valid", VALID_ARCHITECTURES), ("test", TEST_ARCHITECTURES)):
        if any(program == name or program.startswith(f"{name}_") for name in names):
            return split
    return "train"
