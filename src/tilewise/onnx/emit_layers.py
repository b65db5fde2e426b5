"""The operations of layers as ONNX nodes: products, convolutions, pooling, norms, attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.graph.ir import Value
from tilewise.onnx.emit import Emission, emits, gelu


def finish(e: Emission, y: str) -> str:
    """Write the fused residual and activation of a product."""
    residual = e.param("residual")
    if residual is not None:
        y = e.node("Add", y, e.name_of(residual))
    activation = e.param("activation")
    if activation == "relu":
        return e.node("Relu", y)
    return gelu(e, y) if activation == "gelu" else y


@emits("Linear")
def _linear(e: Emission) -> str:
    x, weight = e.inputs[:2]
    if len(e.call.input_shapes[0]) == 2:
        return finish(e, e.node("Gemm", *e.inputs, transB=1))
    source = e.call.inputs[1]
    if isinstance(source, Value):
        transposed = e.node("Transpose", weight, perm=[1, 0])
    else:  # a constant is written the other way round instead
        transposed = e.graph.weight(np.ascontiguousarray(source.T), f"{weight}.T")
    y = e.node("MatMul", x, transposed)
    return finish(e, y if len(e.inputs) == 2 else e.node("Add", y, e.inputs[2]))


def sides(padding: Any) -> list[int]:
    """(rows, columns) or (top, left, bottom, right), as ONNX says it."""
    return [*padding, *padding] if len(padding) == 2 else list(padding)


@emits("Conv2d")
def _conv(e: Emission) -> str:
    settings = {"strides": list(e.param("stride")), "pads": sides(e.param("padding")), "group": e.param("groups")}
    y = e.node("Conv", *e.inputs, **settings, dilations=list(e.param("dilation", (1, 1))))
    return finish(e, y)


@emits("ConvTranspose2d")
def _conv_transpose(e: Emission) -> str:
    settings = {"strides": list(e.param("stride")), "pads": sides(e.param("padding")), "group": e.param("groups")}
    return e.node("ConvTranspose", *e.inputs, **settings, output_padding=list(e.param("output_padding")))


@emits("MaxPool2d", "AvgPool2d")
def _pool(e: Emission) -> str:
    settings = {
        "kernel_shape": list(e.param("kernel")),
        "strides": list(e.param("stride")),
        "pads": sides(e.param("padding")),
    }
    if e.call.operation.__name__ == "MaxPool2d":
        return e.node("MaxPool", e.inputs[0], **settings)
    return e.node("AveragePool", e.inputs[0], **settings, count_include_pad=1)


@emits("GlobalAvgPool")
def _global_pool(e: Emission) -> str:
    return e.node("Flatten", e.node("GlobalAveragePool", e.inputs[0]), axis=1)


@emits("LayerNorm")
def _layer_norm(e: Emission) -> str:
    return e.node("LayerNormalization", *e.inputs, axis=-len(e.call.input_shapes[1]), epsilon=e.param("eps"))


@emits("FixedNorm")
def _fixed_norm(e: Emission) -> str:
    mean, var = (e.name_of(e.param(n)) for n in ("mean", "var"))
    return e.node("BatchNormalization", *e.inputs, mean, var, epsilon=e.param("eps"))


@emits("Attention")
def _attention(e: Emission) -> str:
    (_, _, t, d), (_, _, s, _) = e.call.input_shapes[:2]
    scale = e.param("scale")
    return attend(
        e, e.inputs, (t, s), 1 / math.sqrt(d) if scale is None else scale, bool(e.param("causal")), e.param("mask")
    )


def attend(e: Emission, qkv: list[str], size: tuple[int, int], scale: float, causal: bool, mask: Any) -> str:
    """softmax(q kᵀ · scale + mask) v."""
    q, k, v = qkv
    scores = e.node("MatMul", e.node("Mul", q, e.number(scale)), e.node("Transpose", k, perm=[0, 1, 3, 2]))
    if causal:
        t, s = size
        visible = np.tril(np.ones((t, s), bool), s - t)
        scores = e.node("Add", scores, e.graph.constant(np.where(visible, 0, -np.inf), e.call.dtype))
    if mask is not None:
        scores = _masked(e, scores, mask)
    return e.node("MatMul", e.node("Softmax", scores, axis=-1), v)


def _masked(e: Emission, scores: str, mask: Any) -> str:
    if isinstance(mask, Value):
        return e.node("Where", e.name_of(mask), scores, e.number(-np.inf))
    added = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask
    return e.node("Add", scores, e.graph.constant(added, e.call.dtype))


@emits("PackedAttention")
def _packed_attention(e: Emission) -> str:
    _, t, width = e.call.shape
    heads = e.param("heads")
    apart = e.node("Reshape", e.inputs[0], e.graph.constant([0, 0, 3, heads, width // heads]))
    parts = e.graph.node("Split", [e.node("Transpose", apart, perm=[2, 0, 3, 1, 4])], 3, axis=0)
    qkv = [e.node("Squeeze", part, e.graph.constant([0])) for part in parts]
    mixed = attend(e, qkv, (t, t), 1 / math.sqrt(width // heads), True, None)
    return e.node("Reshape", e.node("Transpose", mixed, perm=[0, 2, 1, 3]), e.graph.constant([0, 0, width]))
