"""`load_gguf`: load a GPT-2 or LLaMA-family model from a GGUF file, with its tokenizer.

The metadata contains the sizes; every tensor of a model of these sizes must exist with its shape before anything is
built. Linear layers in Q4_0 and Q4_1 keep their INT4 codes; everything else is converted to float32.
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
_MAX_LAYERS, _MAX_SIZE = 1024, 1 << 24  # guard against hostile files
_LLAMA_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Tensors of LLaMA variants that are not supported; ignoring them would give wrong results.
_UNSUPPORTED = ("attn_q_norm.weight", "attn_k_norm.weight", "ffn_gate_inp.weight", "attn_post_norm.weight")


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer (None if the file has none), and the value of `generate`'s argument `weights`."""

    model: GPT | Llama
    tokenizer: Tokenizer | None
    weights: str
    name: str


def load_gguf(path: str | os.PathLike[str]) -> LoadedModel:
    """Load the model in a GGUF file. `weights` is "int8" for Q8_0, else "float32" (INT4 layers stay INT4)."""
    source = _Source(read_gguf(path))
    architecture = source.text("general.architecture")
    builders: dict[str, Callable[[_Source], GPT | Llama]] = {"gpt2": _gpt2, "llama": _llama, "qwen2": _llama}
    if architecture not in builders:
        raise FileFormatError(
            f"{path} has the unsupported architecture {architecture[:40]!r}; {', '.join(builders)} are supported."
        )
    try:
        model = builders[architecture](source)
        tokenizer = tokenizer_of(source.file.metadata, model.vocab, str(path))
    except FileFormatError:
        raise
    except (TilewiseError, MemoryError) as error:
        raise FileFormatError(f"{path} is not a complete {architecture} model: {str(error).rstrip('.')}.") from None
    kinds = [t.kind.name for t in source.file.tensors.values() if len(t.shape) == 2]
    is_int8 = native is not None and kinds.count("Q8_0") > len(kinds) / 2
    name = source.file.metadata.get("general.name")
    return LoadedModel(
        model, tokenizer, "int8" if is_int8 else "float32", name if isinstance(name, str) else architecture
    )


class _Source:
    """Checked access to the file's metadata and tensors; anything missing or of the wrong shape is an error."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = ""

    def error(self, reason: str) -> FileFormatError:
        return FileFormatError(f"{self.file.path} is not a complete model: {reason}.")

    def text(self, key: str) -> str:
        """Return a string of the metadata."""
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.error(f"its {key} is missing")
        return value

    def size(self, key: str, default: int | None = None, maximum: int = _MAX_SIZE) -> int:
        """Return a positive integer of the metadata."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self.error(f"its {self.prefix + key} is {_short(value)}")
        return value

    def real(self, key: str, default: float) -> float:
        """Return a positive number of the metadata."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int | float) or not 0 < float(value) < 1e12:
            raise self.error(f"its {self.prefix + key} is {_short(value)}")
        return float(value)

    def check(self, name: str, *shape: int) -> None:
        """Raise an error unless the tensor exists with this shape."""
        info = self.file.tensors.get(name)
        if info is None:
            raise self.error(f"there is no tensor {name!r}")
        if info.shape != shape:
            raise self.error(f"the tensor {name!r} is {info.shape}, not {shape}")

    def floats(self, name: str, *shape: int) -> Array:
        """Read a tensor of this shape as float32."""
        self.check(name, *shape)
        return self.file.floats(name)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> Any:
        """Read a linear layer; it is INT4 if its weight is stored so."""
        self.check(f"{name}.weight", outputs, inputs)
        bias_values = self.floats(f"{name}.bias", outputs) if bias else None
        info = self.file.tensors[f"{name}.weight"]
        if info.kind.name in FOUR_BITS:
            blocks = four_bit_blocks(info.kind, self.file.read(info.name), info.shape)
            minimums = blocks.scales if blocks.minimums is None else blocks.minimums
            if not (np.isfinite(blocks.scales).all() and np.isfinite(minimums).all()):
                raise self.error(f"{info.name!r} contains NaN or infinity")
            return FourBitLinear(blocks, bias_values)
        layer = Linear(0, 0, bias)
        layer.in_features, layer.out_features = inputs, outputs
        layer.weight = Parameter(self.file.floats(info.name))
        if bias_values is not None:
            layer.bias = Parameter(bias_values)
        return layer

    def head(self, width: int, vocabulary: int) -> Any:
        """Read the output layer; a file without one shares the token embedding."""
        name = "output" if "output.weight" in self.file.tensors else "token_embd"
        return self.linear(name, width, vocabulary, False)

    def vocabulary(self, width: int) -> int:
        """Return the number of token embeddings."""
        info = self.file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2 or info.shape[1] != width:
            raise self.error(f"there is no tensor 'token_embd.weight' of width {width}")
        return info.shape[0]


def _short(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]


# --- GPT-2 ---


def _gpt2(source: _Source) -> GPT:
    """Build a GPT-2 model; all shapes are checked before memory is allocated."""
    source.prefix = "gpt2."
    width, layers = source.size("embedding_length"), source.size("block_count", maximum=_MAX_LAYERS)
    heads, context = source.size("attention.head_count"), source.size("context_length")
    vocabulary = source.vocabulary(width)
    if width % heads:
        raise source.error(f"{width} channels cannot be divided among {heads} heads")
    _check_gpt2(source, layers, width)
    source.check("position_embd.weight", context, width)
    model = GPT(0, width, heads, 0, 0, approximate="tanh")
    model.vocab, model.context = vocabulary, context
    model.token_embedding.weight = Parameter(source.floats("token_embd.weight", vocabulary, width))
    model.position_embedding.weight = Parameter(source.floats("position_embd.weight", context, width))
    # The smallest possible block is the template of all blocks; its tensors are replaced by those of the file.
    template = GPT(1, heads, heads, 1, 1, approximate="tanh").blocks[0]
    eps = source.real("attention.layer_norm_epsilon", 1e-5)
    model.blocks = type(model.blocks)(*(_gpt2_block(source, i, width, heads, template, eps) for i in range(layers)))
    _load_norm(source, model.norm, "output_norm", width, eps)
    model.head = source.head(width, vocabulary)
    return model


def _check_gpt2(source: _Source, layers: int, width: int) -> None:
    """Check the shapes of all blocks' matrices before the first is read."""
    for i in range(layers):
        for name, outputs, inputs in (
            ("attn_qkv", 3 * width, width),
            ("attn_output", width, width),
            ("ffn_up", 4 * width, width),
            ("ffn_down", width, 4 * width),
        ):
            source.check(f"blk.{i}.{name}.weight", outputs, inputs)


