"""The float model as a list of steps, whose results can be observed and which integer layers then replace.

The steps are the ops of the float plan (`tilewise.plan`): norms are folded into convolutions, activations and residual
additions are fused. Operations that the plan does not support are steps that run in float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, ShapeError, TilewiseError
from tilewise.graph.ir import Array, Node, Op, Value, unique_name
from tilewise.graph.ops import NATIVE_OPS, Quantization, kinds_with
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.patterns import match_patterns
from tilewise.graph.trace import trace as trace_module
from tilewise.nn import Module
from tilewise.nn.resampling import Taps
from tilewise.tensor import no_grad

# Float steps that the native graph runs between integer ones.
NATIVE_NORMS = kinds_with(Quantization.FLOAT)


@dataclass
class FloatGraph:
    """A traced float model as operators in execution order; the first is the input, the last one the result."""

    steps: list[Op]
    batch: int = 0  # batch size of the example that the model was traced with
    any_batch: bool = True  # the steps are the same for another batch than the example's
    any_size: bool = False  # the steps are the same for images of another size than the example's
    module_result: Array | None = None  # the module's own result for the example, until it was compared
    island_plans: dict[tuple[int, ...], Any] = field(default_factory=dict)  # by the steps of an island (float_islands)

    def copy(self) -> FloatGraph:
        """Return a copy with its own list of operators, which conversion may change; arrays are shared."""
        steps = [replace(step) for step in self.steps]
        return FloatGraph(steps, self.batch, self.any_batch, self.any_size, island_plans=self.island_plans)

    def users(self, index: int) -> Iterator[Op]:
        return (step for step in self.steps if index in step.inputs)

    def run(self, x: Array, watch: Callable[[int, Array], None] | None = None) -> Array:
        """Run the model in float on a batch; `watch` receives the index and the result of every operator."""
        self.check_batch(x)
        results: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.steps):
                out = x if step.kind == "input" else self.run_float(step, [results[i] for i in step.inputs], len(x))
                results.append(out)
                if watch is not None:
                    watch(index, out)
        return results[-1]

    def check_batch(self, x: Array) -> None:
        """Raise ShapeError if the steps do not hold for a batch of this size."""
        if not self.any_batch and len(x) != self.batch:
            raise ShapeError(
                f"this network computes with its batch, so a quantized copy takes batches of {self.batch} only, not of "
                f"{len(x)}: let it take any batch, as an ONNX file does that was exported with dynamic axes"
            )

    def results(self, x: Array) -> list[Array]:
        """Run the model in float on a batch and return the result of every operator."""
        results: list[Array] = []
        self.run(x, lambda _, result: results.append(result))
        return results

    def run_float(self, step: Op, inputs: list[Array], batch: int) -> Array:
        """Run one operator in float32 on the results that it reads; `batch` is the number of the network's inputs."""
        try:
            if step.node is not None and step.kind == "python":
                return run_node(at_batch(step.node, batch), inputs)
            reference = NATIVE_OPS[step.kind].reference
            assert reference is not None
            return reference(step, *inputs)
        except TilewiseError:
            raise
        except ValueError:
            shapes = " and ".join(str(i.shape) for i in inputs)
            raise ShapeError(f"{step.name} ({step.kind}) cannot take {shapes}: channels or sizes do not fit") from None


def run_node(node: Node, arrays: list[Array]) -> Array:
    """Evaluate a traced operation on `arrays`, one for each value that it reads; ShapeError if nothing is left."""
    array_of = {value.number: array for value, array in zip(node.reads(), arrays, strict=True)}
    result = node.evaluate(lambda value: array_of[value.number])
    if not result.size and all(array.size for array in arrays):
        raise ShapeError(f"{node.layer or node.name} leaves nothing of inputs this small")
    return result


# --- numbers that follow the batch ---

_OTHER = "this network computes something else for another batch"


@dataclass(frozen=True)
class BatchInteger:
    """An integer that follows the batch: `each` per input plus `fixed`."""

    each: int
    fixed: int

    def at(self, batch: int) -> int:
        return self.each * batch + self.fixed


class RepeatedConstant:
    """A constant that is repeated for every input along one axis, where `array` has one entry."""

    def __init__(self, array: Array, axis: int = 0) -> None:
        if not isinstance(array, np.ndarray) or not 0 <= axis < array.ndim or array.shape[axis] != 1:
            raise ValueError
        self.array, self.axis, self.nbytes = array, axis, array.nbytes

    def at(self, batch: int) -> Array:
        shape = self.array.shape
        return np.broadcast_to(self.array, (*shape[: self.axis], batch, *shape[self.axis + 1 :]))


