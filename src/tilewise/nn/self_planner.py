"""The plans of a module that compiles itself (`self_planning.py`), and the watch over what they depend on.

A plan is valid as long as nothing can have changed the module. Assigning an attribute of any module increases
`structure.count`, and reading `.data` of a parameter or buffer (which every write does) increases the tensor's own
count, so that one comparison of numbers per call is enough. A module whose weights change often, as between the steps
of training, is called layer by layer for a while before it is planned again.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise import _events
from tilewise._extension import native
from tilewise._threads import get_batch_invariant
from tilewise.backend.registry import is_default_backend
from tilewise.errors import TilewiseError
from tilewise.nn.self_planning import is_own, layer_by_layer, structure
from tilewise.ops import Operation
from tilewise.tensor import Tensor, _record, _wrap, enable_grad, is_grad_enabled, no_grad

if TYPE_CHECKING:
    from tilewise.graph.plan import Plan
    from tilewise.nn.module import Module

Array = npt.NDArray[Any]
InputKey = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]  # shape and dtype of every input

_MAX_SHAPES = 8  # input shapes of one module that stay planned: as many as `Plan` stores
_MAX_UNUSED = 4  # planned shapes that were called once; arbitrary: later shapes are planned on their second call
_MAX_PAUSE = 1024  # calls; arbitrary, planning once in 1,024 calls costs nothing
_WORTH = 32  # calls after which a plan has saved more than it cost; arbitrary between 10 and 100
_MAX_COMPARED = 64 << 20  # bytes of arrays that are compared at each call; layers compare all of theirs at each call
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic)


class SelfPlanner:
    """The compiled plans of one module, which stores it as an attribute; a copied module starts without plans."""

    def __init__(self) -> None:
        """Start without plans."""
        self._lock = threading.RLock()
        self._state: _Planned | None = None
        self._pause = 0  # calls until planning is tried again
        self._last_pause = 1
        self._doubt = ""  # reason why there is currently no plan
        self._counted_at = -1  # value of the structure counter when the layers were counted
        self._is_single = False
        self._sightings: dict[InputKey, int] = {}

    def __reduce__(self) -> tuple[type[SelfPlanner], tuple[()]]:
        return SelfPlanner, ()

    def call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module by its plan if there is or can be one for these inputs, else layer by layer."""
        if self.is_single_layer(module):
            return module.forward(*args, **kwargs)
        result: Any = self.run(module, args, kwargs)
        if result is None:
            with layer_by_layer(), no_grad():
                result = module.forward(*args, **kwargs)
        if is_grad_enabled():
            _attach_gradients(result, Recompute.of(module, args, kwargs), self.tensors(module))
        return result

    def is_single_layer(self, module: Module) -> bool:
        """Tell whether a module has fewer than two layers with weights, so that a plan gains nothing."""
        if self._counted_at != structure.count:
            self._is_single = sum(layer.holds_weights() for layer in module.modules()) < 2
            self._counted_at = structure.count
        return self._is_single

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Run the module's plan for these inputs; None if it has to run layer by layer."""
        if self._pause > 0:
            self._pause -= 1
            return None
        if not is_default_backend() or get_batch_invariant():
            return None
        arrays = module._plan_inputs(args, kwargs)
        if arrays is None:
            return None
        key = tuple([(array.shape, array.dtype) for array in arrays])
        state = self._state
        if state is None or key not in state.calls or not state.watch.is_unchanged(module):
            state = self._prepare(module, arrays, key)
            if state is None:
                return None
        state.calls[key] = state.calls.get(key, 0) + 1
        return _wrap(state.plans[tuple([array.dtype for array in arrays])](*arrays))

    def _prepare(self, module: Module, arrays: list[Array], key: InputKey) -> _Planned | None:
        """Compile a plan for these inputs; None if that is impossible or not worth it yet."""
        with self._lock:
            state = self._state
            if state is not None and not state.watch.is_unchanged(module):
                self._retire(state)
                return None
            if state is None:
                watch = WeightWatch(module)
                self._doubt = watch.reason_not_to()
                if self._doubt:  # it may hold for the next call only
                    self._wait()
                    return None
                state = self._state = _Planned(watch)
            if key in state.reasons or not self._is_worth_planning(state, key):
                return None
            if key not in state.calls:
                state.compile(module, arrays, key)
            return state if key in state.calls else None

    def _is_worth_planning(self, state: _Planned, key: InputKey) -> bool:
        """Tell whether to compile for this input shape now, or to wait until it comes again."""
        if key in state.calls or sum(count < 2 for count in state.calls.values()) < _MAX_UNUSED:
            return True
        if len(self._sightings) > 8 * _MAX_SHAPES:
            self._sightings.clear()
        self._sightings[key] = self._sightings.get(key, 0) + 1
        return self._sightings[key] > 1

    def _retire(self, state: _Planned) -> None:
        """Discard the plans of a module that changed; if they were little used, plan again later."""
        if sum(state.calls.values()) >= _WORTH:
            self._last_pause = 1
        self._state, self._doubt = None, "its weights or attributes changed"
        self._wait()

    def _wait(self) -> None:
        """Run layer by layer for the next calls, twice as many as at the last change of weights."""
        self._pause = self._last_pause = min(2 * self._last_pause, _MAX_PAUSE)

    def tensors(self, module: Module) -> list[Any]:
        """Return all tensors of the module, from the plan's record if there is one."""
        state = self._state
        return [tensor for _, tensor in module.named_tensors()] if state is None else state.watch.tensors

    def lines(self, module: Module) -> list[str]:
        """Return a line for each input shape of past calls: how it runs, and why there is no plan."""
        state = self._state
        if self.is_single_layer(module):
            return ["has a single layer with weights, which needs no plan"]
        if state is None:
            return [f"runs layer by layer for {self._pause} more calls, because {self._doubt}"]
        lines = []
        for key, count in state.calls.items():
            plan = state.plans[tuple(dtype for _, dtype in key)]
            calls = f"{plan.native_calls} native call{'s' if plan.native_calls != 1 else ''}"
            times = "once" if count == 1 else f"{count} times"
            lines.append(f"{_describe(key)}: planned in {calls}, called {times}")
        lines += [f"{_describe(key)}: layer by layer, because {reason}" for key, reason in state.reasons.items()]
        return lines or ["was called with several shapes once each; a shape is planned when it comes again"]


