"""One layer of a cache, as attention sees it: append what is new, get back everything it may look at.

Sequences of equal length need no mask beyond the causal rule. Where lengths differ, or old positions have slid out, the
view also says which stored position each new one may see.
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
    """One layer of a KVCache; what attention takes as `past_kv`."""

    cache: KVCache
    index: int

    @property
    def lengths(self) -> Array:
        """Positions seen so far, per sequence; empty before the first."""
        if self.index >= self.cache.n_layers:
            return np.zeros(0, np.int64)
        lengths: Array = self.cache.lengths[self.index]
        return lengths

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Store the next positions (B, H, T, D) of every sequence; returns all keys and values that they may see."""
        steps = key.shape[2]
        before = self.lengths.copy() if self.lengths.size else np.zeros(key.shape[0], np.int64)
        longest = int(before.max(initial=0)) + steps
        if longest > self.cache.max_seq_len and self.cache.overflow == "slide":
            return self._append_sliding(key, value, before)
        self.cache.update(self.index, key, value, before)
        return self.cache.get(self.index, longest)

    def mask(self, steps: int) -> Array | None:
        """After `append` of `steps` positions: what each may see, True or False, (B, 1, steps, stored); None where the
        causal rule says it all."""
        after, window = self.lengths, self.cache.max_seq_len
        longest = int(after.max(initial=0))
        if longest <= window and int(after.min(initial=longest)) == longest:
            return None
        first = max(0, longest - steps - window) if longest > window else 0
        seen = np.arange(first, longest)
        position = (after[:, None] - steps + np.arange(steps))[:, None, :, None]  # (B, 1, T, 1)
        allowed: Array = (seen <= position) & (seen > position - window)
        return allowed

    def _append_sliding(self, key: Array, value: Array, before: Array) -> tuple[Array, Array]:
        if int(before.min()) != int(before.max()):
            raise ShapeError("a sliding cache needs sequences of equal length")
        held = int(before[0])
        window = slice(max(0, held - self.cache.max_seq_len), held)
        old_key, old_value = self.cache.get(self.index, window) if held else (key[:, :, :0], value[:, :, :0])
        keys, values = np.concatenate([old_key, key], 2), np.concatenate([old_value, value], 2)
        self.cache.update(self.index, key, value, before)
        return keys, values