def at_batch(value: Any, batch: int) -> Any:
    """Replace what follows the batch by its value for `batch`, in nodes and nested lists too."""
    if isinstance(value, BatchInteger | RepeatedConstant):
        return value.at(batch)
    if isinstance(value, tuple | list):
        return type(value)(at_batch(v, batch) for v in value)
    if isinstance(value, slice):
        return slice(*(at_batch(end, batch) for end in (value.start, value.stop, value.step)))
    if isinstance(value, Node):
        params = {name: at_batch(v, batch) for name, v in value.params.items()}
        return replace(value, inputs=at_batch(value.inputs, batch), params=params)
    return value


def follow_batch(node: Node, other: Node | None, batches: tuple[int, int]) -> Node:
    """Return a traced operation for any batch; `other` is the same one, traced with the second of two batches.

    ConfigurationError if a number depends on the batch in another way than `BatchInteger` and `RepeatedConstant` do.
    """
    if other is None or node.operation is not other.operation or node.params.keys() != other.params.keys():
        raise ConfigurationError(_OTHER)
    params = {name: _for_any_batch(v, other.params[name], batches) for name, v in node.params.items()}
    return replace(node, inputs=_for_any_batch(node.inputs, other.inputs, batches), params=params)


def _for_any_batch(value: Any, other: Any, batches: tuple[int, int]) -> Any:
    """Return an operand or parameter in a form for any batch size, from its values at the two sizes `batches`."""
    if type(value) is not type(other):
        raise ConfigurationError(_OTHER)
    if isinstance(value, tuple | list) and len(value) == len(other):
        return type(value)(_for_any_batch(a, b, batches) for a, b in zip(value, other, strict=True))
    if isinstance(value, slice):
        ends = ((getattr(value, end), getattr(other, end)) for end in ("start", "stop", "step"))
        return slice(*(_for_any_batch(a, b, batches) for a, b in ends))
    if isinstance(value, np.ndarray):
        return _array_for_any_batch(value, other, batches)
    if type(value) is int and value != other:
        each, remainder = divmod(other - value, batches[1] - batches[0])
        if not remainder:
            return BatchInteger(each, value - each * batches[0])
    if isinstance(value, int | float | tuple | list | Value) and value != other:
        raise ConfigurationError("a number of this network depends on the batch, and not as a size does")
    return value


def _array_for_any_batch(value: Array, other: Array, batches: tuple[int, int]) -> Array | RepeatedConstant:
    """Return a constant for any batch: itself if both traces have it, or what is repeated along an axis."""
    if value is other or _same_numbers(value, other):
        return value
    for axis, sizes in enumerate(zip(value.shape, other.shape, strict=False)):
        one = value.take([0], axis)
        is_repeated = sizes == batches and _same_numbers(np.broadcast_to(one, value.shape), value)
        if is_repeated and _same_numbers(np.broadcast_to(one, other.shape), other):
            return RepeatedConstant(np.ascontiguousarray(one), axis)
    raise ConfigurationError("a constant of this network depends on the batch")


