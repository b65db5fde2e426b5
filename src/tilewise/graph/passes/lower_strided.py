"""Lowering of everything that is not a layer: elementwise functions, reductions, products, concatenation and padding.

These rules accept floats of any rank and read views in target (strided.py). They are tried after the rules of layers.
Elementwise functions have records (op_specs/functions.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.graph.ir import Node, Op, Shape, Value
from tilewise.graph.op_specs.functions import BINARY, UNARY
from tilewise.graph.passes.strided import (
    Factor,
    Strided,
    common_axes,
    make_loop,
    materialized,
    native_shape,
    offset,
    result_operand,
    storage_order,
    strided_operand,
)
from tilewise.graph.passes.views import permuted, whole

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering

StridedRule = Callable[["Lowering", int, Node], Op | bool | None]

# A native op has at most this many operands (kMaxOperands in native/graph/op.h).
_MAX_OPERANDS = 4


def _result_layout(shape: Shape, operands: list[Strided]) -> bool:
    """Tell whether a result is stored channels-last: yes, unless its image operands are channels-first."""
    if len(shape) != 4:
        return True
    whole_operands = [o.axes for o in operands if o.shape == shape]
    is_image = any(axes[1] and axes[1][-1].step == (0, 1) for axes in whole_operands)
    return not is_image or any(axes[3] and axes[3][-1].step == (0, 1) for axes in whole_operands)


def _elementwise(
    low: Lowering, number: int, node: Node, values: list[Any], kind: str, bounds: tuple[float, float] = (0.0, 0.0)
) -> Op | None:
    """Return an elementwise op of `kind`; operands whose axes cannot share one loop nest are copied first."""
    operands = _operands(low, values)
    if operands is None or node.dtype != np.float32 or not math.prod(node.shape):
        return None
    channels_last = _result_layout(node.shape, operands)
    operands = [o.broadcast(node.shape) for o in operands]
    result = result_operand(node.shape, channels_last)
    order = storage_order(node.shape, channels_last)
    loop_axes = common_axes([*operands, result], order)
    if loop_axes is None:
        operands = [materialized(low, o, node.layer) for o in operands]
        loop_axes = common_axes([*operands, result], order)
    assert loop_axes is not None  # copies have one factor per axis
    low.fix_layout(number, channels_last)
    options = {"loop": make_loop(loop_axes, [*operands, result], native_shape(node.shape, channels_last)), "kind": kind}
    return Op(
        "map",
        tuple(o.number for o in operands),
        node.shape,
        node.layer,
        options={**options, "low": bounds[0], "high": bounds[1]},
    )


def _operands(low: Lowering, values: list[Any]) -> list[Strided] | None:
    """Return all operands as strided views, or None if one of them has no such view."""
    operands = [strided_operand(low, value) for value in values]
    complete = [o for o in operands if o is not None]
    return complete if len(complete) == len(values) else None


def _elementwise_rule(kind: str, *params: str) -> StridedRule:
    """Return the lowering rule of a native elementwise function; up to two `params` become its bounds."""

    def rule(low: Lowering, number: int, node: Node) -> Op | None:
        first, second, *_ = (*(float(node.params[name]) for name in params), 0.0, 0.0)
        return _elementwise(low, number, node, list(node.inputs), kind, (first, second))

    return rule


def _pow(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a power; squares and roots have functions of their own."""
    exponent = node.inputs[1]
    constant = None if isinstance(exponent, Value) or np.size(exponent) != 1 else float(np.asarray(exponent).item())
    kind = {2.0: "square", 0.5: "sqrt", 1.0: "copy"}.get(constant) if constant is not None else None
    values = list(node.inputs) if kind is None else [node.inputs[0]]
    return _elementwise(low, number, node, values, kind or "pow")


