"""A network that was loaded, written again: the nodes of its file, with the weights that its layers have now."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise import nn
from tilewise.nn import Module, Sequential
from tilewise.onnx.building import LayerCall
from tilewise.onnx.layers import Operator
from tilewise.onnx.network import Network
from tilewise.onnx.writer import OnnxWriter

# (graph, layer, the value it reads, the name its result gets, the layer's name)
WriteLayer = Callable[[OnnxWriter, Any, str, str, str], None]


def save_network(network: Network, path: str | os.PathLike[str]) -> None:
    graph = OnnxWriter(network.opset)
    for port in network.inputs:
        graph.name(port.name)
    for step in network.steps:
        for name in filter(None, step.outputs):
            graph.name(name)
    constants = network.constants()
    for name in constants:
        graph.name(name)
    for step in network.steps:
        layer = getattr(network, step.layer)
        if isinstance(layer, Operator):
            _operation(graph, step, constants)
        else:
            _layers(graph, layer, step)
    for port in network.outputs:
        if port.name in constants:
            graph.weights[port.name] = constants[port.name]
    graph.write(path, network.inputs, network.outputs)


def _operation(graph: OnnxWriter, step: LayerCall, constants: dict[str, Any]) -> None:
    node = step.nodes[0]
    for name in node.inputs:
        if name in constants:
            graph.weights[name] = constants[name]
    as_tensor = graph.onnx.numpy_helper.from_array
    settings = {k: as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in node.attributes.items()}
    graph.node(node.op, node.inputs, node.outputs, **settings)


def _layers(graph: OnnxWriter, layer: Module, step: LayerCall) -> None:
    parts = list(layer) if isinstance(layer, Sequential) else [layer]
    value = step.inputs[0]
    for index, part in enumerate(parts):
        result = step.outputs[0] if index == len(parts) - 1 else graph.name(f"{step.layer}.{index}")
        LAYERS[type(part)](graph, part, value, result, step.layer)
        value = result


def _weights(graph: OnnxWriter, layer: Any, prefix: str, *names: str) -> list[str]:
    arrays = [(name, getattr(layer, name)) for name in names]
    return [graph.weight(t.data, f"{prefix}.{name}") for name, t in arrays if t is not None]


def _conv(graph: OnnxWriter, layer: Any, x: str, out: str, name: str) -> None:
    from tilewise.onnx.emit_layers import sides

    settings = {"strides": list(layer.stride), "pads": sides(layer.padding), "group": layer.groups}
    settings["dilations"] = list(getattr(layer, "dilation", (1, 1)))
    graph.node("Conv", [x, *_weights(graph, layer, name, "weight", "bias")], [out], **settings)


def _linear(graph: OnnxWriter, layer: Any, x: str, out: str, name: str) -> None:
    weight = graph.weight(np.ascontiguousarray(layer.weight.data.T), f"{name}.weight")
    product = graph.name(f"{name}.product") if layer.bias is not None else out
    graph.node("MatMul", [x, weight], [product])
    if layer.bias is not None:
        graph.node("Add", [product, *_weights(graph, layer, name, "bias")], [out])


def _batch_norm(graph: OnnxWriter, layer: Any, x: str, out: str, name: str) -> None:
    arrays = _weights(graph, layer, name, "weight", "bias", "running_mean", "running_var")
    graph.node("BatchNormalization", [x, *arrays], [out], epsilon=layer.eps)


def _layer_norm(graph: OnnxWriter, layer: Any, x: str, out: str, name: str) -> None:
    arrays = _weights(graph, layer, name, "weight", "bias")
    graph.node("LayerNormalization", [x, *arrays], [out], axis=-layer.weight.ndim, epsilon=layer.eps)


def _pool(graph: OnnxWriter, layer: Any, x: str, out: str, _name: str) -> None:
    settings: dict[str, Any] = {"kernel_shape": list(layer.kernel_size), "strides": list(layer.stride)}
    settings["pads"] = [*layer.padding, *layer.padding]
    if isinstance(layer, nn.AvgPool2d):
        graph.node("AveragePool", [x], [out], **settings, count_include_pad=1)
    else:
        graph.node("MaxPool", [x], [out], **settings)


def _plain(op: str, **settings: Callable[[Any], Any]) -> WriteLayer:
    """A layer that is one node without weights; its settings are read from the layer."""

    def write(graph: OnnxWriter, layer: Any, x: str, out: str, _name: str) -> None:
        graph.node(op, [x], [out], **{key: read_setting(layer) for key, read_setting in settings.items()})

    return write


def _relu6(graph: OnnxWriter, _layer: Any, x: str, out: str, _name: str) -> None:
    graph.node("Clip", [x, graph.constant(0.0, np.float32), graph.constant(6.0, np.float32)], [out])


LAYERS: dict[type, WriteLayer] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.BatchNorm2d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2d: _pool,
    nn.AvgPool2d: _pool,
    nn.ReLU: _plain("Relu"),
    nn.Sigmoid: _plain("Sigmoid"),
    nn.Tanh: _plain("Tanh"),
    nn.Hardswish: _plain("HardSwish"),
    nn.GELU: _plain("Gelu"),
    nn.LeakyReLU: _plain("LeakyRelu", alpha=lambda layer: layer.negative_slope),
    nn.ELU: _plain("Elu", alpha=lambda layer: layer.alpha),
    nn.Softmax: _plain("Softmax", axis=lambda layer: layer.dim),
    nn.Flatten: _plain("Flatten", axis=lambda _: 1),
    nn.ReLU6: _relu6,
}
