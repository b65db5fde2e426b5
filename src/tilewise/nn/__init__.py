"""Layers, losses, the transformer block and GPT."""

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
from tilewise.nn.module import Module, ModuleList, Parameter, Sequential
from tilewise.nn.transformer import GPT, MultiHeadAttention, TransformerBlock

__all__ = [
    "GELU",
    "GPT",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "ReLU",
    "Sequential",
    "Softmax",
    "TransformerBlock",
    "functional",
]
