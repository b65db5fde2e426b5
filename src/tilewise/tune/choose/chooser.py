"""The framework's tile chooser: a tuned tile, else the model's first choice without measuring, else the default.

`enable()` sets it on the current backend; the backend does not know where tiles come from. A shape with a known tile
costs one table lookup inside the compiled call. A new shape costs about a millisecond, once, after several milliseconds
were spent computing it (`CpuDevice.candidates` lists the candidates, `decide` selects). Integer products use a tuned
tile or their default; the model does not rank them.

The chooser is opt-in: a program that does not enable it loads no model and pays for no lookup.
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
from tilewise.tune.choose.cache import ChoiceFile
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import ModelScores, file_scores, shipped_scores
from tilewise.tune.choose.tuned_table import Key, TunedTable
from tilewise.tune.families.cpu.family import get_family, tile_for
from tilewise.tune.measure.cpu.device import MIN_WORK, CpuDevice

# Multiplications before a shape is ranked: about 5 ms of work. Ranking takes 0.5 to 1 ms, so a program whose
# shapes hardly repeat becomes at most a fifth slower. With several threads the same work takes less time, and ranking
# up to 3 ms between calls that keep them busy, so the limit is higher.
_WARM_UP, _WARM_UP_THREADED = 250_000_000, 2_000_000_000
_MAX_RANKED_SHAPES = 4096  # entries of the table of ranked shapes; arbitrary
Situation = tuple[int, str, Key]  # threads, instruction set, key


class ModelChooser(TunedTable):
    """A tuned table whose fallback ranks new shapes with a cost model.

    `ranked_shapes` counts the shapes that were ranked, `replaced_defaults` those whose default tile was replaced.
    """

    min_work = MIN_WORK

    def __init__(self, model: ModelScores | None, choices: ChoiceFile | None = None) -> None:
        if native is None:
            raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
        super().__init__(native, choices.all() if choices is not None else [], self._ranked_tile)
        self._device, self.model = CpuDevice(), model
        self.ranked_shapes = self.replaced_defaults = 0
        self._lock = threading.Lock()  # guards the counts and the ranked tiles; ranking runs outside it
        self._ranked: dict[Situation, Any] = {}

    @property
    def warm_up(self) -> int:  # type: ignore[override]
        """Multiplications a shape must have computed before it is ranked."""
        return _WARM_UP if self._native.num_threads() == 1 else _WARM_UP_THREADED

    def _ranked_tile(self, key: Key) -> Any:
        """Rank a shape once per thread count and instruction set; later calls return the stored tile."""
        situation = (self._native.num_threads(), self._native.isa(), key)
        if situation in self._ranked:
            return self._ranked[situation]
        tile = self._choose(key, situation[0])
        with self._lock:
            self.ranked_shapes += 1
            self.replaced_defaults += tile is not None
            if len(self._ranked) >= _MAX_RANKED_SHAPES:
                self._ranked.pop(next(iter(self._ranked)))
            self._ranked[situation] = tile
        return tile

    def _choose(self, key: Key, threads: int) -> Any:
        """Choose a tile with the model; None for the default."""
        if self.model is None or (key[0] == "conv2d" and "winograd" not in self.model.columns):
            return None
        problem = problem_of(key, threads)
        if problem is None:
            return None
        device = self._device
        problem = device.problem(problem)  # on one thread if it is too small to share, as the tuner chooses for it
        candidates = device.candidates(problem)
        scores = self.model.rank(problem, candidates) if len(candidates) > 1 else None
        decision = decide(problem, candidates, scores, usable=lambda config: device.runs(problem, config))
        return tile_for(key[0], decision.config) if decision.source == "model" else None


def problem_of(key: Key, threads: int) -> Problem | None:
    """Convert a backend key to a tuning problem; None if no family covers it."""
    op, shape, dtype, layout = key
    spec = tiled_op(op).spec(shape, layout) if dtype == "float32" and op in TILED else None
    return None if spec is None else measurable(op, {"threads": threads, **spec})


def measurable(family: str, spec: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a family; None if it cannot be measured (too large, or too many threads)."""
    try:
        return get_family(family).problem({"family": family, **spec})
    except ConfigurationError:
        return None


def make_chooser(
    cache: str | os.PathLike[str] | None = None, model: str | os.PathLike[str] | None = None
) -> ModelChooser:
    """Make a chooser from the tuner's cache and the shipped model (or a model file)."""
    device = CpuDevice()
    identity = device.machine.identity
    scores = file_scores(os.fspath(model)) if model is not None else shipped_scores(device.collection, identity)[0]
    return ModelChooser(scores, ChoiceFile(cache, identity, device.version))


def enable(
    cache: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    backend: OptimizedBackend | None = None,
) -> ModelChooser:
    """Let the current backend use tuned tiles and the model's choices from now on.

    >>> tilewise.tune.enable()  # doctest: +SKIP
    """
    chooser = make_chooser(cache, model)
    (backend or current_backend()).tile_chooser = chooser
    return chooser


def disable(backend: OptimizedBackend | None = None) -> None:
    """Return the backend to the analytical default tiles."""
    (backend or current_backend()).tile_chooser = None


@contextlib.contextmanager
def tuned(
    cache: str | os.PathLike[str] | None = None, model: str | os.PathLike[str] | None = None
) -> Iterator[ModelChooser]:
    """Apply `enable` inside a `with` statement."""
    backend = current_backend()
    previous = backend.tile_chooser
    try:
        yield enable(cache, model, backend)
    finally:
        backend.tile_chooser = previous
