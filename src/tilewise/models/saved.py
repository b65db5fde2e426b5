"""Which reference model does a saved file hold? The names and shapes of its tensors tell."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from tilewise.errors import FileFormatError, TilewiseError
from tilewise.models.reference import GPT_SIZES, cnn, mlp, resnet8, vgg6
from tilewise.nn import GPT, Module

Shapes = dict[str, tuple[int, ...]]


def load_model(path: str | os.PathLike[str]) -> tuple[str, Module]:
    """The name of the reference model in a safetensors file, and the model with the file's weights."""
    from tilewise.io import load_arrays

    arrays, metadata = load_arrays(path)
    name, model = model_for({key: value.shape for key, value in arrays.items()}, metadata, os.fspath(path))
    try:
        model.load_state_dict(arrays)
    except TilewiseError as error:
        raise FileFormatError(f"{os.fspath(path)} looks like a {name}, but {error}") from None
    return name, model


def model_for(shapes: Shapes, metadata: Mapping[str, str], where: str) -> tuple[str, Module]:
    """An untrained model with tensors of these names and shapes."""
    for name, build in (("gpt", _gpt), ("resnet8", _resnet8), ("vgg6", _vgg6), ("cnn", _cnn), ("mlp", _mlp)):
        try:
            model = build(shapes, metadata)
        except (KeyError, IndexError, TilewiseError):
            continue
        if {key: tensor.shape for key, tensor in model.named_tensors()} == shapes:
            return name, model
    raise FileFormatError(f"{where} holds none of the reference models (mlp, cnn, vgg6, resnet8, gpt)")


def _mlp(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return mlp(inputs=shapes["0.weight"][1], classes=shapes["4.weight"][0])


def _cnn(shapes: Shapes, _: Mapping[str, str]) -> Module:
    classes, features = shapes["12.weight"]
    return cnn(channels=shapes["0.weight"][1], size=4 * math.isqrt(features // 64), classes=classes)


def _vgg6(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return vgg6(classes=shapes["13.weight"][0])


def _resnet8(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return resnet8(classes=shapes["fc.weight"][0])


def _gpt(shapes: Shapes, metadata: Mapping[str, str]) -> Module:
    (vocab, width), context = shapes["token_embedding.weight"], shapes["position_embedding.weight"][0]
    layers = len({key.split(".")[1] for key in shapes if key.startswith("blocks.")})
    known = {(n, w): heads for n, w, heads in GPT_SIZES.values()}
    heads: Any = metadata.get("heads", "")
    heads = int(heads) if heads.isdecimal() else known.get((layers, width), max(width // 64, 1))
    return GPT(layers, width, heads, vocab, context, 0)
