"""Each operation of the framework as ONNX nodes. The table is by class name; a function writes one traced call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.graph.ir import Node, Value, four_sides
from tilewise.graph.op_specs.functions import ACTIVATIONS, BINARY, UNARY, Activation, Function, write_activation
from tilewise.onnx.writer import OnnxWriter


@dataclass
class Emission:
    """One traced call that is being written as ONNX nodes; `other_shape` is its shape at another batch size."""

    graph: OnnxWriter
    call: Node
    inputs: list[str]
    name_of: Callable[[Any], str]
    other_shape: tuple[int, ...] | None = None
    batch_input: str = ""  # the network's first input, whose first size is the batch

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name: str = self.graph.node(op, inputs, **attributes)
        return name

    def number(self, value: float) -> str:
        return self.graph.constant(value, self.call.dtype)

    def param(self, name: str, default: Any = None) -> Any:
        return self.call.params.get(name, default)


Emit = Callable[[Emission], str]


# --- elementwise ---


def _activation(activation: Activation) -> Emit:
    return lambda e: activation.onnx(e, e.inputs[0])


def _function(function: Function) -> Emit:
    """Return the function that writes an elementwise operation with a single ONNX counterpart."""
    defaults = inspect.signature(function.operation.forward).parameters

    def emit(e: Emission) -> str:
        settings = {a: e.param(name, defaults[name].default) for name, (a, _) in function.attributes.items()}
        return e.node(function.onnx, *e.inputs, **settings)

    return emit


def _elu(e: Emission) -> str:
    """Write scale * (x if x > 0 else alpha * (exp(x / width) - 1)) as ONNX nodes."""
    alpha, width, scale = (e.param(n, 1.0) for n in ("alpha", "width", "scale"))
    x = e.inputs[0] if width == 1 else e.node("Div", e.inputs[0], e.number(width))
    if width == 1:
        y = e.node("Elu", x, alpha=alpha)
    else:
        y = e.node("Max", e.inputs[0], e.number(0.0))
        y = e.node("Add", y, e.node("Elu", e.node("Min", x, e.number(0.0)), alpha=alpha))
    return y if scale == 1 else e.node("Mul", y, e.number(scale))


def _clip(e: Emission) -> str:
    bounds = ["" if b is None else e.number(b) for b in (e.param("low"), e.param("high"))]
    return e.node("Clip", e.inputs[0], *bounds)


# --- along axes ---


def _axes(e: Emission) -> list[int]:
    """Return the axes of a reduction as non-negative numbers; all axes if none is named."""
    axis = e.param("axis")
    rank = len(e.call.input_shapes[0])
    if axis is None:
        return list(range(rank))
    return [a % rank for a in (axis if isinstance(axis, tuple | list) else (axis,))]


def _var(e: Emission) -> str:
    """Write a variance as ONNX nodes: squares of the centred input, summed and divided by count - correction."""
    axes, x = _axes(e), e.inputs[0]
    count = math.prod(e.call.input_shapes[0][a] for a in axes)
    centred = e.node("Sub", x, e.node("ReduceMean", x, axes=axes, keepdims=1))
    squares = e.node("Mul", centred, centred)
    total = e.node("ReduceSum", squares, e.graph.constant(axes), keepdims=int(e.param("keepdims", False)))
    return e.node("Div", total, e.number(max(count - e.param("correction", 1), 0)))


# --- shapes ---

_TANGLED = "this model's shapes follow the batch in a way that ONNX cannot say; save it with dynamic=False"


def _reshape(e: Emission) -> str:
    """Write a reshape as Flatten if it keeps the batch dimension of a 2-D result, else as Reshape."""
    input_shape = e.call.input_shapes[0]
    if len(e.call.shape) == 2 and len(input_shape) > 1 and input_shape[0] == e.call.shape[0]:
        return e.node("Flatten", e.inputs[0], axis=1)
    return e.node("Reshape", e.inputs[0], e.graph.constant(free_shape(e.call, e.other_shape)))


def free_shape(call: Node, other: tuple[int, ...] | None) -> list[int]:
    """Return the target shape of a `Reshape` node that holds for every batch size.

    Of the sizes that differ between the call's two traces, 0 copies the input's first size and -1 is computed.
    """
    shape = list(call.shape)
    moving = [i for i, n in enumerate(other or ()) if n != shape[i]]
    if len(moving) > 1 and moving[0] == 0 and call.input_shapes[0][:1] == call.shape[:1]:
        shape[0] = 0
        moving = moving[1:]
    if len(moving) > 1:
        raise ConfigurationError(_TANGLED)
    for axis in moving:
        shape[axis] = -1
    return shape


def _permute(e: Emission) -> str:
    rank = len(e.call.input_shapes[0])
    return e.node("Transpose", e.inputs[0], perm=[a % rank for a in e.param("axes")])


def _expand(e: Emission) -> str:
    """Write a broadcast; if a size depends on the batch, the target shape is computed from the input."""
    shape, other = list(e.call.shape), e.other_shape
    moving = [] if other is None else [i for i, n in enumerate(other) if n != shape[i]]
    if not moving:
        return e.node("Expand", e.inputs[0], e.graph.constant(shape))
    if moving != [0] and len(moving) > 1:
        raise ConfigurationError(_TANGLED)
    return repeat(e.graph, e.inputs[0], shape, moving[0], e.batch_input)


def repeat(graph: Any, x: str, shape: Sequence[int], axis: int, batch_input: str) -> str:
    """Write a broadcast to `shape`, where `axis` gets the batch, which is the first size of `batch_input`."""
    batch = graph.node("Slice", [graph.node("Shape", [batch_input]), *(graph.constant([n]) for n in (0, 1, 0))])
    sizes = [graph.constant(shape[:axis]), batch, graph.constant(shape[axis + 1 :])]
    not_empty = [part for part, n in zip(sizes, (axis, 1, len(shape) - axis - 1), strict=True) if n]
    return str(graph.node("Expand", [x, graph.node("Concat", not_empty, axis=0)]))


def _pad(e: Emission) -> str:
    """Write a Pad node, which lists all widths before an axis first, then all behind."""
    widths = e.param("widths")
    pads = e.graph.constant([w[0] for w in widths] + [w[1] for w in widths])
    return e.node("Pad", e.inputs[0], pads, e.number(e.param("value")))


def _get_item(e: Emission) -> str:
    """Write an index expression as slices, or as a gather if it contains an array."""
    index = e.param("index")
    indices = list(index) if isinstance(index, tuple) else [index]
    arrays = [p for p in indices if isinstance(p, np.ndarray | Value)]
    if arrays:
        return _gather(e, indices, arrays)
    return _slices(e, indices)


def _gather(e: Emission, indices: list[Any], arrays: list[Any]) -> str:
    """Write indexing by one array along one axis as a Gather node; `arrays` are the array indices."""
    whole = [p for p in indices if isinstance(p, slice) and p == slice(None)]
    if (
        len(arrays) != 1
        or len(whole) != len(indices) - 1
        or (isinstance(arrays[0], np.ndarray) and arrays[0].dtype == bool)
    ):
        raise ConfigurationError("looking up by several arrays, or by a mask, cannot be written to ONNX")
    axis = next(i for i, p in enumerate(indices) if p is arrays[0])
    return e.node("Gather", e.inputs[0], e.name_of(arrays[0]), axis=axis)


def _slices(e: Emission, indices: list[Any]) -> str:
    """Write indexing by slices, integers, None and Ellipsis as Slice, Squeeze and Unsqueeze nodes."""
    rank = len(e.call.input_shapes[0])
    axes_used = sum(p is not None and p is not Ellipsis for p in indices)
    if Ellipsis in indices:
        at = indices.index(Ellipsis)
        indices[at : at + 1] = [slice(None)] * (rank - axes_used)
    axis, cuts, dropped, added, out_axis = 0, [], [], [], 0
    for part in indices:
        if part is None:
            added.append(out_axis)
            out_axis += 1
            continue
        if isinstance(part, slice):
            start, stop, step = part.indices(e.call.input_shapes[0][axis])
            if part != slice(None):
                cuts.append((start, stop if stop >= 0 else -(1 << 31), axis, step))
            out_axis += 1
        else:
            at = int(part)
            cuts.append((at, at + 1 if at != -1 else 1 << 31, axis, 1))
            dropped.append(axis)
        axis += 1
    x = e.inputs[0]
    if cuts:
        x = e.node("Slice", x, *(e.graph.constant(list(column)) for column in zip(*cuts, strict=True)))
    x = e.node("Squeeze", x, e.graph.constant(dropped)) if dropped else x
    return e.node("Unsqueeze", x, e.graph.constant(added)) if added else x


def _resample(e: Emission) -> str:
    """Write resampling along an axis as a weighted sum of gathered entries, one per tap."""
    taps, axis, rank = e.param("taps"), e.param("axis"), len(e.call.shape)
    total = ""
    for positions, weights in zip(taps.positions, taps.weights, strict=True):
        part = e.node("Gather", e.inputs[0], e.graph.constant(positions), axis=axis)
        if not (weights == 1).all():
            along_axis = weights.reshape((-1,) + (1,) * (rank - axis - 1))
            part = e.node("Mul", part, e.graph.constant(along_axis, e.call.dtype))
        total = e.node("Add", total, part) if total else part
    return total


# --- layers ---


def _recurrent(e: Emission) -> str:
    """Write one direction of a recurrent layer; an LSTM's result ends with the last cell state."""
    kind = e.param("kind")
    x, *weights = e.inputs[:4]
    first = e.graph.constant([0])
    weights = [e.node("Unsqueeze", name, first) for name in weights]
    state = [e.node("Unsqueeze", name, first) for name in e.inputs[4:]]
    settings: dict[str, Any] = {"hidden_size": e.call.shape[-1]}
    if e.param("reverse"):
        settings["direction"] = "reverse"
    if kind == "gru":
        settings["linear_before_reset"] = 1
    if kind == "rnn_relu":
        settings["activations"] = ["Relu"]
    op = {"lstm": "LSTM", "gru": "GRU"}.get(kind, "RNN")
    outputs = e.graph.node(op, [x, *weights, "", *state], 3 if op == "LSTM" else 1, **settings)
    steps, _, cell = outputs if op == "LSTM" else (outputs, "", "")
    hidden = e.node("Squeeze", steps, e.graph.constant([1]))
    return e.node("Concat", hidden, cell, axis=0) if cell else hidden


