"""Structured pruning: filters that go, with everything that belonged to them.

`shrink` gives a smaller dense model: a filter leaves with its bias and its place in a batch norm, and the layers that
read it lose the matching inputs, through pooling and flattening. Where residual paths meet, both sides keep the same
channels.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.models import ResidualBlock, ResNet8
from tilewise.nn import Module
from tilewise.nn.module import Parameter
from tilewise.prune.masks import checked_sparsity, checked_weights
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]


def prune_conv_filters(conv_layer: nn.Conv2d, sparsity: float = 0.5) -> tuple[nn.Conv2d, Array]:
    """A smaller Conv2d without the filters of smallest norm, and the indices of those that stay, in order."""
    _check_groups(conv_layer)
    kept = kept_channels([conv_layer], sparsity)
    return smaller_conv(conv_layer, kept, None), kept


def shrink(model: Module, sparsity: float = 0.5) -> Module:
    """A smaller dense copy of a Sequential network or a ResNet8, with `sparsity` of each layer's filters removed.

    >>> from tilewise import models
    >>> sum(p.size for p in shrink(models.vgg6(), 0.5).parameters()), sum(p.size for p in models.vgg6().parameters())
    (140714, 557898)
    """
    checked_sparsity(sparsity)
    if isinstance(model, ResNet8):
        return _shrink_resnet8(copy.deepcopy(model), sparsity)
    if isinstance(model, nn.Sequential):
        return _shrink_sequential(copy.deepcopy(model), sparsity)
    raise ConfigurationError(f"shrink knows Sequential models and ResNet8, not {type(model).__name__}")


def kept_channels(convs: list[nn.Conv2d], sparsity: float) -> Array:
    """The channels to keep where these convolutions' outputs meet: those whose filters have the largest norms."""
    checked_sparsity(sparsity)
    norms: Array = np.sum([_norms(conv) for conv in convs], 0)
    keep = len(norms) - round(sparsity * len(norms))
    if keep < 1:
        raise ConfigurationError(f"at {sparsity:.0%} a convolution of {len(norms)} filters would lose them all")
    return np.sort(np.argsort(-norms, kind="stable")[:keep])


def _norms(conv: nn.Conv2d) -> Array:
    w = checked_weights(conv.weight.data)
    norms: Array = np.sqrt((w.reshape(len(w), -1).astype(np.float64) ** 2).sum(1))
    return norms


def _check_groups(conv: nn.Conv2d) -> None:
    if conv.groups != 1:
        raise ConfigurationError("a convolution with groups ties its filters to inputs; shrink it by hand")


def smaller_conv(conv: nn.Conv2d, outputs: Array | None, inputs: Array | None) -> nn.Conv2d:
    """`conv` with only these outputs and inputs."""
    _check_groups(conv)
    weight = conv.weight.data
    weight = weight if outputs is None else weight[outputs]
    weight = weight if inputs is None else weight[:, inputs]
    how = {"bias": conv.bias is not None, "dilation": conv.dilation, "rng": 0}
    small = nn.Conv2d(weight.shape[1], weight.shape[0], conv.kernel_size, conv.stride, conv.padding, **how)  # type: ignore[arg-type]
    small.weight = Parameter(np.array(weight, order="C"))
    if conv.bias is not None:
        small.bias = Parameter(np.array(conv.bias.data if outputs is None else conv.bias.data[outputs]))
    return small


def smaller_norm(norm: nn.BatchNorm2d, kept: Array) -> nn.BatchNorm2d:
    small = nn.BatchNorm2d(len(kept), norm.eps, norm.momentum)
    small.weight, small.bias = Parameter(norm.weight.data[kept]), Parameter(norm.bias.data[kept])
    small.running_mean, small.running_var = Tensor(norm.running_mean.data[kept]), Tensor(norm.running_var.data[kept])
    small.training = norm.training
    return small


def smaller_linear(linear: nn.Linear, channels: Array, of: int) -> nn.Linear:
    """`linear` reading only these of `of` channels, each of which may be several inputs (a flattened image)."""
    per_channel, rest = divmod(linear.in_features, of)
    if rest:
        raise ShapeError(f"{linear.in_features} inputs do not come from {of} channels")
    columns = (channels[:, None] * per_channel + np.arange(per_channel)).reshape(-1)
    small = nn.Linear(len(columns), linear.out_features, bias=linear.bias is not None, rng=0)
    small.weight = Parameter(np.array(linear.weight.data[:, columns], order="C"))
    if linear.bias is not None:
        small.bias = Parameter(np.array(linear.bias.data))
    return small


_TRANSPARENT = (nn.ReLU, nn.GELU, nn.MaxPool2d, nn.AvgPool2d, nn.Dropout, nn.Flatten)


def _shrink_sequential(model: Any, sparsity: float) -> Module:
    layers = list(model.named_children())
    last = max((i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Conv2d | nn.Linear)), default=-1)
    kept: Array | None = None  # channels that are left of what the last convolution gave
    channels = 0
    for index, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            outputs = None if index == last else kept_channels([layer], sparsity)
            setattr(model, name, smaller_conv(layer, outputs, kept))
            kept, channels = outputs, layer.out_channels
        elif kept is None:
            continue
        elif isinstance(layer, nn.BatchNorm2d):
            setattr(model, name, smaller_norm(layer, kept))
        elif isinstance(layer, nn.Linear):
            setattr(model, name, smaller_linear(layer, kept, channels))
            kept = None
        elif not isinstance(layer, _TRANSPARENT) and type(layer).__name__ != "GlobalAvgPool":
            raise ConfigurationError(f"shrink does not know how {type(layer).__name__} passes channels on")
    out: Module = model
    return out


def _shrink_resnet8(model: ResNet8, sparsity: float) -> Module:
    blocks = [model.block1, model.block2, model.block3]
    joined: list[nn.Conv2d] = [model.conv]  # convolutions whose outputs are added up in the current stage
    stages: list[list[nn.Conv2d]] = []
    for block in blocks:
        if block.skip is None:
            joined.append(block.conv2)
        else:
            stages.append(joined)
            joined = [block.conv2, block.skip]
    stages.append(joined)
    kept = [kept_channels(stage, sparsity) for stage in stages]
    width, stage = model.fc.in_features, 0
    model.conv = smaller_conv(model.conv, kept[0], None)
    for block in blocks:
        before = stage
        stage += block.skip is not None
        _shrink_block(block, kept[before], kept[stage], sparsity)
    model.fc = smaller_linear(model.fc, kept[-1], width)
    return model


def _shrink_block(block: ResidualBlock, inputs: Array, outputs: Array, sparsity: float) -> None:
    inner = kept_channels([block.conv1], sparsity)
    block.conv1 = smaller_conv(block.conv1, inner, inputs)
    block.conv2 = smaller_conv(block.conv2, outputs, inner)
    if block.skip is not None:
        block.skip = smaller_conv(block.skip, outputs, inputs)
