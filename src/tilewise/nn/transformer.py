"""Attention, the transformer block and GPT.

Names follow PyTorch's MultiheadAttention and TransformerEncoderLayer (norm_first), so state dicts load both ways.

A block takes `past_kv`, one layer's view of a KV cache: any object whose `append(k, v)` stores arrays (B, H, T, D) and
returns all keys and values so far. It may have a method `mask(T)` that returns the mask of the new positions if the
causal mask is not sufficient. Without `past_kv`, attention is over `x` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tilewise import nn
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn.layers import Embedding, LayerNorm, Linear, Rng, uniform
from tilewise.nn.module import Module, ModuleList, Parameter, pack_parameters
from tilewise.tensor import Tensor, TensorLike, is_grad_enabled


class LayerCache(Protocol):
    """One layer's view of a KV cache."""

    def append(self, k: Any, v: Any) -> tuple[Any, Any]: ...


class MultiHeadAttention(Module):
    """Self-attention over (B, T, C)."""

    def __init__(self, embed_dim: int, num_heads: int, causal: bool = False, rng: Rng = None) -> None:
        """Check the number of heads and draw the initial weights."""
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigurationError(f"{embed_dim} channels cannot be divided among {num_heads} heads")
        rng = np.random.default_rng(rng)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.causal = causal
        self.in_proj_weight = uniform(rng, (3 * embed_dim, embed_dim), math.sqrt(6 / (4 * embed_dim)))
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim, np.float32))
        self.out_proj = Linear(embed_dim, embed_dim, rng=rng)
        self.out_proj.bias = Parameter(np.zeros(embed_dim, np.float32))

    def forward(
        self,
        x: Tensor,
        past_kv: LayerCache | None = None,
        mask: TensorLike | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Apply self-attention to `x` (B, T, C) and the cached positions.

        `residual` is added to the result by the output projection, in inference only.
        """
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ShapeError(f"attention takes (B, T, {self.embed_dim}), not {x.shape}")
        qkv = self.project(x)  # (B, T, 3C)
        if past_kv is None and mask is None and self.causal:
            attended = nn.functional.packed_causal_attention(qkv, self.num_heads)
        else:
            attended = self.attend(qkv, past_kv, mask)
        out: Tensor = self.out_proj(attended, residual=residual)
        return out

    def project(self, x: Tensor) -> Tensor:
        """Compute the packed queries, keys and values (B, T, 3C)."""
        return nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)

    def in_layer(self) -> Module:
        """Return the packed query, key and value projection as a linear layer that shares its arrays."""
        layer = Linear(0, 0)
        layer.in_features, layer.out_features = self.embed_dim, 3 * self.embed_dim
        layer.weight, layer.bias = self.in_proj_weight, self.in_proj_bias
        return layer

    def attend(self, qkv: Tensor, past_kv: LayerCache | None, mask: TensorLike | None) -> Tensor:
        """Apply attention to packed queries, keys and values (B, T, 3C); returns (B, T, C)."""
        b, t, _ = qkv.shape
        split = qkv.reshape(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        q, k, v = split[0], split[1], split[2]
        if past_kv is not None:
            keys, values = past_kv.append(k.data, v.data)
            k, v = Tensor(keys), Tensor(values)
            cache_mask = getattr(past_kv, "mask", None)
            mask = cache_mask(t) if mask is None and cache_mask is not None else mask
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return attended.permute(0, 2, 1, 3).reshape(b, t, self.embed_dim)


class TransformerBlock(Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); `approximate="tanh"` uses the tanh GELU."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: int = 4,
        causal: bool = True,
        rng: Rng = None,
        approximate: str = "none",
    ) -> None:
        """Create norms, attention and the two linear layers, the inner one `mlp_ratio` times as wide."""
        if approximate not in ("none", "tanh"):
            raise ConfigurationError(f'approximate must be "none" or "tanh", not {approximate!r}')
        rng = np.random.default_rng(rng)
        self.approximate = approximate
        self.self_attn = MultiHeadAttention(embed_dim, num_heads, causal, rng)
        self.linear1 = Linear(embed_dim, mlp_ratio * embed_dim, rng=rng)
        self.linear2 = Linear(mlp_ratio * embed_dim, embed_dim, rng=rng)
        self.norm1, self.norm2 = LayerNorm(embed_dim), LayerNorm(embed_dim)

    def forward(self, x: Tensor, past_kv: LayerCache | None = None) -> Tensor:
        """Run the block; in inference the residuals and the GELU are fused into the products."""
        if not is_grad_enabled() and self.approximate == "none":
            x = self.self_attn(self.norm1(x), past_kv, residual=x)
            out: Tensor = self.linear2(self.linear1(self.norm2(x), activation="gelu"), residual=x)
            return out
        x = x + self.self_attn(self.norm1(x), past_kv)
        hidden: Tensor = self.linear1(self.norm2(x))
        hidden = hidden.gelu() if self.approximate == "none" else nn.functional.gelu_tanh(hidden)
        result: Tensor = x + self.linear2(hidden)
        return result


class GPT(Module):
    """Decoder-only language model: token ids (B, T) to logits (B, T, vocab)."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocab: int = 65,
        context: int = 256,
        rng: Rng = None,
        approximate: str = "none",
    ) -> None:
        """Create the layers; the weight matrices are packed into one block of memory."""
        rng = np.random.default_rng(rng)
        self.vocab, self.context, self.heads, self.approximate = vocab, context, heads, approximate
        self.token_embedding = Embedding(vocab, width, rng)
        self.position_embedding = Embedding(context, width, rng)
        self.blocks = ModuleList(
            *(TransformerBlock(width, heads, rng=rng, approximate=approximate) for _ in range(layers))
        )
        self.norm = LayerNorm(width)
        self.head = Linear(width, vocab, bias=False, rng=rng)
        pack_parameters(p for module in (self.blocks, self.head) for p in module.parameters() if p.ndim == 2)

    def forward(
        self, ids: TensorLike, past_kv: Sequence[LayerCache] | None = None, position: int | Sequence[int] = 0
    ) -> Tensor:
        """Compute logits (B, T, vocab) for token `ids` (B, T).

        The first token is at `position`, one for all rows or one each. `past_kv` has one cache view per block.
        """
        tokens = ids._array if isinstance(ids, Tensor) else np.asarray(ids)
        if tokens.ndim != 2:
            raise ShapeError(f"GPT takes token ids of shape (B, T), not {tokens.shape}")
        positions = np.asarray(position)[..., None] + np.arange(tokens.shape[1])  # (T,) or (B, T)
        if positions.size and positions.max() >= self.context:
            raise ShapeError(f"{positions.max() + 1} tokens do not fit into this model's context of {self.context}")
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        caches: Sequence[LayerCache | None] = [None] * len(self.blocks) if past_kv is None else past_kv
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits
