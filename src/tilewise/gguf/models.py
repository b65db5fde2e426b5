"""`load_gguf`: the model in a GGUF file, GPT-2 or of the LLaMA family, with its tokenizer.

Metadata names the sizes, and every tensor that a model of these sizes needs must be there in that shape before anything
is built. Linear layers in Q4_0 and Q4_1 keep their own four-bit codes; everything else becomes float32.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import FileFormatError, TilewiseError
from tilewise.gguf.reader import GGUFFile, read_gguf
from tilewise.gguf.tensors import FOUR_BITS, four_bit_blocks
from tilewise.gguf.tokenizers import Tokenizer, tokenizer_of
from tilewise.nn import GPT, Linear, Llama, LlamaConfig, Parameter
from tilewise.nn.llama import rotary_frequencies
from tilewise.quantize.dynamic import QuantizedAttention
from tilewise.quantize.four_bits import FourBitLinear

Array = npt.NDArray[Any]
_MOST_LAYERS, _MOST_SIZE = 1024, 1 << 24
_LLAMA_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_UNREAD = ("attn_q_norm.weight", "attn_k_norm.weight", "ffn_gate_inp.weight", "attn_post_norm.weight")


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer where the file has one, and the kind of its weights: what `generate` decodes with."""

    model: GPT | Llama
    tokenizer: Tokenizer | None
    weights: str
    name: str


def load_gguf(path: str | os.PathLike[str]) -> LoadedModel:
    """The model in a GGUF file. `weights` is "int8" for Q8_0, else "float32" (four-bit layers are their own)."""
    source = _Source(read_gguf(path))
    architecture = source.text("general.architecture")
    builders: dict[str, Callable[[_Source], GPT | Llama]] = {"gpt2": _gpt2, "llama": _llama, "qwen2": _llama}
    if architecture not in builders:
        raise FileFormatError(
            f"{path} holds a model of the kind {architecture[:40]!r}; {', '.join(builders)} are read."
        )
    try:
        model = builders[architecture](source)
        tokenizer = tokenizer_of(source.file.metadata, model.vocab, str(path))
    except FileFormatError:
        raise
    except (TilewiseError, MemoryError) as error:
        raise FileFormatError(f"{path} holds no whole {architecture} model: {str(error).rstrip('.')}.") from None
    kinds = [t.kind.name for t in source.file.tensors.values() if len(t.shape) == 2]
    eight = native is not None and kinds.count("Q8_0") > len(kinds) / 2
    name = source.file.metadata.get("general.name")
    return LoadedModel(
        model, tokenizer, "int8" if eight else "float32", name if isinstance(name, str) else architecture
    )


