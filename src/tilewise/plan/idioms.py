"""Layers that were written as their parts, found again in a trace: layer norm, GELU, attention (scores.py), padding.

Files of other frameworks hold a norm as means and roots, GELU as a polynomial of an error function, attention as two
products around a softmax, with scales, masks, reshapes and permutations wherever their author put them. What counts
here is what is computed, and not how it was written down.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.registry import current_backend
from tilewise.nn.primitives import LayerNorm
from tilewise.ops import Add, Gelu, Mul
from tilewise.ops.base import Grads, Operation
from tilewise.plan.rewriting import Operand, Rewriting, Rule, by_channel, one_number, parted, same
from tilewise.plan.scores import attention, known_attention
from tilewise.plan.trace import Node, Trace, Value
from tilewise.plan.views import reshaped, whole

Array = npt.NDArray[Any]


class GeluTanh(Operation):
    """GELU by its tanh formula, for inference."""

    def forward(self, x: Array) -> Array:
        half, cubic = np.float32(0.5), np.float32(0.044715)
        return np.asarray(half * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + cubic * x * x * x))))

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError("this stands in plans, which have no gradients")


class GroupNorm(Operation):
    """Layer norm over each group of channels and all their pixels, for inference; weight and bias by channel."""

    def forward(self, x: Array, weight: Array, bias: Array, *, groups: int, eps: float) -> Array:
        rows = x.reshape(len(x), groups, -1)
        centred = rows - rows.mean(-1, keepdims=True)
        normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(eps))
        by_channel = (-1, *(1,) * (x.ndim - 2))
        return np.asarray(normed.reshape(x.shape) * weight.reshape(by_channel) + bias.reshape(by_channel))

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError("this stands in plans, which have no gradients")


class PaddedMaxPool(Operation):
    """Max pooling with any padding (top, left, bottom, right), for inference."""

    def forward(self, x: Array, *, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, ...]) -> Array:
        top, left, bottom, right = (*padding, *padding)[:4]
        padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=-np.inf)
        y, _ = current_backend().dispatch("max_pool2d", padded, kernel=kernel, stride=stride, padding=(0, 0))
        return np.asarray(y)

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError("this stands in plans, which have no gradients")


def recognised(trace: Trace, single: bool = False) -> Trace:
    """The same computation with its layers named; with `single` all but attention, which the integer graph runs part
    by part."""
    return Rewriting(trace, _SINGLE if single else _RULES).finished()


# --- layer norm ---


def _is_mean(w: Rewriting, value: Any) -> Operand | None:
    """What `value` is the mean of along its last axis."""
    mean = w.node(value, "Mean")
    if mean is None or not mean.params.get("keepdims"):
        return None
    axis, rank = mean.params.get("axis"), len(mean.shape)
    axes = axis if isinstance(axis, tuple) else (axis,)
    return mean.inputs[0] if len(axes) == 1 and axes[0] in (-1, rank - 1) else None


def _is_centred(w: Rewriting, value: Any) -> Operand | None:
    """x where `value` is x - mean(x)."""
    difference = w.node(value, "Sub")
    if difference is None or _is_mean(w, difference.inputs[1]) != difference.inputs[0]:
        return None
    return difference.inputs[0]


def _is_square(w: Rewriting, value: Any) -> Operand | None:
    power, product = w.node(value, "Pow"), w.node(value, "Mul")
    if power is not None and one_number(power.inputs[1]) == 2:
        return power.inputs[0]
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _variance_of(w: Rewriting, value: Any) -> tuple[Operand, float] | None:
    """(x, eps) where `value` is x's variance along its last axis plus eps."""
    total = w.node(value, "Add")
    parts = None if total is None else parted(total)
    eps = None if parts is None else one_number(parts[1])
    if parts is None or eps is None or eps < 0:
        return None
    spread = w.node(parts[0], "Var")
    if spread is not None and spread.params.get("keepdims") and spread.params.get("correction") == 0:
        last = spread.params.get("axis") in (-1, (-1,), len(spread.shape) - 1, (len(spread.shape) - 1,))
        return (spread.inputs[0], eps) if last else None
    x = _is_centred(w, _is_square(w, _is_mean(w, parts[0])))
    return None if x is None else (x, eps)