def _clip(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a clip with constant scalar bounds to an elementwise op; None for other bounds."""
    bounds = (node.params["low"], node.params["high"])
    if any(isinstance(b, Value) or (b is not None and np.size(b) != 1) for b in bounds):
        return None
    lowest, highest = (default if b is None else float(b) for b, default in zip(bounds, (-np.inf, np.inf), strict=True))
    return _elementwise(low, number, node, [node.inputs[0]], "clip", (lowest, highest))


def _extremum(low: Lowering, number: int, node: Node) -> Op | None:
    kind = "maximum" if node.params.get("sign", 1) > 0 else "minimum"
    return _elementwise(low, number, node, list(node.inputs), kind)


def _select(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower where(condition, a, b) with a constant condition; None for other conditions."""
    condition = node.params["condition"]
    if isinstance(condition, Value):
        return None
    return _elementwise(low, number, node, [np.asarray(condition), *node.inputs], "select")


# --- reductions and scans ---


def _reduce(kind: str) -> StridedRule:
    """Return the lowering rule of a sum, mean or extremum over some axes."""

    def rule(low: Lowering, number: int, node: Node) -> Op | None:
        """Lower one reduction to an op over the kept and the reduced axes."""
        operands = _operands(low, [node.inputs[0]])
        if operands is None or not math.prod(node.shape):
            return None
        x, axis = operands[0], node.params.get("axis")
        rank = len(x.axes)
        axes = list(range(rank)) if axis is None else [a % rank for a in (axis if isinstance(axis, tuple) else (axis,))]
        # The result with all axes: reduced ones have size 1, whether the trace keeps them or not.
        channels_last = _result_layout(x.shape, [x]) or len(node.shape) != 4
        outer_axes = [i for i in storage_order(x.shape, channels_last) if i not in axes]
        result = result_operand(node.shape, channels_last)
        result_axes: list[Any] = [()] * rank
        for position, i in enumerate(sorted(outer_axes)):
            result_axes[i] = result.axes[i if len(node.shape) == rank else position]
        full = replace(result, axes=tuple(result_axes))
        outer = common_axes([x, full], outer_axes)
        inner = common_axes([x], [i for i in axes if x.axes[i]])
        if outer is None or inner is None:
            return None
        low.fix_layout(number, channels_last)
        sizes, views, shape = make_loop(outer, [x, full], native_shape(node.shape, channels_last))
        # The operand has the outer axes and then the axes that are reduced; the result has the outer ones only.
        inner = inner or [(1, [(0, 0)])]
        views[0][2].extend(steps[0] for _, steps in inner)
        sign = "min" if kind == "max" and node.params.get("sign", 1) < 0 else kind
        options = {"loop": ([*sizes, *(n for n, _ in inner)], views, shape), "kind": sign, "reduced": len(inner)}
        return Op("reduce", (x.number,), node.shape, node.layer, options=options)

    return rule


def _with_axis_last(low: Lowering, node: Node, axis: int) -> tuple[Strided, Shape, list[int]] | None:
    """Return a node's input as a strided operand with `axis` moved last, its shape, and the inverse permutation.

    None if the input has no strided form.
    """
    operands = _operands(low, [node.inputs[0]])
    if operands is None:
        return None
    x, rank = operands[0], len(operands[0].axes)
    order = [i for i in range(rank) if i != axis % rank] + [axis % rank]
    rows = replace(x, axes=tuple(x.axes[i] for i in order))
    return rows, rows.shape, [order.index(i) for i in range(rank)]


def _softmax(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Lower a softmax; along another axis than the last it is a view of one along the last."""
    if node.params.get("log"):
        return None
    # Rows along `axis`, one after the other.
    row_form = _with_axis_last(low, node, node.params["axis"])
    if row_form is None:
        return None
    x, shape, restore = row_form
    # The kernel reads contiguous rows.
    if x.axes[-1] not in ((), (Factor(shape[-1], (0, 1)),)):
        x = materialized(low, x, node.layer)
    result = result_operand(shape, True)
    lead = common_axes([x, result], list(range(len(shape) - 1)))
    assert lead is not None
    loop = make_loop([*lead, (shape[-1], [(0, 1), (0, 1)])], [x, result], native_shape(shape, True))
    op = Op("softmax", (x.number,), shape, node.layer, options={"loop": loop})
    return _register_permuted(low, number, op, restore)


def _cumulative_sum(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a cumulative sum along any axis."""
    # Exclusive and reversed sums have other parameters and are not supported.
    operands = _operands(low, [node.inputs[0]])
    if operands is None or set(node.params) != {"axis"}:
        return None
    x, axis = operands[0], node.params["axis"] % len(node.shape)
    channels_last = _result_layout(node.shape, operands)
    result, order = result_operand(node.shape, channels_last), storage_order(node.shape, channels_last)
    at = order.index(axis)
    before, along, after = (common_axes([x, result], axes) for axes in (order[:at], [axis], order[at + 1 :]))
    if before is None or along is None or after is None or len(along) != 1:
        return None
    low.fix_layout(number, channels_last)
    loop = make_loop([*before, *along, *after], [x, result], native_shape(node.shape, channels_last))
    options = {"loop": loop, "axis": len(before)}
    return Op("cumulative_sum", (x.number,), node.shape, node.layer, options=options)


def _register_permuted(low: Lowering, number: int, op: Op, axes: list[int]) -> Op | bool:
    """Make a node the permutation by `axes` of the result of `op`; return the op itself if that changes nothing."""
    if axes == list(range(len(axes))):
        low.fix_layout(number, True)
        return op
    # The op computes a new value, of which the node is a view.
    value = low.new_value(op.shape)
    low.fix_layout(value, True)
    low.ops[value] = op
    low.views[number] = permuted(whole(value, op.shape), tuple(axes))
    return True


# --- products ---


def _matmul(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a product of two values (.., M, K) · (.., K, N) with broadcast batch axes."""
    operands = _operands(low, list(node.inputs))
    if operands is None or any(len(o.axes) < 2 for o in operands) or len(node.shape) < 2:
        return None
    (m, n), k, batch = node.shape[-2:], operands[0].shape[-1], node.shape[:-2]
    result = result_operand(node.shape, True)
    sides = [operands[0].broadcast((*batch, m, k)), operands[1].broadcast((*batch, k, n))]
    # M, K and N must have one step each; operands that do not are copied once.
    for attempt in range(2):
        lead = common_axes([*sides, result], list(range(len(batch))))
        rows = _single_loop_steps(
            common_axes([replace(sides[0], axes=sides[0].axes[-2:-1]), _only_axis(result, -2)], [0])
        )
        inner = _single_loop_steps(common_axes([_only_axis(sides[0], -1), _only_axis(sides[1], -2)], [0]))
        columns = _single_loop_steps(common_axes([_only_axis(sides[1], -1), _only_axis(result, -1)], [0]))
        if lead is not None and None not in (rows, inner, columns):
            break
        if attempt:
            return None
        sides = [materialized(low, side, node.layer) for side in sides]
    assert lead is not None and rows is not None and inner is not None and columns is not None
    steps = [[s[i] for _, s in lead] for i in range(3)]
    sizes = [*(size for size, _ in lead), m, n]
    # The loop ends with (M, N); the operands have (M, K) and (K, N) there.
    views = [
        (*sides[0].first, [*steps[0], rows[0], inner[0]]),
        (*sides[1].first, [*steps[1], inner[1], columns[0]]),
        (0, 0, [*steps[2], rows[1], columns[1]]),
    ]
    low.fix_layout(number, True)
    options = {"loop": (sizes, views, native_shape(node.shape, True)), "k": k}
    return Op("matmul", (sides[0].number, sides[1].number), node.shape, node.layer, options=options)


def _only_axis(operand: Strided, axis: int) -> Strided:
    """Return a strided operand with only one of its axes."""
    return replace(operand, axes=(operand.axes[axis],))


def _single_loop_steps(loop_axes: list[tuple[int, list[Any]]] | None) -> list[Any] | None:
    """Return each operand's step along an axis that is one loop (0 for size 1); None if it needs nested loops."""
    if loop_axes is None or len(loop_axes) > 1:
        return None
    return loop_axes[0][1] if loop_axes else [(0, 0), (0, 0)]


# --- concatenation and padding ---


def _assemble(
    low: Lowering, number: int, node: Node, values: list[Any], starts: list[Shape], **settings: Any
) -> Op | None:
    """Return an op that copies each value into the result at its start index; other places get `fill`.

    `starts` has one index into the result per value. With `covered` the values fill the whole result.
    """
    operands = _operands(low, values)
    if operands is None or not math.prod(node.shape):
        return None
    fill, covered = float(settings.get("fill", 0.0)), bool(settings.get("covered", False))
    channels_last = _result_layout(operands[0].shape, operands) if len(node.shape) == 4 else True
    result = result_operand(node.shape, channels_last)
    # The step of each result axis places an operand at its start.
    units = [strides[0].step if strides else (0, 0) for strides in result.axes]
    loops = []
    for operand, start in zip(operands, starts, strict=True):
        axes = tuple((Factor(n, u),) if n != 1 else () for n, u in zip(operand.shape, units, strict=True))
        target = Strided(0, offset(start, units), axes)
        loop_axes = common_axes([operand, target], storage_order(node.shape, channels_last))
        assert loop_axes is not None  # a target has one factor per axis
        loops.append(make_loop(loop_axes, [operand, target], native_shape(node.shape, channels_last)))
    low.fix_layout(number, channels_last)
    options = {"parts": loops, "fill": fill, "covered": covered}
    return Op("assemble", tuple(o.number for o in operands), node.shape, node.layer, options=options)


def _cat(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower a concatenation; more inputs than a native op takes are joined in groups."""
    axis, values = node.params["axis"] % len(node.shape), list(node.inputs)
    sizes = [low.shapes[v.number][axis] if isinstance(v, Value) else np.shape(v)[axis] for v in values]
    values = [v for v, size in zip(values, sizes, strict=True) if size]
    sizes = [size for size in sizes if size]
    # Zero-sized inputs are gone; join groups until one op can read all of them.
    while len(values) > _MAX_OPERANDS:
        groups = range(0, len(values), _MAX_OPERANDS)
        joined: list[Any] = []
        for i in groups:
            part, widths = values[i : i + _MAX_OPERANDS], sizes[i : i + _MAX_OPERANDS]
            shape = tuple(sum(widths) if a == axis else n for a, n in enumerate(node.shape))
            value = low.new_value(shape)
            op = _cat_op(low, value, replace(node, shape=shape), part, widths, axis)
            if op is None:
                return None
            low.ops[value] = op
            joined.append(Value(value))
        sizes = [sum(sizes[i : i + _MAX_OPERANDS]) for i in groups]
        values = joined
    return _cat_op(low, number, node, values, sizes, axis)


def _cat_op(low: Lowering, number: int, node: Node, values: list[Any], sizes: list[int], axis: int) -> Op | None:
    """Return an op that concatenates `values`, of sizes `sizes` along `axis`; None if one has no strided form."""
    # Each value starts where the one before it ends.
    ends = np.cumsum(sizes).tolist()
    starts = [
        tuple(end - n if a == axis else 0 for a in range(len(node.shape))) for end, n in zip(ends, sizes, strict=True)
    ]
    return _assemble(low, number, node, values, starts, covered=True)


def _pad(low: Lowering, number: int, node: Node) -> Op | None:
    """Lower constant padding."""
    starts = [tuple(before for before, _ in node.params["widths"])]
    return _assemble(low, number, node, [node.inputs[0]], starts, fill=node.params["value"])


# The strided rule of each traced operation.
STRIDED_RULES: dict[str, StridedRule] = {
    **{f.operation.__name__: _elementwise_rule(f.native, *f.attributes) for f in (*UNARY, *BINARY) if f.native},
    **dict.fromkeys(("Copy", "Cast"), _elementwise_rule("copy")),
    "GeluTanh": _elementwise_rule("gelu_tanh"),
    "Pow": _pow,
    "Clip": _clip,
    "Maximum": _extremum,
    "Where": _select,
    "Sum": _reduce("sum"),
    "Mean": _reduce("mean"),
    "Max": _reduce("max"),
    "Softmax": _softmax,
    "CumSum": _cumulative_sum,
    "MatMul": _matmul,
    "Cat": _cat,
    "Pad": _pad,
}
