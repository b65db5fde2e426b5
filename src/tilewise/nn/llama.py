"""Decoder-only language models of today: one description, `LlamaConfig`, covers LLaMA, Qwen, Gemma, Phi and GPT-2.

The description says which norms, positions, attention and feed-forward layers a model has. Its linear layers come from
a factory (name, inputs, outputs, bias), so that a file reader can insert its weights (INT4 as well) without creating
random ones first. `past_kv` is as in `tilewise.nn.transformer`; keys are cached after the rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ShapeError
from tilewise.nn import functional as F
from tilewise.nn.decoder_config import LlamaConfig
from tilewise.nn.layers import Embedding, LayerNorm, Linear, Rng
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


def rotate(
    x: Tensor, positions: Array, frequencies: Array, interleaved_rope: bool = False, magnitude: float = 1.0
) -> Tensor:
    """Apply the rotary position embedding (Su et al. 2021) to heads (B, H, T, D) at positions (T,) or (B, T).

    The first 2 * len(frequencies) elements of each head form pairs: (i, i + pairs), or neighbours (2 i, 2 i + 1) if
    `interleaved_rope`. They are multiplied by `magnitude`; the remaining elements are unchanged.
    """
    count = len(frequencies)
    if count == 0:
        return x
    angles = np.asarray(positions)[..., None] * frequencies.astype(np.float64)  # (T, pairs) or (B, T, pairs)
    angles = angles[:, None] if angles.ndim == 3 else angles
    # Angles are computed in float64: at large positions float32 would lose the fraction of a turn.
    cosine, sine = (np.asarray(part * magnitude, x.dtype) for part in (np.cos(angles), np.sin(angles)))
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


def make_norm(config: LlamaConfig) -> Module:
    """Create the norm layer over the model's width that the configuration names."""
    norms: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
    return norms[config.norm](config.width, config.eps)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Limit values smoothly to ±cap (Gemma 2); 0 leaves them unchanged."""
    return (x / cap).tanh() * cap if cap else x


class GroupedQueryAttention(Module):
    """Causal grouped-query attention (Ainslie et al. 2023) over (B, T, C).

    Each group of `heads / kv_heads` neighbouring query heads shares one head of keys and values.
    """

    def __init__(self, config: LlamaConfig, layer: LinearFactory, prefix: str = "", index: int = 0) -> None:
        """Create the projections with `layer`; `prefix` and `index` are the block's name and number."""
        self.config, self.index = config, index
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = layer(f"{prefix}q_proj", config.width, queries, config.qkv_bias)
        self.k_proj = layer(f"{prefix}k_proj", config.width, keys, config.qkv_bias)
        self.v_proj = layer(f"{prefix}v_proj", config.width, keys, config.qkv_bias)
        self.o_proj = layer(f"{prefix}o_proj", queries, config.width, config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.eps) for _ in range(2))

    def forward(self, x: Tensor, past_kv: LayerCache | None = None, positions: Array | None = None) -> Tensor:
        """Apply attention to x (B, T, C); `positions`, (T,) or (B, T), default to 0 … T − 1."""
        config, (b, t, _) = self.config, x.shape
        positions = np.arange(t) if positions is None else positions
        q, k, v = (
            layer(x).reshape(b, t, heads, config.head_dim).permute(0, 2, 1, 3)  # (B, H, T, D)
            for layer, heads in (
                (self.q_proj, config.heads),
                (self.k_proj, config.kv_heads),
                (self.v_proj, config.kv_heads),
            )
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        last = int(np.max(positions, initial=0))
        frequencies = config.layer_frequencies(self.index, getattr(past_kv, "capacity", last + 1))
        q, k = (
            rotate(each, positions, frequencies, config.interleaved_rope, config.rotary_magnitude) for each in (q, k)
        )
        mask = None
        if past_kv is not None:
            keys, values = past_kv.append(k.data, v.data)
            k, v = Tensor(keys), Tensor(values)
            cache_mask = getattr(past_kv, "mask", None)
            mask = None if cache_mask is None else cache_mask(t)
        attended = self._attend(q, self._repeat_heads(k), self._repeat_heads(v), positions, mask)
        out: Tensor = self.o_proj(attended.permute(0, 2, 1, 3).reshape(b, t, config.heads * config.head_dim))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Array, mask: Array | None) -> Tensor:
        """Attend over heads (B, H, T, D), with the model's sliding window and score cap if any."""
        config, window = self.config, self.config.windows[self.index]
        if window or config.attention_cap:
            # The last key is that of the last position; (T, S) or (B, 1, T, S).
            stored = int(np.max(positions, initial=0)) + 1 - k.shape[2] + np.arange(k.shape[2])
            queries = positions[..., None] if positions.ndim == 1 else positions[:, None, :, None]
            allowed = (stored <= queries) & (stored > queries - (window or config.context))
            mask = allowed if mask is None else allowed & mask
        if not config.attention_cap:
            scale = config.attention_scale
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        scores = soft_cap(q @ k.transpose() * config.attention_scale, config.attention_cap)
        return scores.masked_fill(np.broadcast_to(~np.asarray(mask), scores.shape), -np.inf).softmax() @ v

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """Repeat each key/value head for its group of query heads: (B, KV, T, D) to (B, H, T, D)."""
        b, kv, t, d = x.shape
        group = self.config.heads // kv
        return x if group == 1 else x.unsqueeze(2).expand(b, kv, group, t, d).reshape(b, kv * group, t, d)


