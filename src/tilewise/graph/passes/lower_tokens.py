"""Lowering rules for views and for layers over the last axis: linear layers, layer norm and attention on tokens.

The heads of attention are slices of channels: reshapes, permutations and indices are tracked as one `View` (views.py)
and never run. Attention over views of whole heads becomes an op that reads the heads in place and writes tokens
(B, T, heads · width). Any other reader of a view gets it as an op of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise._extension import native
from tilewise.graph.ir import Node, Op, Value
from tilewise.graph.passes.layout import is_token_reshape, lower_view
from tilewise.graph.passes.strided import (
    Factor,
    Strided,
    common_axes,
    flatten_op,
    materialized,
    merge_factors,
    strided_operand,
)
from tilewise.graph.passes.views import Axis, View, apply_node, permuted, reshaped, whole

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering


def lower_recurrent(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower a recurrent layer to products of its whole input and an op for the steps in time."""
    from tilewise.nn.recurrent import input_bias  # late: few networks are recurrent

    x, (weight, recurrent, bias, *state) = low.tokens(node.inputs[0]), node.inputs[1:]
    weights = [a for a in (weight, recurrent, bias) if isinstance(a, np.ndarray) and a.dtype == np.float32]
    if x is None or not low.is_float or len(weights) < 3 or node.params["kind"] == "gru_reset_first":
        return None
    weight, recurrent, bias = weights
    # A first state of zeros is the default.
    zeros = all(isinstance(s, np.ndarray) and not s.any() for s in state)
    states = [] if zeros else [low.constant(s) if isinstance(s, np.ndarray) else low.image(s) for s in state]
    if None in states:
        return None
    kind, steps, batch = node.params["kind"], *low.shapes[x][:2]
    total = np.asarray(input_bias(kind, bias, recurrent.shape[1], np.concatenate), np.float32)
    products = low.new_value((steps, batch, len(weight)))
    low.ops[products] = Op("linear", (x,), low.shapes[products], node.layer, weight=weight, bias=total)
    options = {"kind": kind, "steps": steps, "reverse": node.params["reverse"]}
    inputs = (products, *(s for s in states if s is not None))
    hidden_bias = bias[-recurrent.shape[1] :]
    return Op("recurrent", inputs, node.shape, node.layer, weight=recurrent, bias=hidden_bias, options=options)


