"""The float model as a list of steps, whose results can be observed and which integer layers then replace.

The steps are the ops of the float plan (`tilewise.plan`): norms are folded into convolutions, activations and residual
additions are fused. Operations that the plan does not support are steps that run in float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, ShapeError, TilewiseError
from tilewise.graph.ir import Node, Op, Value
from tilewise.graph.ops import NATIVE_OPS, EmitContext
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.patterns import ChannelNorm, GroupNorm, match_patterns
from tilewise.graph.trace import trace as trace_module
from tilewise.nn import Module
from tilewise.ops.shapes import Reshape
from tilewise.quantize.reference import is_leaky, leaky_slope
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
# Float steps that the native graph runs between integer ones.
NATIVE_NORMS = ("group_norm", "channel_norm")


@dataclass
class FloatGraph:
    """Steps in execution order; step 0 is the input, the last one the result. Names are unique."""

    steps: list[Op]
    batch: int = 0  # batch size of the example that the model was traced with
    module_result: Array | None = None  # the module's own result for the example, until it was compared

    def copy(self) -> FloatGraph:
        """Copy the steps; arrays are shared. Conversion drops the float weights of the graph that it is given."""
        return FloatGraph([replace(step) for step in self.steps], self.batch)

    def users(self, index: int) -> Iterator[Op]:
        return (step for step in self.steps if index in step.inputs)

    def run(self, x: Array, watch: Callable[[int, Array], None] | None = None) -> Array:
        """Run the model in float; `watch` receives the index and the result of every step."""
        results: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.steps):
                out = x if step.kind == "input" else self.run_float(step, [results[i] for i in step.inputs])
                results.append(out)
                if watch is not None:
                    watch(index, out)
        return results[-1]

    def run_float(self, step: Op, inputs: list[Array]) -> Array:
        """Run one step in float32."""
        try:
            if step.node is not None and step.kind == "python":
                return _run_node(step.node, inputs, self.batch)
            return _KINDS[step.kind](step, *inputs)
        except TilewiseError:
            raise
        except ValueError:
            shapes = " and ".join(str(i.shape) for i in inputs)
            raise ShapeError(f"{step.name} ({step.kind}) cannot take {shapes}: channels or sizes do not fit") from None


# --- one step in float ---


def activated(x: Array, name: str) -> Array:
    """Apply an activation by name; "" is the identity."""
    if name == "relu6":
        return np.clip(x, 0, 6)
    if is_leaky(name):
        return np.maximum(x, x * np.float32(leaky_slope(name)))
    if name in ("", "relu", "gelu"):
        out: Array = x if not name else current_backend().dispatch(name, x)
        return out
    if name in ("sigmoid", "silu"):
        with np.errstate(over="ignore"):
            gate: Array = 1 / (1 + np.exp(-x))
        return x * gate if name == "silu" else gate
    gate = np.clip(x + np.float32(3), 0, 6) / np.float32(6)
    return x * gate if name == "hard_swish" else gate


def _conv(step: Op, x: Array, residual: Array | None = None) -> Array:
    # Backends take (height, width) if both sides have the same padding, which more kernels support.
    options = {"stride": step.stride, "padding": step.padding, "groups": step.groups, "dilation": step.dilation}
    if step.padding[:2] == step.padding[2:]:
        options["padding"] = step.padding[:2]
    out: Array = current_backend().dispatch("conv2d", x, step.weight, step.bias, **options)
    return activated(out if residual is None else out + residual, step.activation)


def _linear(step: Op, x: Array) -> Array:
    assert step.weight is not None
    out: Array = current_backend().dispatch("matmul", x, step.weight.T, bias=step.bias)
    return activated(out, step.activation)


def _windows(step: Op, x: Array, fill: float) -> Array:
    """Return the windows (N, C, H', W', kh, kw) of images padded with `fill`."""
    top, left, bottom, right = step.padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(padded, step.kernel, (2, 3))
    strided: Array = windows[:, :, :: step.stride[0], :: step.stride[1]]
    return strided


def _max_pool(step: Op, x: Array) -> Array:
    top, left, bottom, right = step.padding
    # The backend pads both sides by the same amount, at most half a window.
    if (top, left) == (bottom, right) and 2 * top <= step.kernel[0] and 2 * left <= step.kernel[1]:
        settings = {"kernel": step.kernel, "stride": step.stride, "padding": (top, left)}
        pooled: Array = current_backend().dispatch("max_pool2d", np.ascontiguousarray(x), **settings)[0]
        return pooled
    largest: Array = _windows(step, x, -np.inf).max((4, 5))
    return largest


def _avg_pool(step: Op, x: Array) -> Array:
    # (N, C, H', W', kh, kw) to (N, C, H', W')
    sums = _windows(step, x, 0).sum((4, 5), dtype=np.float32)
    if step.options.get("count_padding", True):
        whole: Array = sums / np.float32(step.kernel[0] * step.kernel[1])
        return whole
    inside: Array = sums / _windows(step, np.ones_like(x), 0).sum((4, 5), dtype=np.float32)
    return inside


def _affine(step: Op, x: Array) -> Array:
    by_channel = (1, -1) + (1,) * (x.ndim - 2)
    if step.weight is not None:
        x = x * step.weight.reshape(by_channel)
    if step.bias is not None:
        x = x + step.bias.reshape(by_channel)
    return activated(x, step.activation)


def _norm(step: Op, x: Array) -> Array:
    """Normalize by the native operator, so that a step alone and inside a native call gives the same bits."""
    assert step.weight is not None and step.bias is not None
    if native is None or x.size == 0 or x.ndim != 4:
        operation = GroupNorm() if step.kind == "group_norm" else ChannelNorm()
        return np.asarray(operation.forward(x, step.weight, step.bias, **step.options))
    plan = native.Graph()
    plan.output(NATIVE_OPS[step.kind].emit(EmitContext(plan), step, [plan.input(*x.shape)]))
    result: Array = plan.run([np.ascontiguousarray(x, np.float32)])[0]
    return result


def _depth_to_space(step: Op, x: Array) -> Array:
    (by_h, by_w), (n, c, h, w) = step.options["by"], x.shape
    blocks = x.reshape(n, by_h, by_w, c // (by_h * by_w), h, w).transpose(0, 3, 4, 1, 5, 2)
    return np.ascontiguousarray(blocks).reshape(n, -1, h * by_h, w * by_w)


_KINDS: dict[str, Callable[..., Array]] = {
    "conv": _conv,
    "linear": _linear,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "global_mean": lambda step, x: x.mean((2, 3), dtype=np.float32).reshape(len(x), x.shape[1], *step.shape[2:]),
    "add": lambda step, a, b: activated(a + b, step.activation),
    "sub": lambda step, a, b: activated(a - b, step.activation),
    "mul": lambda step, a, b: activated(a * b, step.activation),
    "affine": _affine,
    "concat": lambda _step, *inputs: np.concatenate(inputs, 1),
    "slice": lambda step, x: x[:, step.options["first"] : step.options["first"] + step.shape[1]],
    "gather_channels": lambda step, x: x[:, step.options["channels"]],
    "upsample": lambda step, x: x.repeat(step.options["by"][0], 2).repeat(step.options["by"][1], 3),
    "depth_to_space": _depth_to_space,
    "flatten": lambda _step, x: x.reshape(len(x), int(np.prod(x.shape[1:]))),
    "identity": lambda step, x: x.reshape(len(x), *step.shape[1:]),
    **dict.fromkeys(NATIVE_NORMS, _norm),
}


def _run_node(node: Node, arrays: list[Array], batch: int) -> Array:
    """Run a traced operation on the arrays that take the place of its traced values, for any batch size.

    A shape that begins with the traced batch follows the current batch. The first axis of a reshape, which may be more
    than the batch (windows or groups of all images), follows the size of its input.
    """
    remaining = iter(arrays)
    inputs = [next(remaining) if isinstance(v, Value) else v for v in node.inputs]
    params = {name: next(remaining) if isinstance(v, Value) else v for name, v in node.params.items()}
    current_batch = len(arrays[0]) if arrays and arrays[0].ndim else batch
    shape = params.get("shape")
    if node.operation is Reshape:
        if arrays[0].size != math.prod(node.shape):
            params["shape"] = (arrays[0].size // max(math.prod(node.shape[1:]), 1), *node.shape[1:])
    elif isinstance(shape, tuple) and shape and shape[0] == batch:
        params["shape"] = (current_batch, *shape[1:])
    return np.asarray(node.operation().forward(*inputs, **params))


# --- from a model ---


def trace(model: Module, example: Array) -> FloatGraph:
    """Trace a model in eval mode into steps, for inputs like this one."""
    original = trace_module(model, example)
    traced = match_patterns(original, attention=False)
    if not isinstance(traced.result, Value):
        raise ConfigurationError(f"the result of {type(model).__name__} does not depend on its input")
    lowering = Lowering(traced)
    graph = FloatGraph([Op("input", (), example.shape, "input")], len(example), original.outputs[""])
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


def unique_name(name: str, names: set[str]) -> str:
    """Return `name`, with a number if it is among `names` already, and add it to them."""
    candidate, count = name, 1
    while candidate in names:
        count += 1
        candidate = f"{name}.{count}"
    names.add(candidate)
    return candidate
