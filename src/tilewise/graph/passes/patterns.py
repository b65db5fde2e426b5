"""Pattern matching: layers that a file holds as several operations become one node (norms, GELU, attention, padding).

Exporters write a norm as means and roots, GELU as a polynomial of an error function, and attention as two products
around a softmax, with scales, masks, reshapes and permutations in any place. The patterns compare what is computed,
not how it was written: polynomials by their coefficients, chains of reshapes as views.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.backend.registry import current_backend
from tilewise.graph.ir import Array, Node, Shape, Trace, Value
from tilewise.graph.passes.attention import match_attention, match_attention_node
from tilewise.graph.passes.rewriter import Operand, Rewriter, Rule, is_value, per_channel, scalar, value_and_constant
from tilewise.graph.passes.views import apply_node, permuted, reshaped, whole
from tilewise.nn.primitives import LayerNorm
from tilewise.ops import Add, Gelu, Mul
from tilewise.ops.base import Grads, Operation


class InferenceOperation(Operation):
    """An operation that only plans contain; it has no gradient."""

    def backward(self, grad: Array) -> Grads:
        raise NotImplementedError("operations of plans have no gradients")


class GeluTanh(InferenceOperation):
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016)."""

    def forward(self, x: Array) -> Array:
        half, cubic = np.float32(0.5), np.float32(0.044715)
        return np.asarray(half * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + cubic * x * x * x))))


class GroupNorm(InferenceOperation):
    """Normalization of each group of channels over all pixels; weight and bias are per channel."""

    def forward(self, x: Array, weight: Array, bias: Array, *, groups: int, eps: float) -> Array:
        """Normalize each sample and group of channels over its pixels, then scale and shift per channel."""
        rows = x.reshape(len(x), groups, -1)
        centred = rows - rows.mean(-1, keepdims=True)
        normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(eps))
        channel_shape = (-1, *(1,) * (x.ndim - 2))
        return np.asarray(normed.reshape(x.shape) * weight.reshape(channel_shape) + bias.reshape(channel_shape))


class ChannelNorm(InferenceOperation):
    """Layer norm over the channels of every pixel of an image (N, C, H, W)."""

    def forward(self, x: Array, weight: Array, bias: Array, *, eps: float) -> Array:
        """Apply a layer norm over the channels at each pixel of images (N, C, H, W)."""
        channels_last = np.ascontiguousarray(x.transpose(0, 2, 3, 1))  # (N, H, W, C)
        normed = np.asarray(LayerNorm().forward(channels_last, weight, bias, eps=eps))
        return np.ascontiguousarray(normed.transpose(0, 3, 1, 2))


class UnpaddedAvgPool(InferenceOperation):
    """Mean of each window over the pixels inside the image; padding does not count."""

    def forward(
        self,
        x: Array,
        *,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, ...],
        count_padding: bool = False,
    ) -> Array:
        """Average each window over its pixels inside the image, leaving out the padding."""
        pool = current_backend().dispatch
        mean = np.asarray(pool("avg_pool2d", x, kernel=kernel, stride=stride, padding=padding))
        return mean * window_shares(x.shape, kernel=kernel, stride=stride, padding=padding)


def window_shares(shape: Shape, *, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, ...]) -> Array:
    """Return (H', W'): each pooling window's size divided by its number of pixels inside an image of `shape`."""
    along = []
    for size, k, s, p in zip(shape[2:], kernel, stride, padding[:2], strict=True):
        starts = np.arange((size + 2 * p - k) // s + 1) * s - p
        inside = np.minimum(starts + k, size) - np.maximum(starts, 0)
        along.append(k / np.maximum(inside, 1))
    return np.asarray(along[0][:, None] * along[1], np.float32)


class RmsNorm(InferenceOperation):
    """Root-mean-square normalization over the last axis (Zhang and Sennrich 2019)."""

    def forward(self, x: Array, weight: Array, *, eps: float) -> Array:
        scale = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
        return np.asarray(x * scale * weight)


class PaddedMaxPool(InferenceOperation):
    """Max pooling with separate padding at the top, left, bottom and right."""

    def forward(self, x: Array, *, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, ...]) -> Array:
        """Max-pool with padding (top, left, bottom, right) of -infinity.

        Two numbers pad both sides of height and width.
        """
        top, left, bottom, right = (*padding, *padding)[:4]
        padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=-np.inf)
        y, _ = current_backend().dispatch("max_pool2d", padded, kernel=kernel, stride=stride, padding=(0, 0))
        return np.asarray(y)


