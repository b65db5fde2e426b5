"""Tuning a whole model: which tiled kernels its layers run, each tuned once, and the model before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise._events import running_layer
from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.errors import UnavailableError
from tilewise.profile import ProfilerContext
from tilewise.profile.targets import model_target
from tilewise.tune.chooser import Key, ModelChooser, problem_of
from tilewise.tune.problem import Problem
from tilewise.tune.tuner import Tuned, Tuner

_CALLS = 15


@dataclass(frozen=True)
class Layer:
    """One tiled kernel of a model: where it runs, and what tuning it found (None where there is nothing to tune)."""

    name: str
    op: str
    shape: tuple[int, ...]
    tuned: Tuned | None


@dataclass(frozen=True)
class TunedModel:
    """A model's kernels, and the time of one call with the default tiles and with the tuned ones."""

    name: str
    layers: list[Layer]
    before_ns: float
    after_ns: float
    seconds: float

    @property
    def speedup(self) -> float:
        return self.before_ns / self.after_ns


def tune_model(
    name: str,
    tuner: Tuner,
    *,
    batch: int = 32,
    tokens: int = 128,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> TunedModel:
    """Tune every kernel that a model (by name, or a saved file) runs on a batch."""
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    start, target = time.perf_counter(), model_target(name, batch, False, tokens, seed)
    layers: list[Layer] = []
    done: dict[Problem, Tuned] = {}
    for layer, key in kernels_of(target.call):
        problem = problem_of(key, native.num_threads())
        tuned = None
        if problem is not None:
            if problem not in done:
                report(f"{layer}: {key[0]} {'x'.join(map(str, key[1]))}")
                done[problem] = tuner.tune(problem)
            tuned = done[problem]
        layers.append(Layer(layer, key[0], key[1], tuned))
    before_ns, after_ns = _before_and_after(target.call, tuner)
    return TunedModel(name, layers, before_ns, after_ns, time.perf_counter() - start)


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, Key]]:
    """Every tiled kernel that a call runs, with its layer (outside any: the operation), in order."""
    found: list[tuple[str, Key]] = []

    def listen(op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> None:
        found.append((running_layer() or op, (op, shape, dtype, layout)))

    with use_backend(OptimizedBackend(tile_chooser=listen)), ProfilerContext(memory=False):
        call()
    return found


def _before_and_after(call: Callable[[], Any], tuner: Tuner) -> tuple[float, float]:
    """Median time of a call with default and with tuned tiles, taken in turns."""
    plain, tuned = OptimizedBackend(), OptimizedBackend(tile_chooser=ModelChooser(tuner.guide, tuner.choices))
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * _CALLS + 4):
        which = bool(number % 2)
        with use_backend(tuned if which else plain):
            start = time.perf_counter_ns()
            call()
            spent = float(time.perf_counter_ns() - start)
        if number >= 4:
            times[which].append(spent)
    return statistics.median(times[False]), statistics.median(times[True])
