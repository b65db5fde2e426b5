"""Structured pruning: remove whole filters (Li et al. 2017), or hidden units of a network without convolutions.

`shrink` returns a smaller dense model: each removed filter takes along its bias and its channel in a batch norm, and
the layers that read it lose the matching inputs, through pooling and flattening. Where residual branches are added,
both keep the same channels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError, ShapeError, type_name
from tilewise.models import ResidualBlock, ResNet8
from tilewise.nn import Module
from tilewise.nn.module import Buffer, Parameter
from tilewise.prune.masks import checked_sparsity, checked_weights

Array = npt.NDArray[Any]


def prune_conv_filters(conv_layer: nn.Conv2d, sparsity: float = 0.5) -> tuple[nn.Conv2d, Array]:
    """Remove the filters with the smallest L2 norms; return the smaller layer and the sorted indices of its filters."""
    _check_groups(conv_layer)
    channels = select_channels([conv_layer], sparsity)
    return smaller_conv(conv_layer, channels, None), channels


def shrink(model: Module, sparsity: float = 0.5) -> Module:
    """Copy a Sequential network or a ResNet8 without the fraction `sparsity` of each layer's filters.

    A network without convolutions loses this fraction of the units of each hidden linear layer.

    >>> from tilewise import models
    >>> sum(p.size for p in shrink(models.vgg6(), 0.5).parameters()), sum(p.size for p in models.vgg6().parameters())
    (140714, 557898)
    """
    checked_sparsity(sparsity)
    if isinstance(model, ResNet8):
        return _shrink_resnet8(copy.deepcopy(model), sparsity)
    if isinstance(model, nn.Sequential):
        return _shrink_sequential(copy.deepcopy(model), sparsity)
    raise ConfigurationError(f"shrink supports Sequential models and ResNet8, not {type_name(model)}")


def select_channels(layers: Sequence[nn.Conv2d | nn.Linear], sparsity: float) -> Array:
    """Return the channels to keep, by the filters' norms summed over `layers`, whose outputs are added."""
    checked_sparsity(sparsity)
    norms: Array = np.sum([_norms(layer) for layer in layers], 0)
    keep = len(norms) - round(sparsity * len(norms))
    if keep < 1:
        outputs = "convolution of {} filters" if isinstance(layers[0], nn.Conv2d) else "layer of {} units"
        raise ConfigurationError(f"at {sparsity:.0%} a {outputs.format(len(norms))} would lose them all")
    return np.sort(np.argsort(-norms, kind="stable")[:keep])


def _norms(layer: nn.Conv2d | nn.Linear) -> Array:
    """Return the L2 norm of each filter, or of each row of a linear layer."""
    w = checked_weights(layer.weight.data)
    norms: Array = np.sqrt((w.reshape(len(w), -1).astype(np.float64) ** 2).sum(1))
    return norms


def _check_groups(conv: nn.Conv2d) -> None:
    """Raise `ConfigurationError` unless the layer is an `nn.Conv2d` without groups."""
    if not isinstance(conv, nn.Conv2d):
        raise ConfigurationError(f"filters are removed from an nn.Conv2d, not from a {type_name(conv)}")
    if conv.groups != 1:
        raise ConfigurationError("shrink does not support convolutions with groups")


def _copy_with(layer: Any, **attributes: Any) -> Any:
    """Return a copy of a layer with some attributes replaced."""
    small = copy.copy(layer)
    for name, value in attributes.items():
        setattr(small, name, value)
    return small


def smaller_conv(conv: nn.Conv2d, outputs: Array | None, inputs: Array | None) -> nn.Conv2d:
    """Copy a convolution with only these output and input channels."""
    _check_groups(conv)
    weight, bias = conv.weight.data, conv.bias
    if outputs is not None:
        weight, bias = weight[outputs], None if bias is None else Parameter(bias.data[outputs])
    weight = np.array(weight if inputs is None else weight[:, inputs], order="C")
    small: nn.Conv2d = _copy_with(conv, weight=Parameter(weight), bias=bias)
    small.out_channels, small.in_channels = weight.shape[:2]
    return small


def smaller_norm(norm: nn.BatchNorm2d, channels: Array) -> nn.BatchNorm2d:
    """Copy a batch norm with only these channels."""
    parameters = {name: Parameter(getattr(norm, name).data[channels]) for name in ("weight", "bias")}
    buffers = {name: Buffer(getattr(norm, name).data[channels]) for name in ("running_mean", "running_var")}
    small: nn.BatchNorm2d = _copy_with(norm, num_features=len(channels), **parameters, **buffers)
    return small


def smaller_linear(linear: nn.Linear, channels: Array, channel_count: int) -> nn.Linear:
    """Copy a linear layer with the inputs of only these of `channel_count` channels.

    After flattening an image, each channel is several consecutive inputs.
    """
    per_channel, remainder = divmod(linear.in_features, channel_count)
    if remainder:
        raise ShapeError(f"{linear.in_features} inputs are not a multiple of {channel_count} channels")
    # Input columns of the remaining channels.
    columns = (channels[:, None] * per_channel + np.arange(per_channel)).reshape(-1)
    weight = np.array(linear.weight.data[:, columns], order="C")
    small: nn.Linear = _copy_with(linear, in_features=len(columns), weight=Parameter(weight))
    return small


def _linear_with_units(linear: nn.Linear, units: Array) -> nn.Linear:
    """Copy a linear layer with only these outputs."""
    bias = None if linear.bias is None else Parameter(linear.bias.data[units])
    weight = Parameter(np.array(linear.weight.data[units], order="C"))
    small: nn.Linear = _copy_with(linear, out_features=len(units), weight=weight, bias=bias)
    return small


# Layers that keep the order of channels, so that pruned channels pass through them.
_TRANSPARENT = (nn.ReLU, nn.GELU, nn.MaxPool2d, nn.AvgPool2d, nn.Dropout, nn.Flatten)


def _shrink_sequential(model: Any, sparsity: float) -> Module:
    """Remove filters of every convolution but a final one, in place, and shrink the layers after them.

    Without convolutions, remove units of every linear layer but the last.
    """
    layers = list(model.named_children())
    has_filters = any(isinstance(layer, nn.Conv2d) for _, layer in layers)
    last = max((i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Conv2d | nn.Linear)), default=-1)
    channels: Array | None = None  # remaining output channels of the last convolution; None if all remain
    channel_count = 0
    for index, (name, layer) in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            outputs = None if index == last else select_channels([layer], sparsity)
            setattr(model, name, smaller_conv(layer, outputs, channels))
            channels, channel_count = outputs, layer.out_channels
        elif isinstance(layer, nn.Linear):
            small = layer if channels is None else smaller_linear(layer, channels, channel_count)
            channels = None if has_filters or index == last else select_channels([layer], sparsity)
            setattr(model, name, small if channels is None else _linear_with_units(small, channels))
            channel_count = layer.out_features
        elif channels is None:
            continue
        elif isinstance(layer, nn.BatchNorm2d):
            setattr(model, name, smaller_norm(layer, channels))
        elif not isinstance(layer, _TRANSPARENT) and type(layer).__name__ != "GlobalAvgPool":
            raise ConfigurationError(f"shrink does not support {type(layer).__name__} after a pruned layer")
    out: Module = model
    return out


def _shrink_resnet8(model: ResNet8, sparsity: float) -> Module:
    """Remove filters of a ResNet8 in place; convolutions whose outputs are added keep equal channels."""
    blocks = [model.block1, model.block2, model.block3]
    added: list[nn.Conv2d] = [model.conv]  # convolutions whose outputs are added in the current stage
    stages: list[list[nn.Conv2d]] = []
    for block in blocks:
        if block.skip is None:
            added.append(block.conv2)
        else:  # the skip convolution starts a new stage
            stages.append(added)
            added = [block.conv2, block.skip]
    stages.append(added)
    channels = [select_channels(stage, sparsity) for stage in stages]
    width, stage = model.fc.in_features, 0
    model.conv = smaller_conv(model.conv, channels[0], None)
    for block in blocks:
        input_stage = stage
        stage += block.skip is not None
        _shrink_block(block, channels[input_stage], channels[stage], sparsity)
    model.fc = smaller_linear(model.fc, channels[-1], width)
    return model


def _shrink_block(block: ResidualBlock, inputs: Array, outputs: Array, sparsity: float) -> None:
    """Remove channels of a residual block in place; `inputs` and `outputs` are those to keep."""
    inner = select_channels([block.conv1], sparsity)
    block.conv1 = smaller_conv(block.conv1, inner, inputs)
    block.conv2 = smaller_conv(block.conv2, outputs, inner)
    if block.skip is not None:
        block.skip = smaller_conv(block.skip, outputs, inputs)