class _Source:
    """The file, asked for what a model needs; anything missing or misshapen is one sentence."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = ""

    def wrong(self, why: str) -> FileFormatError:
        return FileFormatError(f"{self.file.path} holds no whole model: {why}.")

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.wrong(f"its {key} is missing")
        return value

    def size(self, key: str, default: int | None = None, most: int = _MOST_SIZE) -> int:
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(f"its {self.prefix + key} is {_short(value)}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int | float) or not 0 < float(value) < 1e12:
            raise self.wrong(f"its {self.prefix + key} is {_short(value)}")
        return float(value)

    def check(self, name: str, *shape: int) -> None:
        place = self.file.tensors.get(name)
        if place is None:
            raise self.wrong(f"there is no tensor {name!r}")
        if place.shape != shape:
            raise self.wrong(f"the tensor {name!r} is {place.shape}, not {shape}")

    def floats(self, name: str, *shape: int) -> Array:
        self.check(name, *shape)
        return self.file.floats(name)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> Any:
        """A linear layer, in four bits where the file has it so."""
        self.check(f"{name}.weight", outputs, inputs)
        values = self.floats(f"{name}.bias", outputs) if bias else None
        place = self.file.tensors[f"{name}.weight"]
        if place.kind.name in FOUR_BITS:
            blocks = four_bit_blocks(place.kind, self.file.read(place.name), place.shape)
            lowest = blocks.scales if blocks.minimums is None else blocks.minimums
            if not (np.isfinite(blocks.scales).all() and np.isfinite(lowest).all()):
                raise self.wrong(f"{place.name!r} holds NaN or infinity")
            return FourBitLinear(blocks, values)
        layer = Linear(0, 0, bias)
        layer.in_features, layer.out_features = inputs, outputs
        layer.weight = Parameter(self.file.floats(place.name))
        if values is not None:
            layer.bias = Parameter(values)
        return layer

    def head(self, width: int, vocabulary: int) -> Any:
        """The output layer; without one of its own a file shares the token embedding."""
        name = "output" if "output.weight" in self.file.tensors else "token_embd"
        return self.linear(name, width, vocabulary, False)

    def vocabulary(self, width: int) -> int:
        place = self.file.tensors.get("token_embd.weight")
        if place is None or len(place.shape) != 2 or place.shape[1] != width:
            raise self.wrong(f"there is no tensor 'token_embd.weight' of width {width}")
        return place.shape[0]


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]


# --- GPT-2 ---


def _gpt2(source: _Source) -> GPT:
    source.prefix = "gpt2."
    width, layers = source.size("embedding_length"), source.size("block_count", most=_MOST_LAYERS)
    heads, context = source.size("attention.head_count"), source.size("context_length")
    vocabulary = source.vocabulary(width)
    if width % heads:
        raise source.wrong(f"{width} channels cannot be shared by {heads} heads")
    _check_gpt2(source, layers, width)
    source.check("position_embd.weight", context, width)
    model = GPT(0, width, heads, 0, 0, approximate="tanh")
    model.vocab, model.context = vocabulary, context
    model.token_embedding.weight = Parameter(source.floats("token_embd.weight", vocabulary, width))
    model.position_embedding.weight = Parameter(source.floats("position_embd.weight", context, width))
    one = GPT(1, heads, heads, 1, 1, approximate="tanh").blocks[0]  # the smallest block there is, to be filled
    eps = source.real("attention.layer_norm_epsilon", 1e-5)
    model.blocks = type(model.blocks)(*(_gpt2_block(source, i, width, heads, one, eps) for i in range(layers)))
    _fill_norm(source, model.norm, "output_norm", width, eps)
    model.head = source.head(width, vocabulary)
    return model


def _check_gpt2(source: _Source, layers: int, width: int) -> None:
    for i in range(layers):
        for name, outputs, inputs in (
            ("attn_qkv", 3 * width, width),
            ("attn_output", width, width),
            ("ffn_up", 4 * width, width),
            ("ffn_down", width, 4 * width),
        ):
            source.check(f"blk.{i}.{name}.weight", outputs, inputs)


def _gpt2_block(source: _Source, index: int, width: int, heads: int, like: Any, eps: float) -> Any:
    block, at = copy.deepcopy(like), f"blk.{index}."
    attention = block.self_attn
    attention.embed_dim, attention.num_heads, attention.head_dim = width, heads, width // heads
    projection = source.linear(f"{at}attn_qkv", width, 3 * width, True)
    out = source.linear(f"{at}attn_output", width, width, True)
    if isinstance(projection, Linear):
        attention.in_proj_weight, attention.in_proj_bias, attention.out_proj = projection.weight, projection.bias, out
    else:
        block.self_attn = QuantizedAttention.around(attention, projection, out)
    block.linear1 = source.linear(f"{at}ffn_up", width, 4 * width, True)
    block.linear2 = source.linear(f"{at}ffn_down", 4 * width, width, True)
    _fill_norm(source, block.norm1, f"{at}attn_norm", width, eps)
    _fill_norm(source, block.norm2, f"{at}ffn_norm", width, eps)
    return block


def _fill_norm(source: _Source, norm: Any, name: str, width: int, eps: float) -> None:
    norm.weight = Parameter(source.floats(f"{name}.weight", width))
    norm.bias = Parameter(source.floats(f"{name}.bias", width))
    norm.eps = eps
    if hasattr(norm, "normalized_shape"):
        norm.normalized_shape = (width,)


# --- the LLaMA family ---


def _llama(source: _Source) -> Llama:
    source.prefix = f"{source.text('general.architecture')}."
    config = _llama_config(source)
    for i in range(config.layers):
        for name in _UNREAD:
            if f"blk.{i}.{name}" in source.file.tensors:
                raise source.wrong(f"its blocks have {name!r}, which is not read here")

    def layer(name: str, inputs: int, outputs: int, bias: bool) -> Any:
        if name == "head":
            return source.head(inputs, outputs)
        _, index, rest = name.split(".", 2)
        return source.linear(f"blk.{index}.{_LLAMA_LAYERS[rest]}", inputs, outputs, bias)

    _check_llama(source, config)
    model = Llama(config, layer=layer)
    model.token_embedding.weight = Parameter(source.floats("token_embd.weight", config.vocab, config.width))
    model.norm.weight = Parameter(source.floats("output_norm.weight", config.width))
    blocks: list[Any] = list(model.blocks)
    for i, block in enumerate(blocks):
        block.norm1.weight = Parameter(source.floats(f"blk.{i}.attn_norm.weight", config.width))
        block.norm2.weight = Parameter(source.floats(f"blk.{i}.ffn_norm.weight", config.width))
    return model


def _check_llama(source: _Source, config: LlamaConfig) -> None:
    """The matrices of all blocks, before the first is read."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "attn_q": (queries, config.width),
        "attn_k": (keys, config.width),
        "attn_v": (keys, config.width),
        "attn_output": (config.width, queries),
        "ffn_gate": (config.hidden, config.width),
        "ffn_up": (config.hidden, config.width),
        "ffn_down": (config.width, config.hidden),
    }
    for i in range(config.layers):
        for name, shape in shapes.items():
            source.check(f"blk.{i}.{name}.weight", *shape)


