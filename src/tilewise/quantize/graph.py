"""The float model as a list of steps, whose results can be observed and which integer layers then replace.

The steps are the ops of the float plan (`tilewise.plan`): norms are folded into convolutions, activations and residual
additions are fused. Operations that the plan does not support are steps that run in float.
"""

from __future__ import annotations

import math
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
from tilewise.ops.shapes import Reshape
from tilewise.tensor import no_grad

# Float steps that the native graph runs between integer ones.
NATIVE_NORMS = kinds_with(Quantization.FLOAT)


@dataclass
class FloatGraph:
    """A traced float model as operators in execution order; the first is the input, the last one the result."""

    steps: list[Op]
    batch: int = 0  # batch size of the example that the model was traced with
    any_size: bool = False  # the steps are the same for images of another size than the example's
    module_result: Array | None = None  # the module's own result for the example, until it was compared
    island_plans: dict[tuple[int, ...], Any] = field(default_factory=dict)  # by the steps of an island (float_islands)

    def copy(self) -> FloatGraph:
        """Return a copy with its own list of operators, which conversion may change; arrays are shared."""
        steps = [replace(step) for step in self.steps]
        return FloatGraph(steps, self.batch, self.any_size, island_plans=self.island_plans)

    def users(self, index: int) -> Iterator[Op]:
        return (step for step in self.steps if index in step.inputs)

    def run(self, x: Array, watch: Callable[[int, Array], None] | None = None) -> Array:
        """Run the model in float on a batch; `watch` receives the index and the result of every operator."""
        results: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.steps):
                out = x if step.kind == "input" else self.run_float(step, [results[i] for i in step.inputs])
                results.append(out)
                if watch is not None:
                    watch(index, out)
        return results[-1]

    def results(self, x: Array) -> list[Array]:
        """Run the model in float on a batch and return the result of every operator."""
        results: list[Array] = []
        self.run(x, lambda _, result: results.append(result))
        return results

    def run_float(self, step: Op, inputs: list[Array]) -> Array:
        """Run one operator in float32 on the results that it reads."""
        try:
            if step.node is not None and step.kind == "python":
                return run_node(node_for_batch(step.node, inputs, self.batch), inputs)
            reference = NATIVE_OPS[step.kind].reference
            assert reference is not None
            return reference(step, *inputs)
        except TilewiseError:
            raise
        except ValueError:
            shapes = " and ".join(str(i.shape) for i in inputs)
            raise ShapeError(f"{step.name} ({step.kind}) cannot take {shapes}: channels or sizes do not fit") from None


def run_node(node: Node, arrays: list[Array]) -> Array:
    """Evaluate a traced operation on `arrays`, one for each traced value that it reads, in order."""
    array_of = {value.number: array for value, array in zip(node.reads(), arrays, strict=True)}
    return node.evaluate(lambda value: array_of[value.number])


def node_for_batch(node: Node, arrays: list[Array], batch: int) -> Node:
    """Return a traced operation with its shape parameter changed from the traced batch size to that of `arrays`.

    `batch` is the traced batch size, `arrays` the operation's current inputs. The first axis of a reshape, which may be
    more than the batch (windows or groups of all images), follows the size of its input.
    """
    current_batch = len(arrays[0]) if arrays and arrays[0].ndim else batch
    shape = node.params.get("shape")
    if node.operation is Reshape:
        if arrays[0].size == math.prod(node.shape):
            return node
        shape = (arrays[0].size // max(math.prod(node.shape[1:]), 1), *node.shape[1:])
    elif isinstance(shape, tuple) and shape and shape[0] == batch:
        shape = (current_batch, *shape[1:])
    else:
        return node
    return replace(node, params={**node.params, "shape": shape})


# --- from a model ---


def _takes_any_size(model: Module, example: Array) -> bool:
    """Tell whether a model runs the same operators on images twice as high and wide as those of `example`.

    A trace stores image sizes as constants where the model computed with them, in reshapes, slices or resampling
    positions; its operators would then be wrong for images of another size.
    """
    one = example[:1]
    try:
        sizes = (one, np.tile(one, (1, 1, *(2,) * (one.ndim - 2))))
        first, second = (Lowering(match_patterns(trace_module(model, x), attention=False)).ops for x in sizes)
    except Exception:  # a model that takes one size only raises anything
        return False
    sizes_of = ({i: _size_dependent_parts(op) for i, op in ops.items()} for ops in (first, second))
    return _deep_equal(*sizes_of)


def _size_dependent_parts(op: Op) -> tuple[Any, ...]:
    """Return the parts of an operator that may depend on the image size, for comparison by `_deep_equal`."""
    node = op.node
    if node is None:
        own = op.kind, op.activation, op.options, op.weight, op.bias, op.gain
        return (op.inputs, len(op.shape), op.shape[1:2], *own)
    return op.inputs, node.operation, node.inputs, node.params, node.shape[1:] if node.operation is Reshape else ()


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
    """Trace a model in eval mode into steps, for inputs like this one."""
    original = trace_module(model, example)
    traced = match_patterns(original, attention=False)
    if not isinstance(traced.result, Value):
        raise ConfigurationError(f"the result of {type(model).__name__} does not depend on its input")
    lowering = Lowering(traced)
    steps = [Op("input", (), example.shape, "input")]
    graph = FloatGraph(steps, len(example), _takes_any_size(model, example), original.outputs[""])
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
