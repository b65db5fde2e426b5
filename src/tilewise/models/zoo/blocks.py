"""Building blocks of the zoo: convolution with norm and activation, squeeze-and-excite, and a classifier network.

Weights use He initialisation (He et al. 2015), so that activations keep their scale through many layers. The last norm
of a residual branch starts with a small weight, as is usual in training.
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
    """Create a convolution with "same" padding and He initialisation."""
    layer = nn.Conv2d(channels, filters, kernel, stride, padding=kernel // 2, groups=groups, bias=bias, rng=rng)
    layer.weight.data *= np.float32(6**0.5)  # the default is uniform in ±1/√fan_in; He needs ±√(6/fan_in)
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
    """Create a convolution, a batch norm (with initial weight `gain`) and an activation."""
    norm = nn.BatchNorm2d(filters)
    norm.weight.data *= np.float32(gain)
    activations = [ACTIVATIONS[activation]()] if activation else []
    return nn.Sequential(convolution(channels, filters, kernel, stride, rng, groups), norm, *activations)


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite (Hu et al. 2018): scale each channel by a gate computed from all channel means."""

    def __init__(self, channels: int, squeezed: int, rng: Rng, activation: str = "relu", hard: bool = False) -> None:
        """Create the two 1×1 convolutions; `hard` uses the hard sigmoid for the gate."""
        self.fc1 = nn.Conv2d(channels, squeezed, 1, rng=rng)
        self.fc2 = nn.Conv2d(squeezed, channels, 1, rng=rng)
        self.activation = ACTIVATIONS[activation]()
        self.hard = hard

    def forward(self, x: Tensor) -> Tensor:
        """Multiply each channel of images (N, C, H, W) by a gate computed from all channels' means."""
        mean = F.global_avg_pool(x).reshape(*x.shape[:2], 1, 1)
        gate: Tensor = self.fc2(self.activation(self.fc1(mean)))
        return x * (F.hardsigmoid(gate) if self.hard else gate.sigmoid())


class ImageNetwork(nn.Module):
    """Image classifier, (N, 3, H, W) to logits: features, global average pool, classifier."""

    example_shape: tuple[int, ...] = (3, 224, 224)

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        self.features, self.pool, self.classifier = features, nn.GlobalAvgPool(), classifier

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(x)))
        return logits


def with_statistics(network: ImageNetwork, rng: Rng, size: int = 96) -> ImageNetwork:
    """Set all batch norms' running statistics from one random batch of `size` × `size` images; return the network.

    Squeeze-and-excite gates below one shrink activations in every block. With the initial statistics (mean 0, variance
    1) they would vanish, and the result would hardly depend on the input.
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
    """Round to the nearest multiple of `by`, but not below 90 % of the number (as in MobileNet)."""
    rounded = max(by, int(number + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * number else rounded
