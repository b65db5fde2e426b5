"""Building a network from nodes: layers of nn where they exist, with the norm and activation behind a convolution."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilewise import nn
from tilewise.nn import Module, Parameter, Sequential
from tilewise.onnx import layers
from tilewise.onnx.graph import OnnxGraph, OnnxNode

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class LayerCall:
    """One layer of the network: its name, the values it reads ("" for none), those it makes, and what to let go."""

    layer: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    done: tuple[str, ...] = ()


def with_ends(steps: list[LayerCall], outputs: set[str]) -> Iterator[LayerCall]:
    """The steps, each knowing which values nobody reads after it."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name in (*step.inputs, *step.outputs):
            last[name] = index
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        if name and name not in outputs:
            ends.setdefault(index, []).append(name)
    for index, step in enumerate(steps):
        yield LayerCall(step.layer, step.inputs, step.outputs, step.nodes, tuple(ends.get(index, ())))


def unique(name: str, used_names: set[str]) -> str:
    """An attribute's name close to a node's or value's, which none of `taken` has; it is taken from now on."""
    base = re.sub(r"[^0-9A-Za-z_.]+", "_", name.lstrip("/").replace("/", ".")) or "value"
    candidate, count = base, 1
    while candidate in used_names:
        count += 1
        candidate = f"{base}_{count}"
    used_names.add(candidate)
    return candidate


class Builder:
    """Turns nodes into steps: layers where nn has them, with what a convolution takes along."""

    def __init__(self, graph: OnnxGraph, used_names: set[str]) -> None:
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
        layer = self._layer(node)
        if layer is None:
            self._operation(node)
            return
        chain, modules = [node], [layer]
        if isinstance(layer, nn.Linear) and layer.bias is None:
            self._take_bias(chain, layer)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            self._take_along(chain, modules)
        self._fused_nodes.update(id(n) for n in chain)
        module: Module = modules[0] if len(modules) == 1 else Sequential(*modules)
        data = next(n for n in node.inputs if n not in self.graph.constants)
        self.steps.append(LayerCall(self._name(node, module), (data,), (chain[-1].outputs[0],), tuple(chain)))
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            self._images.add(chain[-1].outputs[0])

    def _layer(self, node: OnnxNode) -> Module | None:
        weights = [self.graph.constants.get(name) if name else None for name in node.inputs]
        if node.op == "BatchNormalization":
            return layers.batch_norm(node, weights) if node.inputs[0] in self._images else None
        return layers.layer_for(node, weights)

    def _only_reader(self, value: str) -> OnnxNode | None:
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.read_names else None

    def _take_bias(self, chain: list[OnnxNode], layer: nn.Linear) -> None:
        """An addition of one number per output behind a product is the layer's bias."""
        after = self._only_reader(chain[-1].outputs[0])
        if after is None or after.op != "Add" or len(after.inputs) != 2:
            return
        other = after.inputs[1 if after.inputs[0] == chain[-1].outputs[0] else 0]
        bias = self.graph.constants.get(other)
        if bias is not None and bias.shape == (layer.out_features,) and bias.dtype == np.float32:
            layer.bias = Parameter(bias)
            chain.append(after)

    def _take_along(self, chain: list[OnnxNode], modules: list[Module]) -> None:
        """A batch norm and an activation that alone read a convolution's result, the activation of a linear layer."""
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
        if after is not None and isinstance(layer, _ACTIVATIONS) and after.inputs[0] == chain[-1].outputs[0]:
            chain.append(after)
            modules.append(layer)

    def _operation(self, node: OnnxNode) -> None:
        for name in filter(None, node.inputs):
            constant = self.graph.constants.get(name)
            if constant is not None and constant.dtype == np.float32 and constant.size > 1 and name not in self.trained:
                self.trained.append(name)
            self.read_names.add(name) if constant is not None else None
        self.steps.append(LayerCall(self._name(node, layers.operation(node)), node.inputs, node.outputs, (node,)))

    def _name(self, node: OnnxNode, layer: Module) -> str:
        name = unique(node.name, self._names)
        self.layers[name] = layer
        return name


_OWN = ("inputs", "outputs", "opset", "title", "steps", "weights", "_names", "_constants", "training")
