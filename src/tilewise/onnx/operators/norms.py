"""ONNX operations that normalise: by batch, layer, group, instance, channel neighbours, or length."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.errors import ShapeError
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, array, is_float, operator, tensor
from tilewise.tensor import Tensor


@operator("BatchNormalization")
def _batch_norm(node: OnnxNode, x: Value, weight: Value, bias: Value, mean: Value, var: Value) -> Any:
    if not is_float(x, weight, bias, mean, var) or mean.shape != weight.shape or var.shape != weight.shape:
        raise ShapeError(f"{node} has statistics of shape {mean.shape} and a weight of shape {weight.shape}")
    eps, old = node.get("epsilon", 1e-5), (tensor(mean), tensor(var))
    if not node.get("training_mode", 0):
        return F.batch_norm(tensor(x), *old, tensor(weight), tensor(bias), eps=eps)
    result = F.batch_norm(tensor(x), None, None, tensor(weight), tensor(bias), eps=eps)  # as weights are standardised
    if len(node.outputs) == 1:
        return result
    axes, momentum = tuple(a for a in range(len(x.shape)) if a != 1), node.get("momentum", 0.9)
    statistics = tensor(x).mean(axes), tensor(x).var(axes, correction=0)
    return result, *(before * momentum + now * (1 - momentum) for before, now in zip(old, statistics, strict=True))


@operator("LayerNormalization")
def _layer_norm(node: OnnxNode, x: Value, weight: Value, bias: Value | None = None) -> Any:
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {array(x).dtype} of shape {x.shape}")
    inner, eps = tuple(x.shape[axis:]), node.get("epsilon", 1e-5)
    scale = tensor(weight)
    scale = scale if scale.shape == inner else scale.expand(*inner).contiguous()
    shift = Tensor(np.zeros(inner, scale.dtype)) if bias is None else tensor(bias)
    shift = shift if shift.shape == inner else shift.expand(*inner).contiguous()
    result = F.layer_norm(tensor(x), scale, shift, eps)
    if len(node.outputs) == 1:
        return result
    axes = tuple(range(axis, len(x.shape)))
    return result, tensor(x).mean(axes, True), 1.0 / (tensor(x).var(axes, True, 0) + eps).sqrt()


@operator("RMSNormalization")
def _rms_norm(node: OnnxNode, x: Value, weight: Value) -> Value:
    axis = node.get("axis", -1)
    axis = axis + len(x.shape) if axis < 0 else axis
    if not 0 <= axis < len(x.shape) or not is_float(x, weight):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape}")
    t, axes = tensor(x), tuple(range(axis, len(x.shape)))
    size: Tensor = ((t * t).mean(axes, True) + node.get("epsilon", 1e-5)).sqrt()
    return t / size * tensor(weight)


@operator("InstanceNormalization")
def _instance_norm(node: OnnxNode, x: Value, weight: Value, bias: Value) -> Value:
    if len(x.shape) < 3 or not is_float(x, weight, bias):
        raise ShapeError(f"{node} takes images, not a tensor of shape {x.shape}")
    return F.group_norm(tensor(x), x.shape[1], tensor(weight), tensor(bias), node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(node: OnnxNode, x: Value, weight: Value, bias: Value) -> Value:
    groups = node.get("num_groups", 1)
    if len(x.shape) < 3 or not is_float(x, weight, bias) or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"{node} cuts a tensor of shape {x.shape} into {groups} groups")
    scale, shift = tensor(weight), tensor(bias)
    if node.opset < 21 and scale.shape == (groups,):  # before version 21: one number a group
        each = np.repeat(np.arange(groups), x.shape[1] // groups)
        scale, shift = scale[each], shift[each]
    return F.group_norm(tensor(x), groups, scale, shift, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def _lp_norm(node: OnnxNode, x: Value) -> Value:
    axis, p, t = node.get("axis", -1), node.get("p", 2), tensor(x)
    if not -t.ndim <= axis < t.ndim or p not in (1, 2):
        raise ShapeError(f"{node} normalises axis {axis} of {x.shape} by the {p}-norm")
    size = abs(t).sum(axis, True) if p == 1 else (t * t).sum(axis, True).sqrt()
    result: Tensor = t / (size + Tensor((size.data == 0).astype(t.dtype)))  # nothing but zeros stays zeros
    return result


@operator("LRN")
def _lrn(node: OnnxNode, x: Value) -> Value:
    size = node.get("size", 1)
    if len(x.shape) < 3 or not 1 <= size <= 2 * x.shape[1] + 1 or not is_float(x):
        raise ShapeError(f"{node} normalises over {size} channels of {x.shape}")
    t = tensor(x)
    before = (size - 1) // 2
    squares = (t * t).pad([(0, 0), (before, size - 1 - before), *[(0, 0)] * (t.ndim - 2)])
    total = squares[:, : t.shape[1]]
    for i in range(1, size):
        total = total + squares[:, i : i + t.shape[1]]
    scale = total * (node.get("alpha", 1e-4) / size) + node.get("bias", 1.0)
    result: Tensor = t / scale ** node.get("beta", 0.75)
    return result
