"""Networks that concatenate features: ShuffleNetV2, DenseNet-121, SqueezeNet and U-Net."""

from __future__ import annotations

import numpy as np

from tilewise import nn
from tilewise.models.zoo.blocks import ImageNetwork, Rng, conv_norm, convolution
from tilewise.nn.layers import Rng as Seed
from tilewise.tensor import Tensor, cat


class ShuffleUnit(nn.Module):
    """ShuffleNetV2 unit (Ma et al. 2018): one half of the channels is convolved, then both halves are shuffled.

    With stride 2 both branches take all channels and the other branch is downsampled as well.
    """

    def __init__(self, channels: int, filters: int, stride: int, rng: Rng) -> None:
        """Create the main branch, and the downsampling branch for stride 2."""
        half, self.stride = filters // 2, stride
        main_inputs = channels if stride == 2 else half
        self.main = nn.Sequential(
            *conv_norm(main_inputs, half, 1, rng=rng),
            *conv_norm(half, half, 3, stride, None, half, rng=rng),
            *conv_norm(half, half, 1, rng=rng),
        )
        self.side = (
            nn.Sequential(
                *conv_norm(channels, channels, 3, 2, None, channels, rng=rng), *conv_norm(channels, half, 1, rng=rng)
            )
            if stride == 2
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit to images: half of the channels (with stride 2, all) per branch, then a channel shuffle."""
        half = x.shape[1] // 2
        first, second = (x, x) if self.stride == 2 else (x[:, :half], x[:, half:])
        features = cat([self.side(first), self.main(second)], axis=1)
        n, c, h, w = features.shape
        # Channel shuffle: interleave the two halves.
        return features.reshape(n, 2, c // 2, h, w).permute(0, 2, 1, 3, 4).reshape(n, c, h, w)


def shufflenet_v2(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build ShuffleNetV2 ×1.0: 2.3 million parameters."""
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = [*conv_norm(3, 24, 3, 2, rng=rng), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for filters, count in ((116, 4), (232, 8), (464, 4)):
        for index in range(count):
            layers.append(ShuffleUnit(channels, filters, 1 if index else 2, rng))
            channels = filters
    layers += conv_norm(channels, 1024, 1, rng=rng)
    return ImageNetwork(nn.Sequential(*layers), nn.Linear(1024, classes, rng=rng))


class DenseLayer(nn.Module):
    """DenseNet layer (Huang et al. 2017): norm, ReLU, 1×1, norm, ReLU, 3×3; concatenates `growth` channels."""

    def __init__(self, channels: int, growth: int, rng: Rng) -> None:
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), convolution(channels, 4 * growth, 1, 1, rng)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), convolution(4 * growth, growth, 3, 1, rng)
        self.conv2.weight.data *= np.float32(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.conv1(self.norm1(x).relu())
        return cat([x, self.conv2(self.norm2(hidden).relu())], axis=1)


def densenet121(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build DenseNet-121: 8.0 million parameters."""
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = [*conv_norm(3, 64, 7, 2, rng=rng), nn.MaxPool2d(3, 2, 1)]
    channels, growth = 64, 32
    for stage, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            layers.append(DenseLayer(channels, growth, rng))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if stage < 3:
            layers += [convolution(channels, channels // 2, 1, 1, rng), nn.AvgPool2d(2)]
            channels //= 2
    return ImageNetwork(nn.Sequential(*layers), nn.Linear(channels, classes, rng=rng))


class Fire(nn.Module):
    """Fire module of SqueezeNet (Iandola et al. 2016): 1×1 squeeze, then 1×1 and 3×3 expand in parallel."""

    def __init__(self, channels: int, squeezed: int, expanded: int, rng: Rng) -> None:
        self.squeeze = nn.Sequential(convolution(channels, squeezed, 1, 1, rng, bias=True), nn.ReLU())
        self.small = nn.Sequential(convolution(squeezed, expanded, 1, 1, rng, bias=True), nn.ReLU())
        self.large = nn.Sequential(convolution(squeezed, expanded, 3, 1, rng, bias=True), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.squeeze(x)
        return cat([self.small(hidden), self.large(hidden)], axis=1)


def squeezenet(classes: int = 1000, seed: Seed = 0) -> ImageNetwork:
    """Build SqueezeNet 1.1: 1.2 million parameters; the classifier is a convolution."""
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, rng=rng), nn.ReLU(), nn.MaxPool2d(3, 2)]
    channels = 64
    for squeezed, expanded, has_pool in (
        (16, 64, False), (16, 64, True), (32, 128, False), (32, 128, True), (48, 192, False), (48, 192, False),
        (64, 256, False), (64, 256, False),
    ):  # fmt: skip
        layers.append(Fire(channels, squeezed, expanded, rng))
        channels = 2 * expanded
        layers += [nn.MaxPool2d(3, 2)] if has_pool else []
    layers += [convolution(channels, classes, 1, 1, rng, bias=True), nn.ReLU()]
    return ImageNetwork(nn.Sequential(*layers), nn.Identity())


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with four levels: (N, 3, H, W) to (N, classes, H, W).

    H and W must be multiples of 16.
    """

    example_shape: tuple[int, ...] = (3, 256, 256)

    def __init__(self, classes: int, width: int, rng: Rng) -> None:
        """Create the layers; the first level has `width` channels."""
        sizes = [width << i for i in range(5)]
        self.downs = nn.ModuleList(*(_double(a, b, rng) for a, b in zip([3, *sizes], sizes, strict=False)))
        self.pool = nn.MaxPool2d(2)
        self.ups = nn.ModuleList(*(nn.ConvTranspose2d(2 * n, n, 2, 2, rng=rng) for n in sizes[-2::-1]))
        self.joins = nn.ModuleList(*(_double(2 * n, n, rng) for n in sizes[-2::-1]))
        self.head = nn.Conv2d(width, classes, 1, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        """Segment images (N, 3, H, W): one score per class and pixel."""
        skips: list[Tensor] = []
        for index, down in enumerate(self.downs):
            x = down(x if index == 0 else self.pool(x))
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, skips[-2::-1], strict=True):
            x = join(cat([skip, up(x)], axis=1))
        out: Tensor = self.head(x)
        return out


def _double(channels: int, filters: int, rng: Rng) -> nn.Sequential:
    """Create two 3×3 convolutions with batch norm and ReLU."""
    return nn.Sequential(*conv_norm(channels, filters, rng=rng), *conv_norm(filters, filters, rng=rng))


def unet(classes: int = 2, width: int = 32, seed: Seed = 0) -> UNet:
    """Build a U-Net: 7.8 million parameters at width 32."""
    return UNet(classes, width, np.random.default_rng(seed))
