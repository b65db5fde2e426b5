"""The hook for profilers: who listens, and what they are told.

`recorders` is empty unless something is being profiled; the framework asks `if recorders:` in four places (an
operation, its gradient, a layer, a kernel chosen by the backend) and only then comes here. Each leaves one tuple when
it ends, made of what is cheap to read: clock, byte counter, shapes. Who contains whom, names, tiles and work are found
out later, by `tilewise.profile.events.decode`. A record never holds an array, so recording keeps nothing alive.

A record goes to the recorders of its own thread. A thread that has none of its own tells all of them, so a recorder
also sees the threads that its own thread starts, and two threads that each profile do not see each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy import ndarray

from tilewise._extension import native

now = perf_counter_ns
Arrays = list[Any]  # shape, dtype, shape, dtype, ... of each array


class Record(NamedTuple):
    """What is told, as a plain tuple in this order (making the named one would cost as much as all the rest).

    `recorded_ns` keeps the cost of recording out of everybody's time; `allocated` are bytes taken in large blocks
    meanwhile, where a profiler counts them. An operation that ran kernels leaves its arrays to them.
    """

    kind: str  # "module", "forward" or "backward" of an operation, "kernel"
    what: Any  # the layer's or the operation's class; the name of a kernel's operation
    layer: str
    thread: int
    start_ns: int
    end_ns: int
    recorded_ns: int
    allocated: int
    failed: bool
    inputs: Arrays
    outputs: Arrays
    details: Any  # of an operation: its result is a view; of a kernel: (implementation, options, strides)


class Recorder(Protocol):
    """Receives records as things end."""

    owner: int  # the thread it was started in
    records: list[Any]
    models: list[Callable[[], Any]]  # weak references to the outermost models that ran, for the names of their layers


class Recorders(list[Recorder]):
    """Those who listen. `changes` counts comings and goings, so that a thread need not look at every record."""

    changes = 0

    def attach(self, recorder: Recorder) -> None:
        self.append(recorder)
        self.changes += 1

    def detach(self, recorder: Recorder) -> None:
        self[:] = [r for r in self if r is not recorder]
        self.changes += 1
        _thread.state.look_around()  # its records are let go with it, not while the next one listens


recorders = Recorders()

# Of `tilewise.plan`: called with every operation, its arrays, its parameters and its result. Asked only where somebody
# records, so a tracer also attaches a recorder.
tracers: list[Callable[[Any, list[Any], dict[str, Any], Any], None]] = []


class _State:
    """One thread: whom it tells, the layer under way, and the names of the layers in the outermost model."""

    __slots__ = ("changes", "complete", "kernels", "layer", "listeners", "module", "names", "root", "thread", "told")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.changes = -1
        self.listeners: list[Callable[[Any], None]] = []
        self.told: list[Recorder] = []
        self.kernels = 0  # run so far
        self.layer = ""
        self.module: type | None = None
        self.root: Callable[[], Any] = _nobody
        self.names: dict[int, tuple[Callable[[], Any], str]] = {}
        self.complete = False

    def look_around(self) -> None:
        """Find out whom to tell, now that somebody came or went."""
        self.changes = recorders.changes
        told = [r for r in recorders if r.owner == self.thread] or recorders
        self.listeners = [r.records.append for r in told]
        self.told = told
        self.root = _nobody  # layers may have been renamed since

    def path_of(self, layer: Any) -> str:
        """The dotted name under the outermost model that is running; of somebody else's layer, the class below ours."""
        if self.changes != recorders.changes:
            self.look_around()
        if self.module is None and self.root() is not layer:
            self.root = weakref.ref(layer)
            for recorder in self.told:
                recorder.models.append(self.root)
            self._collect_names(layer)
        found = self.names.get(id(layer))
        if found is not None and found[0]() is layer:
            return found[1]
        root = self.root()
        if not self.complete and root is not None:  # a layer that was put in since the names were collected
            self._collect_names(root)
            self.complete = True
            return self.path_of(layer)
        name = type(layer).__name__
        return f"{self.layer}.{name}" if self.layer else name

    def _collect_names(self, root: Any) -> None:
        self.names = {id(m): (weakref.ref(m), path) for path, m in root.named_modules()}


def _nobody() -> None:
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


_thread = _Thread()


def running_layer() -> str:
    """The dotted name of the layer that runs on this thread; "" outside, and where nobody records."""
    return _thread.state.layer


def _nothing_allocated() -> int:
    return 0


_allocated: Callable[[], int] = _nothing_allocated if native is None else native.watch_allocated


