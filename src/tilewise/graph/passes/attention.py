"""Attention pattern: two products around a softmax, with the scale and the mask at any place, become one node."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.graph.ir import Node, Shape, Value
from tilewise.graph.passes.rewriter import Operand, Rewriter, is_value, scalar, value_and_constant
from tilewise.nn.primitives import Attention

# Mask values at or below this number hide a score: exp(-1e4) is 0 in float32.
_HIDING = -1e4
# A score added to a number at or below this one is lost in rounding, so adding equals replacing.
_ABSORBING = -1e30


def _unscaled(w: Rewriter, value: Operand) -> tuple[Operand, float]:
    """Factor a value as x · factor; return (x, factor). Reshapes and permutations between the two are looked through.

    `factor` is 1 if the value is not a product with a scalar.
    """
    node = w.node(value, "Mul", "Div", "Reshape", "Permute", "GetItem")
    if node is None:
        return value, 1.0
    kind = node.operation.__name__
    if kind in ("Mul", "Div"):
        operands = value_and_constant(node)
        number = None if operands is None else scalar(operands[1])
        reciprocal = kind == "Div" and operands is not None and operands[0] is not node.inputs[0]
        if operands is None or not number or reciprocal or w.shape(operands[0]) != node.shape:
            return value, 1.0
        inner, factor = _unscaled(w, operands[0])
        return inner, factor / number if kind == "Div" else factor * number
    inner, factor = _unscaled(w, node.inputs[0])
    return (value, 1.0) if inner is node.inputs[0] else (w.add(replace(node, inputs=(inner,))), factor)


def _scores_and_mask(w: Rewriter, node: Node) -> tuple[Value, Operand] | None:
    """Match an Add or Where node as masked scores: return (scores, additive mask), or None."""
    a, b = node.inputs
    if node.operation.__name__ == "Add":
        if not isinstance(a, Value) or not _is_attention_score(w, a):
            a, b = b, a
        return (a, b) if isinstance(a, Value) and w.shape(a) == node.shape else None
    condition, scores_if_true = node.params["condition"], isinstance(a, Value)
    scores, fill = (a, b) if scores_if_true else (b, a)
    number = scalar(fill)
    if not isinstance(scores, Value) or number is None or w.shape(scores) != node.shape or number > _HIDING:
        return None
    if isinstance(condition, Value):
        # With -inf, rows that see nothing would become NaN in one form and not in the other.
        if not -np.inf < number <= _ABSORBING:
            return None
        zero, low = np.zeros((), np.float32), np.asarray(np.float32(number))
        branches = (zero, low) if scores_if_true else (low, zero)
        return scores, w.make(node, node.operation, w.shape(condition), *branches, condition=condition)
    mask = np.where(condition, 0.0, number) if scores_if_true else np.where(condition, number, 0.0)
    return scores, mask.astype(np.float32)


def _is_attention_score(w: Rewriter, value: Value) -> bool:
    """Tell whether a value matches attention scores, Q Kᵀ with optional scale and mask."""
    return w.node(_unscaled(w, value)[0], "MatMul", "Add", "Where") is not None


def _scores(w: Rewriter, value: Operand) -> tuple[Node, float, Operand | None] | None:
    """Match scale · (Q Kᵀ) + mask; return (product node, scale, mask or None), or None without a match."""
    value, factor = _unscaled(w, value)
    product = w.node(value, "MatMul")
    if product is not None:
        return product, factor, None
    node = w.node(value, "Add", "Where")
    split = None if node is None or factor != 1.0 else _scores_and_mask(w, node)
    inner = None if split is None else _scores(w, split[0])
    if split is None or inner is None or inner[2] is not None:
        return None
    return inner[0], inner[1], split[1]


def _softmax(w: Rewriter, value: Operand) -> tuple[Node, bool] | None:
    """Match a softmax along the last axis; return (its node, whether NaN rows are replaced by zeros), or None."""
    guard = w.node(value, "Where")
    weights = value
    if guard is not None:
        # Newer torch exports write where(isnan(p), 0, p).
        test, (zero, weights) = w.node(guard.params["condition"], "Computed"), guard.inputs
        is_nan = test is not None and test.params.get("name") == "IsNaN" and is_value(test.inputs[0], weights)
        if not is_nan or scalar(zero) != 0:
            return None
    softmax = w.node(weights, "Softmax")
    if softmax is None or softmax.params.get("log") or softmax.params["axis"] not in (-1, len(softmax.shape) - 1):
        return None
    return softmax, guard is not None


def _is_causal(mask: Any, queries: int, keys: int) -> bool:
    """Tell whether a mask (..., queries, keys) hides exactly the keys after each query's position."""
    if isinstance(mask, Value) or mask is None or np.ndim(mask) < 2 or np.shape(mask)[-2:] != (queries, keys):
        return False
    visible = np.tril(np.ones((queries, keys), bool), keys - queries)
    return queries <= keys and bool(((mask == 0) == visible).all() and (mask[..., ~visible] <= _HIDING).all())