def _inverse_root(w: Rewriting, value: Any) -> Operand | None:
    """v where `value` is 1 / sqrt(v)."""
    quotient, power = w.node(value, "Div"), w.node(value, "Pow")
    if power is not None and one_number(power.inputs[1]) == -0.5:
        return power.inputs[0]
    root = w.node(quotient.inputs[1], "Sqrt") if quotient is not None and one_number(quotient.inputs[0]) == 1 else None
    return None if root is None else root.inputs[0]


def _normed(w: Rewriting, node: Node) -> Value | None:
    """(x - mean) / sqrt(variance + eps), or times one over it."""
    a, b = node.inputs
    if node.operation.__name__ == "Div":
        root = w.node(b, "Sqrt")
        ways: list[tuple[Operand, Operand | None]] = [] if root is None else [(a, root.inputs[0])]
    else:
        ways = [(a, _inverse_root(w, b)), (b, _inverse_root(w, a))]
    for centred, below in ways:
        x, spread = _is_centred(w, centred), _variance_of(w, below)
        if x is not None and spread is not None and same(x, spread[0]):
            one = np.ones(node.shape[-1:], np.float32)
            return w.make(node, LayerNorm, node.shape, x, one, np.zeros_like(one), eps=spread[1])
    return None


def _after_norm(w: Rewriting, node: Node) -> Value | None:
    """A number a channel, times or plus what a norm gives: its weight or bias."""
    parts = parted(node)
    norm = None if parts is None else w.node(parts[0], "LayerNorm", "GroupNorm")
    if parts is None or norm is None or w.readers[parts[0].number] != 1 or node.shape != norm.shape:
        return None
    x, weight, bias = norm.inputs
    if isinstance(weight, Value) or isinstance(bias, Value) or weight.ndim != 1 or parts[1].dtype != np.float32:
        return None
    constant = by_channel(parts[1], node.shape, 1 if norm.operation is GroupNorm else len(node.shape) - 1)
    if constant is None:
        return None
    if node.operation.__name__ == "Mul":
        weight, bias = weight * constant, bias * constant
    else:
        bias = bias + constant
    return w.make(node, norm.operation, node.shape, x, weight, bias, **norm.params)


def _group_norm(w: Rewriting, node: Node) -> Value | None:
    """Rows of whole groups of channels, normed and seen as the image again."""
    x = node.inputs[0]
    back = reshaped(w.views.get(x.number, whole(x.number, w.shape(x))), node.shape) if isinstance(x, Value) else None
    norm = None if back is None else w.node(Value(back.source), "LayerNorm")
    if len(node.shape) != 4 or not node.shape[0] or back is None or norm is None or len(norm.shape) != 2:
        return None
    rows, weight, bias = norm.inputs
    there = w.views.get(rows.number) if isinstance(rows, Value) else None
    if there is None or w.shape(Value(there.source)) != node.shape or norm.shape[0] % node.shape[0]:
        return None
    groups = norm.shape[0] // node.shape[0]
    as_rows = reshaped(whole(there.source, node.shape), norm.shape)
    if isinstance(weight, Value) or isinstance(bias, Value) or not np.all(weight == 1) or np.any(bias):
        return None
    if node.shape[1] % groups or there != as_rows or back != reshaped(whole(back.source, norm.shape), node.shape):
        return None
    one = np.ones(node.shape[1], np.float32)
    source, eps = Value(there.source), float(norm.params["eps"])
    return w.make(node, GroupNorm, node.shape, source, one, np.zeros_like(one), groups=groups, eps=eps)


def _changes_nothing(w: Rewriting, node: Node) -> Value | None:
    """Times ones, plus zeros."""
    parts = parted(node)
    if parts is None or w.shape(parts[0]) != node.shape:
        return None
    return parts[0] if bool(np.all(parts[1] == (1 if node.operation.__name__ == "Mul" else 0))) else None


# --- GELU ---

Polynomial = dict[tuple[int, int], float]  # by the powers of two unknowns
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Neg")
_DEEP = 8


