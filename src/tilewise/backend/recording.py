"""Records of operations, layers and kernels for the active recorders (`_events`).

Each call appends one tuple when it ends, with values that are cheap to read: clock, byte counter, shapes. Nesting,
names, tiles and FLOPs are computed later, by `tilewise.profile.events.decode`. A record never contains an array, so
recording does not extend the lifetime of any array.

A thread appends to its own recorders. A thread without recorders appends to all of them. So a recorder also receives
records of threads that its thread starts, and two threads that both profile do not affect each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from tilewise._events import Recorder, recorders, tracers, value_readers
from tilewise._extension import native

now = perf_counter_ns
Arrays = list[Any]  # shape, dtype, shape, dtype, ... of each array


class Record(NamedTuple):
    """Fields of a record. Recorders store plain tuples in this order, because a named tuple costs much more to create.

    `recorded_ns` allows the overhead of recording to be subtracted; `allocated` counts bytes allocated in large blocks
    during the call, if a profiler counts them. An operation that ran kernels has no arrays; its kernels record them.
    """

    kind: str  # "module", "forward" or "backward" of an operation, "kernel"
    subject: Any  # class of the layer or operation; name of the operation for a kernel
    layer: str
    thread: int
    start_ns: int
    end_ns: int
    recorded_ns: int
    allocated: int
    failed: bool
    inputs: Arrays
    outputs: Arrays
    details: Any  # operation: True if its result is a view; kernel: (implementation, options, strides)


def note_read(array: Any) -> None:
    """Tell tracers that an array's values leave the framework: what is computed from them is not traced."""
    layers = value_readers.get()
    if layers is not None and any(tracer.is_traced(array) for tracer in tracers):
        layers.append(running_layer())


class _ThreadState:
    """Recording state of one thread: its recorders, the running layer, and the layers' names."""

    __slots__ = ("appends", "changes", "complete", "kernels", "layer", "module", "names", "recorders", "root", "thread")

    def __init__(self) -> None:
        """Start without recorders and outside any layer."""
        self.thread = threading.get_ident()
        self.changes = -1  # value of `Recorders.changes` at the last update
        self.recorders: list[Recorder] = []
        self.appends: list[Callable[[Any], None]] = []  # the `append` methods of the recorders' lists
        self.kernels, self.layer = 0, ""  # number of kernels run so far, name of the running layer
        self.module: type | None = None
        self.root: Callable[[], Any] = _no_model
        self.names: dict[int, tuple[Callable[[], Any], str]] = {}
        self.complete = False  # the names were collected again during the running call of the root

    def update_recorders(self) -> None:
        """Look up the recorders of this thread again, after one was attached or detached."""
        self.changes = recorders.changes
        self.recorders = [r for r in recorders if r.owner == self.thread] or recorders
        self.appends = [r.records.append for r in self.recorders]
        self.root = _no_model  # layers may have been renamed since

    def path_of(self, layer: Any) -> str:
        """Return the dotted name of a layer in the outermost model that is running.

        A layer that is not part of that model gets its class name, below the layer that called it.
        """
        if self.changes != recorders.changes:
            self.update_recorders()
        if self.module is None and self.root() is not layer:
            self.root = weakref.ref(layer)
            for recorder in self.recorders:
                recorder.models.append(self.root)
            self._collect_names(layer)
        entry = self.names.get(id(layer))
        if entry is not None and entry[0]() is layer:  # an id may be reused after its object was deleted
            return entry[1]
        root = self.root()
        if not self.complete and root is not None:  # the layer may have been added since the names were collected
            self._collect_names(root)
            self.complete = True
            return self.path_of(layer)
        name = type(layer).__name__
        return f"{self.layer}.{name}" if self.layer else name

    def _collect_names(self, root: Any) -> None:
        self.names = {id(m): (weakref.ref(m), path) for path, m in root.named_modules()}


def _no_model() -> None:
    return None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_thread = _Thread()


def release() -> None:
    """Drop this thread's references to recorders, so that a detached one is freed."""
    _thread.state.update_recorders()


def running_layer() -> str:
    """Return the dotted name of the layer running on this thread; "" outside of layers or without recorders."""
    return _thread.state.layer


_allocated: Callable[[], int] = (lambda: 0) if native is None else native.watch_allocated


def _array_specs(values: Any) -> Arrays:
    """Return shape and dtype of every array in `values`: an array, or a tuple or list with arrays."""
    if isinstance(values, ndarray):
        return [values.shape, values.dtype]
    shapes_and_dtypes: Arrays = []
    if isinstance(values, (tuple, list)):
        for value in values:
            if isinstance(value, ndarray):
                shapes_and_dtypes.append(value.shape)
                shapes_and_dtypes.append(value.dtype)
    return shapes_and_dtypes


def _is_view(data: Any, source: Any) -> bool:
    """Tell whether `data` is `source` or shares memory with it."""
    if data is source:
        return True
    base = data.base if isinstance(data, ndarray) else None
    return base is not None and (base is source or bool(np.may_share_memory(data, source)))


