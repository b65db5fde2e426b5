"""ResNet-18 and 50, and ResNeXt-50 (32 groups): stages of residual blocks behind a 7×7 stem."""

from __future__ import annotations

import numpy as np

from tilewise import nn
from tilewise.models.zoo.blocks import ImageNetwork, Rng, conv_norm
from tilewise.nn.layers import Rng as Seed
from tilewise.tensor import Tensor

_BRANCH_GAIN = 0.3  # initial weight of a branch's last norm; small, so that deep random networks stay finite


class BasicBlock(nn.Module):
    """Residual block of two 3×3 convolutions (He et al. 2016)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, rng: Rng, groups: int = 1, base: int = 64) -> None:
        """Create the convolutions; the skip connection gets one if the shape changes."""
        self.branch = nn.Sequential(
            *conv_norm(channels, width, 3, stride, rng=rng),
            *conv_norm(width, width, activation=None, rng=rng, gain=_BRANCH_GAIN),
        )
        shape_changes = stride != 1 or channels != width
        self.shortcut = conv_norm(channels, width, 1, stride, None, rng=rng) if shape_changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total.relu()


class Bottleneck(nn.Module):
    """Residual block of 1×1, 3×3 and 1×1 convolutions; the middle one is grouped in ResNeXt (Xie et al. 2017)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, rng: Rng, groups: int = 1, base: int = 64) -> None:
        """Create the convolutions; `groups` and `base` set the width of the middle one."""
        inner, out = width * base // 64 * groups, width * self.expansion
        self.branch = nn.Sequential(
            *conv_norm(channels, inner, 1, rng=rng),
            *conv_norm(inner, inner, 3, stride, groups=groups, rng=rng),
            *conv_norm(inner, out, 1, activation=None, rng=rng, gain=_BRANCH_GAIN),
        )
        shape_changes = stride != 1 or channels != out
        self.shortcut = conv_norm(channels, out, 1, stride, None, rng=rng) if shape_changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total.relu()


def _resnet(
    block: type[BasicBlock] | type[Bottleneck],
    depths: tuple[int, ...],
    classes: int,
    seed: Seed,
    groups: int,
    base: int,
) -> ImageNetwork:
    """Build a ResNet with `depths` blocks per stage; `groups` and `base` are ResNeXt's cardinality and base width."""
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = [*conv_norm(3, 64, 7, 2, rng=rng), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(block(channels, 64 << stage, 2 if stage and not index else 1, rng, groups, base))
            channels = (64 << stage) * block.expansion
    return ImageNetwork(nn.Sequential(*layers), nn.Linear(channels, classes, rng=rng))


def resnet18(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build ResNet-18: 11.7 million parameters."""
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, seed, groups=1, base=64)


def resnet50(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build ResNet-50: 25.6 million parameters."""
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, seed, groups=1, base=64)


def resnext50(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build ResNeXt-50 32×4d: 25.0 million parameters."""
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, seed, groups=32, base=4)
