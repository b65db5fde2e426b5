"""Logits of the next positions of several sequences, over a cache: the native decoder, or the model itself.

Both take the same flat list of rows (token, sequence, position), so prompts of different lengths are prefilled together
without padding. The native decoder does a whole model in one call and reads float32 weights where they lie; int8 and
four-bit weights are copies, a quarter and a seventh of the size. What it prepares (copies, large pages) is kept with
the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.generate.cache import KVCache
from tilewise.nn import GPT, Linear, Llama, RMSNorm
from tilewise.nn.llama import LlamaBlock
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
LanguageModel = GPT | Llama


class Engine(Protocol):
    """What `generate` drives."""

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        """Rows (n, 3) of token, sequence, position are stored; logits (len(wanted), vocabulary) of those named."""
        ...


def new_cache(model: LanguageModel, batch: int, length: int | None = None, dtype: str = "float32") -> KVCache:
    """A cache of the shape this model needs."""
    kv_heads, head_dim = head_shape(model)
    return KVCache(
        length or model.context, kv_heads, head_dim, n_layers=len(model.blocks), batch_size=batch, dtype=dtype
    )


def head_shape(model: LanguageModel) -> tuple[int, int]:
    """How many heads have keys and values of their own, and how wide they are."""
    if isinstance(model, Llama):
        return model.config.kv_heads, model.config.head_dim
    return model.heads, model.token_embedding.weight.shape[1] // model.heads


def make_engine(model: LanguageModel, weights: str = "float32") -> Engine:
    """The fastest engine for this model: native where the extension is built and the weights are float32 arrays or four
    bits (`quantize(model, bits=4)`); `weights` "int8" or "int4" decodes with copies of float32 weights.

    A native engine stays with its model, so the next call has it at once; it is made anew when a parameter was replaced
    or, behind integer copies, changed.
    """
    if weights not in ("float32", "int8", "int4"):
        raise ConfigurationError(f'weights must be "float32", "int8" or "int4", not {weights!r}')
    if native is not None and _is_native(model):
        return _kept_engines(model).get(model, weights)
    if weights != "float32":
        raise ConfigurationError(f"{weights} weights need the compiled kernels and a float32 model")
    return ModelEngine(model)


class NativeEngine:
    """The decoder of the compiled extension."""

    def __init__(self, model: LanguageModel, weights: str = "float32") -> None:
        assert native is not None
        self.settings = _settings(model)
        dense = _four_bit_dense if weights == "int4" else _dense
        try:
            self._decoder = native.Decoder(
                model.token_embedding.weight.data,
                model.position_embedding.weight.data if isinstance(model, GPT) else None,
                [_block_parts(block, dense) for block in model.blocks],
                [*_norm_parts(model.norm), dense(model.head)],
                *self.settings[:6],
                _rotary(model),
                self.settings[6],
                weights == "int8",
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every token reads."""
        return int(self._decoder.weight_bytes)

    def fresh(self) -> bool:
        """Whether integer copies are still those of the weights; that costs reading these once."""
        return bool(self._decoder.fresh())

    def products(self) -> None:
        """The matrix products of one token and nothing else: what reading the weights once is compared with."""
        self._decoder.products()

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        logits: Array = self._decoder.run(rows, cache.keys, cache.values, cache.key_scales, cache.value_scales, wanted)
        np.maximum.at(cache.lengths.T, rows[:, 1], rows[:, 2:] + 1)
        return logits


def _settings(model: LanguageModel) -> tuple[Any, ...]:
    """What the decoder is told beside its arrays: heads, their sizes, positions, eps, GELU's form, the rotary pairs."""
    kv_heads, head_dim = head_shape(model)
    if isinstance(model, Llama):
        frequencies = _rotary(model)
        turns = b"" if frequencies is None else frequencies.tobytes()
        return model.heads, kv_heads, head_dim, model.context, model.norm.eps, False, model.config.side_by_side, turns
    tanh = model.approximate == "tanh"
    return model.heads, kv_heads, head_dim, model.context, model.norm.eps, tanh, False, b""


