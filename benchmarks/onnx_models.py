"""The reference CNNs as ONNX graphs, built node by node from a tilewise model's weights, to time ONNX Runtime.

Where onnx or ONNX Runtime is not installed, `HERE` is false and the benchmarks go without that peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.models import ResNet8
from tilewise.nn import Conv2d, Flatten, GlobalAvgPool, Linear, MaxPool2d, Module, ReLU, Sequential

try:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
except ImportError:
    HERE = False
else:
    HERE = True


class Graph:
    """Collects nodes and weights; every method takes and returns the name of a value."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def weight(self, array: np.ndarray) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def conv(self, x: str, layer: Conv2d) -> str:
        inputs = [x, self.weight(layer.weight.data)]
        if layer.bias is not None:
            inputs.append(self.weight(layer.bias.data))
        (sh, sw), (ph, pw) = layer.stride, layer.padding
        return self.node("Conv", inputs, strides=[sh, sw], pads=[ph, pw, ph, pw], group=layer.groups)

    def linear(self, x: str, layer: Linear) -> str:
        assert layer.bias is not None
        return self.node("Gemm", [x, self.weight(layer.weight.data), self.weight(layer.bias.data)], transB=1)

    def global_pool(self, x: str) -> str:
        return self.node("Flatten", [self.node("GlobalAveragePool", [x])])


def _sequential(graph: Graph, x: str, layers: Sequential) -> str:
    for layer in layers:
        x = _layer(graph, x, layer)
    return x


def _layer(graph: Graph, x: str, layer: Module) -> str:
    match layer:
        case Conv2d():
            return graph.conv(x, layer)
        case Linear():
            return graph.linear(x, layer)
        case ReLU():
            return graph.node("Relu", [x])
        case MaxPool2d():
            return graph.node("MaxPool", [x], kernel_shape=list(layer.kernel_size), strides=list(layer.stride))
        case GlobalAvgPool():
            return graph.global_pool(x)
        case Flatten():
            return graph.node("Flatten", [x])
    raise TypeError(f"no ONNX form for {type(layer).__name__}")


def _resnet(graph: Graph, x: str, model: ResNet8) -> str:
    x = graph.node("Relu", [graph.conv(x, model.conv)])
    for block in (model.block1, model.block2, model.block3):
        shortcut = x if block.skip is None else graph.conv(x, block.skip)
        hidden = graph.node("Relu", [graph.conv(x, block.conv1)])
        x = graph.node("Relu", [graph.node("Add", [graph.conv(hidden, block.conv2), shortcut])])
    return graph.linear(graph.global_pool(x), model.fc)


def proto(model: Module, shape: tuple[int, ...]) -> Any:
    """The ONNX graph of `model` for inputs "x" of one shape."""
    graph = Graph()
    result = _resnet(graph, "x", model) if isinstance(model, ResNet8) else _sequential(graph, "x", as_sequential(model))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)]
    return helper.make_model(
        helper.make_graph(graph.nodes, "model", inputs, outputs, graph.weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )


def runs(model: Module, x: np.ndarray, threads: int) -> dict[str, Callable[[], Any]]:
    """The model in ONNX Runtime, as a contender; none where it is not installed."""
    if not HERE:
        return {}
    ready = session(model, x.shape, threads)
    return {"onnxruntime": lambda: ready.run(None, {"x": x})[0]}


def session(model: Module, shape: tuple[int, ...], threads: int) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session of `model` for inputs "x" of one shape."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(proto(model, shape).SerializeToString(), options)


def as_sequential(model: Module) -> Sequential:
    return model if isinstance(model, Sequential) else Sequential(model)
