"""Conversion of ONNX nodes to layers of `nn`, which then have their weights as the layers of any model do.

A convolution, a linear layer, a norm or an activation that nn has becomes that very layer, so that what works on layers
(quantizing, pruning, tuning, folding norms) works on networks that were loaded. Everything else runs as an `Operator`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tilewise import nn
from tilewise.graph.ir import Array, unique_name
from tilewise.nn import Buffer, Module, Parameter, Sequential
from tilewise.onnx.graph import OnnxGraph, OnnxNode
from tilewise.onnx.operators import TABLE

Weights = list[Array | None]  # of a node's inputs: the constant, or None where it is computed
Build = Callable[[OnnxNode, Weights], Module | None]
_BUILDERS: dict[str, Build] = {}


class Operator(Module):
    """Module for a node without a counterpart in nn; its subclass has the operation's name, for reports."""

    takes_arrays = True

    def __init__(self, node: OnnxNode) -> None:
        self.node = node

    def forward(self, *values: Any) -> Any:
        return TABLE[self.node.op](self.node, *values)


@cache
def _operator_class(op: str) -> type[Operator]:
    return type(op, (Operator,), {})


def operation(node: OnnxNode) -> Operator:
    """Wrap a node as a module named after its operation."""
    return _operator_class(node.op)(node)


def layer_for(node: OnnxNode, weights: Weights) -> Module | None:
    """Return the layer of nn that computes a node from its first input and constant weights; else None."""
    build = _BUILDERS.get(node.op)
    if build is None or not weights or weights[0] is not None or len(node.outputs) != 1:
        return None
    return build(node, weights if len(weights) > 1 else [*weights, None])


def _builds(*names: str) -> Callable[[Build], Build]:
    """Register the decorated function as the builder of layers for these ONNX operators."""

    def mark(build: Build) -> Build:
        for name in names:
            _BUILDERS[name] = build
        return build

    return mark


def _blank(kind: type[Module], **facts: Any) -> Any:
    """Create a layer with these attributes, skipping its constructor, which would draw random weights."""
    layer = kind.__new__(kind)
    for name, value in facts.items():
        setattr(layer, name, value)
    return layer


def _is_float(*arrays: Array | None) -> bool:
    return all(a is not None and a.dtype == np.float32 for a in arrays)


def _pair(node: OnnxNode, name: str, default: int) -> tuple[int, int] | None:
    """Return an attribute of two integers, such as strides; None if it has another length."""
    pair = node.attributes.get(name, (default, default))
    fits = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) and 0 <= n < 1 << 31 for n in pair)
    return (pair[0], pair[1]) if fits else None


def _padding(node: OnnxNode) -> tuple[int, ...] | None:
    """Convert a node's padding to `nn.Conv2d`'s: (rows, columns), or (top, left, bottom, right) if sides differ.

    None for `auto_pad=SAME_*`, whose padding depends on the size of the input.
    """
    pads = node.attributes.get("pads", (0, 0, 0, 0))
    if node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or not isinstance(pads, tuple):
        return None
    if node.attributes.get("auto_pad") == "VALID":
        return (0, 0)
    if len(pads) != 4 or not all(isinstance(n, int) and 0 <= n < 1 << 16 for n in pads):
        return None
    return pads[:2] if pads[:2] == pads[2:] else pads


