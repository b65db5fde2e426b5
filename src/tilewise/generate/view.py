"""View of one layer of a cache, for attention: append new keys and values, get all that they may attend to.

Sequences of equal length need no mask beyond the causal one. If lengths differ, or a sliding cache has dropped old
positions, the view also provides a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ShapeError

if TYPE_CHECKING:
    from tilewise.generate.cache import KVCache

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LayerView:
    """One layer of a KVCache; the argument `past_kv` of attention."""

    cache: KVCache
    index: int

    @property
    def lengths(self) -> Array:
        """Number of stored positions per sequence; empty before the first update."""
        if self.index >= self.cache.n_layers:
            return np.zeros(0, np.int64)
        lengths: Array = self.cache.lengths[self.index]
        return lengths

    @property
    def capacity(self) -> int:
        """Number of positions that the cache has memory for."""
        return self.cache.max_seq_len

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Store the next positions (B, H, T, D) of every sequence; return all keys and values to attend to."""
        steps = key.shape[2]
        lengths = self.lengths.copy() if self.lengths.size else np.zeros(key.shape[0], np.int64)
        longest = int(lengths.max(initial=0)) + steps
        if longest > self.cache.max_seq_len and self.cache.overflow == "slide":
            return self._append_sliding(key, value, lengths)
        self.cache.update(self.index, key, value, lengths)
        return self.cache.get(self.index, longest)

    def mask(self, steps: int) -> Array | None:
        """Mask for the last `steps` appended positions, (B, 1, steps, stored), True where attention is allowed.

        None if the causal mask is sufficient.
        """
        lengths, window = self.lengths, self.cache.max_seq_len
        longest = int(lengths.max(initial=0))
        if longest <= window and int(lengths.min(initial=longest)) == longest:
            return None
        first = max(0, longest - steps - window) if longest > window else 0
        stored = np.arange(first, longest)
        # A position attends to itself and earlier ones, but only within the sliding window.
        position = (lengths[:, None] - steps + np.arange(steps))[:, None, :, None]  # (B, 1, T, 1)
        allowed: Array = (stored <= position) & (stored > position - window)
        return allowed

    def _append_sliding(self, key: Array, value: Array, lengths: Array) -> tuple[Array, Array]:
        """Append to a full sliding cache; the old positions are read before the new ones overwrite them."""
        if int(lengths.min()) != int(lengths.max()):
            raise ShapeError("a sliding cache needs sequences of equal length")
        length = int(lengths[0])
        window = slice(max(0, length - self.cache.max_seq_len), length)
        old_key, old_value = self.cache.get(self.index, window) if length else (key[:, :, :0], value[:, :, :0])
        keys, values = np.concatenate([old_key, key], 2), np.concatenate([old_value, value], 2)
        self.cache.update(self.index, key, value, lengths)
        return keys, values