def _llama_config(source: _Source) -> LlamaConfig:
    width, heads = source.size("embedding_length"), source.size("attention.head_count")
    if width % heads and source.prefix + "attention.key_length" not in source.file.metadata:
        raise source.wrong(f"{width} channels cannot be shared by {heads} heads")
    head_dim = source.size("attention.key_length", max(1, width // heads))
    if source.size("attention.value_length", head_dim) != head_dim:
        raise source.wrong("its keys and values have different widths")
    kv_heads = source.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise source.wrong(f"{heads} heads cannot share {kv_heads} keys and values")
    return LlamaConfig(
        layers=source.size("block_count", most=_MOST_LAYERS),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=source.size("feed_forward_length"),
        vocab=source.vocabulary(width),
        context=source.size("context_length"),
        head_dim=head_dim,
        eps=source.real("attention.layer_norm_rms_epsilon", 1e-5),
        frequencies=_frequencies(source, head_dim),
        side_by_side=source.prefix == "llama.",
        qkv_bias="blk.0.attn_q.bias" in source.file.tensors,
    )


def _frequencies(source: _Source, head_dim: int) -> Array:
    """The rotary ones, stretched as the file says."""
    pairs = source.size("rope.dimension_count", head_dim) // 2
    if 2 * pairs > head_dim:
        raise source.wrong(f"{2 * pairs} rotary numbers are more than a head of {head_dim} has")
    frequencies = rotary_frequencies(pairs, source.real("rope.freq_base", 10000.0))
    kind = source.file.metadata.get(f"{source.prefix}rope.scaling.type", "none")
    if kind == "linear":
        frequencies = frequencies / np.float32(source.real("rope.scaling.factor", 1.0))
    elif kind != "none":
        raise source.wrong(f"its rotary positions are scaled by {_short(kind)}; none and linear are read")
    if "rope_freqs.weight" in source.file.tensors:
        factors = source.floats("rope_freqs.weight", pairs)
        if not (factors > 0).all():
            raise source.wrong("its rope_freqs.weight are not all positive")
        frequencies = frequencies / factors
    return frequencies.astype(np.float32)