def finish(e: Emission, y: str) -> str:
    """Write the residual and activation that are fused into a product with result `y`; return the final name."""
    residual = e.param("residual")
    if residual is not None:
        y = e.node("Add", y, e.name_of(residual))
    return write_activation(e, y, e.param("activation") or "")


def _linear(e: Emission) -> str:
    """Write a linear layer: Gemm for rows, MatMul and Add for more axes."""
    x, weight = e.inputs[:2]
    if len(e.call.input_shapes[0]) == 2:
        return finish(e, e.node("Gemm", *e.inputs, transB=1))
    source = e.call.inputs[1]
    if isinstance(source, Value):
        transposed = e.node("Transpose", weight, perm=[1, 0])
    else:  # a constant is written the other way round instead
        transposed = e.graph.weight(np.ascontiguousarray(source.T), f"{weight}.T")
    y = e.node("MatMul", x, transposed)
    return finish(e, y if len(e.inputs) == 2 else e.node("Add", y, e.inputs[2]))


def _window(e: Emission) -> dict[str, Any]:
    """Return strides, pads and groups of a convolution or pooling as ONNX attributes."""
    return {
        "strides": list(e.param("stride")),
        "pads": list(four_sides(e.param("padding"))),
        "group": e.param("groups"),
    }


def _conv(e: Emission) -> str:
    return finish(e, e.node("Conv", *e.inputs, **_window(e), dilations=list(e.param("dilation", (1, 1)))))


