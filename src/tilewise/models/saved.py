"""Models with trained weights: those shipped with the package, and saved files.

The kind of a saved model is recognised by the names and shapes of its tensors. Trained weights of four reference models
are shipped; each file was written by one command (AVX-512 kernels, one thread, Python 3.11's topics for the text):

    tilewise fit mlp --seed 0 --threads 1     98.3 % of the held-out digits
    tilewise fit cnn --seed 0 --threads 1     99.2 % of the held-out digits
    tilewise fit resnet8 --seed 0 --threads 1 98.9 % of the held-out digits (enlarged to 32×32)
    tilewise fit gpt --seed 0 --threads 1     validation loss 1.185 nats per character (1.71 bits)

Other instruction sets and kernel versions round differently, so a repeated run gives equally good weights, but not
the same bits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, overload

from tilewise.data.text import VOCABULARY
from tilewise.errors import (
    ConfigurationError,
    FileFormatError,
    MissingFileError,
    TilewiseError,
    did_you_mean,
    type_name,
)
from tilewise.io import load
from tilewise.models.reference import GPT_SIZES, ResNet8, cnn, gpt, mlp, resnet8, vgg6
from tilewise.nn import GPT, Module, Sequential

PRETRAINED: dict[str, Callable[[], Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet8": resnet8,
    "gpt": lambda: gpt("4x128", vocab=len(VOCABULARY), context=256),
}


@overload
def pretrained(name: Literal["mlp", "cnn"]) -> Sequential: ...
@overload
def pretrained(name: Literal["resnet8"]) -> ResNet8: ...
@overload
def pretrained(name: Literal["gpt"]) -> GPT: ...
@overload
def pretrained(name: str) -> Module: ...
def pretrained(name: str) -> Module:
    """Load a model with trained weights: "mlp", "cnn" or "resnet8" for digits, or the character model "gpt".

    >>> model = pretrained("mlp")
    """
    if name not in PRETRAINED:
        label = repr(name) if isinstance(name, str) else f"a {type_name(name)}"
        raise ConfigurationError(f"there are no trained weights for {label}; choose one of {', '.join(PRETRAINED)}")
    model = PRETRAINED[name]()
    model.load_state_dict(load(Path(__file__).parent / "weights" / f"{name}.safetensors"))
    return model.eval()


Shapes = dict[str, tuple[int, ...]]
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npy")  # formats that may execute code when loaded
_MAX_LAYERS = 1000  # guards against hostile files


def load_model(name: str | os.PathLike[str]) -> Module:
    """Load a shipped model by its name ("mlp", "cnn", "resnet8", "gpt"), or a reference model saved as safetensors.

    >>> load_model("mlp").training
    False
    """
    if not name or not isinstance(name, str | os.PathLike):
        text = repr(name) if isinstance(name, str | int) else type_name(name)
        raise ConfigurationError(f"load_model takes the name of a model or of a file, not {text}")
    path = Path(name)
    if str(name) in PRETRAINED:
        return pretrained(str(name))
    if path.suffix in _PICKLES:
        raise FileFormatError(
            f"{path} holds a pickle, and loading one can run any program; save the weights as safetensors instead"
        )
    if not path.suffix and not path.exists():
        raise MissingFileError(f"there is no model {str(name)!r}; {did_you_mean(str(name), PRETRAINED)}")
    return load_saved(path)[1].eval()


def load_saved(path: str | os.PathLike[str]) -> tuple[str, Module]:
    """Load a safetensors file; return the name of the reference model and the model with the file's weights."""
    from tilewise._safetensors import load_arrays

    arrays, metadata = load_arrays(path)
    name, model = model_for({key: value.shape for key, value in arrays.items()}, metadata, os.fspath(path))
    try:
        model.load_state_dict(arrays)
    except TilewiseError as error:
        raise FileFormatError(f"{os.fspath(path)} looks like a {name}, but {error}") from None
    return name, model


def model_for(shapes: Shapes, metadata: Mapping[str, str], where: str) -> tuple[str, Module]:
    """Build the untrained reference model whose tensors have these names and shapes; return its name and the model.

    `where` is named in errors.
    """
    for name, build in (("gpt", _gpt), ("resnet8", _resnet8), ("vgg6", _vgg6), ("cnn", _cnn), ("mlp", _mlp)):
        try:
            model = build(shapes, metadata)
        except (KeyError, IndexError, ValueError, TilewiseError):  # ValueError: another number of dimensions
            continue
        if {key: tensor.shape for key, tensor in model.named_tensors()} == shapes:
            return name, model
    raise FileFormatError(f"{where} is not one of the reference models (mlp, cnn, vgg6, resnet8, gpt)")


def _free_size(shapes: Shapes, name: str, axis: int, reference: Module) -> int:
    """Return one axis's size of a stored tensor whose other axes must equal the reference model's; else KeyError.

    The check ensures that no model is built which is larger than the file.
    """
    expected, shape = dict(reference.named_tensors())[name].shape, shapes[name]
    if len(shape) != len(expected) or any(shape[i] != expected[i] for i in range(len(expected)) if i != axis):
        raise KeyError(name)
    return shape[axis]


def _mlp(shapes: Shapes, _: Mapping[str, str]) -> Module:
    reference = mlp()
    return mlp(_free_size(shapes, "0.weight", 1, reference), classes=_free_size(shapes, "4.weight", 0, reference))


def _cnn(shapes: Shapes, _: Mapping[str, str]) -> Module:
    (classes, features), channels = shapes["12.weight"], _free_size(shapes, "0.weight", 1, cnn())
    return cnn(channels=channels, size=4 * math.isqrt(features // 64), classes=classes)


def _vgg6(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return vgg6(classes=_free_size(shapes, "13.weight", 0, vgg6()))


def _resnet8(shapes: Shapes, _: Mapping[str, str]) -> Module:
    return resnet8(classes=_free_size(shapes, "fc.weight", 0, resnet8()))


def _gpt(shapes: Shapes, metadata: Mapping[str, str]) -> Module:
    """Build a GPT for these shapes; the number of heads is from the metadata, a known size, or width / 64."""
    (vocab, width), context = shapes["token_embedding.weight"], shapes["position_embedding.weight"][0]
    layers = len({key.split(".")[1] for key in shapes if key.startswith("blocks.")})
    heads_by_size = {(n, w): heads for n, w, heads in GPT_SIZES.values()}
    heads: Any = metadata.get("heads", "")
    heads = int(heads) if heads.isdecimal() else heads_by_size.get((layers, width), max(width // 64, 1))
    check_gpt_size((layers, width, heads, vocab, context), shapes)
    return GPT(layers, width, heads, vocab, context, 0)


def check_gpt_size(size: tuple[int, int, int, int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise FileFormatError if a GPT of (layers, width, heads, vocabulary, context) is larger than the file."""
    layers, width, heads, vocabulary, context = size
    # 4 w² for attention and 8 w² for the MLP per layer; embeddings, positions and the head besides.
    parameters = layers * (12 * width * width + 13 * width) + (2 * vocabulary + context + 2) * width
    stored = sum(math.prod(shape) for shape in shapes.values())
    if min(size) < 1 or layers > _MAX_LAYERS or heads > width or parameters > 2 * stored:
        raise FileFormatError(
            f"{layers} layers of width {width} for {vocabulary} tokens do not match the tensors in the file"
        )
