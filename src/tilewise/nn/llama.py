"""LLaMA-family models: RMS norm, rotary position embedding, grouped-query attention, gated feed-forward.

A model is built from a `LlamaConfig`. Its linear layers come from a factory (name, inputs, outputs, bias), so that a
file reader can insert its weights (INT4 as well) without creating random ones first. `past_kv` is as in
`tilewise.nn.transformer`; keys are cached after the rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn import functional as F
from tilewise.nn.layers import Embedding, Linear, Rng
from tilewise.nn.module import Module, ModuleList, Parameter
from tilewise.nn.transformer import LayerCache
from tilewise.tensor import Tensor, TensorLike, cat

Array = npt.NDArray[Any]
LinearFactory = Callable[[str, int, int, bool], Any]


class RMSNorm(Module):
    """RMS norm (Zhang and Sennrich 2019): x / sqrt(mean(x²) + eps) * weight, over the last axis."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        self.eps = eps
        self.weight = Parameter(np.ones(width, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdims=True) + self.eps).sqrt() * self.weight


def rotary_frequencies(pairs: int, base: float = 10000.0) -> Array:
    """Radians per position for each of `pairs` pairs: from 1 down to almost 1 / base."""
    return (1.0 / base ** (np.arange(pairs) / max(1, pairs))).astype(np.float32)


