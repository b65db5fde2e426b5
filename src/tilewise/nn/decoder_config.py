"""The description of a decoder-only language model, which its layers and its native engine are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]


def rotary_frequencies(pairs: int, base: float = 10000.0) -> Array:
    """Return the rotation in radians per position of each of `pairs` pairs: base ** (-i / pairs)."""
    return (1.0 / base ** (np.arange(pairs) / max(1, pairs))).astype(np.float32)


@dataclass(frozen=True)
class LlamaConfig:
    """Description of a decoder. The defaults are LLaMA's; 0 means that a model does without a cap or a window.

    `head_dim` defaults to width / heads, `attention_scale` to 1 / sqrt(head_dim), `frequencies` to
    `rotary_frequencies`, and `window_frequencies` to `frequencies`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    context: int = 2048
    head_dim: int = 0
    norm: str = "rms"  # or "layer", with a bias
    eps: float = 1e-5
    post_norms: bool = False  # normalize what attention and feed-forward add as well
    qk_norm: bool = False  # RMS norm of each head's queries and keys, before the rotation
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True  # feed-forward with a gate
    activation: str = "silu"  # or "gelu", "gelu_tanh"
    learned_positions: bool = False  # added to the token embedding, instead of rotary positions
    frequencies: Array | None = None
    window_frequencies: Array | None = None  # of layers with a window
    long_frequencies: Array | None = None  # replace `frequencies` if more than `long_context` positions are used
    long_context: int = 0
    rotary_magnitude: float = 1.0  # factor of the rotated queries and keys
    interleaved_rope: bool = False
    windows: tuple[int, ...] = ()  # for each layer the number of latest positions it attends to, 0 for all
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_cap: float = 0.0  # scores become cap * tanh(score / cap)
    logit_cap: float = 0.0

    def __post_init__(self) -> None:
        """Check the sizes and fill in the defaults."""
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise ConfigurationError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads")
        if not self.head_dim and self.width % self.heads:
            raise ConfigurationError(f"{self.width} channels cannot be divided among {self.heads} heads")
        head_dim = self.head_dim or self.width // self.heads
        pairs = 0 if self.learned_positions else head_dim // 2
        defaults = {
            "head_dim": head_dim,
            "frequencies": rotary_frequencies(pairs) if self.frequencies is None else self.frequencies,
            "windows": self.windows or (0,) * self.layers,
            "attention_scale": self.attention_scale or head_dim**-0.5,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        for frequencies in (self.frequencies, self.window_frequencies, self.long_frequencies):
            if frequencies is not None and 2 * len(frequencies) > self.head_dim:
                raise ConfigurationError(
                    f"{len(frequencies)} rotary pairs need a head width of at least "
                    f"{2 * len(frequencies)}, not {self.head_dim}"
                )
        if self.activation not in (("silu", "gelu_tanh") if self.gated else ("gelu", "gelu_tanh")):
            raise ConfigurationError(f"{self.activation!r} is not supported {'in' if self.gated else 'without'} a gate")
        if len(self.windows) != self.layers:
            raise ConfigurationError(f"{self.layers} layers need as many windows, not {len(self.windows)}")

    def layer_frequencies(self, layer: int, length: int) -> Array:
        """Return the rotary frequencies of a layer for sequences of up to `length` positions."""
        if self.windows[layer] and self.window_frequencies is not None:
            return self.window_frequencies
        if self.long_frequencies is not None and length > self.long_context:
            return self.long_frequencies
        assert self.frequencies is not None
        return self.frequencies
