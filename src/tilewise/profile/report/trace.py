"""Chrome trace format: one complete event ("ph": "X") per recorded event, in microseconds.

Perfetto and chrome://tracing read it. Times are relative to the start of the profile. Threads are numbered from 1 in
the order in which they first appear.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tilewise.profile.events import ProfileEvent
from tilewise.profile.flops import cost_of


def chrome_trace(events: Sequence[ProfileEvent], start_ns: int) -> dict[str, Any]:
    """Convert events to the trace, as plain data for JSON."""
    process = os.getpid()
    threads: dict[int, int] = {}
    ordered = sorted(events, key=lambda e: (e.start_ns, -e.end_ns))
    entries: list[dict[str, Any]] = [_name("process_name", process, 0, "tilewise")]
    for event in ordered:
        number = threads.setdefault(event.thread, len(threads) + 1)
        entries.append(_entry(event, process, number, start_ns))
    entries += [_name("thread_name", process, number, f"thread {number}") for number in threads.values()]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _entry(event: ProfileEvent, process: int, thread: int, start_ns: int) -> dict[str, Any]:
    """Convert one event to a trace entry."""
    return {
        "name": event.layer or event.name if event.kind == "module" else event.name,
        "cat": f"{event.kind},{event.phase}",
        "ph": "X",
        "ts": max(event.start_ns - start_ns, 0) / 1000,
        "dur": event.duration_ns / 1000,
        "pid": process,
        "tid": thread,
        "args": _details(event),
    }


def _details(event: ProfileEvent) -> dict[str, Any]:
    """Shapes, work, backend, tile and memory of an event, for the details pane of the viewer."""
    details: dict[str, Any] = {"layer": event.layer, "kind": event.name}
    if event.inputs:
        details["inputs"] = [list(shape) for shape in event.inputs]
        details["outputs"] = [list(shape) for shape in event.outputs]
    cost = cost_of(event)
    if cost is not None:
        details |= {"flops": cost.flops, "elementwise": cost.elementwise, "bytes": cost.bytes_moved}
    if event.backend:
        details["backend"] = event.backend
    if event.tile is not None:
        details["tile"] = str(event.tile)
    if event.allocated:
        details["allocated"] = event.allocated
    if event.failed:
        details["failed"] = True
    return details


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