def _same_numbers(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# --- from a model ---

_WINDOWS = ("conv", "max_pool", "avg_pool")  # kinds of ops whose stride may round sizes


def larger_images(x: Array) -> Array:
    """Return images twice as high and wide; inputs without height and width stay as they are."""
    return np.tile(x, (1, 1, *(2,) * (x.ndim - 2)))


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a model by a function; None if it raises, as a model that takes one batch or one size only does."""
    try:
        return function(*arguments)
    except Exception:  # a model may raise anything
        return None


def _lowered(model: Module, example: Array) -> dict[int, Op]:
    """Return the ops of a model for an example."""
    return Lowering(match_patterns(trace_module(model, example), attention=False)).ops


def _generalize(graph: FloatGraph, lowering: Lowering, model: Module, example: Array) -> None:
    """Make the traced operations of `graph` follow the batch, and find out whether images may have another size.

    A trace holds sizes as numbers where the model computed with them: in reshapes, slices, resampling positions and
    constants. Traces of two other examples show which numbers follow the batch, and whether any follows the image.
    """
    ops, second = lowering.ops, np.resize(example, (3 if len(example) == 2 else 2, *example.shape[1:]))
    twins, larger = (attempt(_lowered, model, x) or {} for x in (second, larger_images(second)))
    graph.any_batch = graph.any_size = False
    batches = len(example), len(second)
    if twins.keys() != ops.keys():
        return
    try:
        nodes = {number: follow_batch(op.node, twins[number].node, batches) for number, op in ops.items() if op.node}
    except ConfigurationError:
        return
    is_unchanged = all(op.node or _deep_equal(_contents(op), _contents(twins[n])) for n, op in ops.items())
    # A network that selects inputs by number has the same operations for any batch, and another result.
    result = twins.get(lowering.resolve(lowering.result))
    graph.any_batch = is_unchanged and (result is None or result.shape[:1] == second.shape[:1])
    if graph.any_batch:
        for number, node in nodes.items():
            ops[number].node = node
        graph.any_size = _deep_equal(*({n: _contents(op) for n, op in ops.items()} for ops in (twins, larger)))
        graph.any_size = graph.any_size and not any(_hides_size(number, twins, larger) for number in twins)


def _hides_size(number: int, ops: dict[int, Op], larger: dict[int, Op]) -> bool:
    """Tell whether two input sizes give a window the same output size, so that later ops do not reveal them."""
    op, source = ops[number], ops[number].inputs[0]
    has_one_input_size = source in ops and ops[source].shape[2:] == larger[source].shape[2:]
    return op.kind in _WINDOWS and not has_one_input_size and op.shape[2:] == larger[number].shape[2:]


def _contents(op: Op) -> tuple[Any, ...]:
    """Return all of an op that may hold a size of its inputs; its channels do where it flattens images."""
    if op.node is not None:
        return op.inputs, op.node.operation, op.node.inputs, op.node.params
    return op.inputs, len(op.shape), op.shape[1:2], op.kind, op.activation, op.options, op.weight, op.bias, op.gain


def same_nodes(a: list[Node], b: list[Node]) -> bool:
    """Tell whether two traces have the same operations, with the same numbers in them."""
    return _deep_equal(*([(node.operation, node.inputs, node.params) for node in nodes] for nodes in (a, b)))


def _deep_equal(a: Any, b: Any) -> bool:
    """Compare two operands or parameters recursively, including arrays in tuples, lists and dictionaries."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a is b or np.array_equal(a, b)
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(map(_deep_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_deep_equal(a[key], b[key]) for key in a)
    if isinstance(a, Taps) and isinstance(b, Taps):
        return _deep_equal((a.positions, a.weights), (b.positions, b.weights))
    return bool(a is b or a == b)


def trace(model: Module, example: Array) -> FloatGraph:
    """Trace a model in eval mode, for inputs like `example`, and return its operators as a `FloatGraph`."""
    graph = _trace(model, example)
    if graph.any_batch or len(example) > 1:
        return graph
    # With a batch of one, axes of size 1 are merged and moved that are not for other batches.
    general: FloatGraph | None = attempt(_trace, model, np.resize(example, (2, *example.shape[1:])))
    return graph if general is None or not general.any_batch else replace(general, module_result=graph.module_result)


def _trace(model: Module, example: Array) -> FloatGraph:
    """Trace a model to operators that hold for this example and, as far as is known, for other batches and sizes."""
    original = trace_module(model, example)
    traced = match_patterns(original, attention=False)
    if not isinstance(traced.result, Value):
        raise ConfigurationError(f"the result of {type(model).__name__} does not depend on its input")
    lowering = Lowering(traced)
    steps = [Op("input", (), example.shape, "input")]
    graph = FloatGraph(steps, len(example), module_result=original.outputs[""])
    _generalize(graph, lowering, model, example)
    index_of = {0: 0}  # the step of each value of the trace
    names = {"input"}
    for number, step in lowering.ops.items():
        step.inputs = tuple(index_of[i] for i in step.inputs)
        step.layer = unique_name(step.layer or step.kind, names)
        if step.weight is not None:
            # A folded norm's gain is quantized together with the weights.
            step.weight, step.gain = step.scaled_weight(), None
        if step.kind == "mul" and graph.steps[step.inputs[0]].shape != step.shape:
            step.inputs = step.inputs[::-1]  # a gate is the second operand
        graph.steps.append(step)
        index_of[number] = len(graph.steps) - 1
    last = index_of[lowering.resolve(traced.result)]
    if last != len(graph.steps) - 1:  # the input or an inner step is the result
        graph.steps.append(Op("identity", (last,), graph.steps[last].shape, unique_name("result", names)))
    return graph