def _polynomial(w: Rewriting, value: Any, x: Value, y: Value | None, deep: int = _DEEP) -> Polynomial | None:
    """`value` as a polynomial of x and y, of a degree of at most three."""
    if isinstance(value, Value) and value == x:
        return {(1, 0): 1.0}
    if isinstance(value, Value) and value == y:
        return {(0, 1): 1.0}
    if not isinstance(value, Value):
        number = one_number(value)
        return None if number is None else {(0, 0): number}
    node = w.node(value, *_ARITHMETIC)
    if node is None or not deep:
        return None
    parts = [_polynomial(w, v, x, y, deep - 1) for v in node.inputs]
    if parts[0] is None or parts[-1] is None:
        return None
    return _combined(node.operation.__name__, parts[0], parts[-1])


def _combined(kind: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    if kind == "Neg":
        return {key: -c for key, c in a.items()}
    if kind in ("Add", "Sub"):
        sign = 1 if kind == "Add" else -1
        return {key: a.get(key, 0.0) + sign * b.get(key, 0.0) for key in {*a, *b}}
    if kind == "Mul":
        return _product(a, b)
    if set(b) != {(0, 0)}:
        return None
    number = b[0, 0]
    if kind == "Div":
        return {key: c / number for key, c in a.items()} if number else None
    if number not in (2.0, 3.0):
        return None
    square = _product(a, a)
    return square if number == 2 or square is None else _product(square, a)


def _product(a: Polynomial, b: Polynomial) -> Polynomial | None:
    found: Polynomial = {}
    for (i, j), c in a.items():
        for (k, m), d in b.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + c * d
    return found if all(i + j <= 3 for i, j in found) else None


def _alike(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None:
        return False
    return all(
        math.isclose(found.get(k, 0.0), wanted.get(k, 0.0), rel_tol=1e-5, abs_tol=1e-9) for k in {*found, *wanted}
    )


_TANH = math.sqrt(2 / math.pi)
_GELUS: dict[str, tuple[type, Polynomial]] = {
    "Erf": (Gelu, {(1, 0): math.sqrt(0.5)}),
    "Tanh": (GeluTanh, {(1, 0): _TANH, (3, 0): _TANH * 0.044715}),
}


def _below(w: Rewriting, value: Any, kinds: tuple[str, ...], deep: int = _DEEP) -> list[Value]:
    """Values that `value` is computed of by arithmetic, and those of the given kinds that end it."""
    found = [value] if isinstance(value, Value) else []
    node = w.node(value, *_ARITHMETIC)
    if node is not None and deep:
        found += [v for part in node.inputs for v in _below(w, part, kinds, deep - 1)]
    return list(dict.fromkeys(v for v in found if not kinds or w.node(v, *kinds) is not None))


def _gelu(w: Rewriting, node: Node) -> Value | None:
    """x / 2 · (1 + erf or tanh of its own polynomial of x), multiplied in any order."""
    for bend in [v for part in node.inputs for v in _below(w, part, tuple(_GELUS), 3)]:
        inner = w.node(bend, *_GELUS)
        assert inner is not None
        operation, wanted = _GELUS[inner.operation.__name__]
        for x in _below(w, inner.inputs[0], ()):
            a, b = (_polynomial(w, part, x, bend) for part in node.inputs)
            product = None if a is None or b is None else _product(a, b)
            outer = _alike(product, {(1, 0): 0.5, (1, 1): 0.5}) and w.shape(x) == node.shape
            if outer and _alike(_polynomial(w, inner.inputs[0], x, None), wanted):
                return w.make(node, operation, node.shape, x)
    return None


# --- layers that work token by token, before a view instead of after it ---


def _before_view(w: Rewriting, node: Node) -> Value | None:
    """A layer over the last axis reads the tokens themselves where its input is those in another order."""
    x = node.inputs[0]
    view = w.views.get(x.number) if isinstance(x, Value) else None
    if view is None or any(isinstance(v, Value) for v in (*node.inputs[1:], *node.params.values())):
        return None
    if node.operation is LayerNorm and len(w.shape(node.inputs[1])) != 1:
        return None
    shape = w.shape(Value(view.source))
    last = len(shape) - 1
    lead = [axis for group in view.groups[:-1] for axis in group]
    if last != 2 or view.groups[-1] != whole(view.source, shape).groups[last] or any(view.first) or not view.groups:
        return None
    sizes = {axis.along: axis.size for axis in lead}
    if (
        len(sizes) != len(lead)
        or any(sizes.get(i, 1) != shape[i] for i in range(last))
        or any(a.step != 1 for a in lead)
    ):
        return None
    to = (*shape[:-1], node.shape[-1])
    made = w.make(node, node.operation, to, Value(view.source), *node.inputs[1:], **node.params)
    order = [axis.along for axis in lead]
    order = [*order, *(i for i in range(last) if i not in order), last]
    return w.reshape(node, w.permute(node, made, tuple(order)), node.shape)


def _norm_of_rows(w: Rewriting, node: Node) -> Value | None:
    """A batch norm over tokens that were written as rows: a number a channel, times and plus, of the tokens."""
    x, weight, bias = node.inputs
    view = w.views.get(x.number) if isinstance(x, Value) else None
    numbers = [weight, bias, node.params["mean"], node.params["var"]]
    if view is None or len(node.shape) != 2 or any(isinstance(a, Value) for a in numbers):
        return None
    tokens = w.shape(Value(view.source))
    if len(tokens) != 3 or view != reshaped(whole(view.source, tokens), node.shape) or tokens[2] != node.shape[1]:
        return None
    weight, bias, mean, var = (np.asarray(a, np.float32) for a in numbers)
    scale = weight / np.sqrt(var + np.float32(node.params["eps"]))
    scaled = w.make(node, Mul, tokens, Value(view.source), scale)
    return w.reshape(node, w.make(node, Add, tokens, scaled, bias - mean * scale), node.shape)


# --- a border that the layer after it can add itself ---


def _padded(w: Rewriting, node: Node) -> Value | None:
    """A convolution or a window's maximum over an image with a border of what it would see outside anyway."""
    pad = w.node(node.inputs[0], "Pad")
    if pad is None or len(node.shape) != 4 or any((*pad.params["widths"][0], *pad.params["widths"][1])):
        return None
    (_, _, (top, bottom), (left, right)), own = pad.params["widths"], node.params["padding"]
    own = own if len(own) == 4 else (*own, *own)
    border = tuple(a + b for a, b in zip((top, left, bottom, right), own, strict=True))
    if min(top, left, bottom, right) < 0 or not _sees_the_same(w, node, pad, border):
        return None
    params = {**node.params, "padding": border[:2] if border[:2] == border[2:] else border}
    operation = PaddedMaxPool if node.operation.__name__ == "MaxPool2d" else node.operation
    return w.make(node, operation, node.shape, pad.inputs[0], *node.inputs[1:], **params)


def _sees_the_same(w: Rewriting, node: Node, pad: Node, border: tuple[int, ...]) -> bool:
    fill = pad.params["value"]
    if node.operation.__name__ == "Conv2d":
        return bool(fill == 0)
    inside = all(p < k for p, k in zip(border, (*node.params["kernel"], *node.params["kernel"]), strict=True))
    never_above = fill == 0 and w.node(pad.inputs[0], "Relu") is not None and not any(node.params["padding"])
    return inside and bool(fill == -np.inf or never_above)


def _first_of(*rules: Rule) -> Rule:
    def rule(w: Rewriting, node: Node) -> Operand | None:
        return next((made for r in rules if (made := r(w, node)) is not None), None)

    return rule


_RULES: dict[str, Rule] = {
    "Div": _normed,
    "Mul": _first_of(_changes_nothing, _normed, _after_norm, _gelu),
    "Add": _first_of(_changes_nothing, _after_norm),
    "Reshape": _group_norm,
    "MatMul": attention,
    "Attention": known_attention,
    "Linear": _before_view,
    "LayerNorm": _before_view,
    "Gelu": _before_view,
    "FixedNorm": _norm_of_rows,
    "Conv2d": _padded,
    "MaxPool2d": _padded,
}
_SINGLE: dict[str, Rule] = {name: _RULES[name] for name in ("Div", "Mul", "Add", "Reshape", "Conv2d", "MaxPool2d")}
