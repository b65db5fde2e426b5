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
_MOST_LAYERS = 1000


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
        except (KeyError, IndexError, ValueError, TilewiseError):  # ValueError: a tensor with other axes
            continue
        if {key: tensor.shape for key, tensor in model.named_tensors()} == shapes:
            return name, model
    raise FileFormatError(f"{where} holds none of the reference models (mlp, cnn, vgg6, resnet8, gpt)")


def _free_size(shapes: Shapes, name: str, axis: int, reference: Module) -> int:
    """The size of one axis of a tensor whose others are the reference model's. Where they are not, the file holds less
    than a model of that size would take, and none is built."""
    usual, found = dict(reference.named_tensors())[name].shape, shapes[name]
    if len(found) != len(usual) or any(found[i] != usual[i] for i in range(len(usual)) if i != axis):
        raise KeyError(name)
    return found[axis]


def _mlp(shapes: Shapes, _: Mapping[str, str]) -> Module:
    usual = mlp()
    return mlp(_free_size(shapes, "0.weight", 1, usual), classes=_free_size(shapes, "4.weight", 0, usual))


def _cnn(shapes: Shapes, _: Mapping[str, str]) -> Module:
    (classes, features), channels = shapes["12.weight"], _free_size(shapes, "0.weight", 1, cnn())
    return cnn(channels=channels, size=4 * math.isqrt(features // 64), classes=classes)


def _vgg6(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return vgg6(classes=_free_size(shapes, "13.weight", 0, vgg6()))


def _resnet8(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return resnet8(classes=_free_size(shapes, "fc.weight", 0, resnet8()))


def _gpt(shapes: Shapes, metadata: Mapping[str, str]) -> Module:
    (vocab, width), context = shapes["token_embedding.weight"], shapes["position_embedding.weight"][0]
    layers = len({key.split(".")[1] for key in shapes if key.startswith("blocks.")})
    known = {(n, w): heads for n, w, heads in GPT_SIZES.values()}
    heads: Any = metadata.get("heads", "")
    heads = int(heads) if heads.isdecimal() else known.get((layers, width), max(width // 64, 1))
    check_gpt_size((layers, width, heads, vocab, context), shapes)
    return GPT(layers, width, heads, vocab, context, 0)


def check_gpt_size(size: tuple[int, int, int, int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse to build a GPT of (layers, width, heads, vocabulary, context) that is larger than what a file holds."""
    layers, width, heads, vocabulary, context = size
    needed = layers * (12 * width * width + 13 * width) + (2 * vocabulary + context + 2) * width
    held = sum(math.prod(shape) for shape in shapes.values())
    if min(size) < 1 or layers > _MOST_LAYERS or heads > width or needed > 2 * held:
        raise FileFormatError(f"{layers} layers of width {width} for {vocabulary} tokens are not what the file holds")
