"""Rules for values whose channels come last, tokens (B, T, C) above all: linear layers, layer norm and attention.

The heads of attention are channels seen in another order: reshapes, permutations and indices over a value are followed
as one `View` (views.py) and never run. Where attention reads views of whole heads it becomes a step that reads them
where they lie, and writes (B, T, heads · width) as the reshape after it wants. Whatever else reads a view gets it as it
was traced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.plan.layouts import laid_out, lies_there
from tilewise.plan.steps import Shape, Step
from tilewise.plan.trace import Node, Value
from tilewise.plan.views import Axis, View, permuted, reshaped, seen, whole

if TYPE_CHECKING:
    from tilewise.plan.lower import Lowering


@dataclass(frozen=True)
class Mixed:
    """What attention will make once a reshape asks for its result as tokens."""

    inputs: tuple[int, ...]
    options: dict[str, Any]
    layer: str
    shape: Shape


def viewed(low: Lowering, number: int, node: Node) -> Step | bool | None:
    """A reshape, permutation or index: noted, and made where somebody needs the numbers; heads that were mixed are made
    where their channels come together again."""
    view = _view_of(low, node.inputs[0])
    found = None if view is None else seen(view, node)
    if found is None:
        return None
    mixed = low.mixed.get(found.source)
    if mixed is not None and node.shape == mixed.shape and found == whole(found.source, mixed.shape):
        return Step("attention", mixed.inputs, node.shape, mixed.layer, options=mixed.options)
    if node.shape == low.shapes[found.source] and found == whole(found.source, node.shape):
        low.same_as[number] = found.source
        return True
    low.views[number] = found
    if not lies_there(low, number):
        return True
    step = laid_out(low, number)
    del low.views[number]
    return step


def _view_of(low: Lowering, value: Any) -> View | None:
    """A value as a view: the one it is known as, or all of itself."""
    if not isinstance(value, Value):
        return None
    source, shape = low.find(value), low.shapes[value.number]
    known = low.views.get(source)
    held = low.forms(source) and min(shape[1:]) > 0
    return whole(source, shape) if known is None and held else known


def linear(low: Lowering, node: Node, filters: tuple[Any, Any]) -> Step | None:
    x, residual = low.tokens(node.inputs[0]), node.params.get("residual")
    added = None if residual is None else low.tokens(residual)
    if x is None or (residual is not None and added is None):
        return None
    inputs = (x,) if added is None else (x, added)
    return Step("linear", inputs, node.shape, node.layer, node.params.get("activation") or "", *filters)


def layer_norm(low: Lowering, _number: int, node: Node) -> Step | None:
    x, weight, bias = low.pixels(node.inputs[0]), node.inputs[1], node.inputs[2]
    if x is None or isinstance(weight, Value) or isinstance(bias, Value):
        return None
    if not low.is_float or any(a.dtype != np.float32 or a.ndim != 1 for a in (weight, bias)):
        return None
    return Step("layer_norm", (x,), node.shape, node.layer, "", weight, bias, {"eps": float(node.params["eps"])})


@dataclass(frozen=True)
class _Heads:
    """Where heads lie in the channels of tokens: (B, T) of them, where the first begins, how far the next is."""

    batch: int
    count: int
    first: int
    step: int
    dim: int


def _heads(low: Lowering, value: Any) -> _Heads | None:
    """The heads of a value (B, H, T, D), where it is a view of all tokens."""
    view = _view_of(low, value)
    if view is None or len(view.groups) != 4 or view.source in low.mixed or len(low.shapes[view.source]) != 3:
        return None
    batch, tokens, _ = low.shapes[view.source]
    _, _, length, dim = view.shape
    lead = [axis for group in view.groups[:2] for axis in group]
    if lead and lead[0].along == 0:
        batch -= lead.pop(0).size - 1  # the rest must be one
    wanted = (Axis(length, 1, 1),) if length != 1 else (), (Axis(dim, 2, 1),) if dim != 1 else ()
    if view.groups[2:] != wanted or view.first[:2] != (0, 0) or (batch, tokens) != (1, length):
        return None
    if not lead:
        return _Heads(low.shapes[view.source][0], 1, view.first[2], dim, dim)
    if len(lead) > 1 or lead[0].along != 2:
        return None
    return _Heads(low.shapes[view.source][0], lead[0].size, view.first[2], lead[0].step, dim)


def attention(low: Lowering, number: int, node: Node) -> bool | None:
    if not low.is_float:
        return None
    heads = [_heads(low, value) for value in node.inputs]
    q, k, v = heads
    if q is None or k is None or v is None or len({(h.batch, h.count) for h in (q, k, v)}) > 1:
        return None
    scale = 1 / math.sqrt(q.dim) if node.params["scale"] is None else node.params["scale"]
    options: dict[str, Any] = {"heads": q.count, "dim": q.dim, "value_dim": v.dim, "scale": float(scale)}
    options |= {"first": [h.first for h in (q, k, v)], "step": [h.step for h in (q, k, v)]}
    options["causal"] = bool(node.params["causal"])
    views = [_view_of(low, value) for value in node.inputs]
    tokens = (q.batch, node.shape[2], q.count * v.dim)
    inputs = tuple(view.source for view in views if view)
    if node.params["mask"] is not None:
        mask = _mask(low, node.params["mask"])
        if mask is None or node.shape[:2] != (q.batch, q.count):
            return None
        inputs = (*inputs, mask)
    low.mixed[number] = Mixed(inputs, options, node.layer, tokens)
    apart = reshaped(whole(number, tokens), (q.batch, node.shape[2], q.count, v.dim))
    assert apart is not None
    turned = reshaped(permuted(apart, (0, 2, 1, 3)), node.shape)
    if turned is None:
        return None
    low.views[number] = turned
    return True


def _mask(low: Lowering, mask: Any) -> int | None:
    """What is added to the scores, (B or 1, H or 1, T or 1, S)."""
    if isinstance(mask, Value):
        return low.image(mask) if len(low.shapes[mask.number]) == 4 and low.dtype(mask) == np.float32 else None
    if mask.dtype == bool:
        mask = np.where(mask, 0, -np.inf)
    return low.constant(mask.astype(np.float32).reshape((1,) * (4 - mask.ndim) + mask.shape))


def packed_attention(low: Lowering, _number: int, node: Node) -> Step | None:
    x, heads, width = low.tokens(node.inputs[0]), int(node.params["heads"]), node.shape[-1]
    if x is None:
        return None
    dim = width // heads
    options = {"heads": heads, "dim": dim, "value_dim": dim, "first": [0, width, 2 * width], "step": [dim] * 3}
    options |= {"scale": 1 / math.sqrt(dim), "causal": True}
    return Step("attention", (x, x, x), node.shape, node.layer, options=options)
