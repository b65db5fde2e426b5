"""Lowering rules for views and for layers over the last axis: linear layers, layer norm and attention on tokens.

The heads of attention are slices of channels: reshapes, permutations and indices are tracked as one `View` (views.py)
and never run. Attention over views of whole heads becomes an op that reads the heads in place and writes tokens
(B, T, heads · width). Any other reader of a view gets it as an op of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise._extension import native
from tilewise.graph.ir import Node, Op, Shape, Value
from tilewise.graph.passes.layout import is_token_reshape, lower_view
from tilewise.graph.passes.views import Axis, View, apply_node, permuted, reshaped, whole

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering


@dataclass(frozen=True)
class PendingAttention:
    """An attention op that is added once a reshape reads its result as tokens."""

    inputs: tuple[int, ...]
    options: dict[str, Any]
    layer: str
    shape: Shape


def lower_view_node(low: Lowering, number: int, node: Node) -> Op | bool | None:
    """Track a reshape, permutation or index as a view; add the attention op where its heads are joined again."""
    source = _view(low, node.inputs[0])
    view = None if source is None else apply_node(source, node)
    if view is None:
        return None
    # A view of pending attention that is exactly its tokens needs the numbers now.
    pending = low.pending_attention.get(view.source)
    if pending is not None and node.shape == pending.shape and view == whole(view.source, pending.shape):
        return Op("attention", pending.inputs, node.shape, pending.layer, options=pending.options)
    # A chain without effect is an alias of its source.
    if node.shape == low.shapes[view.source] and view == whole(view.source, node.shape):
        low.aliases[number] = view.source
        return True
    low.views[number] = view
    if not is_token_reshape(low, number):
        return True
    op = lower_view(low, number)
    del low.views[number]
    return op


def _view(low: Lowering, value: Any) -> View | None:
    """Return a value as the view it is, or as the view of all of itself."""
    if not isinstance(value, Value):
        return None
    source, shape = low.resolve(value), low.shapes[value.number]
    view = low.views.get(source)
    supported = low.possible_layouts(source) and min(shape[1:]) > 0
    return whole(source, shape) if view is None and supported else view


def lower_token_linear(low: Lowering, node: Node, weights: tuple[Any, Any]) -> Op | None:
    """Lower a linear layer over the last axis of tokens, with an optional residual."""
    x, residual = low.tokens(node.inputs[0]), node.params.get("residual")
    addend = None if residual is None else low.tokens(residual)
    if x is None or (residual is not None and addend is None):
        return None
    inputs = (x,) if addend is None else (x, addend)
    return Op("linear", inputs, node.shape, node.layer, node.params.get("activation") or "", *weights)


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


def lower_layer_norm(low: Lowering, _number: int, node: Node) -> Op | None:
    x, weight, bias = low.last_axis_channels(node.inputs[0]), node.inputs[1], node.inputs[2]
    if x is None or isinstance(weight, Value) or isinstance(bias, Value):
        return None
    if not low.is_float or any(a.dtype != np.float32 or a.ndim != 1 for a in (weight, bias)):
        return None
    options = {"eps": float(node.params["eps"])}
    return Op("layer_norm", (x,), node.shape, node.layer, weight=weight, bias=bias, options=options)


@dataclass(frozen=True)
class _Heads:
    """Heads in the channels of tokens: the first channel, the distance between heads, and their width."""

    batch: int
    count: int
    first: int
    step: int
    dim: int


def _heads(low: Lowering, value: Any) -> _Heads | None:
    """Return the heads of a value (B, H, T, D) if it is a view of all tokens."""
    view = _view(low, value)
    if view is None or len(view.groups) != 4:
        return None
    if view.source in low.pending_attention or len(low.shapes[view.source]) != 3:
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
    """Note attention over views of heads; the op is added where its result is read as tokens."""
    if not low.is_float:
        return None
    q, k, v = (_heads(low, value) for value in node.inputs)
    if q is None or k is None or v is None or len({(h.batch, h.count) for h in (q, k, v)}) > 1:
        return None
    scale = 1 / math.sqrt(q.dim) if node.params["scale"] is None else node.params["scale"]
    options: dict[str, Any] = {"heads": q.count, "dim": q.dim, "value_dim": v.dim, "scale": float(scale)}
    options |= {"first": [h.first for h in (q, k, v)], "step": [h.step for h in (q, k, v)]}
    options["causal"] = bool(node.params["causal"])
    views = [_view(low, value) for value in node.inputs]
    tokens = (q.batch, node.shape[2], q.count * v.dim)
    inputs = tuple(view.source for view in views if view)
    if node.params["mask"] is not None:
        mask = _mask(low, node.params["mask"])
        if mask is None or node.shape[:2] != (q.batch, q.count):
            return None
        inputs = (*inputs, mask)
    low.pending_attention[number] = PendingAttention(inputs, options, node.layer, tokens)
    # The traced result (B, H, T, D) is a view of the tokens (B, T, H · D).
    heads = reshaped(whole(number, tokens), (q.batch, node.shape[2], q.count, v.dim))
    assert heads is not None
    result = reshaped(permuted(heads, (0, 2, 1, 3)), node.shape)
    if result is None:
        return None
    low.views[number] = result
    return True


def _mask(low: Lowering, mask: Any) -> int | None:
    """Return the additive mask (B or 1, H or 1, T or 1, S) as a value."""
    if isinstance(mask, Value):
        return low.image(mask) if len(low.shapes[mask.number]) == 4 and low.dtype(mask) == np.float32 else None
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
