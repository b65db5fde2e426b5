"""What is learned about a kernel while it is used: runtimes by key and configuration, and a belief made of them.

The kernel may be anybody's, so nothing is known but the names and numbers it is launched with: the configuration's
meta-parameters, warps and stages, and the values of the key arguments. Both enter in doublings. What was measured for
other keys teaches a new one (see `belief.Memory`), and goes to a store, so the next process goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.errors import TilewiseError
from tilewise.tune.choose.cache import Choice, Choices
from tilewise.tune.choose.scores import Guide, Recollection
from tilewise.tune.choose.tuner import measurements
from tilewise.tune.families.space import space_of
from tilewise.tune.measure.store import Machine, Store
from tilewise.tune.problem import Config, Kernel, Problem, Value
from tilewise.tune.search.gaussian_process import BLIND, Belief, Memory, Numbers, Prior
from tilewise.tune.search.loop import Found, Rule, search, settle

FIRST_SHAPES = 3  # of a kernel nothing is known of, for which twice as much is measured
PROGRAM = "autotuned"
_CLOSE = 0.04
_SURE = 0.01  # expected loss below which a new key is not measured at all


def config_of(settings: Mapping[str, Any]) -> Config:
    """A launch's settings as a configuration: whole numbers as they are, anything else as a switch of its own."""
    values: dict[str, int] = {}
    for name, value in settings.items():
        if isinstance(value, bool | int):
            values[name] = int(value)
        elif value is not None:
            values[f"{name}={value}"] = 1
    return Config(values)


def problem_of(kernel: str, source: str, key: Mapping[str, Any]) -> Problem:
    """A kernel and the values of its key; `source` changes with its code."""
    values: dict[str, Value] = {}
    for name, value in key.items():
        values[re.sub(r"\W", "_", name)] = int(value) if isinstance(value, bool | int) else str(value)
    return Problem({**values, "family": f"{kernel}:{source}"})


class Online:
    """One kernel on one machine. `budget` is how many configurations a new key may cost."""

    def __init__(
        self,
        machine: Machine,
        version: str,
        folder: Path,
        budget: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.machine, self.folder, self.budget, self.say = machine, folder, budget, say
        self.choices = Choices(folder, machine.identity, version)
        for note in self.choices.notes:
            say(note)
        self.measured: dict[Problem, dict[Config, float]] = {}
        self._read: set[str] = set()

    def kept(self, problem: Problem, configs: Sequence[Config]) -> Config | None:
        """The choice that is on disk, if the list of configurations still has it."""
        found = self.choices.get(problem, configs.__contains__)
        return found.config if found is not None else None

    def tune(
        self,
        problem: Problem,
        configs: Sequence[Config],
        measure: Callable[[int], float | None],
        guide: Guide | None = None,
        scores: Numbers | None = None,
    ) -> Found:
        """The best configuration for a new key: without measuring where the belief is sure, else with a few."""
        self._recall(problem.family)
        known = [p for p in self.measured if p.family == problem.family and p != problem]
        prior, rule = self._terms(guide, len(known), len(configs))
        memory = self._memory(problem, configs, guide, scores)
        start = scores if scores is not None else np.zeros(len(configs))
        belief = Belief(start, space_of(configs).scaled(prior), prior, memory, _sizes(problem))
        belief.explores = guide is None and len(known) < FIRST_SHAPES
        if memory is not None and len(known) >= FIRST_SHAPES:
            loss, first = belief.first_loss()
            if loss < _SURE:
                return Found(first, None, True, f"sure from {len(memory)} earlier measurements", [])
        times: dict[int, float] = {}

        def take(index: int) -> float | None:
            runtime_ns = measure(index)
            if runtime_ns is not None and 0 < runtime_ns < math.inf:
                times[index] = runtime_ns
            return runtime_ns

        found = search(belief, take, rule, patience=min(rule.budget, 5 if guide is None else 1))
        best = settle(belief, lambda few: [take(index) for index in few], _CLOSE)
        if best is not None:
            found = dataclasses.replace(found, best=best, runtime_ns=math.exp(belief.measured[best]))
        self._keep(problem, configs, times)
        if found.best is not None and found.runtime_ns is not None:
            choice = Choice(problem, configs[found.best], found.runtime_ns, found.measurements, found.sure)
            with self._forgiving():
                self.choices.put(choice)
        return found

    def _terms(self, guide: Guide | None, known: int, configs: int) -> tuple[Prior, Rule]:
        if guide is not None:
            return guide.prior, dataclasses.replace(guide.rule, budget=self.budget)
        budget = 2 * self.budget
        budget *= 2 if known < FIRST_SHAPES else 1
        return BLIND, Rule(0.005, 0.0, min(budget, configs))

    def _memory(
        self, problem: Problem, configs: Sequence[Config], guide: Guide | None, scores: Numbers | None
    ) -> Memory | None:
        if guide is not None and scores is not None:
            return None  # the model's errors on another shape are its own; a shipped model knows more than they tell
        blind = guide or Guide(None, BLIND, Rule(), "")
        known = Recollection(blind, None, self.measured, lambda other: configs, most_shapes=12, most_rows=240)  # type: ignore[arg-type]
        return known.near(problem)

    @contextlib.contextmanager
    def _forgiving(self) -> Any:
        """What cannot be kept is said, and costs the next process its measurements, not this one its run."""
        try:
            yield
        except (TilewiseError, OSError) as error:
            self.say(str(error))

    def _store(self) -> Store:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{self.machine.kind}-{self.machine.identity}").strip("-").lower()
        return Store(self.folder / f"{name}.sqlite")

    def _recall(self, family: str) -> None:
        if family in self._read:
            return
        self._read.add(family)
        with self._forgiving(), self._store() as store:
            for problem, times in measurements(store, family).items():
                self.measured.setdefault(problem, {}).update(times)

    def _keep(self, problem: Problem, configs: Sequence[Config], times: Mapping[int, float]) -> None:
        if not times:
            return
        self.measured.setdefault(problem, {}).update({configs[index]: ns for index, ns in times.items()})
        with self._forgiving(), self._store() as store:
            run = store.begin(self.machine, 0, {"autotune": True})
            rows = [(configs[index], ns) for index, ns in times.items()]
            store.add_batch(run, Kernel(PROGRAM, problem), 0, min(times.values()), rows)


def _sizes(problem: Problem) -> Numbers:
    from tilewise.tune.choose.scores import shape_fields

    return shape_fields(problem)
