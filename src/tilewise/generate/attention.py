"""Causal self-attention with a KV cache.

`attention(x)` is attention over `x`; `attention(x, past_kv=cache)` stores the keys and values of `x` and attends to all
stored positions. Of a cache with several layers, pass one: `cache.layer(i)`. It is the framework's attention with
`causal=True`, so training and generation share weights and code.
"""

from __future__ import annotations

from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, type_name
from tilewise.generate.cache import KVCache
from tilewise.nn.layers import Rng
from tilewise.nn.transformer import LayerCache, MultiHeadAttention
from tilewise.tensor import Tensor, TensorLike


class CachedAttention(MultiHeadAttention, metaclass=ExplainsMethods):
    """Causal attention over (B, T, C) that continues a layer of a KVCache if `past_kv` is given.

    >>> import numpy as np
    >>> from tilewise import Tensor, no_grad
    >>> from tilewise.generate import KVCache
    >>> attention, cache = CachedAttention(8, 2), KVCache(16, 2, 4)
    >>> with no_grad():
    ...     attention(Tensor(np.zeros((1, 3, 8), np.float32)), cache).shape
    (1, 3, 8)
    """

    def __init__(self, embed_dim: int, num_heads: int, rng: Rng = None) -> None:
        super().__init__(embed_dim, num_heads, causal=True, rng=rng)

    def forward(
        self,
        x: TensorLike,
        past_kv: KVCache | LayerCache | None = None,
        mask: TensorLike | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Apply attention to `x` (B, T, C) and the cached positions; the cache `past_kv` is extended in place."""
        if isinstance(past_kv, KVCache):
            if past_kv.n_layers > 1:
                raise ConfigurationError(
                    f"this cache has {past_kv.n_layers} layers, and attention continues one: pass cache.layer(i)"
                )
            past_kv = past_kv.layer(0)
        elif past_kv is not None and not hasattr(past_kv, "append"):
            raise ConfigurationError(
                f"past_kv must be a KVCache or one of its layers, not a {type_name(past_kv)}; "
                "KVCache.update stores keys and values"
            )
        return super().forward(x if isinstance(x, Tensor) else Tensor(x), past_kv, mask, residual)