@dataclass
class _Planned:
    """Plans that were compiled for one state of a module's weights."""

    watch: WeightWatch
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)  # by the dtypes of the inputs
    calls: dict[InputKey, int] = field(default_factory=dict)
    reasons: dict[InputKey, str] = field(default_factory=dict)  # why an input has no plan

    def compile(self, module: Module, arrays: list[Array], key: InputKey) -> None:
        """Compile the module for these inputs, or record why that is impossible."""
        reason = unplannable_reason(module, arrays, self.watch)
        if not reason:
            try:
                reason = self._add(module, arrays)
            except TilewiseError as error:
                reason = str(error)
            except Exception as error:  # a module may raise anything; the call without a plan raises it again
                reason = f"{type(error).__name__}: {error}"
        self.watch.renew()
        if reason:
            self.reasons[key] = reason
            return
        self.calls[key] = 0
        if len(self.calls) > _MAX_SHAPES:
            del self.calls[next(iter(self.calls))]

    def _add(self, module: Module, arrays: list[Array]) -> str:
        """Compile the module and test the plan; return why it would be wrong for other inputs, or ""."""
        from tilewise.graph.plan import SelfPlan

        dtypes = tuple([array.dtype for array in arrays])
        plan, readers = self.plans.get(dtypes), _events.value_readers.set([])
        try:
            if plan is None:
                plan = SelfPlan(module, tuple(arrays))
            else:
                plan.prepare(*arrays)
            layers = _events.value_readers.get()
        finally:
            _events.value_readers.reset(readers)
        if layers:
            return (
                f"{layers[0] or type(module).__name__} reads numbers of a tensor and computes with them outside of it"
            )
        if not self.watch.has_same_attributes(module):
            return "its forward() changes its attributes"
        self.plans[dtypes] = plan
        return ""


