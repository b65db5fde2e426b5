"""Attention written as its parts: two products around a softmax, with the scale and the mask wherever they were put."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.nn.primitives import Attention
from tilewise.plan.rewriting import Operand, Rewriting, one_number, parted, same
from tilewise.plan.trace import Node, Value
from tilewise.plan.views import Shape

_HIDDEN = -1e4  # added to a score, or in its place: nothing is left of it after the softmax
_LOWEST = -1e30  # so low that a score added to it is lost in rounding


def _unscaled(w: Rewriting, value: Operand) -> tuple[Operand, float]:
    """A value as another one times a number, also where the product was taken before it was turned."""
    node = w.node(value, "Mul", "Div", "Reshape", "Permute", "GetItem")
    if node is None:
        return value, 1.0
    if node.operation.__name__ in ("Mul", "Div"):
        parts = parted(node)
        number = None if parts is None else one_number(parts[1])
        divides = node.operation.__name__ == "Div"
        if (
            parts is None
            or not number
            or (divides and parts[0] is not node.inputs[0])
            or w.shape(parts[0]) != node.shape
        ):
            return value, 1.0
        inner, factor = _unscaled(w, parts[0])
        return inner, factor / number if divides else factor * number
    inner, factor = _unscaled(w, node.inputs[0])
    return (value, 1.0) if inner is node.inputs[0] else (w.add(replace(node, inputs=(inner,))), factor)


def _mask_of(w: Rewriting, node: Node) -> tuple[Value, Operand] | None:
    """Scores and what is added to them; a choice of low numbers in their place is such an addition."""
    kind, like = node.operation.__name__, np.zeros((), np.float32)
    if kind == "Add":
        a, b = node.inputs
        if not isinstance(a, Value) or not _is_score(w, a):
            a, b = b, a
        return (a, b) if isinstance(a, Value) and w.shape(a) == node.shape else None
    condition, a, b = (node.params["condition"], *node.inputs) if kind == "Where" else node.inputs
    keeps = isinstance(a, Value)
    scores, low = (a, b) if keeps else (b, a)
    number = one_number(low)
    if not isinstance(scores, Value) or number is None or w.shape(scores) != node.shape or number > _HIDDEN:
        return None
    if isinstance(condition, Value):
        if not -np.inf < number <= _LOWEST:
            return None  # rows that see nothing would not be the same
        shape, fill = w.shape(condition), np.float32(number)
        kept = (like, np.asarray(fill)) if keeps else (np.asarray(fill), like)
        if kind == "Where":
            return scores, w.make(node, node.operation, shape, *kept, condition=condition)
        return scores, w.make(node, node.operation, shape, condition, *kept)
    mask = np.where(condition, 0.0, number) if keeps else np.where(condition, number, 0.0)
    return scores, mask.astype(np.float32)


def _is_score(w: Rewriting, value: Value) -> bool:
    return w.node(_unscaled(w, value)[0], "MatMul", "Add", "Where", "Choose") is not None


def _scores(w: Rewriting, value: Operand) -> tuple[Node, float, Operand | None] | None:
    """The product of queries and keys, its scale, and what is added to it."""
    value, factor = _unscaled(w, value)
    product = w.node(value, "MatMul")
    if product is not None:
        return product, factor, None
    masked = w.node(value, "Add", "Where", "Choose")
    found = None if masked is None or factor != 1.0 else _mask_of(w, masked)
    inner = None if found is None else _scores(w, found[0])
    if found is None or inner is None or inner[2] is not None:
        return None
    return inner[0], inner[1], found[1]


def _softmax_of(w: Rewriting, value: Operand) -> tuple[Node, bool] | None:
    """A softmax along the last axis, and whether rows that see nothing become zeros instead of NaN."""
    safe = w.node(value, "Where", "Choose")
    shares = value
    if safe is not None:
        condition, a, b = (safe.params["condition"], *safe.inputs) if len(safe.inputs) == 2 else safe.inputs
        tested = w.node(condition, "Computed")
        if (
            tested is None
            or tested.params.get("name") != "IsNaN"
            or one_number(a) != 0
            or not same(tested.inputs[0], b)
        ):
            return None
        shares = b
    found = w.node(shares, "Softmax")
    if found is None or found.params.get("log") or found.params["axis"] not in (-1, len(found.shape) - 1):
        return None
    return found, safe is not None


def _is_causal(mask: Any, queries: int, keys: int) -> bool:
    """Whether a mask hides what comes later, and nothing else."""
    if isinstance(mask, Value) or mask is None or np.ndim(mask) < 2 or np.shape(mask)[-2:] != (queries, keys):
        return False
    early = np.tril(np.ones((queries, keys), bool), keys - queries)
    return queries <= keys and bool(((mask == 0) == early).all() and (mask[..., ~early] <= _HIDDEN).all())


def _sees(mask: Any) -> bool:
    """Whether every query sees a key for certain."""
    return isinstance(mask, Value) or mask is None or bool((np.asarray(mask) > _HIDDEN).any(-1).all())


def attention(w: Rewriting, node: Node) -> Value | None:
    shares, value = node.inputs
    softmax = _softmax_of(w, shares)
    found = None if softmax is None else _scores(w, softmax[0].inputs[0])
    if softmax is None or found is None or not isinstance(shares, Value) or w.readers[shares.number] != 1:
        return None
    product, scale, mask = found
    if not (_sees(mask) or softmax[1]):
        return None
    queries, by_query = _unscaled(w, product.inputs[0])
    turned, by_key = _unscaled(w, product.inputs[1])
    if not all(isinstance(v, Value) for v in (queries, turned, value)):
        return None
    return _fused(w, node, (queries, turned, value), scale * by_query * by_key, mask)


def _fused(w: Rewriting, node: Node, qkv: tuple[Any, ...], scale: float, mask: Operand | None) -> Value | None:
    q, turned, v = qkv
    rank = len(node.shape)
    shapes = [w.shape(x) for x in qkv]
    if rank not in (3, 4) or any(len(s) != rank or s[:-2] != node.shape[:-2] for s in shapes):
        return None
    lead, (t, dim), length = shapes[0][:-2], shapes[0][-2:], shapes[1][-1]
    k = w.permute(node, turned, (*range(rank - 2), rank - 1, rank - 2))
    causal = _is_causal(mask, t, length)
    if causal or (isinstance(mask, np.ndarray) and not mask.any()):
        mask = None
    if mask is not None:
        if len(w.shape(mask)) > rank or w.shape(mask)[-1:] != (length,) or rank == 3:
            return None
        mask = _of_four_axes(w, node, mask)
    if rank == 3:
        lead = _batch_and_heads(w, q)
        q, k, v = (w.reshape(node, x, (*lead, *w.shape(x)[1:])) for x in (q, k, v))
    wide = (*lead, t, w.shape(v)[-1])
    plain = math.isclose(scale, 1 / math.sqrt(dim), rel_tol=1e-6)
    exact = 1 / math.sqrt(dim) if plain else scale
    made = w.make(node, Attention, wide, q, k, v, causal=causal, mask=mask, scale=exact)
    return _heads_of_tokens(w, node, made)


def _of_four_axes(w: Rewriting, node: Node, mask: Operand) -> Operand:
    shape = (1,) * (4 - len(w.shape(mask))) + w.shape(mask)
    return w.reshape(node, mask, shape) if isinstance(mask, Value) else mask.reshape(shape)


def _batch_and_heads(w: Rewriting, q: Value) -> Shape:
    """What an axis that is both is made of: the heads come out of the channels."""
    view, count = w.views.get(q.number), w.shape(q)[0]
    heads = [axis.size for axis in view.groups[0] if axis.along == 2] if view is not None else []
    return (count // heads[0], heads[0]) if len(heads) == 1 and heads[0] else (count, 1)


def _heads_of_tokens(w: Rewriting, node: Node, mixed: Value) -> Value:
    """What attention gives, (B, H, T, D), as a view of the tokens (B, T, H · D) that it is going to be."""
    b, h, t, d = w.shape(mixed)
    apart = w.permute(node, mixed, (0, 2, 1, 3))
    joined = w.reshape(node, apart, (b, t, h * d))
    w.views.pop(joined.number, None)
    again = w.permute(node, w.reshape(node, joined, (b, t, h, d)), (0, 2, 1, 3))
    return w.reshape(node, again, node.shape)


def known_attention(w: Rewriting, node: Node) -> Value | None:
    return _heads_of_tokens(w, node, w.add(node))
