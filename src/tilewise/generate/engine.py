"""Logits of the next positions of several sequences, over a cache: the native decoder, or the model itself.

Both take the same flat list of rows (token, sequence, position), so prompts of different lengths are prefilled together
without padding. The native decoder does a whole model in one call and reads float32 weights where they lie; int8
weights are copies, a quarter of the size.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.generate.cache import KVCache
from tilewise.nn import GPT
from tilewise.quantize.parameters import INT8Quantizer
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]


class Engine(Protocol):
    """What `generate` drives."""

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        """Rows (n, 3) of token, sequence, position are stored; logits (len(wanted), vocabulary) of those named."""
        ...


def new_cache(model: GPT, batch: int, length: int | None = None, dtype: str = "float32") -> KVCache:
    """A cache of the shape this model needs."""
    return KVCache(
        length or model.context,
        model.heads,
        model.token_embedding.weight.shape[1] // model.heads,
        n_layers=len(model.blocks),
        batch_size=batch,
        dtype=dtype,
    )


def make_engine(model: GPT, weights: str = "float32") -> Engine:
    """The fastest engine for this model: native where the extension is built and the weights are float32 arrays."""
    if weights not in ("float32", "int8"):
        raise ConfigurationError(f'weights must be "float32" or "int8", not {weights!r}')
    plain = all(p.data.dtype == np.float32 and p.data.flags.c_contiguous for p in model.parameters())
    if native is not None and plain:
        return NativeEngine(model, weights)
    if weights == "int8":
        raise ConfigurationError("int8 weights need the compiled kernels and a float32 model")
    return ModelEngine(model)


class NativeEngine:
    """The decoder of the compiled extension."""

    def __init__(self, model: GPT, weights: str = "float32") -> None:
        assert native is not None
        self._decoder = native.Decoder(
            model.token_embedding.weight.data,
            model.position_embedding.weight.data,
            [_block_arrays(block, weights) for block in model.blocks],
            [model.norm.weight.data, model.norm.bias.data, _weight(model.head.weight.data, weights)],
            model.heads,
            model.norm.eps,
            model.approximate == "tanh",
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every token reads."""
        return int(self._decoder.weight_bytes)

    def products(self) -> None:
        """The matrix products of one token and nothing else: what reading the weights once is compared with."""
        self._decoder.products()

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        logits: Array = self._decoder.run(rows, cache.keys, cache.values, cache.key_scales, cache.value_scales, wanted)
        np.maximum.at(cache.lengths.T, rows[:, 1], rows[:, 2:] + 1)
        return logits


def _weight(array: Array, weights: str) -> Any:
    if weights != "int8":
        return array
    quantized = INT8Quantizer().quantize_weights(array)
    return quantized.q, quantized.scale


def _block_arrays(block: Any, weights: str) -> list[Any]:
    attention = block.self_attn
    return [
        *(block.norm1.weight.data, block.norm1.bias.data),
        *(_weight(attention.in_proj_weight.data, weights), attention.in_proj_bias.data),
        *(_weight(attention.out_proj.weight.data, weights), attention.out_proj.bias.data),
        *(block.norm2.weight.data, block.norm2.bias.data),
        *(_weight(block.linear1.weight.data, weights), block.linear1.bias.data),
        *(_weight(block.linear2.weight.data, weights), block.linear2.bias.data),
    ]


class ModelEngine:
    """The model's own layers: a prompt at a time, then all sequences together, a token each."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        one_each = len(rows) == cache.batch_size and bool((rows[:, 1] == np.arange(len(rows))).all())
        with no_grad():
            if one_each:
                views = [cache.layer(i) for i in range(cache.n_layers)]
                logits: Array = self.model(rows[:, :1], views, rows[:, 2]).data[:, 0]
                return logits[wanted]
            return self._prompts(rows, cache)[wanted]

    def _prompts(self, rows: Array, cache: KVCache) -> Array:
        out = np.empty((len(rows), self.model.vocab), self.model.head.weight.dtype)
        for index in np.unique(rows[:, 1]):
            mine = rows[:, 1] == index
            views = [cache.sequence(layer, int(index)).layer(0) for layer in range(cache.n_layers)]
            out[mine] = self.model(rows[mine, 0][None], views, int(rows[mine, 2][0])).data[0]
        return out
