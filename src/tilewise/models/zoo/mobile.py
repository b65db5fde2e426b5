"""MobileNetV2, MobileNetV3 and EfficientNet-B0: inverted residuals around depthwise convolutions."""

from __future__ import annotations

import numpy as np

from tilewise import nn
from tilewise.models.zoo.blocks import ImageNetwork, Rng, SqueezeExcite, conv_norm, divisible, with_statistics
from tilewise.nn.layers import Rng as Seed
from tilewise.tensor import Tensor


class InvertedResidual(nn.Module):
    """Inverted residual (Sandler et al. 2018): 1×1 expansion to `inner` channels, depthwise, 1×1 projection.

    `excite` is an optional squeeze-and-excite block after the depthwise convolution. The input is added if the shapes
    agree.
    """

    def __init__(
        self,
        channels: int,
        inner: int,
        filters: int,
        kernel: int,
        stride: int,
        activation: str,
        rng: Rng,
        excite: nn.Module | None = None,
    ) -> None:
        """Create the convolutions; without expansion if `inner` equals `channels`."""
        expand = [*conv_norm(channels, inner, 1, activation=activation, rng=rng)] if inner != channels else []
        self.branch = nn.Sequential(
            *expand,
            *conv_norm(inner, inner, kernel, stride, activation, inner, rng=rng),
            *([excite] if excite is not None else []),
            *conv_norm(inner, filters, 1, activation=None, rng=rng, gain=0.5),
        )
        self.residual = stride == 1 and channels == filters

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.branch(x)
        return x + out if self.residual else out


def _stages(
    stages: tuple[tuple[int, int, int, int, int], ...], activation: str, rng: Rng, has_excite: bool = False
) -> nn.Sequential:
    """Create a network's features: the first convolution, stages of inverted residuals, and a 1×1 convolution.

    A stage is (expansion, filters, number of blocks, stride of the first block, filter size).
    """
    layers: list[nn.Module] = [*conv_norm(3, 32, 3, 2, activation, rng=rng)]
    channels = 32
    for expansion, filters, count, first, kernel in stages:
        for index in range(count):
            inner, stride = channels * expansion, first if index == 0 else 1
            excite = SqueezeExcite(inner, max(1, channels // 4), rng, activation) if has_excite else None
            layers.append(
                InvertedResidual(
                    channels, inner, filters, kernel, stride=stride, activation=activation, rng=rng, excite=excite
                )
            )
            channels = filters
    return nn.Sequential(*layers, *conv_norm(channels, 1280, 1, activation=activation, rng=rng))


# Table 2 of Sandler et al. 2018 and table 1 of Tan and Le 2019; see `_stages`.
_V2 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3), (6, 160, 3, 2, 3),
    (6, 320, 1, 1, 3),
)  # fmt: skip
_B0 = (
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)  # fmt: skip


def mobilenet_v2(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build MobileNetV2: 3.5 million parameters; ReLU6."""
    rng = np.random.default_rng(seed)
    return ImageNetwork(_stages(_V2, "relu6", rng), nn.Linear(1280, classes, rng=rng))


# Tables 1 and 2 of Howard et al. 2019: filter size, inner channels, filters, squeeze-and-excite, activation, stride
_V3_LARGE = (
    (3, 16, 16, False, "relu", 1), (3, 64, 24, False, "relu", 2), (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2), (5, 120, 40, True, "relu", 1), (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2), (3, 200, 80, False, "hardswish", 1), (3, 184, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1), (3, 480, 112, True, "hardswish", 1), (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2), (5, 960, 160, True, "hardswish", 1), (5, 960, 160, True, "hardswish", 1),
)  # fmt: skip
_V3_SMALL = (
    (3, 16, 16, True, "relu", 2), (3, 72, 24, False, "relu", 2), (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "hardswish", 2), (5, 240, 40, True, "hardswish", 1), (5, 240, 40, True, "hardswish", 1),
    (5, 120, 48, True, "hardswish", 1), (5, 144, 48, True, "hardswish", 1), (5, 288, 96, True, "hardswish", 2),
    (5, 576, 96, True, "hardswish", 1), (5, 576, 96, True, "hardswish", 1),
)  # fmt: skip


def mobilenet_v3(size: str = "large", classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build MobileNetV3 "large" (5.5 million parameters) or "small" (2.5); hard swish and squeeze-and-excite."""
    rng = np.random.default_rng(seed)
    rows, last = (_V3_LARGE, 1280) if size == "large" else (_V3_SMALL, 1024)
    layers: list[nn.Module] = [*conv_norm(3, 16, 3, 2, "hardswish", rng=rng)]
    channels = 16
    for kernel, inner, filters, has_excite, activation, stride in rows:
        excite = SqueezeExcite(inner, divisible(inner / 4), rng, hard=True) if has_excite else None
        layers.append(
            InvertedResidual(
                channels, inner, filters, kernel, stride=stride, activation=activation, rng=rng, excite=excite
            )
        )
        channels = filters
    layers += conv_norm(channels, 6 * channels, 1, activation="hardswish", rng=rng)
    head = (nn.Linear(6 * channels, last, rng=rng), nn.Hardswish(), nn.Linear(last, classes, rng=rng))
    return ImageNetwork(nn.Sequential(*layers), nn.Sequential(*head))


def efficientnet_b0(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build EfficientNet-B0 (Tan and Le 2019): 5.3 million parameters; SiLU and squeeze-and-excite."""
    rng = np.random.default_rng(seed)
    features = _stages(_B0, "silu", rng, has_excite=True)
    return with_statistics(ImageNetwork(features, nn.Linear(1280, classes, rng=rng)), rng)