def match_patterns(trace: Trace, attention: bool = True) -> Trace:
    """Replace matched patterns by single nodes.

    Without `attention`, token layers stay as they are; the integer graph runs attention operation by operation.
    """
    return Rewriter(trace, _PATTERNS if attention else _IMAGE_PATTERNS).finish()


# --- layer norm ---


def _mean_source(w: Rewriter, value: Any) -> Operand | None:
    """Match `value` = mean(x) along the last axis; return x, or None."""
    mean = w.node(value, "Mean")
    if mean is None or not mean.params.get("keepdims"):
        return None
    axis, rank = mean.params.get("axis"), len(mean.shape)
    axes = axis if isinstance(axis, tuple) else (axis,)
    return mean.inputs[0] if len(axes) == 1 and axes[0] in (-1, rank - 1) else None


def _centred_source(w: Rewriter, value: Any) -> Operand | None:
    """Match `value` = x - mean(x); return x, or None."""
    difference = w.node(value, "Sub")
    if difference is None or not is_value(difference.inputs[0], _mean_source(w, difference.inputs[1])):
        return None
    return difference.inputs[0]


def _square_source(w: Rewriter, value: Any) -> Operand | None:
    """Match `value` = x²; return x, or None."""
    power, product = w.node(value, "Pow"), w.node(value, "Mul")
    if power is not None and scalar(power.inputs[1]) == 2:
        return power.inputs[0]
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _variance_source(w: Rewriter, value: Any) -> tuple[Operand, float] | None:
    """Match `value` = variance(x) + eps along the last axis; return (x, eps), or None."""
    total = w.node(value, "Add")
    operands = None if total is None else value_and_constant(total)
    eps = None if operands is None else scalar(operands[1])
    if operands is None or eps is None or eps < 0:
        return None
    variance = w.node(operands[0], "Var")
    if variance is not None and variance.params.get("keepdims") and variance.params.get("correction") == 0:
        last = len(variance.shape) - 1
        return (variance.inputs[0], eps) if variance.params.get("axis") in (-1, (-1,), last, (last,)) else None
    x = _centred_source(w, _square_source(w, _mean_source(w, operands[0])))
    return None if x is None else (x, eps)


def _reciprocal_root_source(w: Rewriter, value: Any) -> Operand | None:
    """Match `value` = 1 / sqrt(v); return v, or None."""
    quotient, power = w.node(value, "Div"), w.node(value, "Pow")
    if power is not None and scalar(power.inputs[1]) == -0.5:
        return power.inputs[0]
    root = w.node(quotient.inputs[1], "Sqrt") if quotient is not None and scalar(quotient.inputs[0]) == 1 else None
    return None if root is None else root.inputs[0]


def _root_quotients(w: Rewriter, node: Node) -> list[tuple[Operand, Operand | None]]:
    """Return the (a, v) for which a Div or Mul node may compute a / sqrt(v); v is None where it does not."""
    a, b = node.inputs
    if node.operation.__name__ == "Div":
        root = w.node(b, "Sqrt")
        return [] if root is None else [(a, root.inputs[0])]
    return [(a, _reciprocal_root_source(w, b)), (b, _reciprocal_root_source(w, a))]


def _layer_norm(w: Rewriter, node: Node) -> Value | None:
    """Match a layer norm without weights, (x - mean) / sqrt(variance + eps); return its replacement, or None."""
    for centred, below in _root_quotients(w, node):
        x, variance = _centred_source(w, centred), _variance_source(w, below)
        if x is not None and variance is not None and is_value(x, variance[0]):
            one = np.ones(node.shape[-1:], np.float32)
            return w.make(node, LayerNorm, node.shape, x, one, np.zeros_like(one), eps=variance[1])
    return None


