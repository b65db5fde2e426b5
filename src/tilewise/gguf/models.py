"""`load_gguf`: load a language model from a GGUF file, with its tokenizer.

An architecture is a record: how its files differ from LLaMA's. Sizes, rotary scaling, windows and caps come from the
metadata, and every tensor of a model of these sizes must exist with its shape before anything is built. Linear layers
compute on the blocks of the file; F16, BF16 and F32 matrices and the token embedding are read in the mapped file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.gguf.reader import GGUFFile, read_gguf
from tilewise.gguf.tensors import block_matrix, block_rows, packed_bytes
from tilewise.gguf.tokenizers import Tokenizer, tokenizer_of
from tilewise.nn import Embedding, Linear, Llama, LlamaConfig, Parameter
from tilewise.nn.decoder_config import rotary_frequencies
from tilewise.quantize.block_linear import BlockEmbedding, BlockLinear
from tilewise.tensor import Array

_MAX_LAYERS, _MAX_SIZE = 1024, 1 << 24  # guard against hostile files


@dataclass(frozen=True)
class DecoderFamily:
    """Settings in which an architecture's models differ from LLaMA; `LlamaConfig` explains common fields."""

    norm: str = "rms"
    post_norms: bool = False
    qk_norm: bool = False
    gated: bool = True
    activation: str = "silu"
    learned_positions: bool = False
    interleaved_rope: bool = False
    embedding_times_sqrt_width: bool = False
    window: int = 0  # default of a file that states none
    window_period: int = 0  # the last of each group of this many layers has no window; 0: no layer has one
    window_rope_base: float = 0.0  # rotary base of layers with a window; 0: that of the others
    attention_cap: float = 0.0  # defaults of files that state none
    logit_cap: float = 0.0
    wide_scale_layers: int = 0  # a model with this many layers scales scores by sqrt(heads / width)


