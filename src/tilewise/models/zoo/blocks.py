"""What the zoo's networks are built of: a convolution with its norm and activation, squeeze-and-excite, a classifier.

Weights are drawn by He's rule, so that signals keep their size through many layers; the last norm of a residual branch
starts small, as it does where such networks are trained.
"""

from __future__ import annotations

import numpy as np

from tilewise import nn
from tilewise.nn import functional as F
from tilewise.tensor import Tensor, no_grad

Rng = np.random.Generator
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
}


def convolution(
    channels: int, filters: int, kernel: int, stride: int, rng: Rng, groups: int = 1, bias: bool = False
) -> nn.Conv2d:
    """A convolution that keeps the image's size but for the stride, with He's weights."""
    layer = nn.Conv2d(channels, filters, kernel, stride, kernel // 2, groups, bias=bias, rng=rng)
    layer.weight.data *= np.float32(6**0.5)
    return layer


def conv_norm(
    channels: int,
    filters: int,
    kernel: int = 3,
    stride: int = 1,
    activation: str | None = "relu",
    groups: int = 1,
    *,
    rng: Rng,
    gain: float = 1.0,
) -> nn.Sequential:
    """Convolution, batch norm (its weights starting at `gain`), activation."""
    norm = nn.BatchNorm2d(filters)
    norm.weight.data *= np.float32(gain)
    after = [ACTIVATIONS[activation]()] if activation else []
    return nn.Sequential(convolution(channels, filters, kernel, stride, rng, groups), norm, *after)


class SqueezeExcite(nn.Module):
    """Each channel times a number between 0 and 1 that all channels' means decide."""

    def __init__(self, channels: int, squeezed: int, rng: Rng, activation: str = "relu", hard: bool = False) -> None:
        self.fc1 = nn.Conv2d(channels, squeezed, 1, rng=rng)
        self.fc2 = nn.Conv2d(squeezed, channels, 1, rng=rng)
        self.activation = ACTIVATIONS[activation]()
        self.hard = hard

    def forward(self, x: Tensor) -> Tensor:
        mean = F.global_avg_pool(x).reshape(*x.shape[:2], 1, 1)
        gate: Tensor = self.fc2(self.activation(self.fc1(mean)))
        return x * (F.hardsigmoid(gate) if self.hard else gate.sigmoid())


class Network(nn.Module):
    """Images (N, 3, H, W) to logits: features, the mean of each channel, a classifier."""

    example_shape: tuple[int, ...] = (3, 224, 224)

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        self.features, self.pool, self.classifier = features, nn.GlobalAvgPool(), classifier

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def with_statistics(network: Network, rng: Rng, size: int = 96) -> Network:
    """The network with its norms' statistics taken from one random batch.

    Gates below one in every block make signals vanish where norms divide by nothing: the result would hardly depend on
    the input.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with no_grad():
        network.train()(Tensor(rng.standard_normal((2, 3, size, size)).astype(np.float32)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return network


def divisible(number: float, by: int = 8) -> int:
    """The multiple of `by` nearest to a number, and not below nine tenths of it."""
    rounded = max(by, int(number + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * number else rounded