def _arrays(values: Any) -> Arrays:
    """Shapes and dtypes of the arrays among `values`: several, or one, or none."""
    if isinstance(values, ndarray):
        return [values.shape, values.dtype]
    found: Arrays = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, ndarray):
                found.append(value.shape)
                found.append(value.dtype)
    return found


def _is_view(data: Any, source: Any) -> bool:
    if data is source:
        return True
    base = data.base if isinstance(data, ndarray) else None
    return base is not None and (base is source or bool(np.may_share_memory(data, source)))


def _passes_on(grads: Any, grad: Any) -> bool:
    """The gradient itself is all that comes out: an addition hands it to both sides."""
    return isinstance(grads, tuple) and all(g is grad or g is None for g in grads)


# --- the four places. Written out one by one: a function shared by them would cost a call and packed arguments ---


def forward(step: Any, arrays: list[Any], params: dict[str, Any]) -> Any:
    """An operation on arrays."""
    here = _thread.state
    layer = step.recorded_layer = here.layer
    kernels, taken = here.kernels, _allocated()
    start = now()
    data, failed = None, True
    try:
        data = step.forward(*arrays, **params)
        failed = False
    finally:
        end = now()
        taken = _allocated() - taken
        ins = outs = _NONE
        if kernels == here.kernels:
            ins, outs = _arrays(arrays), _arrays(data)
        view = step.is_view and _is_view(data, arrays[0])
        if here.changes != recorders.changes:
            here.look_around()
        for tell in here.listeners:
            tell(("forward", type(step), layer, here.thread, start, end, now(), taken, failed, ins, outs, view))
    for told in tracers:
        told(step, arrays, params, data)
    return data


def backward(step: Any, grad: Any) -> Any:
    """The gradient of an operation; it belongs to the layer the operation ran in."""
    here = _thread.state
    above = here.layer
    layer = here.layer = getattr(step, "recorded_layer", "")
    kernels, taken = here.kernels, _allocated()
    start = now()
    grads, failed = None, True
    try:
        grads = step.backward(grad)
        failed = False
    finally:
        end = now()
        here.layer = above
        taken = _allocated() - taken
        ins = outs = _NONE
        if kernels == here.kernels:
            ins, outs = _arrays(grad), _arrays(grads)
        view = _is_view(grads, grad) if step.is_view else _passes_on(grads, grad)
        if here.changes != recorders.changes:
            here.look_around()
        for tell in here.listeners:
            tell(("backward", type(step), layer, here.thread, start, end, now(), taken, failed, ins, outs, view))
    return grads


def module(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A layer."""
    here = _thread.state
    path, kind = here.path_of(layer), type(layer)
    above, module_above = here.layer, here.module
    if module_above is kind and above == path:
        return call(*args, **kwargs)  # a layer that was entered by one of its methods and now calls itself
    if module_above is None:
        here.complete = False
    here.layer, here.module = path, kind
    taken = _allocated()
    start = now()
    failed = True
    try:
        result = call(*args, **kwargs)
        failed = False
    finally:
        end = now()
        here.layer, here.module = above, module_above
        taken = _allocated() - taken
        if here.changes != recorders.changes:
            here.look_around()
        for tell in here.listeners:
            tell(("module", kind, path, here.thread, start, end, now(), taken, failed, _NONE, _NONE, None))
    return result


def kernel(op: str, chosen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An implementation picked by the backend."""
    here = _thread.state
    here.kernels += 1
    taken = _allocated()
    start = now()
    result, failed = None, True
    try:
        result = chosen.run(*args, **kwargs)
        failed = False
    finally:
        end = now()
        taken = _allocated() - taken
        ins, outs = _arrays(args), _arrays(result)
        options = {k: True if isinstance(v, ndarray) else v for k, v in kwargs.items()} if kwargs else kwargs
        strides = (args[0].strides, args[1].strides) if chosen.describe is not None and not failed else None
        details = (chosen, options, strides)
        layer, thread = here.layer, here.thread
        if here.changes != recorders.changes:
            here.look_around()
        for tell in here.listeners:
            tell(("kernel", op, layer, thread, start, end, now(), taken, failed, ins, outs, details))
    return result


def steps(ran: Iterable[tuple[str, str, int, int, Arrays, Arrays, Any]]) -> None:
    """Steps that a plan timed itself: operation, layer, start, end, inputs, outputs, details of a kernel."""
    here = _thread.state
    if here.changes != recorders.changes:
        here.look_around()
    for op, layer, start, end, ins, outs, details in ran:
        here.kernels += 1
        for tell in here.listeners:
            tell(("kernel", op, layer, here.thread, start, end, end, 0, False, ins, outs, details))


_NONE: Arrays = []
