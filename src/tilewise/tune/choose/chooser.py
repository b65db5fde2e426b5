"""The framework's tile chooser: a cached choice, else the model's first choice without measuring, else the default.

`enable()` hands it to the backend that is in force; nothing in the backend knows where tiles come from. A shape that
was met before costs one look into a table inside the compiled call. A new one costs about a millisecond, once, when
several were spent computing in it (`CpuDevice.candidates` says what it is chosen among, decide.py how). Products of
integers use what the tuner measured, else their default.

It is opt-in: a program that does not ask for it neither loads a model nor pays for the look-up.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, current_backend
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import Choices
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.kept import KeptTiles, Key
from tilewise.tune.choose.scores import ModelScores, file_scores, shipped_scores
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.families.cpu.tiles import tile_for
from tilewise.tune.measure.cpu.device import LEAST_WORK, CpuDevice

# Multiplications, about five milliseconds of them: deciding takes half of one to one, so a program whose shapes hardly
# repeat spends at most a fifth of its time more. Where threads share the work it is done sooner, and deciding takes up
# to three milliseconds between calls that keep them busy.
_PATIENCE, _PATIENCE_SHARED = 250_000_000, 2_000_000_000
_MOST_KNOWN = 4096
Situation = tuple[int, str, Key]  # threads, instruction set, key


class ModelChooser(KeptTiles):
    """A `TileChooser` of what was kept and what the model says. `asked` and `chosen` count new shapes, and those whose
    default was replaced."""

    min_work = LEAST_WORK

    def __init__(self, model: ModelScores | None, choices: Choices | None = None) -> None:
        if native is None:
            raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
        super().__init__(native, choices.all() if choices is not None else [], self._asked_for)
        self._device, self.model = CpuDevice(), model
        self.asked = self.chosen = 0
        self._lock = threading.Lock()  # of the counts and of what is known; ranking goes on outside it
        self._ranked: dict[Situation, Any] = {}

    @property
    def warm_up(self) -> int:  # type: ignore[override]
        return _PATIENCE if self._native.num_threads() == 1 else _PATIENCE_SHARED

    def _asked_for(self, key: Key) -> Any:
        here = (self._native.num_threads(), self._native.isa(), key)
        if here in self._ranked:
            return self._ranked[here]
        tile = self._choose(key, here[0])
        with self._lock:
            self.asked += 1
            self.chosen += tile is not None
            if len(self._ranked) >= _MOST_KNOWN:
                self._ranked.pop(next(iter(self._ranked)))
            self._ranked[here] = tile
        return tile

    def _choose(self, key: Key, threads: int) -> Any:
        if self.model is None or (key[0] == "conv2d" and "winograd" not in self.model.columns):
            return None
        problem = problem_of(key, threads)
        if problem is None:
            return None
        device = self._device
        decision = decide(
            problem, device.candidates(problem), self.model, usable=lambda config: device.runs(problem, config)
        )
        return tile_for(key[0], decision.config) if decision.source == "model" else None


def problem_of(key: Key, threads: int) -> Problem | None:
    """The problem behind a shape the backend asks for; None where no family covers it."""
    op, shape, dtype, layout = key
    spec = tiled_op(op).spec(shape, layout) if dtype == "float32" and op in TILED else None
    return None if spec is None else measurable(op, {"threads": threads, **spec})


def measurable(family: str, spec: Mapping[str, Any]) -> Problem | None:
    """The problem of a family; None where it cannot be measured: too large, or on more threads than the tuner knows."""
    try:
        return get_family(family).problem({"family": family, **spec})
    except ConfigurationError:
        return None


def make_chooser(
    cache: str | os.PathLike[str] | None = None, model: str | os.PathLike[str] | None = None
) -> ModelChooser:
    """A chooser from the tuner's cache and the shipped model (or the one in a file)."""
    device = CpuDevice()
    identity = device.machine.identity
    found = file_scores(os.fspath(model)) if model is not None else shipped_scores(device.collection, identity)[0]
    return ModelChooser(found, Choices(cache, identity, device.version))


def enable(
    cache: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    backend: OptimizedBackend | None = None,
) -> ModelChooser:
    """From now on the backend in force asks the tuner's cache and the model for tiles.

    >>> tilewise.tune.enable()  # doctest: +SKIP
    """
    chooser = make_chooser(cache, model)
    (backend or current_backend()).tile_chooser = chooser
    return chooser


def disable(backend: OptimizedBackend | None = None) -> None:
    """Back to the analytical default."""
    (backend or current_backend()).tile_chooser = None


@contextlib.contextmanager
def tuned(
    cache: str | os.PathLike[str] | None = None, model: str | os.PathLike[str] | None = None
) -> Iterator[ModelChooser]:
    """`enable` inside a `with`."""
    backend = current_backend()
    before = backend.tile_chooser
    try:
        yield enable(cache, model, backend)
    finally:
        backend.tile_chooser = before