class WeightWatch:
    """Detects changes of a module's attributes, layers and weights."""

    def __init__(self, module: Module) -> None:
        """Record a module's attributes, and of each tensor a version counter or else its numbers."""
        # The root is not stored: a module that refers to itself would be freed late.
        self._attributes = [(layer, _attributes(layer)) for layer in module.modules() if layer is not module]
        self._own_attributes = _attributes(module)
        tensors = {id(tensor): tensor for _, tensor in module.named_tensors()}.values()
        self.tensors: list[Any] = [tensor for tensor in tensors if hasattr(tensor, "exposures")]
        # Tensors and arrays whose numbers are compared at each call: those that do not count, and those that somebody
        # else holds too (a state dict, another layer, a plan).
        self._plain: list[Any] = [tensor for tensor in tensors if not hasattr(tensor, "exposures")]
        # Several tensors of a module may hold one array: exporters write equal constants once.
        owners = Counter(id(tensor._array) for tensor in self.tensors)
        extra = [(sys.getrefcount(t._array) - owners[id(t._array)] - _SOLE_OWNER + 1, t) for t in self.tensors]
        self._plain += [tensor for count, tensor in extra if count > 0]
        self._containers: list[Any] = []  # lists and dictionaries among the attributes of users' classes
        self._odd_attribute = ""
        for layer in module.modules():
            self._add_attributes(layer)
        self._is_too_large = sum(map(_bytes, self._plain)) > _MAX_COMPARED
        self._recorded_bytes = [] if self._is_too_large else list(map(_content_bytes, self._plain))
        self._copies = [copy.copy(container) for container in self._containers]
        self.renew()

    def renew(self) -> None:
        """Record the current state of all weights as the one that plans were compiled from."""
        self.structure = structure.count
        self._exposures = [tensor.exposures for tensor in self.tensors]
        self._versions = [tensor._version[0] for tensor in self.tensors]

    def is_unchanged(self, module: Module) -> bool:
        """Tell whether nothing has changed in the module since `renew`."""
        if self.structure != structure.count:
            if not self.has_same_attributes(module):
                return False
            self.structure = structure.count
        return (
            [tensor.exposures for tensor in self.tensors] == self._exposures
            and [tensor._version[0] for tensor in self.tensors] == self._versions
            and (not self._plain or list(map(_content_bytes, self._plain)) == self._recorded_bytes)
            and self._containers == self._copies
        )

    def _add_attributes(self, layer: Module) -> None:
        """Record the attributes of a layer of a user's class, changes of which are not counted."""
        if is_own(layer):
            return
        for name, value in _attributes(layer).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
            if isinstance(value, np.ndarray):
                self._plain.append(value)
            elif isinstance(value, _CONTAINERS) and all(isinstance(item, _SCALARS) for item in items):
                self._containers.append(value)
            elif not (isinstance(value, (*_SCALARS, Tensor)) or callable(value)):  # layers are callable
                self._odd_attribute = f"{type(layer).__name__}.{name} is a {type(value).__name__}"

    def has_same_attributes(self, module: Module) -> bool:
        """Tell whether the module has the same layers with the same attributes as recorded."""
        layers = [layer for layer in module.modules() if layer is not module]
        return (
            _same_attributes(_attributes(module), self._own_attributes)
            and len(layers) == len(self._attributes)
            and all(
                layer is expected_layer and _same_attributes(_attributes(layer), attributes)
                for layer, (expected_layer, attributes) in zip(layers, self._attributes, strict=True)
            )
        )

    def reason_not_to(self) -> str:
        """Return why changes of this module could go unnoticed, or "" if none can."""
        if self._odd_attribute:
            return f"{self._odd_attribute}, whose changes cannot be noticed"
        if self._is_too_large:
            return "large arrays of its weights are also held outside of it, and could be changed there"
        return ""


