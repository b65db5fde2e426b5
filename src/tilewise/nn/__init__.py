"""Layers, losses, transformer blocks and language models, with PyTorch's names.

The three most important names: `Module` (base class), `Sequential` and `functional` (layers as functions).
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names
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
    from tilewise.nn import functional
    from tilewise.nn.activations import ELU, Hardsigmoid, Hardswish, Identity, LeakyReLU, ReLU6, Sigmoid, SiLU, Tanh
    from tilewise.nn.decoder_config import LlamaConfig
    from tilewise.nn.llama import FeedForward, GroupedQueryAttention, Llama, RMSNorm
    from tilewise.nn.spatial import ConvTranspose2d, GroupNorm, Upsample
    from tilewise.nn.transformer import GPT, MultiHeadAttention, TransformerBlock

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

__getattr__ = late_names(
    __name__,
    {
        ".activations": "ELU Hardsigmoid Hardswish Identity LeakyReLU ReLU6 Sigmoid SiLU Tanh",
        ".functional": "",
        ".decoder_config": "LlamaConfig",
        ".llama": "FeedForward GroupedQueryAttention Llama RMSNorm",
        ".spatial": "ConvTranspose2d GroupNorm Upsample",
        ".transformer": "GPT MultiHeadAttention TransformerBlock",
    },
)
