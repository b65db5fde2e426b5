"""Causal self-attention with a KV cache.

`attention(x)` is attention over `x`; `attention(x, past_kv=cache.layer(0))` stores the keys and values of `x` and
attends to all stored positions. It is the framework's attention with `causal=True`, so training and generation share
weights and code.
"""

from __future__ import annotations

from tilewise.nn.layers import Rng
from tilewise.nn.transformer import MultiHeadAttention


class CachedAttention(MultiHeadAttention):
    """Causal attention over (B, T, C) that continues a layer of a KVCache if `past_kv` is given.

    >>> import numpy as np
    >>> from tilewise import Tensor, no_grad
    >>> from tilewise.generate import KVCache
    >>> attention, cache = CachedAttention(8, 2), KVCache(16, 2, 4)
    >>> with no_grad():
    ...     attention(Tensor(np.zeros((1, 3, 8), np.float32)), cache.layer(0)).shape
    (1, 3, 8)
    """

    def __init__(self, embed_dim: int, num_heads: int, rng: Rng = None) -> None:
        super().__init__(embed_dim, num_heads, causal=True, rng=rng)