def _returns_same_gradient(grads: Any, grad: Any) -> bool:
    """Tell whether every input gradient is the output gradient itself, as for an addition."""
    return isinstance(grads, tuple) and all(g is grad or g is None for g in grads)


# --- The four hooks. They repeat code on purpose: a shared function would cost a call and packed arguments ---


def record_forward(step: Any, arrays: list[Any], params: dict[str, Any]) -> Any:
    """Run an operation's forward function and record it with its time and arrays."""
    here = _thread.state
    layer = step.recorded_layer = here.layer
    kernels, allocated = here.kernels, _allocated()
    start = now()
    data, failed = None, True
    try:
        data = step.forward(*arrays, **params)
        failed = False
    finally:
        end = now()
        allocated = _allocated() - allocated
        ins = outs = _NO_ARRAYS
        if kernels == here.kernels:  # otherwise the kernels have recorded the arrays
            ins, outs = _array_specs(arrays), _array_specs(data)
        view = step.is_view and _is_view(data, arrays[0])
        if here.changes != recorders.changes:
            here.update_recorders()
        for append in here.appends:
            append(("forward", type(step), layer, here.thread, start, end, now(), allocated, failed, ins, outs, view))
    for trace in tracers:
        trace(step, arrays, params, data)
    return data


def record_backward(step: Any, grad: Any) -> Any:
    """Run an operation's gradient and record it, under the layer in which its forward ran."""
    here = _thread.state
    outer_layer = here.layer
    layer = here.layer = getattr(step, "recorded_layer", "")
    kernels, allocated = here.kernels, _allocated()
    start = now()
    grads, failed = None, True
    try:
        grads = step.backward(grad)
        failed = False
    finally:
        end = now()
        here.layer = outer_layer
        allocated = _allocated() - allocated
        ins = outs = _NO_ARRAYS
        if kernels == here.kernels:
            ins, outs = _array_specs(grad), _array_specs(grads)
        view = _is_view(grads, grad) if step.is_view else _returns_same_gradient(grads, grad)
        if here.changes != recorders.changes:
            here.update_recorders()
        for append in here.appends:
            append(("backward", type(step), layer, here.thread, start, end, now(), allocated, failed, ins, outs, view))
    return grads


def record_module(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a layer and record the call with its time and arrays."""
    here = _thread.state
    path, kind = here.path_of(layer), type(layer)
    outer_layer, outer_module = here.layer, here.module
    if outer_module is kind and outer_layer == path:
        return call(*args, **kwargs)  # a recorded method of this layer calls the layer itself: one record is enough
    if outer_module is None:
        here.complete = False
    here.layer, here.module = path, kind
    allocated = _allocated()
    start = now()
    failed = True
    try:
        result = call(*args, **kwargs)
        failed = False
    finally:
        end = now()
        here.layer, here.module = outer_layer, outer_module
        allocated = _allocated() - allocated
        if here.changes != recorders.changes:
            here.update_recorders()
        for append in here.appends:
            append(
                ("module", kind, path, here.thread, start, end, now(), allocated, failed, _NO_ARRAYS, _NO_ARRAYS, None)
            )
    return result


def record_kernel(op: str, implementation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an implementation of `op` and record it with its time and arrays."""
    here = _thread.state
    here.kernels += 1
    allocated = _allocated()
    start = now()
    result, failed = None, True
    try:
        result = implementation.run(*args, **kwargs)
        failed = False
    finally:
        end = now()
        allocated = _allocated() - allocated
        ins, outs = _array_specs(args), _array_specs(result)
        # Replace arrays among the options, so that the record keeps none alive.
        options = {k: True if isinstance(v, ndarray) else v for k, v in kwargs.items()} if kwargs else kwargs
        strides = (args[0].strides, args[1].strides) if implementation.describe is not None and not failed else None
        details = (implementation, options, strides)
        layer, thread = here.layer, here.thread
        if here.changes != recorders.changes:
            here.update_recorders()
        for append in here.appends:
            append(("kernel", op, layer, thread, start, end, now(), allocated, failed, ins, outs, details))
    return result


def record_timed_kernels(kernels: Sequence[tuple[str, str, int, int, Arrays, Arrays, Any]], returned_ns: int) -> None:
    """Record kernels that a plan has timed already: (operation, layer, start ns, end ns, inputs, outputs, details).

    The plan's call returned at `returned_ns`; the time since then counts as the last kernel's overhead of recording.
    """
    here = _thread.state
    if here.changes != recorders.changes:
        here.update_recorders()
    for number, (op, layer, start, end, ins, outs, details) in enumerate(kernels, 1):
        here.kernels += 1
        recorded = end + now() - returned_ns if number == len(kernels) else end
        for append in here.appends:
            append(("kernel", op, layer, here.thread, start, end, recorded, 0, False, ins, outs, details))


_NO_ARRAYS: Arrays = []
