"""ProfilerContext: record everything the framework does inside a `with`, as tables, data, a trace and an HTML page.

    with ProfilerContext() as profiler:
        model(x)
    print(profiler.report())

Contexts nest: an outer one also records the work inside an inner one. A context records its own thread and all threads
that have no context. Recording adds a few microseconds per operation; without a context the cost is one test of an
empty list.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Self

from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise._threads import get_num_threads
from tilewise.backend import recording
from tilewise.errors import ConfigurationError
from tilewise.profile.events import Recording
from tilewise.profile.machine import MachineFigures
from tilewise.profile.machine import machine as machine_rates
from tilewise.profile.report.results import NANO, ProfileResults, build


class _LargeBlocks:
    """The native counter of large allocations, shared by all open profiler contexts."""

    lock = threading.Lock()
    users = 0
    started = False

    @classmethod
    def acquire(cls) -> None:
        """Start counting large allocations, unless another context does already."""
        with cls.lock:
            cls.users += 1
            if cls.users == 1 and native is not None:
                cls.started = bool(native.watch_start(large_only=True))

    @classmethod
    def release(cls) -> None:
        """Stop counting when the last context ends."""
        with cls.lock:
            cls.users -= 1
            if cls.users == 0 and cls.started and native is not None:
                native.watch_stop()
                cls.started = False


class ProfilerContext(Recording):
    """Records operations, layers and kernels inside a `with` block.

    `machine` holds the peak rates to compare with (default: this machine's). `memory=False` does not count allocations.
    """

    def __init__(self, machine: MachineFigures | None = None, memory: bool = True) -> None:
        """Store the settings; recording starts at the `with` statement."""
        super().__init__()
        self._labels: dict[str, str] = {}
        self._machine = machine
        self._memory = memory
        self._open_since_ns: int | None = None
        self._seconds = 0.0
        self._starts_ns: list[int] = []  # one per `with` block
        self._threads = 1
        self._results: tuple[int, float, ProfileResults] | None = None

    def __enter__(self) -> Self:
        """Start recording on this thread."""
        if self._open_since_ns is not None:
            raise ConfigurationError("this ProfilerContext is already open; create another one to nest them")
        self._threads = get_num_threads()
        if self._memory:
            _LargeBlocks.acquire()
        self._open_since_ns = recording.now()
        self._starts_ns.append(self._open_since_ns)
        return super().__enter__()

    def __exit__(self, *_exc: object) -> None:
        if self._open_since_ns is not None:
            self._seconds += (recording.now() - self._open_since_ns) * NANO
            self._open_since_ns = None
        super().__exit__()
        if self._memory:
            _LargeBlocks.release()
        self._label_layers()

    # --- results ---

    def get_results(self) -> ProfileResults:
        """Return the profile as data, after the block; a context that is entered again accumulates results."""
        if self._open_since_ns is not None:
            raise ConfigurationError("this ProfilerContext is still open; get its results after the `with` block")
        key = (len(self.records), self._seconds)
        if self._results is None or self._results[:2] != key:
            results = build(
                self.events,
                self._seconds,
                self._machine or machine_rates(),
                self._threads,
                starts_ns=self._starts_ns,
                labels=self._labels,
            )
            self._results = (*key, results)
        return self._results[2]

    def _label_layers(self) -> None:
        """Add labels such as `7 Conv2d(64→64, 3×3)`, by dotted layer name, of all profiled models that still exist.

        The context holds weak references only, so it does not keep a model alive.
        """
        from tilewise.nn.describe import layer_names

        for model in {id(model): model for model in (reference() for reference in self.models)}.values():
            self._labels |= layer_names(model) if model is not None else {}
        self.models.clear()

    def report(self, rows: int = 15) -> str:
        """Format tables by layer and by operation, and the program's bottleneck."""
        from tilewise.profile.report.text import text_report

        return text_report(self.get_results(), rows)

    # --- files ---

    def export_trace(self, path: str | Path) -> Path:
        """Write a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing can open."""
        from tilewise.profile.report.text import chrome_trace

        return _write(path, json.dumps(chrome_trace(self.events, self._starts_ns[0] if self._starts_ns else 0)))

    def export_json(self, path: str | Path) -> Path:
        """Write the results as JSON."""
        return _write(path, json.dumps(self.get_results().as_dict(), indent=1) + "\n")

    def export_html(self, path: str | Path, title: str = "tilewise profile") -> Path:
        """Write one self-contained HTML page with the tables, a timeline and a roofline plot."""
        from tilewise.profile.report.text import html_page

        return _write(path, html_page(self.get_results(), self.events, title))

    def as_dict(self) -> dict[str, Any]:
        return self.get_results().as_dict()


def _write(path: str | Path, text: str) -> Path:
    write_atomic(Path(path), text)
    return Path(path)
