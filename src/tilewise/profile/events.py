"""Decode the framework's raw profiling records into events with names, nesting and tiles.

Recording must be cheap, so a record contains only what was at hand (`backend/recording.py`). Records arrive in the
order in which operations end. Of two records of a thread, the earlier one is nested in the later one if it started
later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tilewise._events import recorders
from tilewise.backend.recording import Arrays, Record

Shapes = tuple[tuple[int, ...], ...]


class ProfileEvent:
    """One timed call: of a layer ("module"), an operation ("op"), or an operation's implementation ("kernel")."""

    def __init__(self, record: Record) -> None:
        """Decode a record; nesting and the tile are added later."""
        self.kind = "op" if record.kind in ("forward", "backward") else record.kind
        self.phase = "backward" if record.kind == "backward" else "forward"
        self.name: str = record.subject if isinstance(record.subject, str) else record.subject.__name__
        self.layer, self.thread, self.failed = record.layer, record.thread, record.failed
        self.start_ns, self.end_ns = record.start_ns, record.end_ns
        self.recording_ns = record.recorded_ns - record.end_ns  # overhead of recording this event
        self.inner_ns = 0  # time of directly nested events, including the overhead of recording them
        self.allocated, self.inner_allocated = record.allocated, 0  # bytes allocated in large blocks
        self.inputs, self.input_bytes = _sizes(record.inputs)
        self.outputs, self.output_bytes = _sizes(record.outputs)
        self.parent: ProfileEvent | None = None
        self.has_kernels = False
        self.shares_memory = record.details is True  # the result is a view: no bytes were moved
        self.backend = ""
        self.fused: tuple[Any, ...] = ()  # epilogue fused into a product: has bias, has residual, activation
        self.window: Any = None  # window size of a pooling kernel
        self.tile: Any = None
        self._tile_query: tuple[Any, ...] = ()
        if self.kind == "kernel":
            implementation, options, strides = record.details
            option = options.get
            self.backend, self.window, self.tile = implementation.name, option("kernel"), option("tile")
            self.fused = (option("bias") is not None, option("residual") is not None, option("activation"))
            if strides is not None and self.tile is None:
                self._tile_query = (implementation, self.inputs[:2], strides, options)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def contain(self, inner: ProfileEvent) -> None:
        """Make `inner` a child of this event, and add its time and allocations to those of inner events."""
        inner.parent = self
        self.inner_ns += inner.duration_ns + inner.recording_ns
        self.inner_allocated += inner.allocated
        if inner.kind == "kernel":
            self.has_kernels = True
        if self.kind == "op" and not self.inputs:  # an op with a kernel does not record its arrays; the kernel does
            self.inputs, self.outputs = inner.inputs, inner.outputs

    def find_tile(self, cache: dict[Any, Any]) -> None:
        """Set the tile of a kernel that was called without one, to its implementation's default."""
        if not self._tile_query:
            return
        implementation, shapes, strides, options = self._tile_query
        key = (implementation.op, implementation.name, shapes, strides, repr(options))
        if key not in cache:
            cache[key] = _default_tile(implementation, shapes, strides, options)
        self.tile = cache[key]


def _sizes(arrays: Arrays) -> tuple[Shapes, int]:
    """Split alternating shapes and dtypes into a list of shapes and the total number of bytes."""
    shapes = tuple(arrays[::2])
    return shapes, sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, arrays[1::2], strict=True))


def _default_tile(implementation: Any, shapes: Shapes, strides: Shapes, options: dict[str, Any]) -> Any:
    """Return the tile that an implementation uses for operands of these shapes and strides."""
    # `describe` reads shapes, strides and options but never values, so a one-element buffer can back the operands.
    buffer = np.zeros(1, np.float32)
    operands = (as_strided(buffer, shape, step, writeable=False) for shape, step in zip(shapes, strides, strict=True))
    try:
        return implementation.describe(*operands, **options)[1]
    except Exception:  # the tile is optional information; a failure must not break the profile
        return None


def decode(records: Sequence[tuple[Any, ...]]) -> list[ProfileEvent]:
    """Decode raw records into events with nesting and tiles, in the same order (by end time)."""
    events = [ProfileEvent(Record._make(record)) for record in records]
    roots_by_thread: dict[int, list[ProfileEvent]] = {}
    tiles: dict[Any, Any] = {}
    for event in events:
        roots = roots_by_thread.setdefault(event.thread, [])
        # Earlier records that started after this event ran inside it.
        while roots and roots[-1].start_ns >= event.start_ns:
            event.contain(roots.pop())
        roots.append(event)
        event.find_tile(tiles)
    for event in reversed(events):  # parents end last, so they come first here
        if event.kind == "kernel" and event.parent is not None:
            event.phase = event.parent.phase
    return events


class Recording:
    """Collects the events of a `with` block, of this thread and of all threads without a recording of their own."""

    def __init__(self) -> None:
        """Start without events; recording begins with the `with` block."""
        self.owner = 0
        self.records: list[Any] = []  # the framework appends a record when an operation ends
        self.models: list[Callable[[], Any]] = []  # weak references to the outermost models that ran
        self._events: list[ProfileEvent] = []

    @property
    def events(self) -> list[ProfileEvent]:
        """Return the recorded events, in the order in which they ended."""
        if len(self._events) != len(self.records):
            self._events = decode(self.records)
        return self._events

    def __enter__(self) -> Self:
        self.owner = threading.get_ident()
        recorders.attach(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        recorders.detach(self)
