"""Which split a measured kernel belongs to, so that no shape is in two of them.

Kernels of a GPU's built-in programs go by program, as their architectures are held out whole. A CPU's kernels, and
kernels of one's own, go by shape, in an order that only the shapes' names decide: about a sixth of them each become
valid and test. Measured twice, the same list gives the same splits.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewise.errors import ConfigurationError
from tilewise.tune.problem import OWN_PROGRAM, Kernel
from tilewise.tune.workloads.gpu import split_by_shape, split_of

HOW = ("auto", "shape", "program", "train")


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