def _rotary(model: LanguageModel) -> Array | None:
    if not isinstance(model, Llama) or model.config.frequencies is None:
        return None
    return np.ascontiguousarray(model.config.frequencies, np.float32)


Dense = tuple[Array | None, Any, Array | None]  # a float weight, a four-bit one, a bias


def _dense(layer: Any) -> Dense:
    """A linear layer as the decoder takes it."""
    if isinstance(layer, Linear):
        return layer.weight.data, None, None if layer.bias is None else layer.bias.data
    return None, layer.kernel, layer.float_bias


def _four_bit_dense(layer: Any) -> Dense:
    """The same with a four-bit copy of a float weight, rounded to the nearest."""
    from tilewise.quantize.four_bits.blocks import round_blocks

    weight, kernel, bias = _dense(layer)
    if weight is not None and native is not None:
        blocks = round_blocks(weight)
        kernel = native.Int4Weights(blocks.codes, blocks.scales, blocks.minimums, blocks.column_scale)
    return weight, kernel, bias


def _block_layers(block: Any) -> list[list[Any]]:
    """The linear layers of a block: to queries, keys and values; out; up (with its gate before it); down."""
    attention = block.self_attn
    if isinstance(block, LlamaBlock):
        qkv, mlp = [attention.q_proj, attention.k_proj, attention.v_proj], block.mlp
        return [qkv, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return [[attention.in_layer()], [attention.out_proj], [block.linear1], [block.linear2]]


def _block_parts(block: Any, dense: Callable[[Any], Dense]) -> list[Any]:
    qkv, (out,), up, (down,) = (list(map(dense, layers)) for layers in _block_layers(block))
    return [*_norm_parts(block.norm1), qkv, out, *_norm_parts(block.norm2), up, down]


def _norm_parts(norm: Any) -> list[Array | None]:
    return [norm.weight.data, None if isinstance(norm, RMSNorm) else norm.bias.data]


def _is_native(model: LanguageModel) -> bool:
    """Whether the decoder can read all of this model."""
    layers = [layer for block in model.blocks for part in _block_layers(block) for layer in part] + [model.head]
    fits = all(isinstance(layer, Linear) or _is_four_bit(layer) for layer in layers)
    return fits and all(p.data.dtype == np.float32 and p.data.flags.c_contiguous for p in model.parameters())


def _is_four_bit(layer: Any) -> bool:
    return native is not None and isinstance(getattr(layer, "kernel", None), native.Int4Weights)


class KeptEngines:
    """The native engines of one model, an attribute of it. A copy of the model starts without any."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[NativeEngine, list[Any]]] = {}

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()

    def get(self, model: LanguageModel, weights: str) -> NativeEngine:
        kept = self._engines.get(weights)
        if kept is not None and self._fits(*kept, model):
            return kept[0]
        self._engines.pop(weights, None)  # before the new one is made: two would take twice the memory
        kept = self._engines[weights] = (NativeEngine(model, weights), _weights(model))
        return kept[0]

    @staticmethod
    def _fits(engine: NativeEngine, before: list[Any], model: LanguageModel) -> bool:
        now = _weights(model)
        same = len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
        return same and engine.settings == _settings(model) and engine.fresh()


def _weights(model: LanguageModel) -> list[Any]:
    """What an engine was made of: float arrays and four-bit kernels."""
    return [p.data for p in model.parameters()] + [vars(m)["kernel"] for m in model.modules() if _is_four_bit(m)]


def _kept_engines(model: LanguageModel) -> KeptEngines:
    return cast(KeptEngines, vars(model).setdefault("_engines", KeptEngines()))


class ModelEngine:
    """The model's own layers: a prompt at a time, then all sequences together, a token each."""

    def __init__(self, model: LanguageModel) -> None:
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
        out = np.empty((len(rows), self.model.vocab), self.model.token_embedding.weight.dtype)
        for index in np.unique(rows[:, 1]):
            mine = rows[:, 1] == index
            views = [cache.sequence(layer, int(index)).layer(0) for layer in range(cache.n_layers)]
            out[mine] = self.model(rows[mine, 0][None], views, int(rows[mine, 2][0])).data[0]
        return out
