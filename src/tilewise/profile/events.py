"""From the tuples that the framework leaves while it is profiled to events: names, nesting, tiles.

Recording must be cheap, so a record says only what was at hand (`tilewise._events`). Records arrive as things end, so
what a thread left before, and began later, is inside: that is all it takes to find out who contains whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tilewise._events import Arrays, Record

Shapes = tuple[tuple[int, ...], ...]


class Event:
    """Something that ran: a layer ("module"), an operation ("op"), or an implementation of one ("kernel")."""

    def __init__(self, record: Record) -> None:
        self.kind = "op" if record.kind in ("forward", "backward") else record.kind
        self.phase = "backward" if record.kind == "backward" else "forward"
        self.name: str = record.what if isinstance(record.what, str) else record.what.__name__
        self.layer, self.thread, self.failed = record.layer, record.thread, record.failed
        self.start_ns, self.end_ns = record.start_ns, record.end_ns
        self.recording_ns = record.recorded_ns - record.end_ns  # what recording it cost
        self.inner_ns = 0  # part of it spent in events directly inside, and in recording them
        self.allocated, self.inner_allocated = record.allocated, 0  # bytes taken in large blocks meanwhile
        self.inputs, self.input_bytes = _sizes(record.inputs)
        self.outputs, self.output_bytes = _sizes(record.outputs)
        self.parent: Event | None = None
        self.has_kernels = False
        self.shares_memory = record.details is True  # the result is a view: nothing was moved
        self.backend = ""
        self.fused: tuple[Any, ...] = ()  # what rides along with a product: bias?, residual?, activation
        self.window: Any = None  # of a pooling kernel
        self.tile: Any = None
        self._undescribed: tuple[Any, ...] = ()
        if self.kind == "kernel":
            chosen, options, strides = record.details
            ask = options.get
            self.backend, self.window, self.tile = chosen.name, ask("kernel"), ask("tile")
            self.fused = (ask("bias") is not None, ask("residual") is not None, ask("activation"))
            if strides is not None and self.tile is None:
                self._undescribed = (chosen, self.inputs[:2], strides, options)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def contain(self, inner: Event) -> None:
        inner.parent = self
        self.inner_ns += inner.duration_ns + inner.recording_ns
        self.inner_allocated += inner.allocated
        if inner.kind == "kernel":
            self.has_kernels = True
        if self.kind == "op" and not self.inputs:  # it left its arrays to what is inside it
            self.inputs, self.outputs = inner.inputs, inner.outputs

    def find_tile(self, known: dict[Any, Any]) -> None:
        """The tile of a kernel that was given none: the one its implementation takes for such operands."""
        if not self._undescribed:
            return
        chosen, shapes, strides, options = self._undescribed
        key = (chosen.op, chosen.name, shapes, strides, repr(options))
        if key not in known:
            known[key] = _described_tile(chosen, shapes, strides, options)
        self.tile = known[key]


def _sizes(arrays: Arrays) -> tuple[Shapes, int]:
    """The shapes, and the bytes of all together."""
    shapes = tuple(arrays[::2])
    return shapes, sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, arrays[1::2], strict=True))


def _described_tile(chosen: Any, shapes: Shapes, strides: Shapes, options: dict[str, Any]) -> Any:
    # Operands like those that were: the description looks at shapes, strides and options, never at contents.
    nothing = np.zeros(1, np.float32)
    operands = (as_strided(nothing, shape, step, writeable=False) for shape, step in zip(shapes, strides, strict=True))
    try:
        return chosen.describe(*operands, **options)[1]
    except Exception:  # the description is an extra: without it the profile is still right
        return None


def decode(records: Sequence[tuple[Any, ...]]) -> list[Event]:
    """The events, in the order in which they ended."""
    events = [Event(Record._make(record)) for record in records]
    unclaimed: dict[int, list[Event]] = {}
    tiles: dict[Any, Any] = {}
    for event in events:
        waiting = unclaimed.setdefault(event.thread, [])
        while waiting and waiting[-1].start_ns >= event.start_ns:
            event.contain(waiting.pop())
        waiting.append(event)
        event.find_tile(tiles)
    for event in reversed(events):  # whoever contains comes first
        if event.kind == "kernel" and event.parent is not None:
            event.phase = event.parent.phase
    return events
