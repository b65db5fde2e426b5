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
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from tilewise._extension import native


@dataclass(slots=True)
class Spec:
    """An array as an event remembers it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(slots=True)
class Event:
    """Something that ran: a layer ("module"), an operation ("op"), or an implementation of one ("kernel")."""

    kind: str
    name: str
    layer: str
    phase: str = "forward"
    inputs: tuple[Spec, ...] = ()
    outputs: tuple[Spec, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    backend: str = ""
    tile: Any = None
    shares_memory: bool = False  # the result is a view: nothing was moved
    thread: int = 0
    start_ns: int = 0
    end_ns: int = 0
    inner_ns: int = 0  # part of it spent in events directly inside
    allocated: int = 0  # bytes taken in large blocks meanwhile, where a profiler counts them
    inner_allocated: int = 0
    parent: Event | None = None
    has_kernels: bool = False
    failed: bool = False

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


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


def _allocated() -> int:
    return int(native.watch_allocated()) if native is not None else 0


def _run(event: Event, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make the call inside the event, and tell it to whoever listens."""
    stack = _thread.open
    parent = event.parent = stack[-1] if stack else None
    event.thread = threading.get_ident()
    stack.append(event)
    if parent is not None and event.kind == "kernel":
        parent.has_kernels = True
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
            parent.inner_ns += event.end_ns - event.start_ns
            parent.inner_allocated += event.allocated
        _tell(event)


def _tell(event: Event) -> None:
    own = [r for r in recorders if r.owner == event.thread]
    for recorder in own or list(recorders):
        recorder.add(event)


def _layer() -> str:
    return _thread.open[-1].layer if _thread.open else ""


def _specs(values: Any) -> tuple[Spec, ...]:
    arrays = values if isinstance(values, tuple | list) else (values,)
    return tuple([Spec(a.shape, a.dtype.name, a.nbytes) for a in arrays if isinstance(a, np.ndarray)])


# --- the four places ---


def forward(step: Any, arrays: list[Any], params: dict[str, Any]) -> Any:
    """An operation on arrays."""
    event = Event("op", type(step).__name__, _layer(), inputs=_specs(arrays), params=_plain(params))
    step.recorded_layer = event.layer
    data = _run(event, step.forward, arrays, params)
    event.outputs = _specs(data)
    event.shares_memory = step.is_view and isinstance(data, np.ndarray) and _is_view(data, arrays[0])
    return data


def _is_view(data: Any, source: Any) -> bool:
    return data is source or bool(np.may_share_memory(data, source))


def backward(step: Any, grad: Any) -> Any:
    """The gradient of an operation; it belongs to the layer the operation ran in."""
    layer = getattr(step, "recorded_layer", "")
    event = Event("op", type(step).__name__, layer, phase="backward", inputs=_specs(grad))
    grads = _run(event, step.backward, (grad,), {})
    event.outputs = _specs(grads)
    event.shares_memory = step.is_view and isinstance(grads, np.ndarray) and _is_view(grads, grad)
    return grads


def module(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer; its name is the dotted one under the outermost model that is running."""
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
    return _run(event, call, args, kwargs)


def kernel(op: str, chosen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An implementation picked by the backend."""
    event = Event("kernel", op, _layer(), inputs=_specs(args), params=_plain(kwargs), backend=chosen.name)
    event.phase = _thread.open[-1].phase if _thread.open else "forward"
    event.tile = kwargs["tile"] if kwargs.get("tile") is not None else _default_tile(chosen, args)
    result = _run(event, chosen.run, args, kwargs)
    event.outputs = _specs(result)
    return result


def _default_tile(chosen: Any, args: tuple[Any, ...]) -> Any:
    if chosen.describe is None:
        return None
    key = (chosen.op, chosen.name, *((a.shape, a.strides) for a in args if isinstance(a, np.ndarray)))
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
        if isinstance(value, np.ndarray):
            kept[name] = value.shape
        elif value is None or isinstance(value, bool | int | float | str | tuple):
            kept[name] = value
    return kept
