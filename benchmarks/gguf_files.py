"""GGUF files of our own models, written by the `gguf` package, for llama.cpp to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tilewise.nn import GPT

_GPT2_BLOCK = {
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "linear1": "ffn_up",
    "linear2": "ffn_down",
}


def write_gpt2(model: GPT, path: Path) -> None:
    """A GPT as a GPT-2 in float32, without a tokenizer."""
    width = model.token_embedding.weight.shape[1]
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(model.context)
    writer.add_embedding_length(width)
    writer.add_block_count(len(model.blocks))
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(model.heads)
    writer.add_layer_norm_eps(model.norm.eps)
    writer.add_vocab_size(model.vocab)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(0)
    for name, array in gpt2_tensors(model).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    finish(writer)


def gpt2_tensors(model: GPT) -> dict[str, Any]:
    """Arrays by the names of GGUF."""
    tensors = {
        "token_embd.weight": model.token_embedding.weight,
        "position_embd.weight": model.position_embedding.weight,
        "output_norm.weight": model.norm.weight,
        "output_norm.bias": model.norm.bias,
        "output.weight": model.head.weight,
    }
    for i, block in enumerate(model.blocks):
        state = dict(block.named_tensors())
        tensors[f"blk.{i}.attn_qkv.weight"] = state["self_attn.in_proj_weight"]
        tensors[f"blk.{i}.attn_qkv.bias"] = state["self_attn.in_proj_bias"]
        for ours, theirs in _GPT2_BLOCK.items():
            for kind in ("weight", "bias"):
                tensors[f"blk.{i}.{theirs}.{kind}"] = state[f"{ours}.{kind}"]
    return {name: tensor.data for name, tensor in tensors.items()}


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
