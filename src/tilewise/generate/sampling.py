"""From logits to the next token: the largest, or a draw from the few most likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]


def is_whole(value: Any) -> bool:
    """An integer of Python's or NumPy's, and not a truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, float | np.floating)


@dataclass(frozen=True)
class Sampler:
    """`temperature` 0 takes the most likely token. Otherwise tokens are drawn from the `top_k` most likely, and of
    those from the fewest that together reach probability `top_p`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not np.isfinite(self.temperature) or self.temperature < 0:
            raise ConfigurationError(f"temperature must be 0 (greedy) or positive, not {self.temperature!r}")
        if self.top_k is not None and (not is_whole(self.top_k) or self.top_k < 1):
            raise ConfigurationError(f"top_k must be a whole number of at least 1, not {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigurationError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")

    def pick(self, logits: Array, rng: np.random.Generator) -> Array:
        """One token per row of logits (B, vocabulary)."""
        if np.isnan(logits).any():
            raise ConfigurationError("the model gives NaN instead of logits; its weights hold NaN or infinity")
        if self.temperature == 0:
            greedy: Array = logits.argmax(-1)
            return greedy
        return np.array([self._draw(row, rng) for row in logits], np.int64)

    def _draw(self, logits: Array, rng: np.random.Generator) -> int:
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / self.temperature
        probability = np.exp(scaled - scaled[0])
        probability /= probability.sum()
        if self.top_p is not None:
            kept = int(np.searchsorted(np.cumsum(probability), self.top_p)) + 1
            order, probability = order[:kept], probability[:kept] / probability[:kept].sum()
        return int(rng.choice(order, p=probability))
