"""CTranslate2 as a contender: our GPTs written by its own specification of GPT-2, prompted and continued greedily."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from tilewise.nn import GPT

_ACTIVATIONS = {"tanh": common_spec.Activation.GELUTanh, "none": common_spec.Activation.GELU}


def _linear(spec: Any, weight: Any, bias: Any = None) -> None:
    spec.weight = np.ascontiguousarray(weight.data, np.float32)
    if bias is not None:
        spec.bias = np.ascontiguousarray(bias.data, np.float32)


def _norm(spec: Any, state: dict[str, Any], name: str) -> None:
    spec.gamma, spec.beta = (np.asarray(state[f"{name}.{part}"].data, np.float32) for part in ("weight", "bias"))


def write_gpt2(model: GPT, folder: Path) -> Path:
    """The model's weights in float32, in CTranslate2's format."""
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        len(model.blocks), model.heads, pre_norm=True, activation=_ACTIVATIONS[model.approximate]
    )
    decoder, state = spec.decoder, dict(model.named_tensors())
    decoder.scale_embeddings = False
    decoder.embeddings.weight = np.asarray(model.token_embedding.weight.data, np.float32)
    decoder.position_encodings.encodings = np.asarray(model.position_embedding.weight.data, np.float32)
    _norm(decoder.layer_norm, state, "norm")
    _linear(decoder.projection, model.head.weight)
    for layer, block in zip(decoder.layer, model.blocks, strict=True):
        parts = dict(block.named_tensors())
        _norm(layer.self_attention.layer_norm, parts, "norm1")
        _norm(layer.ffn.layer_norm, parts, "norm2")
        joined, out = layer.self_attention.linear
        _linear(joined, parts["self_attn.in_proj_weight"], parts["self_attn.in_proj_bias"])
        _linear(out, parts["self_attn.out_proj.weight"], parts["self_attn.out_proj.bias"])
        _linear(layer.ffn.linear_0, parts["linear1.weight"], parts["linear1.bias"])
        _linear(layer.ffn.linear_1, parts["linear2.weight"], parts["linear2.bias"])
    spec.register_vocabulary([str(i) for i in range(model.vocab)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    spec.optimize()
    folder.mkdir()
    spec.save(str(folder))
    return folder


class CTranslate2:
    """One model in one form ("float32" or "int8", which it makes when it loads), on the given number of threads."""

    def __init__(self, folder: Path, form: str, threads: int = 1) -> None:
        settings: dict[str, Any] = {"compute_type": form, "inter_threads": 1, "intra_threads": threads}
        self.generator = ctranslate2.Generator(str(folder), device="cpu", **settings)

    def continued(self, tokens: Any, new: int) -> list[int]:
        """The likeliest next tokens, one after the other."""
        names = [str(int(t)) for t in tokens]
        settings: dict[str, Any] = {"max_length": new, "end_token": [], "sampling_topk": 1}
        (result,) = self.generator.generate_batch([names], include_prompt_in_result=False, **settings)
        return list(result.sequences_ids[0])

    def logits(self, tokens: Any) -> np.ndarray:
        """Return the logits of every position."""
        return np.array(self.generator.forward_batch([[str(int(t)) for t in tokens]]))[0]