def _gpt2_block(source: _Source, index: int, width: int, heads: int, template: Any, eps: float) -> Any:
    """Copy the template block and replace its sizes and tensors."""
    block, prefix = copy.deepcopy(template), f"blk.{index}."
    attention = block.self_attn
    attention.embed_dim, attention.num_heads, attention.head_dim = width, heads, width // heads
    projection = source.linear(f"{prefix}attn_qkv", width, 3 * width, True)
    out = source.linear(f"{prefix}attn_output", width, width, True)
    if isinstance(projection, Linear):
        attention.in_proj_weight, attention.in_proj_bias, attention.out_proj = projection.weight, projection.bias, out
    else:
        block.self_attn = QuantizedAttention.around(attention, projection, out)
    block.linear1 = source.linear(f"{prefix}ffn_up", width, 4 * width, True)
    block.linear2 = source.linear(f"{prefix}ffn_down", 4 * width, width, True)
    _load_norm(source, block.norm1, f"{prefix}attn_norm", width, eps)
    _load_norm(source, block.norm2, f"{prefix}ffn_norm", width, eps)
    return block


def _load_norm(source: _Source, norm: Any, name: str, width: int, eps: float) -> None:
    norm.weight = Parameter(source.floats(f"{name}.weight", width))
    norm.bias = Parameter(source.floats(f"{name}.bias", width))
    norm.eps = eps
    if hasattr(norm, "normalized_shape"):
        norm.normalized_shape = (width,)


# --- the LLaMA family ---


def _llama(source: _Source) -> Llama:
    """Build a LLaMA-family model; all shapes are checked before memory is allocated."""
    source.prefix = f"{source.text('general.architecture')}."
    config = _llama_config(source)
    for i in range(config.layers):
        for name in _UNSUPPORTED:
            if f"blk.{i}.{name}" in source.file.tensors:
                raise source.error(f"its blocks have {name!r}, which is not supported")

    def layer(name: str, inputs: int, outputs: int, bias: bool) -> Any:
        if name == "head":
            return source.head(inputs, outputs)
        _, index, layer_name = name.split(".", 2)
        return source.linear(f"blk.{index}.{_LLAMA_LAYERS[layer_name]}", inputs, outputs, bias)

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
    """Check the shapes of all blocks' matrices before the first is read."""
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
    """Read the model's sizes from the metadata."""
    width, heads = source.size("embedding_length"), source.size("attention.head_count")
    if width % heads and source.prefix + "attention.key_length" not in source.file.metadata:
        raise source.error(f"{width} channels cannot be divided among {heads} heads")
    head_dim = source.size("attention.key_length", max(1, width // heads))
    if source.size("attention.value_length", head_dim) != head_dim:
        raise source.error("its keys and values have different widths")
    kv_heads = source.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise source.error(f"{heads} query heads cannot share {kv_heads} key/value heads")
    return LlamaConfig(
        layers=source.size("block_count", maximum=_MAX_LAYERS),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=source.size("feed_forward_length"),
        vocab=source.vocabulary(width),
        context=source.size("context_length"),
        head_dim=head_dim,
        eps=source.real("attention.layer_norm_rms_epsilon", 1e-5),
        frequencies=_frequencies(source, head_dim),
        interleaved_rope=source.prefix == "llama.",
        qkv_bias="blk.0.attn_q.bias" in source.file.tensors,
    )


def _frequencies(source: _Source, head_dim: int) -> Array:
    """Compute the rotary frequencies (pairs,), scaled as the metadata says."""
    pair_count = source.size("rope.dimension_count", head_dim) // 2
    if 2 * pair_count > head_dim:
        raise source.error(f"{2 * pair_count} rotary dimensions are more than the head width of {head_dim}")
    frequencies = rotary_frequencies(pair_count, source.real("rope.freq_base", 10000.0))
    kind = source.file.metadata.get(f"{source.prefix}rope.scaling.type", "none")
    if kind == "linear":
        frequencies = frequencies / np.float32(source.real("rope.scaling.factor", 1.0))
    elif kind != "none":
        raise source.error(f"its rotary scaling {_short(kind)} is not supported; none and linear are")
    if "rope_freqs.weight" in source.file.tensors:
        divisors = source.floats("rope_freqs.weight", pair_count)
        if not (divisors > 0).all():
            raise source.error("its rope_freqs.weight are not all positive")
        frequencies = frequencies / divisors
    return frequencies.astype(np.float32)
