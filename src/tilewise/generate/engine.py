"""Engines that compute logits over a KV cache: the native decoder, or the model's own layers.

Both take a flat list of rows (token, sequence, position), so prompts of different lengths are prefilled together
without padding. The native decoder runs a whole model in one call and reads float32 and sparse weights in place; INT8
and INT4 weights are copies, a quarter and a seventh of the size. Its preparations (copies, large pages) are cached in
the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.generate.cache import KVCache
from tilewise.nn import GPT, Embedding, Linear
from tilewise.nn.decoder_config import LlamaConfig
from tilewise.tensor import Array, no_grad

if TYPE_CHECKING:
    from tilewise.nn import Llama

LanguageModel: TypeAlias = "GPT | Llama"
Engine: TypeAlias = "NativeEngine | ModelEngine"
_Q8_0 = 8  # GGUF's number of the format


def new_cache(model: LanguageModel, batch: int, length: int | None = None, dtype: str = "float32") -> KVCache:
    """Create a KV cache of `length` positions (default: the model's context) with the model's sizes."""
    kv_heads, head_dim = head_shape(model)
    return KVCache(
        length or model.context, kv_heads, head_dim, n_layers=len(model.blocks), batch_size=batch, dtype=dtype
    )


def head_shape(model: LanguageModel) -> tuple[int, int]:
    """Return the number of key/value heads and their width."""
    description = describe(model)
    return description.kv_heads, description.head_dim


def describe(model: LanguageModel) -> LlamaConfig:
    """Return the decoder configuration of a model; a GPT is one with layer norms and learned positions."""
    if not isinstance(model, GPT):
        return model.config
    return LlamaConfig(
        layers=len(model.blocks),
        width=model.token_embedding.weight.shape[1],
        heads=model.heads,
        kv_heads=model.heads,
        hidden=0,
        vocab=model.vocab,
        context=model.context,
        norm="layer",
        eps=model.norm.eps,
        gated=False,
        activation={"tanh": "gelu_tanh"}.get(model.approximate, "gelu"),
        learned_positions=True,
    )


def make_engine(model: LanguageModel, weights: str = "float32") -> Engine:
    """Create the fastest engine for this model.

    The native engine supports float32, INT4 (`quantize(model, bits=4)`) and sparse weights (`prune.sparsify(model)`);
    `weights` "int8" or "int4" decodes with quantized copies of float32 weights. It is cached in the model and created
    again when a parameter was replaced or, if it has quantized copies, changed.
    """
    if weights not in ("float32", "int8", "int4"):
        raise ConfigurationError(f'weights must be "float32", "int8" or "int4", not {weights!r}')
    if native is not None and _is_native(model):
        engines = cast(EngineCache, vars(model).setdefault("_engines", EngineCache()))  # stored on the model itself
        return engines.get(model, weights)
    if weights != "float32":
        raise ConfigurationError(f"{weights} weights need the compiled kernels and a float32 model")
    return ModelEngine(model)


class NativeEngine:
    """The decoder of the compiled extension."""

    def __init__(self, model: LanguageModel, weights: str = "float32") -> None:
        """Pass the model's arrays to the native decoder, which keeps references to them."""
        assert native is not None
        self.settings = _settings(model)
        arena = None if weights == "float32" else _weight_arena(model)
        convert = {"float32": _linear_weights, "int8": _int8_weights, "int4": _int4_weights}[weights]
        dense = functools.partial(convert, arena=arena)
        try:
            self._decoder = native.Decoder(
                _embedding_rows(model),
                model.position_embedding.weight.data if hasattr(model, "position_embedding") else None,
                [
                    [*_block_weights(block, dense), window]
                    for block, window in zip(model.blocks, describe(model).windows, strict=True)
                ],
                [_norm_weights(model.norm), dense(model.head)],
                self.settings,
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that are read for every token."""
        return int(self._decoder.weight_bytes)

    def fresh(self) -> bool:
        """Tell whether quantized copies still match the weights; reads all weights once."""
        return bool(self._decoder.fresh())

    def run(self, rows: Array, cache: KVCache, output_rows: Array) -> Array:
        """Compute rows (n, 3) of token, sequence and position, and store their keys and values in the cache.

        Returns logits (len(output_rows), vocabulary) for the rows at these indices.
        """
        logits: Array = self._decoder.run(
            rows, cache.keys, cache.values, cache.key_scales, cache.value_scales, output_rows
        )
        # Each row extends its sequence to at least position + 1, in all layers.
        np.maximum.at(cache.lengths.T, rows[:, 1], rows[:, 2:] + 1)
        return logits


def _settings(model: LanguageModel) -> dict[str, Any]:
    """Return the native decoder's settings, by field name: sizes, flags and rotary frequencies."""
    c = describe(model)
    window_frequencies = c.frequencies if c.window_frequencies is None else c.window_frequencies
    frequencies = {
        "frequencies": c.frequencies,
        "window_frequencies": window_frequencies if any(c.windows) else None,
        "long_frequencies": c.long_frequencies,
    }
    names = ("heads", "kv_heads", "eps", "activation", "attention_scale", "attention_cap", "embedding_scale")
    return {
        **{name: getattr(c, name) for name in (*names, "logit_cap", "rotary_magnitude")},
        **{k: None if v is None else np.ascontiguousarray(v, np.float32) for k, v in frequencies.items()},
        "head_width": c.head_dim,
        "positions": c.context,
        "long_context": 0 if c.long_frequencies is None else c.long_context,
        "side_by_side": c.interleaved_rope,
        "windows": c.windows,
    }


LinearWeights = tuple[Array | None, Any, Array | None]  # float32 weight, quantized or sparse weight, bias


def _linear_weights(layer: Any, arena: Any = None) -> LinearWeights:
    """Return a linear layer's weights in the decoder's form, without a copy."""
    if isinstance(layer, Linear):
        return layer.weight.data, None, None if layer.bias is None else layer.bias.data
    return None, _packed_kernel(layer), layer.float_bias


def _int8_weights(layer: Any, arena: Any = None) -> LinearWeights:
    """Return a linear layer's weights copied to INT8 blocks (Q8_0)."""
    weight, _, bias = _linear_weights(layer)
    if weight is None or native is None:
        raise ConfigurationError("int8 weights need a float32 model; this one has quantized or sparse weights")
    return weight, native.BlockMatrix.from_floats(weight, arena), bias


def _int4_weights(layer: Any, arena: Any = None) -> LinearWeights:
    """Return a linear layer's weights copied to INT4, rounded to nearest."""
    from tilewise.quantize.four_bits.blocks import round_blocks

    weight, kernel, bias = _linear_weights(layer)
    if weight is not None and native is not None:
        blocks = round_blocks(weight)
        kernel = native.BlockMatrix.from_codes(*blocks.arrays(), arena)
    return weight, kernel, bias


def _weight_arena(model: LanguageModel) -> Any:
    """Allocate memory for INT8 copies of all float32 matrices, which is enough for INT4 copies too."""
    assert native is not None
    shapes = [layer.weight.shape for layer in _linear_layers(model) if isinstance(layer, Linear)]
    return native.WeightArena(sum(native.packed_block_bytes(_Q8_0, *shape) for shape in shapes))


def _embedding_rows(model: LanguageModel) -> Any:
    """Return the token embedding in the decoder's form: a float32 array, or rows of a mapped file."""
    embedding: Any = model.token_embedding
    return embedding.weight.data if isinstance(embedding, Embedding) else embedding.kernel


def _block_layers(block: Any) -> list[list[Any]]:
    """List a block's linear layers by step: query, key, value; output; (gate and) up; down."""
    attention = block.self_attn
    if hasattr(block, "mlp"):  # a block of Llama
        mlp = block.mlp
        qkv, up = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.up_proj]
        return [qkv, [attention.o_proj], [mlp.gate_proj, *up] if mlp.gated else up, [mlp.down_proj]]
    return [[attention.in_layer()], [attention.out_proj], [block.linear1], [block.linear2]]


def _block_weights(block: Any, dense: Callable[[Any], LinearWeights]) -> list[Any]:
    """Return a block's weights in the decoder's order; `dense` converts a linear layer, missing norms are None."""
    qkv, (out,), up, (down,) = (list(map(dense, layers)) for layers in _block_layers(block))
    attention = block.self_attn
    query_norm, key_norm, post1, post2 = (
        _norm_weights(getattr(owner, name, None))
        for owner, name in ((attention, "q_norm"), (attention, "k_norm"), (block, "post_norm1"), (block, "post_norm2"))
    )
    norm1, norm2 = _norm_weights(block.norm1), _norm_weights(block.norm2)
    return [norm1, qkv, query_norm, key_norm, out, post1, norm2, up, down, post2]


def _norm_weights(norm: Any) -> tuple[Array, Array | None] | None:
    """Return the weight and bias of a norm (None for RMS norm); None if there is no layer."""
    if norm is None:
        return None
    return norm.weight.data, norm.bias.data if hasattr(norm, "bias") else None


def _linear_layers(model: LanguageModel) -> list[Any]:
    """Return all linear layers in the order in which the decoder reads them."""
    return [layer for block in model.blocks for group in _block_layers(block) for layer in group] + [model.head]


def _is_native(model: LanguageModel) -> bool:
    """Tell whether the native decoder supports all layers of a model."""
    supported = all(isinstance(layer, Linear) or _packed_kernel(layer) is not None for layer in _linear_layers(model))
    return supported and all(p.data.dtype == np.float32 and p.data.flags.c_contiguous for p in model.parameters())


def _packed_kernel(layer: Any) -> Any:
    """Return the quantized or sparse weights inside a linear layer; None for a float layer."""
    kernel = vars(layer).get("kernel", vars(layer).get("_kernel"))
    packed = native is not None and isinstance(kernel, native.BlockMatrix | native.SparseWeights)
    return kernel if packed else None


class EngineCache:
    """The native engines of one model, stored as an attribute of it. A copy of the model gets an empty cache."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[NativeEngine, list[Any]]] = {}

    def __reduce__(self) -> tuple[type[EngineCache], tuple[()]]:
        return EngineCache, ()

    def get(self, model: LanguageModel, weights: str) -> NativeEngine:
        """Return the cached engine for these `weights` ("float32", "int8", "int4"); create it if it is outdated."""
        entry = self._engines.get(weights)
        if entry is not None and self._is_valid(*entry, model):
            return entry[0]
        self._engines.pop(weights, None)  # free the old engine first: two would take twice the memory
        entry = self._engines[weights] = (NativeEngine(model, weights), _all_weights(model))
        return entry[0]

    @staticmethod
    def _is_valid(engine: NativeEngine, engine_weights: list[Any], model: LanguageModel) -> bool:
        """Tell whether an engine still has the model's arrays and settings, and up-to-date copies."""
        weights = _all_weights(model)
        unchanged = len(engine_weights) == len(weights) and all(
            a is b for a, b in zip(engine_weights, weights, strict=True)
        )
        settings = _settings(model)
        same_settings = all(np.array_equal(settings[name], engine.settings[name]) for name in settings)
        return unchanged and same_settings and engine.fresh()


def _all_weights(model: LanguageModel) -> list[Any]:
    """Return all float32 arrays and the packed kernels of a model."""
    kernels = map(_packed_kernel, model.modules())
    return [p.data for p in model.parameters()] + [kernel for kernel in kernels if kernel is not None]


class ModelEngine:
    """Runs the model's own layers: one prompt at a time, then all sequences together with one token each."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def run(self, rows: Array, cache: KVCache, output_rows: Array) -> Array:
        """Compute logits for rows (n, 3) of (token, sequence, position); see `NativeEngine.run`."""
        one_each = len(rows) == cache.batch_size and bool((rows[:, 1] == np.arange(len(rows))).all())
        with no_grad():
            if one_each:
                views = [cache.layer(i) for i in range(cache.n_layers)]
                logits: Array = self.model(rows[:, :1], views, rows[:, 2]).data[:, 0]
                return logits[output_rows]
            return self._prefill(rows, cache)[output_rows]

    def _prefill(self, rows: Array, cache: KVCache) -> Array:
        """Run the rows of each sequence at once, sequence by sequence; return all logits (n, vocabulary)."""
        logits = np.empty((len(rows), self.model.vocab), np.float32)
        for index in np.unique(rows[:, 1]):
            in_sequence = rows[:, 1] == index
            views = [cache.sequence(layer, int(index)).layer(0) for layer in range(cache.n_layers)]
            tokens, start = rows[in_sequence, 0][None], int(rows[in_sequence, 2][0])
            logits[in_sequence] = self.model(tokens, views, start).data[0]
        return logits