def _rms_norm(w: Rewriter, node: Node) -> Value | None:
    """Match an RMS norm without weights, x / sqrt(mean(x²) + eps); return its replacement, or None."""
    for x, below in _root_quotients(w, node):
        total = w.node(below, "Add")
        operands = None if total is None else value_and_constant(total)
        eps = None if operands is None else scalar(operands[1])
        if operands is None or eps is None or eps < 0 or len(node.shape) < 2:
            continue
        if is_value(x, _square_source(w, _mean_source(w, operands[0]))) and w.shape(x) == node.shape:
            return w.make(node, RmsNorm, node.shape, x, np.ones(node.shape[-1:], np.float32), eps=eps)
    return None


def _norm_weight(w: Rewriter, node: Node) -> Value | None:
    """Fold a per-channel product or sum after a norm into the norm's weight or bias; return the new norm."""
    operands = value_and_constant(node)
    norm = None if operands is None else w.node(operands[0], "LayerNorm", "GroupNorm", "RmsNorm")
    if operands is None or norm is None or w.readers[operands[0].number] != 1 or node.shape != norm.shape:
        return None
    x, weight, *bias = norm.inputs
    if any(isinstance(t, Value) or t.ndim != 1 for t in (weight, *bias)) or operands[1].dtype != np.float32:
        return None
    constant = per_channel(operands[1], node.shape, 1 if norm.operation is GroupNorm else len(node.shape) - 1)
    is_product = node.operation.__name__ == "Mul"
    if constant is None or not (is_product or bias):  # an RMS norm has no bias
        return None
    # (n · w + b) · c = n · (w c) + b c
    tensors = [t * constant for t in (weight, *bias)] if is_product else [weight, bias[0] + constant]
    return w.make(node, norm.operation, node.shape, x, *tensors, **norm.params)


def _group_norm(w: Rewriter, node: Node) -> Value | None:
    """Match an image reshaped to rows of channel groups, normed, and reshaped back."""
    x = node.inputs[0]
    image_view = reshaped(w.view(x), node.shape) if isinstance(x, Value) else None
    norm = None if image_view is None else w.node(Value(image_view.source), "LayerNorm")
    if len(node.shape) != 4 or not node.shape[0] or image_view is None or norm is None or len(norm.shape) != 2:
        return None
    rows, weight, bias = norm.inputs
    rows_view = w.views.get(rows.number) if isinstance(rows, Value) else None
    if rows_view is None or w.shape(Value(rows_view.source)) != node.shape or norm.shape[0] % node.shape[0]:
        return None
    groups = norm.shape[0] // node.shape[0]
    if isinstance(weight, Value) or isinstance(bias, Value) or not np.all(weight == 1) or np.any(bias):
        return None
    # Both reshapes must be plain: image -> rows of groups, and rows -> image.
    plain = rows_view == reshaped(whole(rows_view.source, node.shape), norm.shape)
    plain = plain and image_view == reshaped(whole(image_view.source, norm.shape), node.shape)
    if node.shape[1] % groups or not plain:
        return None
    one = np.ones(node.shape[1], np.float32)
    source, eps = Value(rows_view.source), float(norm.params["eps"])
    return w.make(node, GroupNorm, node.shape, source, one, np.zeros_like(one), groups=groups, eps=eps)


def _channel_norm(w: Rewriter, node: Node) -> Value | None:
    """Match an image permuted to channels-last, normed, and permuted back."""
    normed = node.inputs[0]
    norm = w.node(normed, "LayerNorm")
    if norm is None or len(node.shape) != 4 or not isinstance(normed, Value):
        return None
    x, weight, bias = norm.inputs
    view = w.views.get(x.number) if isinstance(x, Value) else None
    if view is None or isinstance(weight, Value) or isinstance(bias, Value) or weight.ndim != 1:
        return None
    image = w.shape(Value(view.source))
    restored = apply_node(w.view(normed), node) == permuted(whole(normed.number, norm.shape), (0, 3, 1, 2))
    if image != node.shape or not restored or view != permuted(whole(view.source, image), (0, 2, 3, 1)):
        return None
    return w.make(node, ChannelNorm, node.shape, Value(view.source), weight, bias, eps=float(norm.params["eps"]))


def _unpadded_avg_pool(w: Rewriter, node: Node) -> Value | None:
    """Match a mean with padding times the share of each window that is inside the image."""
    operands = value_and_constant(node)
    pool = None if operands is None else w.node(operands[0], "AvgPool2d")
    if operands is None or pool is None or len(pool.params["padding"]) != 2 or node.shape != pool.shape:
        return None
    shares = window_shares(w.shape(pool.inputs[0]), **pool.params)
    if operands[1].shape[-2:] != shares.shape or operands[1].size != shares.size:
        return None
    if not np.allclose(operands[1].reshape(shares.shape), shares, rtol=1e-6):
        return None
    return w.make(node, UnpaddedAvgPool, node.shape, *pool.inputs, **pool.params, count_padding=False)


