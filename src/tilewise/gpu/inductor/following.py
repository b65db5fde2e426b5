"""What comes after a product in the compiler's graph: whether a template could take it in and save a pass over it.

Elementwise operations can be taken in; in front of a sum over rows they are part of that sum's kernel anyway.
"""

from __future__ import annotations

from typing import Any

_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "clone"})
_SUMS = frozenset({"var_mean", "mean", "sum", "amax", "max", "amin", "var", "_softmax", "native_layer_norm"})
_MOST = 24  # nodes looked at


def fuses_next(node: Any) -> bool:
    """Whether elementwise operations follow a node of a graph, and no reduction right behind them."""
    waiting, seen, elementwise = list(getattr(node, "users", ())), 0, False
    while waiting and seen < _MOST:
        user, seen = waiting.pop(0), seen + 1
        name = str(getattr(user.target, "overloadpacket", "")).rpartition(".")[2]
        if name in _SUMS:
            return False
        pointwise = _pointwise(user.target)
        elementwise |= pointwise
        if pointwise or name in _VIEWS:
            waiting += list(user.users)
    return elementwise


def _pointwise(target: Any) -> bool:
    return any(getattr(tag, "name", "") == "pointwise" for tag in getattr(target, "tags", ()))
