"""Choose the next token from logits: greedy, or sampled from the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]


def is_integer(value: Any) -> bool:
    """True for Python and NumPy integers, but not for bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float | np.floating)


@dataclass(frozen=True)
class Sampler:
    """Sampling settings. `temperature` 0 takes the most likely token (greedy decoding).

    Otherwise tokens are sampled from the `top_k` most likely ones, and among those from the smallest set whose
    probabilities add up to `top_p` (nucleus sampling, Holtzman et al. 2020).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not np.isfinite(self.temperature) or self.temperature < 0:
            raise ConfigurationError(f"temperature must be 0 (greedy) or positive, not {self.temperature!r}")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ConfigurationError(f"top_k must be an integer of at least 1, not {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ConfigurationError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")

    def pick(self, logits: Array, rng: np.random.Generator) -> Array:
        """Choose one token per row of logits (B, vocabulary)."""
        if np.isnan(logits).any():
            raise ConfigurationError("the logits are NaN; the model's weights contain NaN or infinity")
        if self.temperature == 0:
            greedy: Array = logits.argmax(-1)
            return greedy
        return np.array([self._sample(row, rng) for row in logits], np.int64)

    def _sample(self, logits: Array, rng: np.random.Generator) -> int:
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / self.temperature
        probability = np.exp(scaled - scaled[0])
        probability /= probability.sum()
        if self.top_p is not None:
            count = int(np.searchsorted(np.cumsum(probability), self.top_p)) + 1
            order, probability = order[:count], probability[:count] / probability[:count].sum()
        return int(rng.choice(order, p=probability))
