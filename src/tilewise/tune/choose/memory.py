"""Choices and measurements of earlier runs on this machine, stored in one folder.

Both are files that other processes read and append to. A damaged store is reported, renamed and replaced by a new one.
The search receives the measurements of the nearest few other problems of a kernel as readings of other tasks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.errors import FileFormatError, TilewiseError, UnavailableError
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import ELSEWHERE, ChoiceFile, Decision
from tilewise.tune.families.space import doublings
from tilewise.tune.search.gaussian_process import Earlier, Numbers

_MAX_PROBLEMS, _MAX_READINGS = 12, 20  # nearest problems, and readings of each; bound the cost of the Gaussian process
Say = Callable[[str], None]
Times = Mapping[Problem, Mapping[Config, float]]


class Memory:
    """Cached choices of one machine and version, and the database of its measurements."""

    def __init__(
        self, folder: Path, machine: Machine, version: str, store_file: Path, say: Say = lambda line: None
    ) -> None:
        """Open the choices in `folder`; the database is opened when it is first used."""
        self.folder, self.machine, self.store_file, self._say = folder, machine, store_file, say
        self.choices = ChoiceFile(folder, machine.identity, version)
        # By family: the stamp of the store when it was read, and its runtimes.
        self._runtimes: dict[str, tuple[list[int], dict[Problem, dict[Config, float]]]] = {}

    def cached_choice(self, problem: Problem, configs: Sequence[Config]) -> Decision | None:
        """Return the cached choice of a problem; None without one, or if it is not among `configs` any more."""
        self.choices.refresh()
        return self.choices.get(problem, configs.__contains__)

    def add(
        self, program: str, decision: Decision, times: Mapping[Config, float], default_ns: float, settings: Any
    ) -> None:
        """Store a measured choice, and the measured nanoseconds (`times`) of all configurations it was made from.

        `program` names the caller, `settings` its timing settings.
        """
        with self.open_store() as store:
            run = store.begin(self.machine, 0, settings)
            store.add_batch(run, Kernel(program, decision.problem), 0, default_ns, list(times.items()))
        self.choices.put(decision)

    def earlier(self, problem: Problem, names: Sequence[str]) -> Earlier | None:
        """Return measurements of similar problems of the same kernel; settings are in the order of `names`."""
        runtimes = self.runtimes(problem.family)
        others = [p for p in runtimes if p != problem and set(p) == set(problem) and len(runtimes[p]) > 1]
        return nearest_readings(problem, {p: runtimes[p] for p in others}, names)

    def runtimes(self, family: str) -> Times:
        """Return all measured runtimes of a family, cached until a process writes to the store."""
        if not self.store_file.is_file():
            return {}
        stamp, cached = self._stamp(), self._runtimes.get(family)
        if cached is None or cached[0] != stamp:
            try:
                with self.open_store() as store:
                    cached = self._runtimes[family] = stamp, measurements(store, family)
            except (TilewiseError, OSError) as error:  # a decision is possible without earlier measurements
                self._say(str(error))
                return {}
        return cached[1]

    def _stamp(self) -> list[int]:
        """Return times and sizes of the database's files, which change with every write to them."""
        files = (self.store_file, self.store_file.with_name(f"{self.store_file.name}-wal"))
        stats = [file.stat() for file in files if file.is_file()]
        return [number for stat in stats for number in (stat.st_mtime_ns, stat.st_size)]

    @contextlib.contextmanager
    def open_store(self) -> Iterator[Store]:
        """Open the machine's measurement store; a damaged one is renamed and replaced by an empty one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"{self.folder} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error
        try:
            store = Store(self.store_file)
        except FileFormatError as error:
            backup = self.store_file.with_suffix(f".damaged-{int(time.time())}")
            self.store_file.replace(backup)
            self._say(f"{error} It was put aside as {backup.name}, and a new one begun.")
            store = Store(self.store_file)
        with store:
            yield store


def measurements(store: Store, family: str) -> dict[Problem, dict[Config, float]]:
    """Return a family's runtimes in ns by problem and configuration, the fastest if one was repeated."""
    runtimes: dict[Problem, dict[Config, float]] = {}
    for kernel in store.kernels():
        if kernel.problem.family == family:
            times = runtimes.setdefault(kernel.problem, {})
            for batch in store.batches(kernel):
                for key, runtime_ns in batch.runtime_ns.items():
                    config = Config.parse(key)
                    times[config] = min(runtime_ns, times.get(config, runtime_ns))
    return runtimes


def nearest_readings(problem: Problem, runtimes: Times, names: Sequence[str]) -> Earlier | None:
    """Return the measurements of the problems with the most similar sizes, by Euclidean distance of log2 sizes."""
    sizes = sizes_of(problem)
    nearest = sorted(runtimes, key=lambda p: (float(np.square(sizes_of(p) - sizes).sum()), p.key))[:_MAX_PROBLEMS]
    rows = [
        (number, p, config, ns)
        for number, p in enumerate(nearest)
        for config, ns in list(runtimes[p].items())[:_MAX_READINGS]
    ]
    if not rows:
        return None
    return Earlier(
        np.array([number for number, *_ in rows], np.int64),
        np.array([sizes_of(p) for _, p, _, _ in rows]),
        doublings([config for _, _, config, _ in rows], names),
        np.zeros(len(rows)),
        np.log([ns for *_, ns in rows]),
    )


def sizes_of(problem: Problem) -> Numbers:
    """Return a problem's parameters as numbers: log2 of sizes, and a fixed arbitrary number for each word."""
    return np.array([_size(value) for name, value in problem.items() if name != "family"])


def _size(value: int | str) -> float:
    """Return log2(1 + value) of a problem's parameter; a word gets a fixed arbitrary number."""
    if isinstance(value, int):
        return float(np.log2(1 + abs(value)))
    return float(sum(ord(letter) * (position + 1) for position, letter in enumerate(value)) % 97) / 24.0