class FeedForward(Module):
    """Feed-forward layers: down(act(gate(x)) * up(x)) (Shazeer 2020), or down(act(up(x))) without a gate."""

    def __init__(self, config: LlamaConfig, layer: LinearFactory, prefix: str = "") -> None:
        """Create the linear layers with `layer`; `prefix` begins their names."""
        activations = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": F.gelu_tanh}
        self.activation, self.gated = activations[config.activation], config.gated
        if config.gated:
            self.gate_proj = layer(f"{prefix}gate_proj", config.width, config.hidden, config.mlp_bias)
        self.up_proj = layer(f"{prefix}up_proj", config.width, config.hidden, config.mlp_bias)
        self.down_proj = layer(f"{prefix}down_proj", config.hidden, config.width, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate, to tokens (B, T, C)."""
        up = self.up_proj(x)
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * up if self.gated else self.activation(up))
        return out


class LlamaBlock(Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); Gemma normalizes both summands again."""

    def __init__(self, config: LlamaConfig, layer: LinearFactory, prefix: str = "", index: int = 0) -> None:
        """Create norms, attention and feed-forward layers; `prefix` and `index` are the block's name and number."""
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.has_post_norms = config.post_norms
        if config.post_norms:
            self.post_norm1, self.post_norm2 = make_norm(config), make_norm(config)
        self.self_attn = GroupedQueryAttention(config, layer, f"{prefix}self_attn.", index)
        self.mlp = FeedForward(config, layer, f"{prefix}mlp.")

    def forward(self, x: Tensor, past_kv: LayerCache | None = None, positions: Array | None = None) -> Tensor:
        """Apply attention and the feed-forward network with norms and residuals; updates `past_kv` in place."""
        attended = self.self_attn(self.norm1(x), past_kv, positions)
        x = x + (self.post_norm1(attended) if self.has_post_norms else attended)
        projected = self.mlp(self.norm2(x))
        out: Tensor = x + (self.post_norm2(projected) if self.has_post_norms else projected)
        return out


class Llama(Module):
    """A decoder-only language model as its `LlamaConfig` describes it: token ids (B, T) to logits (B, T, vocab).

    >>> model = Llama(LlamaConfig(layers=1, width=16, heads=4, kv_heads=2, hidden=32, vocab=10), rng=0)
    >>> model(np.array([[1, 2, 3]])).shape
    (1, 3, 10)
    """

    def __init__(self, config: LlamaConfig, rng: Rng = None, layer: LinearFactory | None = None) -> None:
        """Create the layers; `layer` replaces `nn.Linear`, in which case embeddings are filled in later."""
        self.config = config
        self.vocab, self.context, self.heads = config.vocab, config.context, config.heads
        rng = np.random.default_rng(rng)
        make = layer or (lambda _, inputs, outputs, bias: Linear(inputs, outputs, bias, rng))
        self.token_embedding = Embedding(config.vocab if layer is None else 0, config.width, rng)
        if config.learned_positions:
            self.position_embedding = Embedding(config.context if layer is None else 0, config.width, rng)
        self.blocks = ModuleList(*(LlamaBlock(config, make, f"blocks.{i}.", i) for i in range(config.layers)))
        self.norm = make_norm(config)
        self.head = make("head", config.width, config.vocab, False)

    def forward(
        self, ids: TensorLike, past_kv: Sequence[LayerCache] | None = None, position: int | Sequence[int] = 0
    ) -> Tensor:
        """Compute logits (B, T, vocab) for `ids` (B, T) from `position` on, one start for all rows or one each."""
        tokens = ids._array if isinstance(ids, Tensor) else np.asarray(ids)
        if tokens.ndim != 2:
            raise ShapeError(f"Llama takes token ids of shape (B, T), not {tokens.shape}")
        positions = np.asarray(position)[..., None] + np.arange(tokens.shape[1])  # (T,) or (B, T)
        if positions.size and positions.max() >= self.context:
            raise ShapeError(f"{positions.max() + 1} tokens do not fit into this model's context of {self.context}")
        x = self.token_embedding(tokens)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.config.learned_positions:
            x = x + self.position_embedding(positions)
        caches: Sequence[LayerCache | None] = [None] * len(self.blocks) if past_kv is None else past_kv
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, positions)
        return soft_cap(self.head(self.norm(x)), self.config.logit_cap)