ARCHITECTURES = {
    "gpt2": DecoderFamily(norm="layer", gated=False, activation="gelu_tanh", learned_positions=True),
    "llama": DecoderFamily(interleaved_rope=True),  # also Mistral, SmolLM, TinyLlama
    "qwen2": DecoderFamily(),
    "qwen3": DecoderFamily(qk_norm=True),
    "gemma": DecoderFamily(activation="gelu_tanh", embedding_times_sqrt_width=True),
    "gemma2": DecoderFamily(
        post_norms=True,
        activation="gelu_tanh",
        embedding_times_sqrt_width=True,
        window=4096,
        window_period=2,
        attention_cap=50.0,
        logit_cap=30.0,
        wide_scale_layers=46,
    ),
    "gemma3": DecoderFamily(
        post_norms=True,
        qk_norm=True,
        activation="gelu_tanh",
        embedding_times_sqrt_width=True,
        window_period=6,
        window_rope_base=10000.0,
        wide_scale_layers=62,
    ),
    "phi3": DecoderFamily(),
    "stablelm": DecoderFamily(norm="layer"),
    "starcoder2": DecoderFamily(norm="layer", gated=False, activation="gelu_tanh"),
}
# Tensor names of the format for the modules of a model and of its blocks.
_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {
    "norm": "output_norm",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "post_norm1": "post_attention_norm",
    "post_norm2": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_EPS_KEYS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer (None if the file has none), and `generate`'s argument `weights`, always "float32".

    `kind` is the format of most of the file's weights, such as "Q4_K".
    """

    model: Llama
    tokenizer: Tokenizer | None
    weights: str
    name: str
    kind: str
    chat_template: str | None = None

    def chat_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, ending where the model's answer begins.

        A message is {"role": "user", "content": "..."}; other roles are "assistant" and "system".
        """
        from tilewise.gguf.chat import ChatTemplate  # not needed to load or to generate

        if self.tokenizer is None or self.chat_template is None:
            raise ConfigurationError(f"{self.name} has no chat template; continue a text with it instead")
        bos, eos = map(self.tokenizer.spelling, ("bos", "eos"))
        text = ChatTemplate(self.chat_template).render(messages, bos_token=bos, eos_token=eos)
        return self.tokenizer.encode(text, control=True)


def load_gguf(path: str | os.PathLike[str]) -> LoadedModel:
    """Load the model in a GGUF file; quantized layers compute on the blocks of the file.

    The file stays mapped while the model is used: do not write to it meanwhile.
    """
    source = _Source(read_gguf(path))
    name = source.text("general.architecture")
    source.prefix = f"{name}."
    if "moe" in name or source.file.metadata.get(f"{name}.expert_count", 0):
        raise FileFormatError(f"{path} is a mixture of experts, which is not supported; use a dense model.")
    if source.file.metadata.get("split.count", 1) != 1:
        raise FileFormatError(f"{path} is one part of a split model; join the parts with llama-gguf-split --merge.")
    if name not in ARCHITECTURES:
        raise FileFormatError(
            f"{path} has the unsupported architecture {name[:40]!r}; {', '.join(ARCHITECTURES)} are supported."
        )
    try:
        model = _build(source, ARCHITECTURES[name])
        tokenizer = tokenizer_of(source.file.metadata, model.vocab, str(path))
    except FileFormatError:
        raise
    except (TilewiseError, MemoryError) as error:
        raise FileFormatError(f"{path} is not a complete {name} model: {str(error).rstrip('.')}.") from None
    title = source.file.metadata.get("general.name")
    sizes: Counter[str] = Counter()
    for info in source.file.tensors.values():
        sizes[info.kind.name] += info.nbytes
    title = title if isinstance(title, str) else name
    template = source.file.metadata.get("tokenizer.chat_template")
    kind = sizes.most_common(1)[0][0]
    return LoadedModel(model, tokenizer, "float32", title, kind, template if isinstance(template, str) else None)


class _Source:
    """Checked access to the metadata and tensors of a GGUF file; missing or misshapen ones raise."""

    def __init__(self, file: GGUFFile) -> None:
        """Start reading a parsed file."""
        self.file = file
        self.prefix = ""
        self.checked: set[str] = set()  # names of the tensors that the model uses
        self.arena: Any = None  # memory of the packed matrices

    def error(self, reason: str) -> FileFormatError:
        return FileFormatError(f"{self.file.path} is not a complete model: {reason}.")

    def text(self, key: str) -> str:
        """Return a string of the metadata; raise if it has another type."""
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self.error(f"its {key} is missing")
        return value

    def size(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_SIZE) -> int:
        """Return an integer of the metadata (or `default`); raise unless it is in [minimum, maximum]."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(f"its {self.prefix + key} is {_short(value)}")
        return value

    def real(self, key: str, default: float, zero: bool = False) -> float:
        """Return a positive number of the metadata (or `default`); 0 is valid only if `zero`."""
        value = self.file.metadata.get(self.prefix + key, default)
        if not isinstance(value, int | float) or not (1e-12 < float(value) < 1e12 or (zero and value == 0)):
            raise self.error(f"its {self.prefix + key} is {_short(value)}")
        return float(value)

    def check(self, name: str, *shape: int) -> None:
        """Raise an error unless the tensor exists with this shape."""
        info = self.file.tensors.get(name)
        if info is None:
            raise self.error(f"there is no tensor {name!r}")
        if info.shape != shape:
            raise self.error(f"the tensor {name!r} is {info.shape}, not {shape}")
        self.checked.add(name)

    def split(self, name: str, row_counts: dict[str, int]) -> None:
        """Replace a tensor by consecutive groups of its rows; `row_counts` maps their names to their sizes."""
        info, rows, first = self.file.tensors.pop(name), sum(row_counts.values()), 0
        if info.shape[0] != rows or (len(info.shape) == 1 and info.kind.block > 1):
            raise self.error(f"the tensor {name!r} is {info.shape}, not {rows} rows")
        row_bytes = info.nbytes // rows
        for part, count in row_counts.items():
            offset, shape = info.offset + first * row_bytes, (count, *info.shape[1:])
            self.file.tensors[part] = replace(info, name=part, shape=shape, offset=offset, nbytes=count * row_bytes)
            first += count

    def floats(self, name: str, *shape: int) -> Array:
        """Read a tensor of this shape as float32."""
        self.check(name, *shape)
        return self.file.floats(name)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool) -> Any:
        """Create a linear layer from a tensor; quantized formats are computed on the file's blocks."""
        self.check(f"{name}.weight", outputs, inputs)
        bias_values = self.floats(f"{name}.bias", outputs) if bias else None
        info = self.file.tensors[f"{name}.weight"]
        if info.kind.name != "F32":
            try:
                kernel = block_matrix(info.kind, self.file.read(info.name), (outputs, inputs), self.arena)
            except ValueError as error:
                raise self.error(f"{info.name!r} cannot be used: {error}") from None
            if info.kind.block > 1 and native is not None:
                self.file.release(info.name)
            return BlockLinear(kernel, bias_values)
        layer = Linear(0, 0, bias)
        layer.in_features, layer.out_features = inputs, outputs
        layer.weight = Parameter(self.file.floats(info.name))
        if bias_values is not None:
            layer.bias = Parameter(bias_values)
        return layer

    def embedding(self, vocabulary: int, width: int) -> Any:
        """Create the token embedding, whose rows stay in the mapped file."""
        self.check("token_embd.weight", vocabulary, width)
        info = self.file.tensors["token_embd.weight"]
        if info.kind.name != "F32":
            return BlockEmbedding(block_rows(info.kind, self.file.read(info.name), (vocabulary, width)))
        embedding = Embedding(0, 0)
        embedding.num_embeddings, embedding.embedding_dim = vocabulary, width
        embedding.weight = Parameter(self.file.floats(info.name))
        return embedding

    def reserve(self) -> None:
        """Allocate memory for all packed matrices at once, so that it is backed by large pages."""
        head = "output.weight" if "output.weight" in self.file.tensors else "token_embd.weight"
        sizes = [
            packed_bytes(info.kind, (info.shape[0], info.shape[1]))
            for name, info in self.file.tensors.items()
            if len(info.shape) == 2 and (name.startswith("blk.") or name == head)
        ]
        if native is not None:
            self.arena = native.WeightArena(sum(sizes))

    def head(self, width: int, vocabulary: int) -> Any:
        """Create the output layer; a file without one shares the token embedding."""
        name = "output" if "output.weight" in self.file.tensors else "token_embd"
        return self.linear(name, width, vocabulary, False)

    def vocabulary(self, width: int) -> int:
        """Return the number of token embeddings."""
        info = self.file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2 or info.shape[1] != width:
            raise self.error(f"there is no tensor 'token_embd.weight' of width {width}")
        return info.shape[0]


def _short(value: Any) -> str:
    """Format a metadata value briefly for an error message."""
    return "missing" if value is None else repr(value)[:40]


# --- building ---


def _build(source: _Source, architecture: DecoderFamily) -> Llama:
    """Build the model from a file's tensors, whose shapes are all checked before memory is allocated."""
    config = _read_config(source, architecture)
    for i in range(config.layers):
        _split_fused(source, config, f"blk.{i}.")
    _check_matrices(source, config)

    def layer(name: str, inputs: int, outputs: int, bias: bool) -> Any:
        if name == "head":
            return source.head(inputs, outputs)
        return source.linear(_tensor_name(name, _LAYERS), inputs, outputs, bias)

    source.reserve()
    model = Llama(config, layer=layer)
    model.token_embedding = source.embedding(config.vocab, config.width)
    if config.learned_positions:
        positions = source.floats("position_embd.weight", config.context, config.width)
        model.position_embedding.weight = Parameter(positions)
    for name, parameter in model.named_tensors():
        module, _, part = name.rpartition(".")
        if "norm" in module:
            parameter.data = source.floats(f"{_tensor_name(module, _NORMS)}.{part}", *parameter.shape)
    # Old files store the rotary frequencies of every block, which are computed here.
    unknown = {n for n in source.file.tensors if n.startswith("blk.") and "rot_embd" not in n} - source.checked
    if unknown:
        raise source.error(f"its blocks have {min(unknown)[:80]!r}, which is not supported")
    return model


def _tensor_name(module: str, names: dict[str, str]) -> str:
    """Return the tensor name in the file of a module's path: "blocks.3.norm1" is "blk.3.attn_norm"."""
    if not module.startswith("blocks."):
        return names[module]
    _, index, path = module.split(".", 2)
    return f"blk.{index}.{names[path]}"


def _split_fused(source: _Source, config: LlamaConfig, prefix: str) -> None:
    """Split a block's fused projections into query, key and value, and into gate and up."""
    tensors, keys = source.file.tensors, config.kv_heads * config.head_dim
    for kind in ("weight", "bias"):
        if f"{prefix}attn_qkv.{kind}" in tensors:
            rows = {"attn_q": config.heads * config.head_dim, "attn_k": keys, "attn_v": keys}
            source.split(f"{prefix}attn_qkv.{kind}", {f"{prefix}{name}.{kind}": n for name, n in rows.items()})
        if config.gated and f"{prefix}ffn_up.{kind}" in tensors and f"{prefix}ffn_gate.{kind}" not in tensors:
            rows = {"ffn_gate": config.hidden, "ffn_up": config.hidden}
            source.split(f"{prefix}ffn_up.{kind}", {f"{prefix}{name}.{kind}": n for name, n in rows.items()})


def _check_matrices(source: _Source, config: LlamaConfig) -> None:
    """Check the shapes of all matrices before the first one is read."""
    width, queries, keys = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
    shapes |= {"attn_output": (width, queries), "ffn_up": (config.hidden, width), "ffn_down": (width, config.hidden)}
    if config.gated:
        shapes["ffn_gate"] = (config.hidden, width)
    for i in range(config.layers):
        for name, shape in shapes.items():
            source.check(f"blk.{i}.{name}.weight", *shape)


# --- the description ---


def _read_config(source: _Source, architecture: DecoderFamily) -> LlamaConfig:
    """Read the model's description from the metadata."""
    width, heads = source.size("embedding_length"), source.size("attention.head_count")
    if width % heads and source.prefix + "attention.key_length" not in source.file.metadata:
        raise source.error(f"{width} channels cannot be divided among {heads} heads")
    head_dim = source.size("attention.key_length", max(1, width // heads))
    if source.size("attention.value_length", head_dim) != head_dim:
        raise source.error("its keys and values have different widths")
    kv_heads = source.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise source.error(f"{heads} query heads cannot share {kv_heads} key/value heads")
    layers, context = source.size("block_count", maximum=_MAX_LAYERS), source.size("context_length")
    is_wide = layers == architecture.wide_scale_layers
    tensors = source.file.tensors
    shared = ("norm", "post_norms", "qk_norm", "gated", "activation", "learned_positions", "interleaved_rope")
    return LlamaConfig(
        **{name: getattr(architecture, name) for name in shared},
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=source.size("feed_forward_length"),
        vocab=source.vocabulary(width),
        context=context,
        head_dim=head_dim,
        eps=source.real(_EPS_KEYS[architecture.norm], 1e-5),
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        windows=_windows(source, architecture, layers),
        embedding_scale=math.sqrt(width) if architecture.embedding_times_sqrt_width else 1.0,
        attention_scale=source.real("attention.scale", (heads / width if is_wide else 1 / head_dim) ** 0.5),
        attention_cap=source.real("attn_logit_softcapping", architecture.attention_cap, zero=True),
        logit_cap=source.real("final_logit_softcapping", architecture.logit_cap, zero=True),
        **({} if architecture.learned_positions else _rotary(source, architecture, head_dim, context)),
    )


def _windows(source: _Source, architecture: DecoderFamily, layers: int) -> tuple[int, ...]:
    """Return each layer's attention window in tokens, 0 where there is none."""
    window = source.size("attention.sliding_window", architecture.window, minimum=0)
    if not architecture.window_period or not window:
        return (0,) * layers
    pattern = source.file.metadata.get(source.prefix + "attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):  # one number per layer, not 0 where there is a window
        if len(pattern) < layers:
            raise source.error(f"its sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        return tuple(window if pattern[i] else 0 for i in range(layers))
    period = source.size("attention.sliding_window_pattern", architecture.window_period)
    return tuple(window if i % period < period - 1 else 0 for i in range(layers))


def _rotary(source: _Source, architecture: DecoderFamily, head_dim: int, context: int) -> dict[str, Any]:
    """Return `LlamaConfig`'s rotary settings for heads of `head_dim`, scaled for long contexts as the metadata says."""
    pairs = source.size("rope.dimension_count", head_dim) // 2
    if 2 * pairs > head_dim:
        raise source.error(f"{2 * pairs} rotary dimensions are more than the head width of {head_dim}")
    base, factor = source.real("rope.freq_base", 10000.0), source.real("rope.scaling.factor", 1.0)
    kind = source.file.metadata.get(f"{source.prefix}rope.scaling.type", "linear")
    trained = source.size("rope.scaling.original_context_length", context)
    magnitude = source.real("rope.scaling.attn_factor", 1.0)
    if base <= 1:
        raise source.error(f"its rope.freq_base is {base:g}, not above 1")
    if kind not in _ROPE_SCALINGS:
        raise source.error(f"its rotary scaling {_short(kind)} is not supported; {', '.join(_ROPE_SCALINGS)} are")
    frequencies = rotary_frequencies(pairs, base).astype(np.float64)
    frequencies, scale = _ROPE_SCALINGS[kind](source, frequencies, base, factor, trained)

    def divided(name: str) -> Array:
        """Return the frequencies divided by the factors in a tensor, or unchanged if the file lacks it."""
        divisors = source.floats(name, pairs) if name in source.file.tensors else np.ones(pairs)
        if not (divisors > 1e-6).all():  # smaller ones would overflow
            raise source.error(f"its {name} are not all positive")
        return (frequencies / divisors).astype(np.float32)

    is_short = "rope_freqs.weight" not in source.file.tensors
    window_base = source.real("rope.freq_base_swa", architecture.window_rope_base or base)
    has_window_base = architecture.window_rope_base or window_base != base
    return {
        "frequencies": divided("rope_factors_short.weight" if is_short else "rope_freqs.weight"),
        "window_frequencies": rotary_frequencies(pairs, window_base) if has_window_base else None,
        "long_frequencies": divided("rope_factors_long.weight")
        if is_short and "rope_factors_long.weight" in source.file.tensors
        else None,
        "long_context": trained,
        "rotary_magnitude": magnitude * scale,
    }


def _yarn(source: _Source, frequencies: Array, base: float, factor: float, trained: int) -> tuple[Array, float]:
    """Scale rotary frequencies by YaRN (Peng et al. 2023, sections 3.2, 3.4): interpolate slow ones, keep fast ones.

    Returns the frequencies and the factor that multiplies all rotated values.
    """
    pairs = len(frequencies)

    def pair_with_turns(turns: float) -> float:
        """Return the fractional index of the pair that rotates `turns` times over the trained context."""
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(base)

    low = max(0, math.floor(pair_with_turns(source.real("rope.scaling.yarn_beta_fast", 32.0))))
    high = min(2 * pairs - 1, math.ceil(pair_with_turns(source.real("rope.scaling.yarn_beta_slow", 1.0))))
    slow = np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)  # 0: keep, 1: interpolate
    return frequencies * (1 - slow) + frequencies / factor * slow, 1 + 0.1 * math.log(max(1.0, factor))


# By `rope.scaling.type`: the scaled frequencies, and the factor of the rotated queries and keys.
_ROPE_SCALINGS: dict[str, Callable[[_Source, Array, float, float, int], tuple[Array, float]]] = {
    "none": lambda _, frequencies, *__: (frequencies, 1.0),
    "linear": lambda _, frequencies, __, factor, ___: (frequencies / factor, 1.0),
    "longrope": lambda _, frequencies, __, factor, ___: (frequencies / factor, 1.0),
    "yarn": _yarn,
}