def rotate(x: Tensor, positions: Array, frequencies: Array, interleaved_rope: bool = False) -> Tensor:
    """Apply the rotary position embedding (Su et al. 2021) to heads (B, H, T, D) at positions (T,) or (B, T).

    The first 2 * len(frequencies) elements of each head form pairs: (i, i + pairs), or neighbours (2 i, 2 i + 1) if
    `interleaved_rope`. The remaining elements are unchanged.
    """
    count = len(frequencies)
    angles = np.asarray(positions)[..., None] * frequencies.astype(np.float64)  # (T, pairs) or (B, T, pairs)
    angles = angles[:, None] if angles.ndim == 3 else angles
    # Angles are computed in float64: at large positions float32 would lose the fraction of a turn.
    cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    rotary = x[..., : 2 * count]
    if interleaved_rope:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
    else:
        a, b = rotary[..., :count], rotary[..., count:]
    first, second = a * cosine - b * sine, a * sine + b * cosine
    if interleaved_rope:
        result = cat([first.unsqueeze(-1), second.unsqueeze(-1)], -1).reshape(*rotary.shape)
    else:
        result = cat([first, second], -1)
    return result if 2 * count == x.shape[-1] else cat([result, x[..., 2 * count :]], -1)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model. `head_dim` defaults to width / heads, `frequencies` to `rotary_frequencies`."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    context: int = 2048
    head_dim: int = 0
    eps: float = 1e-5
    frequencies: Array | None = None
    interleaved_rope: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        """Check the sizes and fill in the defaults."""
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise ConfigurationError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads")
        if not self.head_dim:
            if self.width % self.heads:
                raise ConfigurationError(f"{self.width} channels cannot be divided among {self.heads} heads")
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if self.frequencies is None:
            object.__setattr__(self, "frequencies", rotary_frequencies(self.head_dim // 2))
        assert self.frequencies is not None
        if 2 * len(self.frequencies) > self.head_dim:
            raise ConfigurationError(
                f"{len(self.frequencies)} rotary pairs need a head width of at least "
                f"{2 * len(self.frequencies)}, not {self.head_dim}"
            )


class GroupedQueryAttention(Module):
    """Causal grouped-query attention (Ainslie et al. 2023) over (B, T, C).

    Each group of `heads / kv_heads` neighbouring query heads shares one head of keys and values.
    """

    def __init__(self, config: LlamaConfig, layer: LinearFactory, prefix: str = "") -> None:
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = layer(f"{prefix}q_proj", config.width, queries, config.qkv_bias)
        self.k_proj = layer(f"{prefix}k_proj", config.width, keys, config.qkv_bias)
        self.v_proj = layer(f"{prefix}v_proj", config.width, keys, config.qkv_bias)
        self.o_proj = layer(f"{prefix}o_proj", queries, config.width, False)

    def forward(self, x: Tensor, past_kv: LayerCache | None = None, positions: Array | None = None) -> Tensor:
        """Project, rotate and attend; `positions` (T,) or (B, T) default to 0 … T − 1."""
        config, (b, t, _) = self.config, x.shape
        positions = np.arange(t) if positions is None else positions
        assert config.frequencies is not None
        q, k, v = (
            layer(x).reshape(b, t, heads, config.head_dim).permute(0, 2, 1, 3)  # (B, H, T, D)
            for layer, heads in (
                (self.q_proj, config.heads),
                (self.k_proj, config.kv_heads),
                (self.v_proj, config.kv_heads),
            )
        )
        q, k = (rotate(each, positions, config.frequencies, config.interleaved_rope) for each in (q, k))
        mask = None
        if past_kv is not None:
            keys, values = past_kv.append(k.data, v.data)
            k, v = Tensor(keys), Tensor(values)
            cache_mask = getattr(past_kv, "mask", None)
            mask = None if cache_mask is None else cache_mask(t)
        k, v = self._repeat_heads(k), self._repeat_heads(v)
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        out: Tensor = self.o_proj(attended.permute(0, 2, 1, 3).reshape(b, t, config.heads * config.head_dim))
        return out

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """Repeat each key/value head for its group of query heads: (B, KV, T, D) to (B, H, T, D)."""
        b, kv, t, d = x.shape
        group = self.config.heads // kv
        return x if group == 1 else x.unsqueeze(2).expand(b, kv, group, t, d).reshape(b, kv * group, t, d)


class SwiGLU(Module):
    """Gated feed-forward (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, layer: LinearFactory, prefix: str = "") -> None:
        self.gate_proj = layer(f"{prefix}gate_proj", width, hidden, False)
        self.up_proj = layer(f"{prefix}up_proj", width, hidden, False)
        self.down_proj = layer(f"{prefix}down_proj", hidden, width, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, layer: LinearFactory, prefix: str = "") -> None:
        self.norm1, self.norm2 = RMSNorm(config.width, config.eps), RMSNorm(config.width, config.eps)
        self.self_attn = GroupedQueryAttention(config, layer, f"{prefix}self_attn.")
        self.mlp = SwiGLU(config.width, config.hidden, layer, f"{prefix}mlp.")

    def forward(self, x: Tensor, past_kv: LayerCache | None = None, positions: Array | None = None) -> Tensor:
        x = x + self.self_attn(self.norm1(x), past_kv, positions)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(Module):
    """A decoder-only language model of the LLaMA family: token ids (B, T) to logits (B, T, vocab).

    >>> model = Llama(LlamaConfig(layers=1, width=16, heads=4, kv_heads=2, hidden=32, vocab=10), rng=0)
    >>> model(np.array([[1, 2, 3]])).shape
    (1, 3, 10)
    """

    def __init__(self, config: LlamaConfig, rng: Rng = None, layer: LinearFactory | None = None) -> None:
        self.config = config
        self.vocab, self.context, self.heads = config.vocab, config.context, config.heads
        rng = np.random.default_rng(rng)
        make = layer or (lambda _, inputs, outputs, bias: Linear(inputs, outputs, bias, rng))
        self.token_embedding = Embedding(config.vocab if layer is None else 0, config.width, rng)
        self.blocks = ModuleList(*(LlamaBlock(config, make, f"blocks.{i}.") for i in range(config.layers)))
        self.norm = RMSNorm(config.width, config.eps)
        self.head = make("head", config.width, config.vocab, False)

    def forward(
        self, ids: TensorLike, past_kv: Sequence[LayerCache] | None = None, position: int | Sequence[int] = 0
    ) -> Tensor:
        """Compute logits for `ids`, whose first token is at `position` (one start for all rows, or one each)."""
        tokens = ids._array if isinstance(ids, Tensor) else np.asarray(ids)
        if tokens.ndim != 2:
            raise ShapeError(f"Llama takes token ids of shape (B, T), not {tokens.shape}")
        positions = np.asarray(position)[..., None] + np.arange(tokens.shape[1])  # (T,) or (B, T)
        if positions.size and positions.max() >= self.context:
            raise ShapeError(f"{positions.max() + 1} tokens do not fit into this model's context of {self.context}")
        x = self.token_embedding(tokens)
        caches: Sequence[LayerCache | None] = [None] * len(self.blocks) if past_kv is None else past_kv
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits
