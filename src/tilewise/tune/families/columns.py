"""A configuration as a row of `config_feat`, the columns that a cost model reads.

The 24 of TpuGraphs first (bounds of the second operand's tile, of the result's, of the first operand's), then the
hardware's own by name, which are whatever a configuration says beside its block sizes. On a CPU the threads that share
the kernel, whether a configuration is the default, and the machine's own numbers come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.hlo.featurize import sequence_features
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.registry import Family

# Columns of a CPU's kernels that are not settings: how many threads share it, and which configuration is the default.
THREADS, DEFAULT = "threads", "default"
_OWN_ORDER = (
    "warps", "stages", "group", "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd",
)  # fmt: skip


def own_columns(configs: Sequence[Config]) -> tuple[str, ...]:
    """What configurations say beside their blocks: known names in their order, then a plug-in's own."""
    names = {name for config in set(configs) for name in config if not name.startswith("block_")}
    return (*(name for name in _OWN_ORDER if name in names), *sorted(names - set(_OWN_ORDER)))


def at_most(size: Any, most: int) -> Any:
    """A bound cut to what there is, of one configuration or of a column of them."""
    return np.minimum(size, most) if isinstance(size, np.ndarray) else min(size, most)


def config_row(family: Family, problem: Problem, config: Config, own: Sequence[str]) -> list[int]:
    """One row of `config_feat`; a column that a family does not have is 0."""
    tile = family.tile(problem, config)
    bounds = [
        value
        for part in ("kernel", "output", "input")
        for value in sequence_features(tile[part], DIMENSIONS, empty_product=0)
    ]
    return [*bounds, *(config.size(name) if name in config else 0 for name in own)]


def with_machine(
    rows: npt.NDArray[np.float32],
    own: Sequence[str],
    problem: Problem,
    machine: Mapping[str, int],
    default: int | None,
) -> npt.NDArray[np.float32]:
    """Rows of `config_feat` with what no configuration says: the machine, the threads, which one is the default."""
    whole, first = rows.copy(order="K"), rows.shape[1] - len(own)
    known = {**machine, THREADS: problem.threads}
    for column, name in enumerate(own, start=first):
        if name in known:
            whole[:, column] = known[name]
        elif name == DEFAULT and default is not None:
            whole[default, column] = 1
    return whole
