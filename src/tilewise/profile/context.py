"""ProfilerContext: everything the framework does inside a `with`, as tables, data, a trace and a page.

    with ProfilerContext() as profiler:
        model(x)
    print(profiler.report())

Contexts nest: an outer one also sees what happens in an inner one. Threads that profile each see their own work; a
context also sees the threads that have none. While it records, an operation costs some microseconds more, and when
nothing records, one test of an empty list.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tilewise import _events
from tilewise._extension import native
from tilewise._files import write_whole
from tilewise._threads import get_num_threads
from tilewise.errors import ConfigurationError
from tilewise.profile.events import Event, decode
from tilewise.profile.machine import Machine
from tilewise.profile.machine import machine as kept_machine
from tilewise.profile.report.results import NANO, ProfileResults, build


class _LargeBlocks:
    """The count of large allocations, shared by all contexts that are open at a time."""

    lock = threading.Lock()
    users = 0
    started = False

    @classmethod
    def acquire(cls) -> None:
        with cls.lock:
            cls.users += 1
            if cls.users == 1 and native is not None:
                cls.started = bool(native.watch_start(large_only=True))

    @classmethod
    def release(cls) -> None:
        with cls.lock:
            cls.users -= 1
            if cls.users == 0 and cls.started and native is not None:
                native.watch_stop()
                cls.started = False


class ProfilerContext:
    """Records operations, layers and kernels between `with` and its end.

    `machine` are the ceilings to compare with: this machine's, unless given. `memory=False` leaves allocations alone.
    """

    def __init__(self, machine: Machine | None = None, memory: bool = True) -> None:
        self.owner = 0
        self.models: list[Callable[[], Any]] = []
        self._labels: dict[str, str] = {}
        self.records: list[Any] = []  # the framework appends here whatever ends while the context is open
        self._events: list[Event] = []
        self._machine = machine
        self._memory = memory
        self._entered: list[int] = []
        self._seconds = 0.0
        self._starts_ns: list[int] = []  # of every time it was entered
        self._threads = 1
        self._results: tuple[int, float, ProfileResults] | None = None

    @property
    def events(self) -> list[Event]:
        """What was recorded, in the order in which it ended."""
        if len(self._events) != len(self.records):
            self._events = decode(self.records)
        return self._events

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigurationError("this ProfilerContext is open already; make another one to nest them")
        self.owner = threading.get_ident()
        self._threads = get_num_threads()
        if self._memory:
            _LargeBlocks.acquire()
        self._entered.append(_events.now())
        self._starts_ns.append(self._entered[-1])
        _events.recorders.attach(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._seconds += (_events.now() - self._entered.pop()) * NANO
        _events.recorders.detach(self)
        if self._memory:
            _LargeBlocks.release()
        self._label_layers()

    # --- what it saw ---

    def get_results(self) -> ProfileResults:
        """The profile as data; ask after the `with` block. A context entered again adds to what it has."""
        if self._entered:
            raise ConfigurationError("this ProfilerContext is still open; ask for results after its `with` block")
        key = (len(self.records), self._seconds)
        if self._results is None or self._results[:2] != key:
            figures = self._machine or kept_machine()
            built = build(self.events, self._seconds, figures, self._threads, self._starts_ns, self._labels)
            self._results = (*key, built)
        return self._results[2]

    def _label_layers(self) -> None:
        """Dotted name to `7 Conv2d(64→64, 3×3)`, of the models that are still there: nothing is kept alive for this."""
        from tilewise.nn.describe import layer_names

        for model in {id(model): model for model in (reference() for reference in self.models)}.values():
            self._labels |= layer_names(model) if model is not None else {}
        self.models.clear()

    def report(self, rows: int = 15) -> str:
        """Tables by layer and by operation, and what limits the program."""
        from tilewise.profile.report.text import text_report

        return text_report(self.get_results(), rows)

    # --- files ---

    def export_trace(self, path: str | Path) -> Path:
        """A Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        from tilewise.profile.report.trace import chrome_trace

        return self._write(path, json.dumps(chrome_trace(self.events, self._starts_ns[0] if self._starts_ns else 0)))

    def export_json(self, path: str | Path) -> Path:
        """The results as JSON."""
        return self._write(path, json.dumps(self.get_results().as_dict(), indent=1) + "\n")

    def export_html(self, path: str | Path, title: str = "tilewise profile") -> Path:
        """One page with the tables, a timeline and a roofline; it needs nothing else and loads nothing."""
        from tilewise.profile.report.html import html_page

        return self._write(path, html_page(self.get_results(), self.events, title))

    def _write(self, path: str | Path, text: str) -> Path:
        target = Path(path)
        write_whole(target, text)
        return target

    def as_dict(self) -> dict[str, Any]:
        return self.get_results().as_dict()