def _remove_neutral_operand(w: Rewriter, node: Node) -> Value | None:
    """Remove a multiplication by ones or an addition of zeros; return the operand."""
    operands = value_and_constant(node)
    if operands is None or w.shape(operands[0]) != node.shape:
        return None
    neutral = 1 if node.operation.__name__ == "Mul" else 0
    return operands[0] if bool(np.all(operands[1] == neutral)) else None


# --- GELU, recognized by evaluating the expression around erf or tanh ---

_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
}
_CURVES: dict[str, Callable[..., Array]] = {"Erf": np.vectorize(math.erf, otypes=[float]), "Tanh": np.tanh}
# GELU is at most five operations deep in any export seen; the bound only limits the search.
_MAX_DEPTH = 8
_SAMPLES = np.linspace(-6, 6, 64)  # both tails and the curve between them, without 0
_GELUS: dict[str, tuple[type, Array]] = {
    "Erf": (Gelu, _SAMPLES / 2 * (1 + _CURVES["Erf"](_SAMPLES * math.sqrt(0.5)))),
    "Tanh": (GeluTanh, GeluTanh().forward(_SAMPLES)),
}


def _sources(w: Rewriter, value: Any, depth: int = _MAX_DEPTH) -> list[Value]:
    """List `value` and the values that it is computed from, up to `depth` arithmetic operations back."""
    node = w.node(value, *_ARITHMETIC)
    below = [v for x in node.inputs for v in _sources(w, x, depth - 1)] if node is not None and depth else []
    return list(dict.fromkeys([value, *below] if isinstance(value, Value) else below))


def _sampled(w: Rewriter, value: Any, x: Value, depth: int = _MAX_DEPTH) -> Array | None:
    """Evaluate `value` as a function of `x` at the points `_SAMPLES`; None if it depends on other values too."""
    if is_value(value, x):
        return _SAMPLES
    node = w.node(value, *_ARITHMETIC, *_CURVES)
    if node is None or not depth:
        number = scalar(value)
        return None if number is None else np.asarray(number)
    operands = [_sampled(w, v, x, depth - 1) for v in node.inputs]
    if any(operand is None for operand in operands):
        return None
    with np.errstate(all="ignore"):
        return (_ARITHMETIC | _CURVES)[node.operation.__name__](*operands)


def _gelu(w: Rewriter, node: Node) -> Value | None:
    """Match x / 2 · (1 + f(p(x))) with f = erf or tanh and its polynomial p, multiplied in any order."""
    # Try every erf or tanh near the product, and every value below it as x.
    for value in [v for operand in node.inputs for v in _sources(w, operand, 3)]:
        curve = w.node(value, *_CURVES)
        if curve is None:
            continue
        operation, expected = _GELUS[curve.operation.__name__]
        for x in _sources(w, curve.inputs[0]):
            a, b = (_sampled(w, operand, x) for operand in node.inputs)
            is_gelu = a is not None and b is not None and np.allclose(a * b, expected, rtol=1e-5, atol=1e-6)
            if is_gelu and w.shape(x) == node.shape:
                return w.make(node, operation, node.shape, x)
    return None


# --- token layers move in front of a view ---


def _before_view(w: Rewriter, node: Node) -> Value | None:
    """Exchange a layer over the last axis and the reordering of tokens (B, T, C) before it; None if not possible."""
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
    # The view must contain every token once: whole axes in another order.
    sizes = {axis.along: axis.size for axis in lead}
    complete = len(sizes) == len(lead) and all(sizes.get(i, 1) == shape[i] for i in range(last))
    if not complete or any(a.step != 1 for a in lead):
        return None
    tokens = w.make(
        node, node.operation, (*shape[:-1], node.shape[-1]), Value(view.source), *node.inputs[1:], **node.params
    )
    order = [axis.along for axis in lead]
    order = [*order, *(i for i in range(last) if i not in order), last]
    return w.reshape(node, w.permute(node, tokens, tuple(order)), node.shape)