_example = Tensor(np.zeros(1, np.float32))
_SOLE_OWNER = sys.getrefcount(_example._array)  # references to an array that only its tensor has


def _content_bytes(holder: Any) -> bytes:
    """Return the content of a tensor or array as bytes."""
    array: Array = holder._array if isinstance(holder, Tensor) else holder
    return array.tobytes()


def _bytes(holder: Any) -> int:
    return int(holder.size * holder.dtype.itemsize)


def _attributes(module: Module) -> dict[str, Any]:
    """Return the attributes of a module that affect what it computes, by name."""
    own = {name: value for name, value in vars(module).items() if name not in ("_planner", "_engines")}
    return own | {"training": module.training}


def _same_attributes(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Tell whether two attribute dicts have the same objects, or equal numbers and strings, under each name."""
    if now.keys() != before.keys():
        return False
    pairs = ((value, before[name]) for name, value in now.items())
    return all(a is b or (isinstance(a, _SCALARS) and type(a) is type(b) and bool(a == b)) for a, b in pairs)


def unplannable_reason(module: Module, arrays: list[Array], watch: WeightWatch) -> str:
    """Return why a module cannot be planned for these inputs, as known without trying; else ""."""
    if native is None:
        return "the compiled kernels are not installed"
    if any(layer.training and (layer.depends_on_mode or not is_own(layer)) for layer in module.modules()):
        return "a layer in it is in train mode"
    if not arrays or any(array.size == 0 for array in arrays):
        return "an input is empty"
    floats = [array.dtype for array in (*arrays, *(t._array for t in watch.tensors)) if array.dtype.kind == "f"]
    if any(dtype != np.float32 for dtype in floats):
        return "plans compute in float32"
    refusing = next((layer for layer in module.modules() if not layer.plans_itself), None)
    if refusing is not None:
        return f"{type(refusing).__name__} does not plan itself"
    return ""


def _describe(key: InputKey) -> str:
    return " and ".join(f"{shape} {dtype}" for shape, dtype in key)


class Recompute(Operation):
    """Operation that gives a planned call a gradient: `backward` runs the module again with recording."""

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_key: Any = None  # of this result among several: a name or a number

    @classmethod
    def of(cls, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recompute:
        """Create the operation for one call of a module."""
        step = cls()
        step.module, step.args, step.kwargs = module, args, kwargs
        return step

    def backward(self, grad: Array) -> tuple[()]:
        """Run the module again with recording, and backpropagate `grad` to its weights."""
        modes = [(layer, layer.training) for layer in self.module.modules()]
        self.module.eval()
        try:
            with layer_by_layer(), enable_grad():
                result = self.module.forward(*self.args, **self.kwargs)
        finally:
            for layer, training in modes:
                layer.training = training
        tensor: Tensor = result if isinstance(result, Tensor) else result[self.output_key]
        if tensor.requires_grad:
            tensor.backward(grad)  # adds to the gradients of the weights
        return ()


def _attach_gradients(result: Any, recompute: Recompute, tensors: list[Any]) -> None:
    """Make `backward` work on the Tensors in a planned call's result, by `recompute`."""
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    outputs = {None: result} if isinstance(result, Tensor) else result
    if isinstance(outputs, tuple | list):
        outputs = dict(enumerate(outputs))
    if not trained or not isinstance(outputs, dict):
        return
    for output_key, tensor in outputs.items():
        is_new = isinstance(tensor, Tensor) and not tensor.requires_grad
        if is_new and tensor.dtype.kind == "f" and all(tensor is not x for x in recompute.args):
            step = Recompute.of(recompute.module, recompute.args, recompute.kwargs)
            step.output_key = output_key
            _record(step, (), tensor)
            step.saved = tuple([(weight._version, weight._version[0]) for weight in trained])
