"""Rules for tokens (B, T, C): linear layers, layer norm and attention as steps of the native plan.

The heads of attention are channels seen in another order: reshapes, permutations and indices over a value are followed
as one `View` and never run. Where attention reads views of whole heads it becomes a step that reads them where they
lie, and writes (B, T, heads · width) as the reshape after it wants. Whatever else reads a view gets it as it was
traced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.plan.steps import Shape, Step
from tilewise.plan.trace import Node, Value

if TYPE_CHECKING:
    from tilewise.plan.lower import Lowering


@dataclass(frozen=True)
class Axis:
    """An axis of a view: its size, and the axis of (B, T, C) along which it steps, by how much."""

    size: int
    along: int
    step: int


@dataclass(frozen=True)
class View:
    """A value seen otherwise: it begins at channel `first` of `source`."""

    source: int
    axes: tuple[Axis, ...]
    first: int = 0


@dataclass(frozen=True)
class Mixed:
    """What attention will make once a reshape asks for its result as tokens."""

    inputs: tuple[int, ...]
    options: dict[str, Any]
    layer: str


def view_of(low: Lowering, value: Any) -> View | None:
    """A value as a view: the one it is known as, or all of its own tokens."""
    if not isinstance(value, Value):
        return None
    found = low.views.get(low.find(value))
    if isinstance(found, View):
        return found
    source = low.tokens(value)
    return None if source is None else _whole(source, low.shapes[value.number])


def _whole(source: int, shape: Shape) -> View:
    return View(source, tuple(Axis(size, along, 1) for along, size in enumerate(shape)))


def reshaped(low: Lowering, number: int, node: Node) -> Step | bool | None:
    """The channels cut into heads, or heads put together again."""
    view = view_of(low, node.inputs[0])
    if view is None:
        return None
    if len(node.shape) > len(view.axes):
        return _split(low, number, view, node.shape)
    mixed = low.mixed.get(view.source)
    if mixed is None or view != View(view.source, _by_token(mixed, node.shape)):
        return None
    return Step("attention", mixed.inputs, node.shape, mixed.layer, options=mixed.options)


def _by_token(mixed: Mixed, shape: Shape) -> tuple[Axis, ...]:
    """The axes (B, T, heads, width) of what attention makes, where this is its shape as tokens."""
    heads, width = mixed.options["heads"], mixed.options["value_dim"]
    tokens = len(shape) == 3 and shape[2] == heads * width
    return (Axis(shape[0], 0, 1), Axis(shape[1], 1, 1), Axis(heads, 2, width), Axis(width, 2, 1)) if tokens else ()


def _alongs(view: View) -> tuple[int, ...]:
    return tuple(axis.along for axis in view.axes)


def _split(low: Lowering, number: int, view: View, shape: Shape) -> bool | None:
    kept, sizes = view.axes[:-1], shape[len(view.axes) - 1 :]
    last = view.axes[-1]
    if last.along != 2 or shape[: len(kept)] != tuple(a.size for a in kept) or math.prod(sizes) != last.size:
        return None
    steps = [last.step * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    parts = tuple(Axis(size, 2, step) for size, step in zip(sizes, steps, strict=True))
    low.views[number] = replace(view, axes=(*kept, *parts))
    return True


def permuted(low: Lowering, number: int, node: Node) -> bool | None:
    view, axes = view_of(low, node.inputs[0]), node.params["axes"]
    if view is None or axes is None or len(axes) != len(view.axes):
        return None
    low.views[number] = replace(view, axes=tuple(view.axes[a] for a in axes))
    return True


def indexed(low: Lowering, number: int, node: Node) -> bool | None:
    """One of the parts that the channels were cut into, such as queries, keys or values."""
    view, index = view_of(low, node.inputs[0]), node.params["index"]
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if view is None or isinstance(index, bool) or not isinstance(index, (int, np.integer)) or view.axes[0].along != 2:
        return None
    at = int(index) % view.axes[0].size
    low.views[number] = View(view.source, view.axes[1:], view.first + at * view.axes[0].step)
    return True


def linear(low: Lowering, node: Node, filters: tuple[Any, Any]) -> Step | None:
    x, residual = low.tokens(node.inputs[0]), node.params.get("residual")
    added = None if residual is None else low.tokens(residual)
    if x is None or (residual is not None and added is None):
        return None
    inputs = (x,) if added is None else (x, added)
    return Step("linear", inputs, node.shape, node.layer, node.params.get("activation") or "", *filters)


def layer_norm(low: Lowering, _number: int, node: Node) -> Step | None:
    x, weight, bias = low.tokens(node.inputs[0]), node.inputs[1], node.inputs[2]
    if x is None or isinstance(weight, Value) or isinstance(bias, Value):
        return None
    if any(a.dtype != np.float32 or a.ndim != 1 for a in (weight, bias)):
        return None
    return Step("layer_norm", (x,), node.shape, node.layer, "", weight, bias, {"eps": float(node.params["eps"])})


def attention(low: Lowering, number: int, node: Node) -> bool | None:
    views = [view_of(low, value) for value in node.inputs]
    q, k, v = views
    if q is None or k is None or v is None or node.params["mask"] is not None:
        return None
    if any(_alongs(view) != (0, 2, 1, 2) or view.axes[3].step != 1 for view in (q, k, v)):
        return None
    b, heads, t, _ = node.shape
    dim, value_dim = q.axes[3].size, v.axes[3].size
    options = _heads((q, k, v), heads, node.params["scale"] or 1 / math.sqrt(dim), bool(node.params["causal"]))
    low.mixed[number] = Mixed((q.source, k.source, v.source), options, node.layer)
    axes = (Axis(b, 0, 1), Axis(heads, 2, value_dim), Axis(t, 1, 1), Axis(value_dim, 2, 1))
    low.views[number] = View(number, axes)
    return True


def _heads(views: tuple[View, View, View], heads: int, scale: float, causal: bool) -> dict[str, Any]:
    q, _, v = views
    options: dict[str, Any] = {"heads": heads, "dim": q.axes[3].size, "value_dim": v.axes[3].size}
    options |= {"first": [view.first for view in views], "step": [view.axes[1].step for view in views]}
    return options | {"scale": float(scale), "causal": causal}


def packed_attention(low: Lowering, _number: int, node: Node) -> Step | None:
    x, heads, width = low.tokens(node.inputs[0]), int(node.params["heads"]), node.shape[-1]
    if x is None:
        return None
    dim = width // heads
    options = {"heads": heads, "dim": dim, "value_dim": dim, "first": [0, width, 2 * width], "step": [dim] * 3}
    options |= {"scale": 1 / math.sqrt(dim), "causal": True}
    return Step("attention", (x, x, x), node.shape, node.layer, options=options)