def lower_view_node(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Track a reshape, permutation, index or broadcast as a view (True).

    An op computes it where its values are needed.
    """
    source = _view(low, node.inputs[0])
    view = None if source is None else apply_node(source, node)
    if view is None:
        return _reshape_copy(low, number, node)
    # A chain without effect is an alias of its source.
    if node.shape == low.shapes[view.source] and view == whole(view.source, node.shape):
        low.add_alias(number, view.source)
        return True
    low.views[number] = view
    # Only a reshape between tokens and images becomes an op at once; other views wait for a reader.
    if not is_token_reshape(low, number):
        return True
    op = lower_view(low, number)
    del low.views[number]
    return op


def _reshape_copy(low: Lowering, number: int, node: Node) -> bool | None:
    """Lower a reshape that is not a view: copy the value to contiguous memory in logical order, and view the copy."""
    operand = strided_operand(low, node.inputs[0]) if low.is_float and node.dtype == np.float32 else None
    if operand is None or node.operation.__name__ != "Reshape":
        return None
    row = materialized(low, operand, node.layer).number if len(operand.axes) > 1 else operand.number
    flat = low.new_value((math.prod(node.shape),))
    low.ops[flat] = flatten_op(low, row, node.layer)
    view = reshaped(whole(flat, low.shapes[flat]), node.shape)
    assert view is not None  # one contiguous axis splits into any shape
    low.views[number] = view
    return True


def _view(low: Lowering, value: Any) -> View | None:
    """Return a value as a `View`; a value that is not a view is the view of itself. None if it is not traced."""
    if not isinstance(value, Value):
        return None
    source, shape = low.resolve(value), low.shapes[value.number]
    view = low.views.get(source)
    supported = low.possible_layouts(source) and min(shape[1:]) > 0
    supported = supported or (low.is_float and math.prod(shape) > 0)
    return whole(source, shape) if view is None and supported else view


def lower_dynamic_linear(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower an int8 linear layer that quantizes every row of its input by its own scale."""
    layer, residual = node.params["layer"], node.params.get("residual")
    if not low.is_float or native is None or not isinstance(layer.kernel, native.Int8Layer):
        return None
    # The layer's own activation comes before a residual, the node's after it.
    activations = [name for name in (layer.activation, node.params.get("activation")) if name]
    if len(activations) > 1 or (residual is not None and layer.activation):
        return None
    operands = [low.last_axis_channels(v) for v in (node.inputs[0], residual) if v is not None]
    inputs = tuple(number for number in operands if number is not None)
    if len(inputs) < len(operands):
        return None
    activation = activations[0] if activations else ""
    return Op("int8_linear", inputs, node.shape, node.layer, activation, options={"layer": layer.kernel})


@dataclass(frozen=True)
class _Heads:
    """Heads in the channels of tokens: the first channel, the distance between heads, and their width."""

    batch: int
    count: int
    first: int
    step: int
    dim: int


def _heads(low: Lowering, value: Any) -> _Heads | None:
    """Return how heads (B, H, T, D) are stored in tokens, if `value` is a view of whole tokens; else None."""
    view = _view(low, value)
    if view is None or len(view.groups) != 4:
        return None
    if len(low.shapes[view.source]) != 3:
        return None
    batch, tokens, _ = low.shapes[view.source]
    _, _, length, dim = view.shape
    lead = [axis for group in view.groups[:2] for axis in group]
    if lead and lead[0].along == 0:
        batch -= lead.pop(0).size - 1  # 1 remains if the view covers the whole batch
    # Tokens and channels of a head must be contiguous and complete.
    expected = (Axis(length, 1, 1),) if length != 1 else (), (Axis(dim, 2, 1),) if dim != 1 else ()
    if view.groups[2:] != expected or view.first[:2] != (0, 0) or (batch, tokens) != (1, length):
        return None
    if not lead:
        return _Heads(low.shapes[view.source][0], 1, view.first[2], dim, dim)
    if len(lead) > 1 or lead[0].along != 2:
        return None
    return _Heads(low.shapes[view.source][0], lead[0].size, view.first[2], lead[0].step, dim)


def lower_attention(low: Lowering, number: int, node: Node) -> bool | None:
    """Lower attention to an op with result (B, T, H · D), of which the traced result (B, H, T, D) is a view (True)."""
    if not low.is_float or len(node.shape) != 4:
        return None
    op = _token_attention(low, node) or _grouped_attention(low, node)
    if op is None:
        return None
    # The op writes (B, T, H * D); readers of the traced (B, H, T, D) get a permuted view of it.
    b, h, t, d = node.shape
    tokens = low.new_value((b, t, h * d))
    low.ops[tokens] = op
    heads = reshaped(whole(tokens, (b, t, h * d)), (b, t, h, d))
    assert heads is not None
    low.views[number] = permuted(heads, (0, 2, 1, 3))
    return True


def _scale(node: Node, dim: int) -> float:
    """Return the factor of an attention node's scores: its own, or 1 / sqrt(dim)."""
    return float(1 / math.sqrt(dim) if node.params["scale"] is None else node.params["scale"])


def _token_attention(low: Lowering, node: Node) -> Op | None:
    """Return an attention op for heads stored in the channels of tokens; None for other storage."""
    q, k, v = (_heads(low, value) for value in node.inputs)
    if q is None or k is None or v is None or len({(h.batch, h.count) for h in (q, k, v)}) > 1:
        return None
    if any(
        not low.is_native(view.source) and low.dtype(Value(view.source)) != np.float32 for view in _views(low, node)
    ):
        return None
    options: dict[str, Any] = {"heads": q.count, "dim": q.dim, "value_dim": v.dim, "scale": _scale(node, q.dim)}
    options |= {"first": [h.first for h in (q, k, v)], "step": [h.step for h in (q, k, v)]}
    options["causal"] = bool(node.params["causal"])
    inputs = tuple(view.source for view in _views(low, node))
    if node.params["mask"] is not None:
        mask = _mask_value(low, node.params["mask"])
        if mask is None or node.shape[:2] != (q.batch, q.count):
            return None
        inputs = (*inputs, mask)
    return Op("attention", inputs, (q.batch, node.shape[2], q.count * v.dim), node.layer, options=options)


def _views(low: Lowering, node: Node) -> list[View]:
    """Return the views of those inputs of a node that are traced values."""
    return [view for value in node.inputs if (view := _view(low, value)) is not None]


def _grouped_attention(low: Lowering, node: Node) -> Op | None:
    """Return an attention op for heads with any strides; several query heads may share keys and values."""
    operands = [strided_operand(low, value) for value in node.inputs]
    q, k, v = operands
    if q is None or k is None or v is None or any(len(o.axes) != 4 for o in (q, k, v)):
        return None
    (b, h, t, dim), keys, value_dim = q.shape, k.shape[2], v.shape[3]
    # Repeated heads are broadcast: their factor has a step of 0 (Ainslie et al. 2023, grouped queries).
    repeats = k.axes[1][-1].size if k.axes[1] and k.axes[1][-1].step == (0, 0) else 1
    repeats = repeats if v.axes[1] and v.axes[1][-1] == Factor(repeats, (0, 0)) else 1
    groups = (h // repeats, repeats)
    mask = node.params["mask"]
    fourth = []
    if mask is not None:
        mask = np.where(mask, 0, -np.inf) if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else mask
        operand = strided_operand(low, mask)
        if operand is None:
            return None
        fourth = [operand.broadcast((b, h, t, keys))]
    # Steps of each operand along (B, groups, heads per group, T, D).
    views = [_five_axes(low, o, groups, node.layer) for o in (q, k, v)]
    views += [_five_axes(low, o, groups, node.layer, contiguous=False) for o in fourth]
    result = [(t, 0), (0, groups[1] * value_dim), (0, value_dim), (1, 0), (0, 1)]
    sizes = [b, *groups, t, value_dim]
    loop = (sizes, [*(view[1] for view in views), (0, 0, result)], (b, h * value_dim, 1, t))
    causal = bool(node.params["causal"])
    options = {"loop": loop, "keys": keys, "dim": dim, "scale": _scale(node, dim), "causal": causal}
    inputs = tuple(view[0] for view in views)
    return Op("grouped_attention", inputs, (b, t, h * value_dim), node.layer, options=options)


def _five_axes(
    low: Lowering, x: Strided, groups: tuple[int, int], layer: str, contiguous: bool = True
) -> tuple[int, Any]:
    """Return a value (B, H, T, D) as (number, first and steps) along axes (B, groups, heads per group, T, D).

    It is copied if its strides do not allow that or, with `contiguous`, if D is not contiguous.
    """
    split = Strided(0, (0, 0), (tuple(Factor(n, (0, 0)) for n in groups if n != 1),))
    # Try the operand in place first, then a contiguous copy of it, which always fits.
    for operand in (x, None):
        operand = operand or materialized(low, x, layer)
        heads = common_axes([replace(operand, axes=operand.axes[1:2]), split], [0], merge=False)
        sizes = [n for n in groups if n != 1]
        single = all(len(merge_factors(operand.axes[i])) <= 1 for i in (0, 2, 3))
        channels = merge_factors(operand.axes[3])
        if heads is None or [n for n, _ in heads] != sizes or not single:
            continue
        if contiguous and channels and channels[0].step != (0, 1):
            continue
        steps = iter([s[0] for _, s in heads])
        head_steps = [next(steps) if n != 1 else (0, 0) for n in groups]
        first, third, fourth = ((f[0].step if (f := merge_factors(operand.axes[i])) else (0, 0)) for i in (0, 2, 3))
        return operand.number, (*operand.first, [first, *head_steps, third, fourth])
    raise AssertionError("a copy has one factor per axis")


def _mask_value(low: Lowering, mask: Any) -> int | None:
    """Return the number of an additive mask (B or 1, H or 1, T or 1, S) as a value; None if it is unsupported."""
    if isinstance(mask, Value):
        is_scores = len(low.shapes[mask.number]) == 4 and low.dtype(mask) == np.float32
        return low.image(mask) if is_scores and low.is_image(mask) else None
    # True means visible.
    if mask.dtype == bool:
        mask = np.where(mask, 0, -np.inf)
    return low.constant(mask.astype(np.float32).reshape((1,) * (4 - mask.ndim) + mask.shape))


def lower_packed_attention(low: Lowering, _number: int, node: Node) -> Op | None:
    """Lower causal attention over queries, keys and values packed as (B, T, 3 C)."""
    x, heads, width = low.tokens(node.inputs[0]), int(node.params["heads"]), node.shape[-1]
    if x is None:
        return None
    dim = width // heads
    options = {"heads": heads, "dim": dim, "value_dim": dim, "first": [0, width, 2 * width], "step": [dim] * 3}
    options |= {"scale": 1 / math.sqrt(dim), "causal": True}
    return Op("attention", (x, x, x), node.shape, node.layer, options=options)
