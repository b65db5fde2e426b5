"""A list of configurations as arrays, worked out once for a list that is asked about for problem after problem.

A family describes one configuration's tile; handed columns in place of numbers, the same few lines describe all of them
at once. A family that cannot (it compares, or calls `min`) is asked one by one; one that does not say that it
`takes_columns` is tried and compared first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.store.problem import Config, Problem
from tilewise.tune.families.columns import config_row
from tilewise.tune.families.registry import Family

Numbers = npt.NDArray[np.float64]
_PARTS = ("kernel", "output", "input")
_KEPT = 8  # lists that are remembered


def doublings(configs: Sequence[Config], names: Sequence[str]) -> Numbers:
    """Settings as the process compares them, one row a configuration; 0 where it has none of that name."""
    table = np.array([[config.get(name, 0) for name in names] for config in configs], np.float64)
    return np.asarray(np.log2(1.0 + np.abs(table.reshape(len(configs), len(names)))))


class ConfigTable(Sequence[Config]):
    """Configurations as rows of an array with a column for each of `names`; one is made when it is asked for."""

    def __init__(self, names: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        self.names, self.rows = names, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return Config(dict(zip(self.names, self.rows[index].tolist(), strict=True)))


class Space:
    """A list of configurations, what a cost model reads of it, and what the process compares. A family takes it for a
    configuration whose settings are columns, with a row for each of the list."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.configs = configs
        if isinstance(configs, ConfigTable):
            columns = dict(zip(configs.names, configs.rows.T, strict=True))
        else:
            names = {name for config in configs for name in config}
            columns = {name: np.array([c.get(name, 0) for c in configs], np.int64) for name in names}
        self.names = sorted(columns)
        self._columns: Mapping[str, npt.NDArray[np.int64]] = columns
        self._last = np.zeros((0, 0), np.float32)
        self._asked: tuple[Any, ...] = ()  # what `_last` was worked out of
        self._last_bounds: list[Sequence[Any]] = []
        self._tried: dict[str, bool] = {}  # families, and whether they take columns

    @functools.cached_property
    def fields(self) -> Numbers:
        return doublings(self.configs, self.names)

    def size(self, name: str) -> npt.NDArray[np.int64]:
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def scaled(self, weights: Mapping[str, float]) -> Numbers:
        """The settings in doublings, each times its weight (1 where it has none)."""
        if not weights or not self.names:
            return self.fields
        return np.asarray(self.fields * np.array([weights.get(name, 1.0) for name in self.names]))

    def rows(self, family: Family, problem: Problem, own: Sequence[str]) -> npt.NDArray[np.float32]:
        """`config_feat`: the very same array as the last time where nothing in it has changed, so that what was worked
        out of it need not be again."""
        bounds = self._bounds(family, problem)
        asked = (family.name, tuple(own), None if bounds is None else [len(part) for part in bounds])
        if bounds is not None and asked == self._asked and all(map(is_, chain(*bounds), chain(*self._last_bounds))):
            return self._last  # the same columns, bound by bound, as of the problem before
        found = None if bounds is None else self._at_once(family, problem, bounds, own)
        if found is None:
            found = np.array([config_row(family, problem, config, own) for config in self.configs], np.float32)
        if not np.array_equal(self._last, found):
            self._last = found
        self._asked, self._last_bounds = asked, bounds or []
        return self._last

    def _bounds(self, family: Family, problem: Problem) -> list[Sequence[Any]] | None:
        """A tile's bounds, part by part, as columns; None where the family takes none."""
        columns: Any = self
        try:
            if self._tried.get(family.name, True):
                tile: Mapping[str, Sequence[Any]] = family.tile(problem, columns)
                return [tile[part] for part in _PARTS]
        except (TypeError, ValueError, AttributeError, KeyError):
            self._tried[family.name] = False
        return None

    def _at_once(
        self, family: Family, problem: Problem, bounds: Sequence[Sequence[Any]], own: Sequence[str]
    ) -> npt.NDArray[np.float32] | None:
        width = len(_PARTS) * (DIMENSIONS + 2) + len(own)
        found = np.zeros((len(self.configs), width), np.float32, order="F")  # filled and read column by column
        try:
            for number, part in enumerate(bounds):
                _fill(found[:, number * (DIMENSIONS + 2) :], part)
        except (TypeError, ValueError):
            self._tried[family.name] = False
            return None
        for number, name in enumerate(own, start=len(_PARTS) * (DIMENSIONS + 2)):
            if name in self:
                found[:, number] = self.size(name)
        if family.name not in self._tried and not getattr(family, "takes_columns", False):
            every = [config_row(family, problem, config, own) for config in self.configs]
            self._tried[family.name] = np.array_equal(found, np.array(every, np.float32))
        return found if self._tried.get(family.name, True) else None


def _fill(out: npt.NDArray[np.float32], bounds: Sequence[Any]) -> None:
    """The bounds, their sum and their product; all 0 where there are none."""
    for place, bound in enumerate(bounds[:DIMENSIONS]):
        out[:, place] = bound
    if len(bounds):
        total, product = 0, 1
        for bound in bounds:
            total, product = total + bound, product * bound
        out[:, DIMENSIONS], out[:, DIMENSIONS + 1] = total, product


_spaces: list[Space] = []


def space_of(configs: Sequence[Config]) -> Space:
    """The space of a list; remembered where it is a tuple, which nobody changes."""
    if not isinstance(configs, tuple):
        return Space(configs)
    for known in _spaces:
        if known.configs is configs:
            return known
    made = Space(configs)
    _spaces[:] = [made, *_spaces[: _KEPT - 1]]
    return made
