"""GGUF files for tests, written by the `gguf` package: small models with random weights and small vocabularies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tilewise.nn import GPT, Llama, LlamaConfig
from tilewise.nn.decoder_config import rotary_frequencies

_KIND_NAMES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
BLOCK_KINDS = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ4_NL", "Q4_0", "Q4_1")
KINDS = {name: gguf.GGMLQuantizationType[name] for name in _KIND_NAMES}
_GPT2_NORMS = {"norm1": "attn_norm", "norm2": "ffn_norm"}
_GPT2_LAYERS = {"self_attn.out_proj": "attn_output", "linear1": "ffn_up", "linear2": "ffn_down"}
_LLAMA_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "post_norm1": "post_attention_norm",
    "post_norm2": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_GEMMA: dict[str, Any] = {"post_norms": True, "activation": "gelu_tanh", "embedding_scale": 8.0, "head_dim": 32}
_GPT2: dict[str, Any] = {"norm": "layer", "gated": False, "activation": "gelu_tanh"}
_GPT2 |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
# Descriptions of small models of every architecture, as `small_llama` takes them (width 64).
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"interleaved_rope": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "gemma": _GEMMA | {"post_norms": False, "kv_heads": 1},
    "gemma2": _GEMMA | {"windows": (8, 0), "attention_cap": 5.0, "logit_cap": 3.0, "head_dim": 0},
    "gemma3": _GEMMA | {"qk_norm": True, "layers": 7, "windows": (8,) * 5 + (0, 8), "kv_heads": 1},
    "phi3": {
        "frequencies": rotary_frequencies(6) / np.arange(1, 7, dtype=np.float32),
        "long_frequencies": rotary_frequencies(6) / np.arange(2, 8, dtype=np.float32),
        "long_context": 48,
        "rotary_magnitude": 1.25,
    },
    "gpt2": _GPT2 | {"learned_positions": True, "kv_heads": 4},
    "stablelm": {"norm": "layer", "qkv_bias": True, "frequencies": rotary_frequencies(2)},
    "starcoder2": _GPT2,
}


def small_decoder(architecture: str, seed: int = 0, **more: Any) -> Llama:
    """A small model of an architecture, with norms and biases that are not the initial ones."""
    options = {"interleaved_rope": False} | DESCRIPTIONS[architecture] | more
    if architecture == "gemma3":
        options["window_frequencies"] = rotary_frequencies(16, 10000.0)
        options["frequencies"] = rotary_frequencies(16, 1e6) / 8
    model = small_llama(seed, **options)
    if architecture.startswith("gemma"):  # the head is the embedding: a large one would repeat the last token for ever
        model.token_embedding.weight.data[...] *= 0.02
    return model


def small_llama(seed: int = 0, vocab: int = 64, width: int = 64, **more: Any) -> Llama:
    sizes: dict[str, Any] = {
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
        "context": 96,
        "interleaved_rope": True,
    }
    model = Llama(LlamaConfig(width=width, vocab=vocab, **(sizes | more)), rng=seed)
    rng = np.random.default_rng(seed)
    for name, tensor in model.named_tensors():
        if name.endswith("bias"):
            tensor.data[...] = 0.2 * rng.standard_normal(tensor.shape)
        elif "norm" in name:
            tensor.data[...] = rng.uniform(0.5, 1.5, tensor.shape)
    return model


def small_gpt(seed: int = 0, vocab: int = 64, width: int = 64) -> GPT:
    return GPT(2, width, 4, vocab=vocab, context=96, rng=seed, approximate="tanh")


def write_llama(
    model: Llama,
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    **tokenizer: Any,
) -> None:
    """Write a model as `load_gguf` reads it, with more `metadata` if it is given."""
    c = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.width)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.hidden)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    (writer.add_layer_norm_rms_eps if c.norm == "rms" else writer.add_layer_norm_eps)(c.eps)
    writer.add_rope_dimension_count(2 * len(c.frequencies) or c.head_dim)
    writer.add_vocab_size(c.vocab)
    _add_options(writer, c, architecture)
    for key, value in (metadata or {}).items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    tops = {"token_embedding": "token_embd", "position_embedding": "position_embd", "norm": "output_norm"}
    if not architecture.startswith("gemma"):
        tops["head"] = "output"
    names = tops | {
        f"blocks.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(c.layers) for ours, theirs in _LLAMA_LAYERS.items()
    }
    tensors = {}
    for name, tensor in model.named_tensors():
        module, _, part = name.rpartition(".")
        if module in names:
            tensors[f"{names[module]}.{part}"] = tensor.data
    if architecture == "phi3":
        tensors["rope_factors_short.weight"] = np.arange(1, 7, dtype=np.float32)
        tensors["rope_factors_long.weight"] = np.arange(2, 8, dtype=np.float32)
    if architecture in ("phi3", "gpt2"):
        _fuse(tensors, c)
    _write(writer, tensors, kind, tokenizer)


def _add_options(writer: Any, c: LlamaConfig, architecture: str) -> None:
    """The metadata that only some architectures have."""
    if c.head_dim * c.heads != c.width:
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    if any(c.windows):
        writer.add_sliding_window(max(c.windows))
    if c.attention_cap:
        writer.add_attn_logit_softcapping(c.attention_cap)
        writer.add_final_logit_softcapping(c.logit_cap)
    if architecture == "gemma3":
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if c.long_frequencies is not None:
        writer.add_rope_scaling_orig_ctx_len(c.long_context)
        writer.add_rope_scaling_attn_factors(c.rotary_magnitude)


def _fuse(tensors: dict[str, Any], c: LlamaConfig) -> None:
    """Join the projections that Phi-3 and GPT-2 store in one matrix."""
    for i in range(c.layers):
        for part in ("weight", "bias") if c.qkv_bias else ("weight",):
            qkv = [tensors.pop(f"blk.{i}.attn_{name}.{part}") for name in "qkv"]
            tensors[f"blk.{i}.attn_qkv.{part}"] = np.concatenate(qkv)
            if c.gated:
                gate = tensors.pop(f"blk.{i}.ffn_gate.{part}")
                tensors[f"blk.{i}.ffn_up.{part}"] = np.concatenate([gate, tensors[f"blk.{i}.ffn_up.{part}"]])


def write_gpt2(model: GPT, path: Path, kind: str = "F32", **tokenizer: Any) -> None:
    width = model.token_embedding.weight.shape[1]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(model.context)
    writer.add_embedding_length(width)
    writer.add_block_count(len(model.blocks))
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(model.heads)
    writer.add_layer_norm_eps(model.norm.eps)
    writer.add_vocab_size(model.vocab)
    state = dict(model.named_tensors())
    tensors = {
        "token_embd.weight": state["token_embedding.weight"].data,
        "position_embd.weight": state["position_embedding.weight"].data,
        "output.weight": state["head.weight"].data,
    }
    for part in ("weight", "bias"):
        tensors[f"output_norm.{part}"] = state[f"norm.{part}"].data
        for i in range(len(model.blocks)):
            tensors[f"blk.{i}.attn_qkv.{part}"] = state[f"blocks.{i}.self_attn.in_proj_{part}"].data
            for ours, theirs in (_GPT2_LAYERS | _GPT2_NORMS).items():
                tensors[f"blk.{i}.{theirs}.{part}"] = state[f"blocks.{i}.{ours}.{part}"].data
    _write(writer, tensors, kind, tokenizer)


def _write(writer: Any, tensors: dict[str, Any], kind: str, tokenizer: dict[str, Any]) -> None:
    """Matrices in the kind that is asked for, or in turn in all ("every"); vectors and positions in float32."""
    _add_tokenizer(writer, **tokenizer) if tokenizer else writer.add_tokenizer_model("no_vocab")
    kinds = itertools.cycle(BLOCK_KINDS)
    for name, array in tensors.items():
        array = np.ascontiguousarray(array, np.float32)
        if kind == "every" and array.ndim == 2:
            stored = gguf.GGMLQuantizationType[next(kinds)]
            writer.add_tensor(name, random_blocks(stored, array.shape), raw_dtype=stored)
            continue
        stored = KINDS[kind] if array.ndim == 2 and name != "position_embd.weight" else KINDS["F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bytes of a matrix in blocks, (rows, bytes): any codes, scales and minimums between 0.001 and 0.01."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, block_bytes)).astype(np.uint8)
    scales = [208] if kind.name == "Q6_K" else [0, 2] if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    for at in scales:
        raw[:, at : at + 2] = rng.uniform(0.001, 0.01, len(raw)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return raw.reshape(shape[0], -1)


def _add_tokenizer(writer: Any, algorithm: str, tokens: list[str], **more: Any) -> None:
    writer.add_tokenizer_model(algorithm)
    writer.add_token_list(tokens)
    if "scores" in more:
        writer.add_token_scores(more["scores"])
    if "types" in more:
        writer.add_token_types(more["types"])
    if "merges" in more:
        writer.add_token_merges(more["merges"])
    if "pre" in more:
        writer.add_tokenizer_pre(more["pre"])
    for name in ("bos", "eos"):
        if name in more:
            getattr(writer, f"add_{name}_token_id")(more[name])
    if "template" in more:
        writer.add_chat_template(more["template"])
    if "add_bos" in more:
        writer.add_add_bos_token(more["add_bos"])


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """What the `gguf` package says that a stored matrix holds."""
    weights: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(array, KINDS[kind]), KINDS[kind])
    return weights


# --- vocabularies ---


def letters() -> list[str]:
    """The letters that byte-level BPE spells bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def byte_level_vocabulary(pre: str = "gpt-2") -> dict[str, Any]:
    spell = lambda text: "".join(letters()[b] for b in text.encode())  # noqa: E731
    merges, tokens = [], letters()
    for left, right in [
        ("t", "h"),
        ("th", "e"),
        (" ", "the"),
        ("i", "n"),
        ("in", "g"),
        (" ", " "),
        ("é", "t"),
        ("1", "2"),
    ]:
        merges.append(f"{spell(left)} {spell(right)}")
        tokens = [*tokens, spell(left + right)]
    merges.insert(0, " ".join(spell("é")))
    tokens = [*tokens, spell("é"), "<user>", "<|im_end|>", "<|endoftext|>"]
    types = [1] * (len(tokens) - 3) + [4, 3, 3]
    end = len(tokens) - 1
    return {"algorithm": "gpt2", "tokens": tokens, "merges": merges, "types": types, "bos": end, "eos": end, "pre": pre}


def sentencepiece_vocabulary() -> dict[str, Any]:
    tokens, scores, types = ["<unk>", "<s>", "</s>"], [0.0, 0.0, 0.0], [2, 3, 3]
    for byte in range(256):
        tokens.append(f"<0x{byte:02X}>"), scores.append(0.0), types.append(6)
    pieces = ["▁t", "he", "▁the", "in", "ing", "▁", "t", "h", "e", "i", "n", "g", "a", "b", "é", "▁▁", "th", "."]
    for rank, piece in enumerate(pieces):
        tokens.append(piece), scores.append(-float(rank)), types.append(1)
    for token, kind in (("<user>", 4), ("<|im_end|>", 3)):
        tokens.append(token), scores.append(0.0), types.append(kind)
    return {"algorithm": "llama", "tokens": tokens, "scores": scores, "types": types, "bos": 1, "eos": 2}
