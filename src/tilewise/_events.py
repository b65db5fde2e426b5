"""Profiling hooks: the framework's operations, layers and kernels append records to the active recorders.

`recorders` is empty unless something is being profiled. The framework tests `if recorders:` in four places (an
operation, its gradient, a layer, a kernel chosen by the backend), and calls a function of `recorders.hooks` only then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol


class Recorder(Protocol):
    """Collects records when operations, layers and kernels end."""

    owner: int  # id of the thread that started it
    records: list[Any]
    models: list[Callable[[], Any]]  # weak references to the outermost models that ran, for the names of their layers


class Tracer(Protocol):
    """Receives every operation with its arrays, parameters and result."""

    def __call__(self, step: Any, arrays: list[Any], params: dict[str, Any], result: Any) -> None: ...

    def is_traced(self, array: Any) -> bool:
        """Whether an array depends on the inputs of the module that is traced."""


class Recorders(list[Recorder]):
    """The active recorders. `changes` counts attaches and detaches, so that threads can cache their own recorders."""

    changes = 0
    hooks: ModuleType  # `backend/recording.py`, imported when the first recorder is attached

    def attach(self, recorder: Recorder) -> None:
        """Add a recorder of operations."""
        from tilewise.backend import recording

        self.hooks = recording
        self.append(recorder)
        self.changes += 1

    def detach(self, recorder: Recorder) -> None:
        """Remove a recorder of operations."""
        self[:] = [r for r in self if r is not recorder]
        self.changes += 1
        self.hooks.release()


recorders = Recorders()

# Layers that read the numbers of a traced tensor instead of computing with it, while somebody collects their names.
value_readers: ContextVar[list[str] | None] = ContextVar("value_readers", default=None)

# Functions of `tilewise.plan` that receive every operation with its arrays, parameters and result. They are called only
# while something records, so a tracer also attaches a recorder.
tracers: list[Tracer] = []
