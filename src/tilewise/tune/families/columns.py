"""Configurations as rows of `config_feat`, the columns that a cost model reads.

First the 24 columns of TpuGraphs (tile bounds of the second operand, of the result and of the first operand), then the
hardware settings by name: every setting that is not a block size. On a CPU the last columns are the number of threads,
whether the configuration is the default, and the features of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.hlo.graph import sequence_features
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.registry import Family

# Columns of CPU kernels that are not settings: the number of threads, and a flag of the default configuration.
THREADS, DEFAULT = "threads", "default"
_OWN_ORDER = (
    "warps", "stages", "group", "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd",
)  # fmt: skip


def own_columns(configs: Sequence[Config]) -> tuple[str, ...]:
    """Settings that are not block sizes: built-in names in their order, then those of plug-ins."""
    names = {name for config in set(configs) for name in config if not name.startswith("block_")}
    return (*(name for name in _OWN_ORDER if name in names), *sorted(names - set(_OWN_ORDER)))


def at_most(size: Any, limit: int) -> Any:
    """Minimum of a bound and a limit, for one configuration or a column of them."""
    return np.minimum(size, limit) if isinstance(size, np.ndarray) else min(size, limit)


def config_row(family: Family, problem: Problem, config: Config, own: Sequence[str]) -> list[int]:
    """Compute one row of `config_feat`; columns that a family does not have are 0."""
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
    """Fill in the columns that do not depend on settings: the machine, the threads and the default's flag."""
    completed, first = rows.copy(order="K"), rows.shape[1] - len(own)
    values = {**machine, THREADS: problem.threads}
    for column, name in enumerate(own, start=first):
        if name in values:
            completed[:, column] = values[name]
        elif name == DEFAULT and default is not None:
            completed[default, column] = 1
    return completed