def _every_row_visible(mask: Any) -> bool:
    """Tell whether a mask is a known constant that lets every query attend to at least one key."""
    return isinstance(mask, Value) or mask is None or bool((np.asarray(mask) > _HIDING).any(-1).all())


def match_attention(w: Rewriter, node: Node) -> Value | None:
    """Replace softmax(scale · Q Kᵀ + mask) V, a MatMul node, by one Attention node; None if it is not that."""
    probabilities, value = node.inputs
    softmax = _softmax(w, probabilities)
    scores = None if softmax is None else _scores(w, softmax[0].inputs[0])
    if softmax is None or scores is None:
        return None
    if not isinstance(probabilities, Value) or w.readers[probabilities.number] != 1:
        return None
    product, scale, mask = scores
    if not (_every_row_visible(mask) or softmax[1]):
        return None
    queries, query_scale = _unscaled(w, product.inputs[0])
    transposed_keys, key_scale = _unscaled(w, product.inputs[1])
    if not all(isinstance(v, Value) for v in (queries, transposed_keys, value)):
        return None
    return _append_attention(w, node, (queries, transposed_keys, value), scale * query_scale * key_scale, mask)


def _append_attention(
    w: Rewriter, node: Node, operands: tuple[Any, ...], scale: float, mask: Operand | None
) -> Value | None:
    """Append an Attention node for Q (.., T, D), Kᵀ (.., D, S) and V (.., S, E); None if shapes or mask forbid it."""
    q, transposed_keys, v = operands
    rank = len(node.shape)
    shapes = [w.shape(x) for x in operands]
    if rank not in (3, 4) or any(len(s) != rank or s[:-2] != node.shape[:-2] for s in shapes):
        return None
    lead, (t, dim), length = shapes[0][:-2], shapes[0][-2:], shapes[1][-1]
    k = w.permute(node, transposed_keys, (*range(rank - 2), rank - 1, rank - 2))
    causal = _is_causal(mask, t, length)
    if causal or (isinstance(mask, np.ndarray) and not mask.any()):
        mask = None
    if mask is not None:
        if len(w.shape(mask)) > rank or w.shape(mask)[-1:] != (length,) or rank == 3:
            return None
        shape = (1,) * (4 - len(w.shape(mask))) + w.shape(mask)  # (batch, heads, queries, keys)
        mask = w.reshape(node, mask, shape) if isinstance(mask, Value) else mask.reshape(shape)
    if rank == 3:
        lead = _batch_and_heads(w, q)
        q, k, v = (w.reshape(node, x, (*lead, *w.shape(x)[1:])) for x in (q, k, v))
    # The usual scale is used exactly, so that equal networks of different exporters give equal bits.
    usual = math.isclose(scale, 1 / math.sqrt(dim), rel_tol=1e-6)
    result = w.make(
        node,
        Attention,
        (*lead, t, w.shape(v)[-1]),
        q,
        k,
        v,
        causal=causal,
        mask=mask,
        scale=1 / math.sqrt(dim) if usual else scale,
    )
    return _heads_of_tokens(w, node, result)


def _batch_and_heads(w: Rewriter, q: Value) -> Shape:
    """Return the shape (B, H, T, D) of queries whose batch and head axes were merged by a reshape."""
    view, count = w.views.get(q.number), w.shape(q)[0]
    heads = [axis.size for axis in view.groups[0] if axis.along == 2] if view is not None else []
    return (count // heads[0], heads[0]) if len(heads) == 1 and heads[0] else (count, 1)


def _heads_of_tokens(w: Rewriter, node: Node, result: Value) -> Value:
    """Reshape an attention result (B, H, T, D) to native tokens (B, T, H · D); return the heads as a view of them."""
    b, h, t, d = w.shape(result)
    tokens = w.reshape(node, w.permute(node, result, (0, 2, 1, 3)), (b, t, h * d))
    w.views.pop(tokens.number, None)  # views of the result start at the tokens from here on
    heads = w.permute(node, w.reshape(node, tokens, (b, t, h, d)), (0, 2, 1, 3))
    return w.reshape(node, heads, node.shape)


def match_attention_node(w: Rewriter, node: Node) -> Value | None:
    """Lower an Attention operation that the module itself called to the form of `match_attention`."""
    return _heads_of_tokens(w, node, w.add(node))
