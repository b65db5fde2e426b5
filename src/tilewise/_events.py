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
from threading import get_ident
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
    params: dict[str, Any] = {}  # noqa: RUF012 (never changed in place)
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
        arrays = [a for a in values if isinstance(a, ndarray)]
        self.inputs = tuple([a.shape for a in arrays])
        self.input_bytes = sum([a.nbytes for a in arrays])

    def gives(self, values: Any) -> None:
        """Remember the shapes that came out: of one array, or of several."""
        if isinstance(values, ndarray):
            self.outputs, self.output_bytes = (values.shape,), values.nbytes
        elif isinstance(values, tuple | list):
            arrays = [a for a in values if isinstance(a, ndarray)]
            self.outputs = tuple([a.shape for a in arrays])
            self.output_bytes = sum([a.nbytes for a in arrays])


class Recorder(Protocol):
    """Receives events as they end."""

    owner: int  # the thread it was started in

    def add(self, event: Event) -> None: ...


recorders: list[Recorder] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[Event] = []
        self.names: dict[int, str] = {}


_thread = _Thread()
_tiles: dict[Any, Any] = {}


def _nothing_allocated() -> int:
    return 0


_allocated: Callable[[], int] = _nothing_allocated if native is None else native.watch_allocated


def _run(event: Event, entered_ns: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the call inside the event. What recording costs, from `entered_ns` on, is kept out of everybody's time."""
    stack = _thread.open
    parent = event.parent = stack[-1] if stack else None
    event.thread = get_ident()
    stack.append(event)
    before = _allocated()
    event.start_ns = perf_counter_ns()
    try:
        return call(*args, **kwargs)
    except BaseException:
        event.failed = True
        raise
    finally:
        event.end_ns = perf_counter_ns()
        event.allocated = _allocated() - before
        stack.pop()
        if parent is not None:
            parent.inner_allocated += event.allocated
            if event.kind == "kernel":
                parent.has_kernels = True
        _tell(event)
        left_ns = perf_counter_ns()
        event.recording_ns = (left_ns - entered_ns) - (event.end_ns - event.start_ns)
        if parent is not None:
            parent.inner_ns += left_ns - entered_ns


def _tell(event: Event) -> None:
    own = [r for r in recorders if r.owner == event.thread]
    for recorder in own or recorders[:]:
        recorder.add(event)


def _layer() -> str:
    return _thread.open[-1].layer if _thread.open else ""


# --- the four places ---


def forward(step: Any, arrays: list[Any], params: dict[str, Any]) -> Any:
    """An operation on arrays."""
    entered = perf_counter_ns()
    event = Event("op", type(step).__name__, _layer())
    event.takes(arrays)
    if params:
        event.params = _plain(params)
    step.recorded_layer = event.layer
    data = _run(event, entered, step.forward, arrays, params)
    event.gives(data)
    event.shares_memory = step.is_view and _is_view(data, arrays[0])
    return data


def _is_view(data: Any, source: Any) -> bool:
    return data is source or (isinstance(data, ndarray) and bool(np.may_share_memory(data, source)))


def backward(step: Any, grad: Any) -> Any:
    """The gradient of an operation; it belongs to the layer the operation ran in."""
    entered = perf_counter_ns()
    layer = getattr(step, "recorded_layer", "")
    event = Event("op", type(step).__name__, layer)
    event.phase = "backward"
    event.takes((grad,))
    grads = _run(event, entered, step.backward, (grad,), {})
    event.gives(grads)
    event.shares_memory = step.is_view and _is_view(grads, grad)
    return grads


def module(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer; its name is the dotted one under the outermost model that is running."""
    entered = perf_counter_ns()
    modules = [event for event in _thread.open if event.kind == "module"]
    if not modules:
        _thread.names = {id(m): path for path, m in layer.named_modules()}
    path = _thread.names.get(id(layer))
    if path is None:
        above = modules[-1].layer if modules else ""
        path = f"{above}.{type(layer).__name__}" if above else type(layer).__name__
    if modules and modules[-1].layer == path and modules[-1].name == type(layer).__name__:
        return call(*args, **kwargs)  # a layer that was entered by one of its methods and now calls itself
    event = Event("module", type(layer).__name__, path)
    return _run(event, entered, call, args, kwargs)


def kernel(op: str, chosen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An implementation picked by the backend."""
    entered = perf_counter_ns()
    event = Event("kernel", op, _layer())
    event.backend = chosen.name
    event.takes(args)
    if kwargs:
        event.params = _plain(kwargs)
    if _thread.open:
        event.phase = _thread.open[-1].phase
    if chosen.describe is not None:
        event.tile = kwargs["tile"] if kwargs.get("tile") is not None else _default_tile(chosen, args)
    result = _run(event, entered, chosen.run, args, kwargs)
    event.gives(result)
    return result


def _default_tile(chosen: Any, args: tuple[Any, ...]) -> Any:
    key = (chosen.op, chosen.name, *[(a.shape, a.strides) for a in args if isinstance(a, ndarray)])
    if key not in _tiles:
        if len(_tiles) > 10_000:
            _tiles.clear()
        try:
            _tiles[key] = chosen.describe(*args)[1]
        except Exception:  # the description is an extra: without it the operation still runs
            _tiles[key] = None
    return _tiles[key]


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    """The small parameters (strides, axes, flags); arrays become their shapes."""
    kept = {}
    for name, value in params.items():
        if isinstance(value, ndarray):
            kept[name] = value.shape
        elif value is not None and isinstance(value, (bool, int, float, str, tuple)):
            kept[name] = value
    return kept
