"""What earlier runs left on this machine: the choices, and every measurement, in one folder.

Both are files that other processes read and append to. What cannot be read is said and put aside; what was measured for
other problems of a kernel is handed to the search as readings of other tasks: the nearest few.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tilewise.errors import FileFormatError, TilewiseError, UnavailableError
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import ELSEWHERE, Choices, Decision
from tilewise.tune.families.space import doublings
from tilewise.tune.search.gaussian_process import Earlier, Numbers

_PROBLEMS, _READINGS = 12, 20  # the nearest so many, and so many readings of each
Say = Callable[[str], None]
Times = Mapping[Problem, Mapping[Config, float]]


class Memory:
    """The choices of a machine and a version, and the machine's store."""

    def __init__(
        self, folder: Path, machine: Machine, version: str, store_file: Path, say: Say = lambda line: None
    ) -> None:
        self.folder, self.store_file, self._say = folder, store_file, say
        self.choices = Choices(folder, machine.identity, version)
        self._measured: dict[str, tuple[list[int], dict[Problem, dict[Config, float]]]] = {}  # by family; as of when

    def kept(self, problem: Problem, configs: Sequence[Config]) -> Decision | None:
        """The choice for a problem, if the list of configurations still has it."""
        self.choices.refresh()
        return self.choices.get(problem, configs.__contains__)

    def earlier(self, problem: Problem, names: Sequence[str]) -> Earlier | None:
        """Readings of other problems of the same kernel, settings in the order of `names`; None without any."""
        measured = self.measured(problem.family)
        others = [p for p in measured if p != problem and set(p) == set(problem) and len(measured[p]) > 1]
        return earlier_of(problem, {p: measured[p] for p in others}, names)

    def measured(self, family: str) -> Times:
        """Every runtime in the store; read again when the store was written to, by whomever."""
        if not self.store_file.is_file():
            return {}
        stamp, known = self._stamp(), self._measured.get(family)
        if known is None or known[0] != stamp:
            try:
                with self.open_store() as store:
                    known = self._measured[family] = stamp, measurements(store, family)
            except (TilewiseError, OSError) as error:  # it costs what was learned, not the decision
                self._say(str(error))
                return {}
        return known[1]

    def _stamp(self) -> list[int]:
        files = (self.store_file, self.store_file.with_name(f"{self.store_file.name}-wal"))
        stats = [file.stat() for file in files if file.is_file()]
        return [number for stat in stats for number in (stat.st_mtime_ns, stat.st_size)]

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """The machine's store; a damaged one is put aside, said, and begun anew."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"{self.folder} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error
        try:
            store = Store(self.store_file)
        except FileFormatError as error:
            aside = self.store_file.with_suffix(f".damaged-{int(time.time())}")
            self.store_file.replace(aside)
            self._say(f"{error} It was put aside as {aside.name}, and a new one begun.")
            store = Store(self.store_file)
        with store:
            yield store


def measurements(store: Store, family: str) -> dict[Problem, dict[Config, float]]:
    """Every runtime in a store, by problem; where one was measured twice, the faster."""
    found: dict[Problem, dict[Config, float]] = {}
    for kernel in store.kernels():
        if kernel.problem.family == family:
            times = found.setdefault(kernel.problem, {})
            for batch in store.batches(kernel):
                for key, runtime_ns in batch.runtime_ns.items():
                    config = Config.parse(key)
                    times[config] = min(runtime_ns, times.get(config, runtime_ns))
    return found


def earlier_of(problem: Problem, measured: Times, names: Sequence[str]) -> Earlier | None:
    """The readings of the problems nearest in their sizes."""
    here = sizes_of(problem)
    nearest = sorted(measured, key=lambda p: (float(np.square(sizes_of(p) - here).sum()), p.key))[:_PROBLEMS]
    rows = [(number, p, config, ns) for number, p in enumerate(nearest) for config, ns in _some(measured[p])]
    if not rows:
        return None
    return Earlier(
        np.array([number for number, *_ in rows], np.int64),
        np.array([sizes_of(p) for _, p, _, _ in rows]),
        doublings([config for _, _, config, _ in rows], names),
        np.zeros(len(rows)),
        np.log([ns for *_, ns in rows]),
    )


def _some(times: Mapping[Config, float]) -> list[tuple[Config, float]]:
    return list(times.items())[:_READINGS]


def sizes_of(problem: Problem) -> Numbers:
    """A problem's sizes in doublings; words as numbers that differ."""
    return np.array([_size(value) for name, value in problem.items() if name != "family"])


def _size(value: int | str) -> float:
    if isinstance(value, int):
        return float(np.log2(1 + abs(value)))
    return float(sum(ord(letter) * (place + 1) for place, letter in enumerate(value)) % 97) / 24.0