def _conv_transpose(e: Emission) -> str:
    return e.node("ConvTranspose", *e.inputs, **_window(e), output_padding=list(e.param("output_padding")))


def _pool(e: Emission) -> str:
    """Write max or average pooling as an ONNX node."""
    settings = {**_window(e), "kernel_shape": list(e.param("kernel"))}
    if e.call.operation.__name__ == "MaxPool2d":
        return e.node("MaxPool", e.inputs[0], **settings)
    return e.node("AveragePool", e.inputs[0], **settings, count_include_pad=1)


def _attention(e: Emission) -> str:
    """Write attention over separate q, k and v as ONNX nodes."""
    (_, _, t, d), (_, _, s, _) = e.call.input_shapes[:2]
    scale = e.param("scale")
    return attend(
        e, e.inputs, (t, s), 1 / math.sqrt(d) if scale is None else scale, bool(e.param("causal")), e.param("mask")
    )


def attend(e: Emission, qkv: list[str], size: tuple[int, int], scale: float, causal: bool, mask: Any) -> str:
    """Write softmax(q kᵀ · scale + mask) v as nodes; `size` is (queries, keys)."""
    q, k, v = qkv
    scores = e.node("MatMul", e.node("Mul", q, e.number(scale)), e.node("Transpose", k, perm=[0, 1, 3, 2]))
    if causal:
        t, s = size
        visible = np.tril(np.ones((t, s), bool), s - t)
        scores = e.node("Add", scores, e.graph.constant(np.where(visible, 0, -np.inf), e.call.dtype))
    if mask is not None:
        scores = _masked(e, scores, mask)
    return e.node("MatMul", e.node("Softmax", scores, axis=-1), v)


