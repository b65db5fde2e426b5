"""Sparse or dense, by measurement: what the sparse layers share.

A product that skips zeros is not always the faster one, and where the line lies depends on the machine, the shape and
the pattern. So a layer runs both a few times when it meets a new size, keeps the faster, and can say why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.errors import GradientError
from tilewise.tensor import Tensor, is_grad_enabled


@dataclass(frozen=True)
class Choice:
    sparse_s: float
    dense_s: float
    at: str

    @property
    def dense(self) -> bool:
        return self.dense_s < self.sparse_s

    def __str__(self) -> str:
        chosen = "dense" if self.dense else "sparse"
        return f"{chosen}: sparse {self.sparse_s * 1e6:.0f} µs, dense {self.dense_s * 1e6:.0f} µs at {self.at}"


def measured(sparse: Callable[[], Any], dense: Callable[[], Any], at: str) -> Choice:
    """Time both, taking turns; the quickest of a few calls counts."""
    from tilewise.profile.timing.turns import take_turns

    sparse_s, dense_s = (min(times) for times in take_turns((sparse, dense), 5))
    return Choice(sparse_s, dense_s, at)


def refuse_gradient(x: Any) -> None:
    if isinstance(x, Tensor) and x.requires_grad and is_grad_enabled():
        raise GradientError("a sparse layer has no gradient; run it under no_grad()")
