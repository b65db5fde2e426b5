"""Layers, losses, the transformer block and GPT."""

from tilewise.nn import functional
from tilewise.nn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
)
from tilewise.nn.module import Module, ModuleList, Parameter, Sequential
from tilewise.nn.transformer import GPT, MultiHeadAttention, TransformerBlock

__all__ = [
    "GELU",
    "GPT",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "ReLU",
    "Sequential",
    "TransformerBlock",
    "functional",
]
