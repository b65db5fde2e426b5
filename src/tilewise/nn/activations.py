"""Activation layers with PyTorch's names."""

from __future__ import annotations

from tilewise.nn import functional as F
from tilewise.nn.module import Module
from tilewise.tensor import Tensor


class Identity(Module):
    """Returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid()


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class ReLU6(Module):
    """ReLU clipped at 6."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x)


class SiLU(Module):
    """SiLU (swish), x · sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Hardswish(Module):
    """Hard swish, x · clip(x/6 + 1/2, 0, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(x)


class Hardsigmoid(Module):
    """Hard sigmoid, clip(x/6 + 1/2, 0, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(x)


class LeakyReLU(Module):
    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope)


class ELU(Module):
    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, self.alpha)
