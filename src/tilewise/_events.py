"""The hook for profilers: who listens, and what they are told.

`recorders` is empty unless something is being profiled; the framework asks `if recorders:` in four places (an
operation, its gradient, a layer, a kernel chosen by the backend) and only then comes here. An event holds shapes and
times, never arrays, so recording keeps nothing alive.

An operation is told to the recorders of its own thread. A thread that has none of its own is told to all of them, so a
recorder also sees the threads that its own thread starts, and two threads that each profile do not see each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from tilewise._extension import native


class Event:
    """Something that ran: a layer ("module"), an operation ("op"), or an implementation of one ("kernel").

    Made for every operation while a profiler listens, so it is a plain class whose attributes default on the class.
    """

    phase = "forward"
    inputs: tuple[tuple[int, ...], ...] = ()  # shapes
    outputs: tuple[tuple[int, ...], ...] = ()
    input_bytes = 0
    output_bytes = 0
    fused: tuple[Any, ...] = ()  # what rides along with a product: bias?, residual?, activation
    window: Any = None  # of a pooling kernel
    backend = ""
    tile: Any = None
    shares_memory = False  # the result is a view: nothing was moved
    thread = 0
    start_ns = 0
    end_ns = 0
    inner_ns = 0  # part of it spent in events directly inside, and in recording them
    recording_ns = 0  # what recording this event cost
    allocated = 0  # bytes taken in large blocks meanwhile, where a profiler counts them
    inner_allocated = 0
    parent: Event | None = None
    has_kernels = False
    failed = False

    def __init__(self, kind: str, name: str, layer: str) -> None:
        self.kind, self.name, self.layer = kind, name, layer

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def takes(self, values: Any) -> None:
        """Remember the shapes that went in."""
        shapes, total = [], 0
        for value in values:
            if isinstance(value, ndarray):
                shapes.append(value.shape)
                total += value.nbytes
        self.inputs, self.input_bytes = tuple(shapes), total

    def gives(self, values: Any) -> None:
        """Remember the shapes that came out: of one array, or of several."""
        if isinstance(values, ndarray):
            self.outputs, self.output_bytes = (values.shape,), values.nbytes
        elif isinstance(values, tuple):
            arrays = [a for a in values if isinstance(a, ndarray)]
            self.outputs, self.output_bytes = tuple([a.shape for a in arrays]), sum([a.nbytes for a in arrays])


class Recorder(Protocol):
    """Receives events as they end."""

    owner: int  # the thread it was started in

    def add(self, event: Event) -> None: ...


recorders: list[Recorder] = []


class _Open(list[Event]):
    """The events under way in one thread, outermost first."""

    __slots__ = ("names", "thread")

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.names: dict[int, str] = {}  # of the layers in the outermost model


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open = _Open()


_thread = _Thread()
_tiles: dict[Any, Any] = {}


def _nothing_allocated() -> int:
    return 0


_allocated: Callable[[], int] = _nothing_allocated if native is None else native.watch_allocated


def _run(under_way: _Open, event: Event, entered_ns: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the call inside the event. What recording costs, from `entered_ns` on, is kept out of everybody's time."""
    parent = under_way[-1] if under_way else None
    thread = event.thread = under_way.thread
    under_way.append(event)
    result = None
    before = _allocated()
    start = event.start_ns = perf_counter_ns()
    try:
        result = call(*args, **kwargs)
    except BaseException:
        event.failed = True
        raise
    finally:
        end = event.end_ns = perf_counter_ns()
        allocated = event.allocated = _allocated() - before
        under_way.pop()
        if event.kind != "module":
            event.gives(result)
        told = [r for r in recorders if r.owner == thread] or recorders[:]
        for recorder in told:
            recorder.add(event)
        left = perf_counter_ns()
        event.recording_ns = left - entered_ns - (end - start)
        if parent is not None:
            event.parent = parent
            parent.inner_ns += left - entered_ns
            parent.inner_allocated += allocated
            if event.kind == "kernel":
                parent.has_kernels = True
    return result


# --- the four places ---


def forward(step: Any, arrays: list[Any], params: dict[str, Any]) -> Any:
    """An operation on arrays."""
    entered = perf_counter_ns()
    under_way = _thread.open
    event = Event("op", type(step).__name__, under_way[-1].layer if under_way else "")
    event.takes(arrays)
    step.recorded_layer = event.layer
    data = _run(under_way, event, entered, step.forward, arrays, params)
    if step.is_view:
        event.shares_memory = _is_view(data, arrays[0])
    return data


def _is_view(data: Any, source: Any) -> bool:
    return data is source or (isinstance(data, ndarray) and bool(np.may_share_memory(data, source)))


def backward(step: Any, grad: Any) -> Any:
    """The gradient of an operation; it belongs to the layer the operation ran in."""
    entered = perf_counter_ns()
    event = Event("op", type(step).__name__, getattr(step, "recorded_layer", ""))
    event.phase = "backward"
    event.takes((grad,))
    grads = _run(_thread.open, event, entered, step.backward, (grad,), {})
    if step.is_view:
        event.shares_memory = _is_view(grads, grad)
    return grads


def module(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer; its name is the dotted one under the outermost model that is running."""
    entered = perf_counter_ns()
    under_way = _thread.open
    above = next((event for event in reversed(under_way) if event.kind == "module"), None)
    if above is None:
        under_way.names = {id(m): path for path, m in layer.named_modules()}
    name = type(layer).__name__
    path = under_way.names.get(id(layer))
    if path is None:
        path = f"{above.layer}.{name}" if above is not None and above.layer else name
    if above is not None and above.layer == path and above.name == name:
        return call(*args, **kwargs)  # a layer that was entered by one of its methods and now calls itself
    return _run(under_way, Event("module", name, path), entered, call, args, kwargs)


def kernel(op: str, chosen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An implementation picked by the backend."""
    entered = perf_counter_ns()
    under_way = _thread.open
    event = Event("kernel", op, "")
    if under_way:
        event.layer, event.phase = under_way[-1].layer, under_way[-1].phase
    event.backend = chosen.name
    event.takes(args)
    if kwargs:
        ask = kwargs.get
        event.fused = (ask("bias") is not None, ask("residual") is not None, ask("activation"))
        event.window, event.tile = ask("kernel"), ask("tile")
    if chosen.describe is not None and event.tile is None:
        event.tile = _default_tile(chosen, event.inputs, args)
    return _run(under_way, event, entered, chosen.run, args, kwargs)


def _default_tile(chosen: Any, shapes: tuple[tuple[int, ...], ...], args: tuple[Any, ...]) -> Any:
    key = (chosen.op, chosen.name, shapes, args[0].strides, args[1].strides)
    if key not in _tiles:
        if len(_tiles) > 10_000:
            _tiles.clear()
        try:
            _tiles[key] = chosen.describe(*args)[1]
        except Exception:  # the description is an extra: without it the operation still runs
            _tiles[key] = None
    return _tiles[key]
