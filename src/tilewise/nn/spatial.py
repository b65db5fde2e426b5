"""More layers for images: transposed convolution, upsampling, group normalisation."""

from __future__ import annotations

import numpy as np

from tilewise.errors import ShapeError
from tilewise.nn import functional as F
from tilewise.nn.layers import Rng, _bound, uniform
from tilewise.nn.module import Module, Parameter
from tilewise.tensor import Tensor


class ConvTranspose2d(Module):
    """Transposed convolution with weight (in, out/groups, kh, kw)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: F.Size,
        stride: F.Size = 1,
        padding: F.Size = 0,
        output_padding: F.Size = 0,
        groups: int = 1,
        bias: bool = True,
        rng: Rng = None,
    ) -> None:
        """Check the groups and draw the initial weights."""
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ShapeError(f"{in_channels} and {out_channels} channels cannot be divided into {groups} groups")
        rng = np.random.default_rng(rng)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.padding = F.pair(kernel_size), F.pair(stride), F.pair(padding)
        self.output_padding = F.pair(output_padding)
        bound = _bound(out_channels // groups * self.kernel_size[0] * self.kernel_size[1])
        self.weight = uniform(rng, (in_channels, out_channels // groups, *self.kernel_size), bound)
        self.bias = uniform(rng, (out_channels,), bound) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"stride": self.stride, "padding": self.padding, "output_padding": self.output_padding}
        return F.conv_transpose2d(x, self.weight, self.bias, groups=self.groups, **sizes)


class Upsample(Module):
    """Resize images by `scale_factor` with nearest or bilinear interpolation."""

    def __init__(self, scale_factor: float, mode: str = "nearest", align_corners: bool = False) -> None:
        self.scale_factor, self.mode, self.align_corners = scale_factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, self.scale_factor, self.mode, self.align_corners)


class GroupNorm(Module):
    """Group normalisation (Wu and He 2018): normalise each group of channels, then scale and shift each channel."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5) -> None:
        """Create scale 1 and shift 0 per channel; the groups must divide the channels."""
        if num_groups < 1 or num_channels % num_groups:
            raise ShapeError(f"{num_channels} channels cannot be divided into {num_groups} groups")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = Parameter(np.ones(num_channels, np.float32))
        self.bias = Parameter(np.zeros(num_channels, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