@_builds("Conv")
def _conv(node: OnnxNode, weights: Weights) -> Module | None:
    """Build nn.Conv2d from constant float32 filters; None if the node has settings that the layer lacks."""
    weight, bias = weights[1], weights[2] if len(weights) > 2 else None
    padding, stride, dilation = _padding(node), _pair(node, "strides", 1), _pair(node, "dilations", 1)
    groups = node.attributes.get("group", 1)
    if not _is_float(weight) or weight is None or weight.ndim != 4 or (len(node.inputs) > 2 and not _is_float(bias)):
        return None
    if padding is None or stride is None or dilation is None or min(*stride, *dilation) < 1 or not weight.size:
        return None
    if (
        not isinstance(groups, int)
        or groups < 1
        or weight.shape[0] % groups
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        return None
    o, i, kh, kw = weight.shape
    if node.attributes.get("kernel_shape", (kh, kw)) != (kh, kw):
        return None
    layer: Module = _blank(
        nn.Conv2d,
        in_channels=i * groups,
        out_channels=o,
        groups=groups,
        kernel_size=(kh, kw),
        stride=stride,
        padding=padding,
        dilation=dilation,
        weight=Parameter(weight),
        bias=None if bias is None else Parameter(bias),
    )
    return layer


@_builds("Gemm")
def _linear_from_gemm(node: OnnxNode, weights: Weights) -> Module | None:
    """Create a linear layer if weight and bias are constant and alpha and beta are 1; else return None."""
    weight, bias = weights[1], weights[2] if len(weights) > 2 else None
    if weight is None or not _is_float(weight) or weight.ndim != 2 or (len(node.inputs) > 2 and bias is None):
        return None
    if node.get("alpha", 1.0) != 1 or node.get("beta", 1.0) != 1 or node.get("transA", 0):
        return None
    rows_out = weight if node.get("transB", 0) else np.ascontiguousarray(weight.T)
    return linear(rows_out, bias) if bias is None or bias.shape == rows_out.shape[:1] else None


def linear(weight: Array, bias: Array | None) -> nn.Linear:
    """Create a linear layer from a weight (out, in)."""
    layer: nn.Linear = _blank(
        nn.Linear,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        weight=Parameter(weight),
        bias=None if bias is None else Parameter(bias),
    )
    return layer


@_builds("MatMul")
def _linear_from_matmul(node: OnnxNode, weights: Weights) -> Module | None:
    """Create a linear layer without bias if the second operand is a constant float matrix; else return None."""
    weight = weights[1] if len(weights) == 2 else None
    if weight is None or weight.ndim != 2 or not _is_float(weight):
        return None
    return linear(np.ascontiguousarray(weight.T), None)


@_builds("LayerNormalization")
def _layer_norm(node: OnnxNode, weights: Weights) -> Module | None:
    """Create a layer norm over the last axis if its weights are constant; else return None."""
    weight, bias = weights[1], weights[2] if len(weights) > 2 else None
    if weight is None or not _is_float(weight) or weight.ndim != 1 or node.get("axis", -1) != -1:
        return None
    bias = np.zeros_like(weight) if len(node.inputs) == 2 else bias
    if bias is None or bias.shape != weight.shape or not _is_float(bias):
        return None
    layer = nn.LayerNorm(weight.shape, node.get("epsilon", 1e-5))
    layer.weight, layer.bias = Parameter(weight), Parameter(bias)
    return layer


def batch_norm(node: OnnxNode, weights: Weights) -> nn.BatchNorm2d | None:
    """Create the layer of a batch norm over images, in eval mode."""
    arrays = weights[1:]
    if len(arrays) != 4 or not _is_float(*arrays) or node.get("training_mode", 0) or len(node.outputs) != 1:
        return None
    weight, bias, mean, var = (a for a in arrays if a is not None)
    if weight.ndim != 1 or not weight.shape == bias.shape == mean.shape == var.shape:
        return None
    layer = nn.BatchNorm2d(0, node.get("epsilon", 1e-5), 1 - node.get("momentum", 0.9))
    layer.num_features = len(weight)
    layer.weight, layer.bias = Parameter(weight), Parameter(bias)
    layer.running_mean, layer.running_var = Buffer(mean), Buffer(var)
    return layer


@_builds("MaxPool", "AveragePool")
def _pool(node: OnnxNode, _weights: Weights) -> Module | None:
    """Build a pooling layer; None if the node has settings that the layer lacks."""
    kernel, stride, padding = _pair(node, "kernel_shape", 1), _pair(node, "strides", 1), _padding(node)
    plain = not node.get("ceil_mode", 0) and set(node.attributes.get("dilations", (1,))) == {1}
    if kernel is None or stride is None or padding is None or not plain or min(*kernel, *stride) < 1:
        return None
    if len(padding) != 2:  # the pooling layers pad opposite sides alike
        return None
    if 2 * padding[0] > kernel[0] or 2 * padding[1] > kernel[1]:
        return None
    if node.op == "AveragePool" and any(padding) and not node.get("count_include_pad", 0):
        return None
    return (nn.MaxPool2d if node.op == "MaxPool" else nn.AvgPool2d)(kernel, stride, padding)


_ACTIVATIONS: dict[str, Callable[[OnnxNode], Module | None]] = {
    "Relu": lambda _: nn.ReLU(),
    "Sigmoid": lambda _: nn.Sigmoid(),
    "Tanh": lambda _: nn.Tanh(),
    "HardSwish": lambda _: nn.Hardswish(),
    "Gelu": lambda node: nn.GELU() if node.get("approximate", "none") == "none" else None,
    "LeakyRelu": lambda node: nn.LeakyReLU(node.get("alpha", 0.01)),
    "Elu": lambda node: nn.ELU(node.get("alpha", 1.0)),
    "Softmax": lambda node: nn.Softmax(node.get("axis", -1)),
}


@_builds(*_ACTIVATIONS)
def _activation(node: OnnxNode, _weights: Weights) -> Module | None:
    return _ACTIVATIONS[node.op](node)


@_builds("Flatten")
def _flatten(node: OnnxNode, _weights: Weights) -> Module | None:
    return nn.Flatten() if node.get("axis", 1) == 1 else None


@_builds("Reshape")
def _reshape(node: OnnxNode, weights: Weights) -> Module | None:
    """Return a `Flatten` layer for a Reshape to (0, -1); None for other shapes."""
    shape = weights[1] if len(weights) == 2 else None
    flattens = shape is not None and shape.shape == (2,) and shape.tolist() == [0, -1] and not node.get("allowzero", 0)
    return nn.Flatten() if flattens else None


@_builds("Clip")
def _clip(node: OnnxNode, weights: Weights) -> Module | None:
    bounds = [None if b is None else b.reshape(-1).tolist() for b in weights[1:]]
    return nn.ReLU6() if bounds == [[0.0], [6.0]] else None


# --- from nodes to layers ---


_FUSIBLE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class LayerCall:
    """One layer of a network: its name, the values it reads and computes, and the values freed afterwards."""

    layer: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    kinds: tuple[type, ...] = ()  # of the layer, or of the layers of a chain
    done: tuple[str, ...] = ()


def kinds_of(layer: Module) -> tuple[type, ...]:
    """Return the class of a layer, or the classes of the layers in a Sequential."""
    return tuple(map(type, layer)) if isinstance(layer, Sequential) else (type(layer),)


def with_ends(steps: list[LayerCall], outputs: set[str]) -> Iterator[LayerCall]:
    """Yield the layer calls, each with the values to free after it as `done`."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name in (*step.inputs, *step.outputs):
            last[name] = index
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        if name and name not in outputs:
            ends.setdefault(index, []).append(name)
    for index, step in enumerate(steps):
        yield replace(step, done=tuple(ends.get(index, ())))


def unique(name: str, used_names: set[str]) -> str:
    """Return a valid attribute name similar to `name`, not in `used_names`, and add it to them."""
    base = re.sub(r"[^0-9A-Za-z_.]+", "_", name.lstrip("/").replace("/", ".")) or "value"
    return unique_name(base, used_names, "_")


class Builder:
    """Converts a graph's nodes to layers of nn or single operations, fusing norms, biases and activations."""

    def __init__(self, graph: OnnxGraph, used_names: set[str]) -> None:
        """Convert all nodes in order; those fused into an earlier layer are skipped."""
        self.graph = graph
        self.layers: dict[str, Module] = {}
        self.steps: list[LayerCall] = []
        self.trained: list[str] = []  # constants that operations read and that may be trained
        self.read_names: set[str] = {port.name for port in graph.outputs}
        self.readers: dict[str, list[OnnxNode]] = {}
        for node in graph.nodes:
            for name in set(node.inputs):
                self.readers.setdefault(name, []).append(node)
        self._fused_nodes: set[int] = set()
        self._names = {*used_names, *_OWN}  # what no layer may be called
        self._images: set[str] = set()  # values that are surely (N, C, H, W)
        for node in graph.nodes:
            if id(node) not in self._fused_nodes:
                self._add(node)

    def _add(self, node: OnnxNode) -> None:
        """Add a node as a layer, with the nodes that can be fused into it, or as a single operation."""
        layer = self._layer(node)
        if layer is None:
            self._operation(node)
            return
        chain, modules = [node], [layer]
        if isinstance(layer, nn.Linear) and layer.bias is None:
            self._fuse_bias(chain, layer)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            self._fuse_followers(chain, modules)
        self._fused_nodes.update(id(n) for n in chain)
        module: Module = modules[0] if len(modules) == 1 else Sequential(*modules)
        data = next(n for n in node.inputs if n not in self.graph.constants)
        self._append(module, (data,), (chain[-1].outputs[0],), *chain)
        # The bounds of a clip and the target shape of a reshape are not weights.
        self.read_names.update(name for n in chain if n.op in ("Clip", "Reshape") for name in n.inputs[1:])
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            self._images.add(chain[-1].outputs[0])

    def _layer(self, node: OnnxNode) -> Module | None:
        """Return the layer that a node stands for; None if it must be a single operation."""
        weights = [self.graph.constants.get(name) if name else None for name in node.inputs]
        if node.op == "BatchNormalization":
            return batch_norm(node, weights) if node.inputs[0] in self._images else None
        return layer_for(node, weights)

    def _only_reader(self, value: str) -> OnnxNode | None:
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.read_names else None

    def _fuse_bias(self, chain: list[OnnxNode], layer: nn.Linear) -> None:
        """Fuse an Add of one number per output after a product, as the layer's bias."""
        after = self._only_reader(chain[-1].outputs[0])
        if after is None or after.op != "Add" or len(after.inputs) != 2:
            return
        other = after.inputs[1 if after.inputs[0] == chain[-1].outputs[0] else 0]
        bias = self.graph.constants.get(other)
        if bias is not None and bias.shape == (layer.out_features,) and bias.dtype == np.float32:
            layer.bias = Parameter(bias)
            chain.append(after)

    def _fuse_followers(self, chain: list[OnnxNode], modules: list[Module]) -> None:
        """Fuse a batch norm and an activation after the chain's last node, if nothing else reads its result."""
        after = self._only_reader(chain[-1].outputs[0])
        if after is not None and after.op == "BatchNormalization" and isinstance(modules[0], nn.Conv2d):
            self._images.add(chain[-1].outputs[0])
            norm = self._layer(after)
            if norm is None:
                return
            chain.append(after)
            modules.append(norm)
            after = self._only_reader(after.outputs[0])
        layer = None if after is None else self._layer(after)
        if after is not None and isinstance(layer, _FUSIBLE) and after.inputs[0] == chain[-1].outputs[0]:
            chain.append(after)
            modules.append(layer)

    def _operation(self, node: OnnxNode) -> None:
        """Append a node as a single operation; its float constants become trainable parameters."""
        for name in filter(None, node.inputs):
            constant = self.graph.constants.get(name)
            if constant is not None and constant.dtype == np.float32 and constant.size > 1 and name not in self.trained:
                self.trained.append(name)
            self.read_names.add(name) if constant is not None else None
        self._append(operation(node), node.inputs, node.outputs, node)

    def _append(self, layer: Module, inputs: tuple[str, ...], outputs: tuple[str, ...], *nodes: OnnxNode) -> None:
        """Append a call of `layer` under the first node's name, made unique."""
        name = unique(nodes[0].name, self._names)
        self.layers[name] = layer
        self.steps.append(LayerCall(name, inputs, outputs, nodes, kinds_of(layer)))


_OWN = ("inputs", "outputs", "opset", "title", "steps", "weights", "_names", "_constants", "training")
