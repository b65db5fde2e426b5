"""Configurations as rows of `config_feat`, the columns that a cost model reads, computed once for a list.

First the 24 columns of TpuGraphs (tile bounds of the second operand, of the result and of the first operand), then the
hardware settings by name: every setting that is not a block size. On a CPU the last columns are the number of threads,
whether the configuration is the default, and the features of the machine.

A family describes the tile of one configuration. If it receives arrays (one column per setting) instead of numbers, the
same code describes all configurations at once. A family that does not declare `takes_columns` is called once per
configuration, because its code may compare numbers or call `min`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.hlo.graph import sequence_features
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.registry import Family

Numbers = npt.NDArray[np.float64]
_TENSORS = ("kernel", "output", "input")
_MAX_SPACES = 8  # lists in the cache; arbitrary

# Columns of CPU kernels that are not settings: the number of threads, and a flag of the default configuration.
THREADS, DEFAULT = "threads", "default"
_OWN_ORDER = (
    "warps", "stages", "group", "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd",
)  # fmt: skip


def doublings(configs: Sequence[Config], names: Sequence[str]) -> Numbers:
    """Return log2(1 + value) of the settings `names`: (configurations, names); 0 for a missing setting."""
    table = np.array([[config.get(name, 0) for name in names] for config in configs], np.float64)
    return np.asarray(np.log2(1.0 + np.abs(table.reshape(len(configs), len(names)))))


class ConfigTable(Sequence[Config]):
    """A sequence of configurations stored as an array with a column per setting."""

    def __init__(self, names: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        self.names, self.rows = names, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return Config(dict(zip(self.names, self.rows[index].tolist(), strict=True)))


class ConfigSpace:
    """A list of configurations with its features for cost models and for the Gaussian process.

    A family accepts it in place of a configuration; its settings are then arrays with one entry per configuration.
    """

    def __init__(self, configs: Sequence[Config]) -> None:
        """Convert the configurations to one integer column per setting."""
        self.configs = configs
        if isinstance(configs, ConfigTable):
            columns = dict(zip(configs.names, configs.rows.T, strict=True))
        else:
            names = {name for config in configs for name in config}
            columns = {name: np.array([c.get(name, 0) for c in configs], np.int64) for name in names}
        self.names = sorted(columns)
        self._columns: Mapping[str, npt.NDArray[np.int64]] = columns
        self._last = np.zeros((0, 0), np.float32)
        self._last_key: tuple[Any, ...] = ()  # inputs from which `_last` was computed
        self._last_bounds: list[Any] = []

    @functools.cached_property
    def fields(self) -> Numbers:
        """Return log2(1 + value) of all settings: (configurations, settings)."""
        return doublings(self.configs, self.names)

    def size(self, name: str) -> npt.NDArray[np.int64]:
        """Return the values of one setting, (configurations,)."""
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def scaled(self, weights: Mapping[str, float]) -> Numbers:
        """Return the log2 settings, (configurations, settings), times the weight of each (default 1)."""
        if not weights or not self.names:
            return self.fields
        return np.asarray(self.fields * np.array([weights.get(name, 1.0) for name in self.names]))

    def rows(self, family: Family, problem: Problem, own: Sequence[str]) -> npt.NDArray[np.float32]:
        """Compute `config_feat`, the cost model's configuration features: (configurations, columns).

        If nothing has changed since the last call, the same array is returned, so that models can reuse what they
        derived from it. `own` are the settings besides block sizes.
        """
        if not getattr(family, "takes_columns", False):
            return np.array([config_row(family, problem, config, own) for config in self.configs], np.float32)
        columns: Any = self
        tile: Mapping[str, Sequence[Any]] = family.tile(problem, columns)
        bounds = [bound for tensor in _TENSORS for bound in tile[tensor]]
        key = (family.name, tuple(own), *(len(tile[tensor]) for tensor in _TENSORS))
        if key == self._last_key and all(map(is_, bounds, self._last_bounds)):
            return self._last  # all bounds are the same arrays as for the last problem
        first_own = len(_TENSORS) * (DIMENSIONS + 2)
        rows = np.zeros((len(self.configs), first_own + len(own)), np.float32, order="F")  # read by columns
        for number, tensor in enumerate(_TENSORS):
            _write_bounds(rows[:, number * (DIMENSIONS + 2) :], tile[tensor])
        for number, name in enumerate(own, start=first_own):
            if name in self:
                rows[:, number] = self.size(name)
        if not np.array_equal(self._last, rows):
            self._last = rows
        self._last_key, self._last_bounds = key, bounds
        return self._last


def _write_bounds(out: npt.NDArray[np.float32], bounds: Sequence[Any]) -> None:
    """Write a tensor's tile bounds, their sum and their product into `out`; zeros if there are none."""
    for dimension, bound in enumerate(bounds[:DIMENSIONS]):
        out[:, dimension] = bound
    if len(bounds):
        total, product = 0, 1
        for bound in bounds:
            total, product = total + bound, product * bound
        out[:, DIMENSIONS], out[:, DIMENSIONS + 1] = total, product


_spaces: list[ConfigSpace] = []


def space_of(configs: Sequence[Config]) -> ConfigSpace:
    """Return the `ConfigSpace` of a list of configurations; cached for tuples, which are immutable."""
    if not isinstance(configs, tuple):
        return ConfigSpace(configs)
    for space in _spaces:
        if space.configs is configs:
            return space
    space = ConfigSpace(configs)
    _spaces[:] = [space, *_spaces[: _MAX_SPACES - 1]]
    return space


def own_columns(configs: Sequence[Config]) -> tuple[str, ...]:
    """List the settings that are not block sizes: built-in names first, then those of plug-ins."""
    names = {name for config in set(configs) for name in config if not name.startswith("block_")}
    return (*(name for name in _OWN_ORDER if name in names), *sorted(names - set(_OWN_ORDER)))


def config_row(family: Family, problem: Problem, config: Config, own: Sequence[str]) -> list[int]:
    """Compute the row of `config_feat` of one configuration; columns the family lacks are 0."""
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
    """Add to `config_feat` the columns that are equal for all settings: machine, threads, and the default's flag."""
    completed, first = rows.copy(order="K"), rows.shape[1] - len(own)
    values = {**machine, THREADS: problem.threads}
    for column, name in enumerate(own, start=first):
        if name in values:
            completed[:, column] = values[name]
        elif name == DEFAULT and default is not None:
            completed[default, column] = 1
    return completed
