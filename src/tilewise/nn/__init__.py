"""Layers, losses, transformer blocks and language models, with PyTorch's names.

The three most important names: `Module` (base class), `Sequential` and `functional` (layers as functions).
"""

import importlib
from typing import TYPE_CHECKING, Any

from tilewise.nn import functional
from tilewise.nn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool,
    LayerNorm,
    Linear,
    MaxPool2d,
    MSELoss,
    ReLU,
    Softmax,
)
from tilewise.nn.module import Buffer, Module, ModuleList, Parameter, Sequential

if TYPE_CHECKING:
    from tilewise.nn.activations import ELU, Hardsigmoid, Hardswish, Identity, LeakyReLU, ReLU6, Sigmoid, SiLU, Tanh
    from tilewise.nn.llama import FeedForward, GroupedQueryAttention, Llama, LlamaConfig, RMSNorm
    from tilewise.nn.spatial import ConvTranspose2d, GroupNorm, Upsample
    from tilewise.nn.transformer import GPT, MultiHeadAttention, TransformerBlock

# Imported at first use: few programs need them all.
_MODULES = {
    "activations": ("ELU", "Hardsigmoid", "Hardswish", "Identity", "LeakyReLU", "ReLU6", "Sigmoid", "SiLU", "Tanh"),
    "llama": ("FeedForward", "GroupedQueryAttention", "Llama", "LlamaConfig", "RMSNorm"),
    "spatial": ("ConvTranspose2d", "GroupNorm", "Upsample"),
    "transformer": ("GPT", "MultiHeadAttention", "TransformerBlock"),
}

__all__ = [
    "ELU",
    "GELU",
    "GPT",
    "AvgPool2d",
    "BatchNorm2d",
    "Buffer",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Flatten",
    "GlobalAvgPool",
    "GroupNorm",
    "GroupedQueryAttention",
    "Hardsigmoid",
    "Hardswish",
    "Identity",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "Llama",
    "LlamaConfig",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "TransformerBlock",
    "Upsample",
    "functional",
]


def __getattr__(name: str) -> Any:
    """Import a layer from its module on first use."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
