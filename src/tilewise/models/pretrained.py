"""Trained weights of four reference models, shipped with the package.

Each file was written by one command (AVX-512 kernels, one thread, Python 3.11's topics for the text):

    tilewise fit mlp --seed 0 --threads 1     98.3 % of the held-out digits
    tilewise fit cnn --seed 0 --threads 1     99.2 % of the held-out digits
    tilewise fit resnet8 --seed 0 --threads 1 98.9 % of the held-out digits (enlarged to 32×32)
    tilewise fit gpt --seed 0 --threads 1     validation loss 1.185 nats per character (1.71 bits)

Other instruction sets and kernel versions round differently, so a repeated run gives equally good weights, but not
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, overload

from tilewise.data.text import VOCABULARY
from tilewise.errors import ConfigurationError
from tilewise.io import load
from tilewise.models.reference import ResNet8, cnn, gpt, mlp, resnet8
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
        raise ConfigurationError(f"there are no trained weights for {name!r}; choose one of {', '.join(PRETRAINED)}")
    model = PRETRAINED[name]()
    model.load_state_dict(load(Path(__file__).parent / "weights" / f"{name}.safetensors"))
    return model.eval()
