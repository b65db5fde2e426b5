"""Detect whether the operations after a matrix product can be fused into its template as an epilogue.

Fusing elementwise operations saves a pass over the result. Elementwise operations in front of a reduction are fused
into the reduction's kernel instead, so they save nothing here.
"""

from __future__ import annotations

from typing import Any

_VIEW_OPS = frozenset({"view", "_unsafe_view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "clone"})
_REDUCTION_OPS = frozenset({"var_mean", "mean", "sum", "amax", "max", "amin", "var", "_softmax", "native_layer_norm"})
_MAX_NODES = 24  # nodes to visit; an arbitrary bound on the search


def has_fusible_epilogue(node: Any) -> bool:
    """Tell whether elementwise operations follow a node of an FX graph, with no reduction right behind them."""
    # Breadth-first over the users; views are followed because they do not stop a fusion.
    queue, visits, any_elementwise = list(getattr(node, "users", ())), 0, False
    while queue and visits < _MAX_NODES:
        user, visits = queue.pop(0), visits + 1
        name = str(getattr(user.target, "overloadpacket", "")).rpartition(".")[2]
        if name in _REDUCTION_OPS:
            return False
        elementwise = _is_elementwise(user.target)
        any_elementwise |= elementwise
        if elementwise or name in _VIEW_OPS:
            queue += list(user.users)
    return any_elementwise


def _is_elementwise(target: Any) -> bool:
    """Tell whether PyTorch tags an operator as pointwise."""
    return any(getattr(tag, "name", "") == "pointwise" for tag in getattr(target, "tags", ()))
