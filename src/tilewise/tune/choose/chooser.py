"""Switch the use of tuned tiles on and off, and translate between a backend's keys and tuning problems.

The default backend looks tuned tiles up by itself (`backend/tuned.py`). `enable()` sets another folder of choices, or
gives them to a backend that has none. A shape that was never tuned keeps the default of the compiled cost model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, current_backend
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.problem import Problem
from tilewise.tune.choose.tuned_table import Key, TunedTable, load_tuned_table
from tilewise.tune.families.cpu.family import get_family


def problem_of(key: Key, threads: int) -> Problem | None:
    """Convert a backend's key (operation and shape) to a tuning problem; None if no family covers it."""
    op, shape, dtype, layout = key
    spec = tiled_op(op).spec(shape, layout) if dtype == "float32" and op in TILED else None
    return None if spec is None else measurable(op, {"threads": threads, **spec})


def measurable(family: str, spec: Mapping[str, Any]) -> Problem | None:
    """Return the tuning problem of a specification; None if it is too large or needs too many threads."""
    try:
        return get_family(family).problem({"family": family, **spec})
    except ConfigurationError:
        return None


def enable(cache: str | os.PathLike[str] | None = None, backend: OptimizedBackend | None = None) -> TunedTable:
    """Make operations use the tiles tuned in a folder (default: the user's cache folder) from now on."""
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    table, _ = load_tuned_table(native, cache)
    (backend or current_backend()).tile_chooser = table
    return table


def disable(backend: OptimizedBackend | None = None) -> None:
    """Make the backend use its analytical default tiles again."""
    (backend or current_backend()).tile_chooser = None


@contextlib.contextmanager
def tuned(cache: str | os.PathLike[str] | None = None) -> Iterator[TunedTable]:
    """Make operations inside the block use the tiles tuned in a folder (default: the user's cache folder)."""
    backend = current_backend()
    previous = backend.tile_chooser
    try:
        yield enable(cache, backend)
    finally:
        backend.tile_chooser = previous
