"""The reference models that everything in tilewise trains, quantizes, prunes, times and compares.

They are small enough to read and to train on a laptop. Initial weights are drawn from PyTorch's default distributions
with a seed, so two runs start equally.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.nn import (
    GPT,
    BatchNorm2d,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Sequential,
)
from tilewise.nn.layers import Rng
from tilewise.tensor import Tensor, is_grad_enabled

GPT_SIZES = {"4x128": (4, 128, 4), "6x384": (6, 384, 6), "12x768": (12, 768, 12)}  # layers, width, heads


def mlp(inputs: int = 64, classes: int = 10, seed: Rng = 0) -> Sequential:
    """Build the multilayer perceptron: inputs - 256 - 128 - classes with ReLU."""
    rng = np.random.default_rng(seed)
    return Sequential(
        Linear(inputs, 256, rng=rng), ReLU(), Linear(256, 128, rng=rng), ReLU(), Linear(128, classes, rng=rng)
    )


def cnn(channels: int = 1, size: int = 8, classes: int = 10, seed: Rng = 0) -> Sequential:
    """Build conv 32, conv 64, pool, conv 64, pool (3×3, with batch norm and ReLU), linear. size=28 for MNIST."""
    if size < 4:
        raise ConfigurationError(f"the cnn halves its image twice, so it needs at least 4×4 pixels, not {size}×{size}")
    rng = np.random.default_rng(seed)
    return Sequential(
        *_conv_norm_relu(channels, 32, rng),
        *_conv_norm_relu(32, 64, rng),
        MaxPool2d(2),
        *_conv_norm_relu(64, 64, rng),
        MaxPool2d(2),
        Flatten(),
        Linear(64 * (size // 4) ** 2, classes, rng=rng),
    )


def _conv_norm_relu(channels: int, filters: int, rng: np.random.Generator) -> list[Module]:
    return [Conv2d(channels, filters, 3, padding=1, rng=rng), BatchNorm2d(filters), ReLU()]


def vgg6(classes: int = 10, seed: Rng = 0) -> Sequential:
    """Build conv 64, 64, pool, 128, 128, pool, 256 (3×3, ReLU), global average pool, linear, for 3×32×32 images."""
    rng = np.random.default_rng(seed)
    layers: list[Module] = []
    channels = 3
    for filters in (64, 64, 0, 128, 128, 0, 256):
        if filters == 0:
            layers.append(MaxPool2d(2))
            continue
        layers += [Conv2d(channels, filters, 3, padding=1, rng=rng), ReLU()]
        channels = filters
    return Sequential(*layers, GlobalAvgPool(), Linear(channels, classes, rng=rng))


class ResidualBlock(Module):
    """Residual block: conv, ReLU, conv, add the skip (a 1×1 convolution if the shape changes), ReLU."""

    def __init__(self, channels: int, filters: int, stride: int, rng: Rng = None) -> None:
        """Create the convolutions; the skip connection gets one if the shape changes."""
        rng = np.random.default_rng(rng)
        self.conv1 = Conv2d(channels, filters, 3, stride, padding=1, rng=rng)
        self.conv2 = Conv2d(filters, filters, 3, padding=1, rng=rng)
        shape_changes = stride != 1 or channels != filters
        self.skip = Conv2d(channels, filters, 1, stride, rng=rng) if shape_changes else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the block; without gradients the residual and the ReLU are fused into the second convolution."""
        shortcut: Tensor = x if self.skip is None else self.skip(x)
        hidden: Tensor = self.conv1(x, activation="relu")
        if is_grad_enabled():
            total: Tensor = self.conv2(hidden) + shortcut
            return total.relu()
        out: Tensor = self.conv2(hidden, activation="relu", residual=shortcut)
        return out


class ResNet8(Module):
    """Residual network for 3×32×32 images; see `resnet8`."""

    def __init__(self, classes: int = 10, rng: Rng = None) -> None:
        """Create the layers with random weights."""
        rng = np.random.default_rng(rng)
        self.conv = Conv2d(3, 16, 3, padding=1, rng=rng)
        self.block1 = ResidualBlock(16, 16, 1, rng)
        self.block2 = ResidualBlock(16, 32, 2, rng)
        self.block3 = ResidualBlock(32, 64, 2, rng)
        self.pool = GlobalAvgPool()
        self.fc = Linear(64, classes, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, C, H, W)."""
        x = self.conv(x, activation="relu")
        logits: Tensor = self.fc(self.pool(self.block3(self.block2(self.block1(x)))))
        return logits


def resnet8(classes: int = 10, seed: Rng = 0) -> ResNet8:
    """Build conv 16, residual blocks of 16, 32 and 64 (the last two with stride 2), global average pool, linear."""
    return ResNet8(classes, seed)


def image_model(name: str, size: int = 8, seed: Rng = 0) -> Module:
    """Build "mlp", "cnn", "resnet8" or "vgg6" for grey images of `size` × `size` pixels; see `data.model_inputs`."""
    builders: dict[str, Callable[[], Module]] = {
        "mlp": lambda: mlp(size * size, seed=seed),
        "cnn": lambda: cnn(1, size, seed=seed),
        "resnet8": lambda: resnet8(seed=seed),
        "vgg6": lambda: vgg6(seed=seed),
    }
    if name not in builders:
        raise ConfigurationError(f"there is no image model {name!r}; choose one of {', '.join(builders)}")
    return builders[name]()


def gpt(size: str = "4x128", vocab: int = 65, context: int = 256, seed: Rng = 0) -> GPT:
    """Build a GPT of size "4x128" (0.8 million parameters), "6x384" (10.8) or "12x768" (85)."""
    if size not in GPT_SIZES:
        raise ConfigurationError(f"there is no gpt of size {size!r}; choose one of {', '.join(GPT_SIZES)}")
    layers, width, heads = GPT_SIZES[size]
    return GPT(layers, width, heads, vocab, context, seed)