def _masked(e: Emission, scores: str, mask: Any) -> str:
    """Apply an attention mask to scores: computed masks with Where, constant ones with Add."""
    if isinstance(mask, Value):
        return e.node("Where", e.name_of(mask), scores, e.number(-np.inf))
    added = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask
    return e.node("Add", scores, e.graph.constant(added, e.call.dtype))


def _packed_attention(e: Emission) -> str:
    """Write causal self-attention over packed q, k, v (B, T, 3·width) as ONNX nodes."""
    _, t, width = e.call.shape
    heads = e.param("heads")
    by_head = e.node("Reshape", e.inputs[0], e.graph.constant([0, 0, 3, heads, width // heads]))
    stacked = e.node("Transpose", by_head, perm=[2, 0, 3, 1, 4])  # (3, B, H, T, D)
    split = e.graph.node("Split", [stacked], 3, axis=0)
    qkv = [e.node("Squeeze", one, e.graph.constant([0])) for one in split]
    mixed = attend(e, qkv, (t, t), 1 / math.sqrt(width // heads), True, None)
    return e.node("Reshape", e.node("Transpose", mixed, perm=[0, 2, 1, 3]), e.graph.constant([0, 0, width]))


def _reduction(maximum: str, minimum: str = "") -> Emit:
    """Return the function that writes a reduction, as the node `minimum` if its `sign` is negative."""

    def emit(e: Emission) -> str:
        op = maximum if e.param("sign", 1) > 0 else minimum
        return e.node(op, e.inputs[0], axes=_axes(e), keepdims=int(e.param("keepdims", False)))

    return emit


def _renamed(op: str) -> Emit:
    return lambda e: e.node(op, *e.inputs)


EMITTERS: dict[str, Emit] = {
    **{a.operation: _activation(a) for a in ACTIVATIONS.values() if a.operation},
    **{f.operation.__name__: _function(f) for f in (*UNARY, *BINARY) if f.onnx},
    "MatMul": _renamed("MatMul"),
    "Copy": _renamed("Identity"),
    "Dropout": _renamed("Identity"),
    "Where": lambda e: e.node("Where", e.name_of(e.param("condition")), *e.inputs),
    "Maximum": lambda e: e.node("Max" if e.param("sign", 1) > 0 else "Min", *e.inputs),
    "Cast": lambda e: e.node("Cast", e.inputs[0], to=e.graph.type_of(e.call.dtype)),
    "Elu": _elu,
    "Clip": _clip,
    # Along axes.
    "Sum": lambda e: e.node(
        "ReduceSum", e.inputs[0], e.graph.constant(_axes(e)), keepdims=int(e.param("keepdims", False))
    ),
    "Mean": _reduction("ReduceMean"),
    "Max": _reduction("ReduceMax", "ReduceMin"),
    "Var": _var,
    "CumSum": lambda e: e.node("CumSum", e.inputs[0], e.graph.constant(e.param("axis"))),
    "Softmax": lambda e: e.node("LogSoftmax" if e.param("log", False) else "Softmax", *e.inputs, axis=e.param("axis")),
    # Shapes and lookup by index.
    "Reshape": _reshape,
    "Permute": _permute,
    "Expand": _expand,
    "Cat": lambda e: e.node("Concat", *e.inputs, axis=e.param("axis")),
    "Pad": _pad,
    "GetItem": _get_item,
    "TakeAlongAxis": lambda e: e.node(
        "GatherElements", e.inputs[0], e.name_of(e.param("indices")), axis=e.param("axis")
    ),
    "Lookup": lambda e: e.node("Gather", *e.inputs, axis=e.param("axis", 0)),
    "Embedding": lambda e: e.node("Gather", e.inputs[0], e.name_of(e.param("ids")), axis=0),
    "Resample": _resample,
    # Layers.
    "Linear": _linear,
    "Conv2d": _conv,
    "ConvTranspose2d": _conv_transpose,
    "MaxPool2d": _pool,
    "AvgPool2d": _pool,
    "GlobalAvgPool": lambda e: e.node("Flatten", e.node("GlobalAveragePool", e.inputs[0]), axis=1),
    "LayerNorm": lambda e: e.node(
        "LayerNormalization", *e.inputs, axis=-len(e.call.input_shapes[1]), epsilon=e.param("eps")
    ),
    "FixedNorm": lambda e: e.node(
        "BatchNormalization", *e.inputs, *(e.name_of(e.param(n)) for n in ("mean", "var")), epsilon=e.param("eps")
    ),
    "Recurrent": _recurrent,
    "Attention": _attention,
    "PackedAttention": _packed_attention,
}
