"""Load GPT-2 files with the public tensor names into this package's GPT.

GPT-2 stores linear weights as (inputs, outputs), shares the token embedding with the output head, and uses the tanh
approximation of GELU; otherwise it equals the reference model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilewise.errors import FileFormatError, TilewiseError
from tilewise.io import load
from tilewise.models import GPT_SIZES
from tilewise.models.saved import check_gpt_size
from tilewise.nn import GPT
from tilewise.tensor import Array

_BLOCK = {
    "ln_1.weight": "norm1.weight",
    "ln_1.bias": "norm1.bias",
    "attn.c_attn.weight": "self_attn.in_proj_weight",
    "attn.c_attn.bias": "self_attn.in_proj_bias",
    "attn.c_proj.weight": "self_attn.out_proj.weight",
    "attn.c_proj.bias": "self_attn.out_proj.bias",
    "ln_2.weight": "norm2.weight",
    "ln_2.bias": "norm2.bias",
    "mlp.c_fc.weight": "linear1.weight",
    "mlp.c_fc.bias": "linear1.bias",
    "mlp.c_proj.weight": "linear2.weight",
    "mlp.c_proj.bias": "linear2.bias",
}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
_TOP = {
    "wte.weight": "token_embedding.weight",
    "wpe.weight": "position_embedding.weight",
    "ln_f.weight": "norm.weight",
    "ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
}
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")  # causal masks, which some files contain


def load_gpt2(path: str | os.PathLike[str], heads: int | None = None) -> GPT:
    """Load a safetensors file with GPT-2's tensor names. `heads` defaults to width / 64, as in GPT-2."""
    tensors = {name.removeprefix("transformer."): t.data for name, t in load(path).items()}
    state = _convert_state(tensors, path)
    embedding = state.get("token_embedding.weight", np.zeros((0, 0)))
    state.setdefault("head.weight", embedding)
    return _build(state, path, "tanh", max(1, embedding.shape[-1] // 64) if heads is None else heads)


def load_gpt(path: str | os.PathLike[str]) -> GPT:
    """Load a GPT from a file of this package (`tilewise fit gpt`) or a GPT-2 file."""
    tensors = load(path)
    if any(name.endswith("wte.weight") for name in tensors):
        return load_gpt2(path)
    return _build(tensors, path, "none")


def _build(state: Mapping[str, Any], path: str | os.PathLike[str], approximate: str, heads: int | None = None) -> GPT:
    """Build a GPT from a state dict, whose shapes determine its sizes.

    `approximate` is the form of GELU, `path` is named in errors.
    """
    try:
        vocabulary, width = state["token_embedding.weight"].shape
        context = state["position_embedding.weight"].shape[0]
    except (KeyError, ValueError, IndexError):
        raise FileFormatError(f"{path} is not a GPT: the embeddings of tokens and positions are missing") from None
    layers = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    if heads is None:
        heads = {w: h for _, w, h in GPT_SIZES.values()}.get(width, max(1, width // 64))
    if min(layers, width, heads, vocabulary, context) < 1:
        raise FileFormatError(f"{path} is not a complete GPT: it has {layers} layers of {width} channels")
    try:
        check_gpt_size((layers, width, heads, vocabulary, context), {name: np.shape(t) for name, t in state.items()})
        model = GPT(layers, width, heads, vocabulary, context, approximate=approximate)
        model.load_state_dict(state)
    except TilewiseError as error:
        raise FileFormatError(f"{path} is not a complete GPT: {error}") from None
    return model


def _convert_state(tensors: dict[str, Array], path: str | os.PathLike[str]) -> dict[str, Array]:
    """Rename GPT-2's tensors and transpose its linear weights."""
    state: dict[str, Array] = {}
    for name, array in tensors.items():
        if _BUFFERS.match(name):
            continue
        block = re.fullmatch(r"h\.([^.]*)\.(.*)", name)
        if name in _TOP:
            state[_TOP[name]] = np.ascontiguousarray(array, np.float32)
        elif block is not None and block[2] in _BLOCK:
            weight = array.T if name.endswith(_TRANSPOSED) and array.ndim == 2 else array
            state[f"blocks.{block[1]}.{_BLOCK[block[2]]}"] = np.ascontiguousarray(weight, np.float32)
        else:
            raise FileFormatError(f"{path} is not a GPT-2 file: it contains the tensor {name!r}")
    return state
