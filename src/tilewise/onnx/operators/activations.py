"""ONNX's activations with settings of their own."""

from __future__ import annotations

from tilewise import ops
from tilewise.nn import functional as F
from tilewise.onnx.graph import OnnxNode
from tilewise.onnx.operators.base import Value, broadcast, choice, operator, tensor
from tilewise.onnx.operators.elementwise import float_only
from tilewise.tensor import apply, where


@operator("LeakyRelu")
def _leaky_relu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return F.leaky_relu(tensor(x), node.get("alpha", 0.01))


@operator("PRelu")
def _prelu(node: OnnxNode, x: Value, slope: Value) -> Value:
    float_only(node, x, slope)
    broadcast(x, slope)
    t = tensor(x)
    return t.relu() - (-t).relu() * tensor(slope)


@operator("Elu")
def _elu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return apply(ops.Elu, tensor(x), alpha=node.get("alpha", 1.0))


@operator("Selu")
def _selu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return apply(ops.Elu, tensor(x), alpha=alpha, scale=gamma)


@operator("Celu")
def _celu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    alpha = node.get("alpha", 1.0)
    return apply(ops.Elu, tensor(x), alpha=alpha, width=alpha)


@operator("HardSigmoid")
def _hard_sigmoid(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    return apply(ops.HardSigmoid, tensor(x), slope=node.get("alpha", 0.2), offset=node.get("beta", 0.5))


@operator("ThresholdedRelu")
def _thresholded(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return where(t > node.get("alpha", 1.0), t, 0.0)


@operator("Softsign")
def _softsign(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return t / (abs(t) + 1.0)


@operator("Mish")
def _mish(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t = tensor(x)
    return t * F.softplus(t).tanh()


@operator("Swish")
def _swish(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    t, alpha = tensor(x), node.get("alpha", 1.0)
    return F.silu(t) if alpha == 1 else t * (t * alpha).sigmoid()


@operator("Gelu")
def _gelu(node: OnnxNode, x: Value) -> Value:
    float_only(node, x)
    exact = choice(node, "approximate", "none", ("none", "tanh")) == "none"
    return F.gelu(tensor(x)) if exact else F.gelu_tanh(tensor(x))