def _batch_norm_of_tokens(w: Rewriter, node: Node) -> Value | None:
    """Replace a batch norm over tokens that were reshaped to rows by a per-channel product and sum of the tokens."""
    x, weight, bias = node.inputs
    view = w.views.get(x.number) if isinstance(x, Value) else None
    statistics = [weight, bias, node.params["mean"], node.params["var"]]
    if view is None or len(node.shape) != 2 or any(isinstance(a, Value) for a in statistics):
        return None
    tokens = w.shape(Value(view.source))
    if len(tokens) != 3 or view != reshaped(whole(view.source, tokens), node.shape) or tokens[2] != node.shape[1]:
        return None
    weight, bias, mean, var = (np.asarray(a, np.float32) for a in statistics)
    scale = weight / np.sqrt(var + np.float32(node.params["eps"]))
    product = w.make(node, Mul, tokens, Value(view.source), scale)
    return w.reshape(node, w.make(node, Add, tokens, product, bias - mean * scale), node.shape)


# --- explicit padding moves into the layer that reads it ---


def _explicit_padding(w: Rewriter, node: Node) -> Value | None:
    """Merge a Pad node into the convolution or max pool that reads it; None if the fill differs."""
    pad = w.node(node.inputs[0], "Pad")
    if pad is None or len(node.shape) != 4 or any((*pad.params["widths"][0], *pad.params["widths"][1])):
        return None
    (_, _, (top, bottom), (left, right)), own = pad.params["widths"], node.params["padding"]
    own = own if len(own) == 4 else (*own, *own)
    padding = tuple(a + b for a, b in zip((top, left, bottom, right), own, strict=True))
    if min(top, left, bottom, right) < 0 or not _padding_is_equivalent(w, node, pad, padding):
        return None
    params = {**node.params, "padding": padding[:2] if padding[:2] == padding[2:] else padding}
    operation = PaddedMaxPool if node.operation.__name__ == "MaxPool2d" else node.operation
    return w.make(node, operation, node.shape, pad.inputs[0], *node.inputs[1:], **params)


def _padding_is_equivalent(w: Rewriter, node: Node, pad: Node, padding: tuple[int, ...]) -> bool:
    """Tell whether a layer's own padding is equivalent to the Pad node's fill value."""
    fill = pad.params["value"]
    if node.operation.__name__ == "Conv2d":
        return bool(fill == 0)
    # A max pool ignores padding; zeros have the same effect if no entry is negative.
    inside = all(p < k for p, k in zip(padding, (*node.params["kernel"], *node.params["kernel"]), strict=True))
    not_negative = fill == 0 and w.node(pad.inputs[0], "Relu") is not None and not any(node.params["padding"])
    return inside and bool(fill == -np.inf or not_negative)


def _first_match(*rules: Rule) -> Rule:
    """Combine rules: the first one that matches replaces the node."""

    def rule(w: Rewriter, node: Node) -> Operand | None:
        """Return the replacement by the first rule that matches, or None."""
        return next((result for r in rules if (result := r(w, node)) is not None), None)

    return rule


# The patterns by the operation of their last node.
_PATTERNS: dict[str, Rule] = {
    "Div": _first_match(_layer_norm, _rms_norm),
    "Mul": _first_match(_remove_neutral_operand, _unpadded_avg_pool, _layer_norm, _rms_norm, _norm_weight, _gelu),
    "Add": _first_match(_remove_neutral_operand, _norm_weight),
    "Reshape": _group_norm,
    "MatMul": match_attention,
    "Attention": match_attention_node,
    "Linear": _before_view,
    "LayerNorm": _before_view,
    "Gelu": _before_view,
    "FixedNorm": _batch_norm_of_tokens,
    "Conv2d": _explicit_padding,
    "MaxPool2d": _explicit_padding,
}
_IMAGE_PATTERNS: dict[str, Rule] = {
    "Div": _layer_norm,
    "Mul": _first_match(_remove_neutral_operand, _unpadded_avg_pool, _layer_norm, _norm_weight, _gelu),
    **{name: _PATTERNS[name] for name in ("Add", "Reshape", "Conv2d", "MaxPool2d")},
    # The float lowering tracks permutations as views; the integer one needs the norm of an image as one node.
    "Permute": _channel_norm,
}
