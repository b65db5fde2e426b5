"""`save(model, path)`: a module as an ONNX file that other runtimes run with the same numbers.

A module is run once on an example and what it computed is written down (emit.py); it is run again on
another batch, and what differs tells which sizes follow the batch. A network that was loaded is written node by node
with the weights it has now. A model in INT8 is written in QDQ form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise import nn
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.graph.ir import Array, Node, Trace, Value, four_sides
from tilewise.graph.trace import trace
from tilewise.nn import Module, Sequential
from tilewise.onnx.emit import EMITTERS, Emission
from tilewise.onnx.graph import OnnxNode, Port
from tilewise.onnx.layers import LayerCall, Operator
from tilewise.onnx.network import Network
from tilewise.onnx.writer import OnnxWriter
from tilewise.tensor import Tensor


def save(
    model: Module,
    path: str | os.PathLike[str],
    example: Any = None,
    dynamic: bool = True,
) -> None:
    """Write `model`, in eval mode, as an ONNX file.

    `example` is an input (or a list of inputs) with a batch in front. The zoo's and the reference models, models that
    were loaded and models in INT8 need none. With `dynamic` the file takes any batch.

    >>> tilewise.onnx.save(models.zoo.resnet18(), "resnet18.onnx")  # doctest: +SKIP
    """
    from tilewise.quantize import QuantizedModel

    if isinstance(model, QuantizedModel):
        from tilewise.onnx.qdq import save_quantized

        save_quantized(model, path)
        return
    if isinstance(model, Network) and example is None and model.is_as_loaded():
        save_network(model, path)
        return
    inputs = examples(model, example)
    for name, layer in model.named_modules():
        if getattr(layer, "computes_in_int8", False):
            raise ConfigurationError(
                f"{name or type(layer).__name__} computes in int8 inside a float model; save the float model"
            )
    _write_traced(model, path, inputs, _other_batch(inputs) if dynamic else None)


def examples(model: Module, example: Any) -> list[Array]:
    """Return `example` as a list of arrays; if it is None, zeros of the shape that the model declares."""
    if example is not None:
        several = example if isinstance(example, list | tuple) else [example]
        return [np.array(x.data if isinstance(x, Tensor) else x) for x in several]
    if isinstance(model, Network):
        return model.example(batch=2)
    spec = example_shape(model)
    if spec is None:
        raise ConfigurationError(
            f"{type(model).__name__} does not state its input; pass save an example, such as an array of zeros"
        )
    shape, kind = spec
    return [np.zeros((2, *shape), kind)]


def example_shape(model: Module) -> tuple[tuple[int, ...], type] | None:
    """Return the shape and dtype of the input, if the model or its first layer states them."""
    from tilewise.models import ResNet8

    if isinstance(model, nn.GPT):
        return (model.context,), np.int64
    if isinstance(model, ResNet8):
        return (3, 32, 32), np.float32
    own = getattr(model, "example_shape", None)
    if own is not None:
        return tuple(own), np.float32 if len(own) > 1 else np.int64
    layers = list(model) if isinstance(model, nn.Sequential) else []
    if layers and isinstance(layers[0], nn.Linear):
        return (layers[0].in_features,), np.float32
    if layers and isinstance(layers[0], nn.Conv2d):
        return _image_shape(layers)
    return None


def _image_shape(layers: list[Module]) -> tuple[tuple[int, ...], type] | None:
    """Choose a square image shape for a chain of layers: one that its first linear layer accepts, or 32 × 32."""
    last = next((layer for layer in layers if isinstance(layer, nn.Linear)), None)
    for size in (32, *range(4, 513, 4)):
        x = np.zeros((1, layers[0].in_channels, size, size), np.float32)  # type: ignore[attr-defined]
        if last is None or _features_at_linear(layers, x) == last.in_features:
            return x.shape[1:], np.float32
    return None


def _features_at_linear(layers: list[Module], x: Array) -> int:
    """Return the number of features an image x has at the first linear layer, computed from shapes only."""
    c, h, w = x.shape[1:]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            return int(c * h * w)
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            (sh, sw), pads = layer.stride, four_sides(layer.padding)
            dilation = layer.dilation if isinstance(layer, nn.Conv2d) else (1, 1)
            kh, kw = ((k - 1) * d + 1 for k, d in zip(layer.kernel_size, dilation, strict=True))
            h, w = (h + pads[0] + pads[2] - kh) // sh + 1, (w + pads[1] + pads[3] - kw) // sw + 1
            c = layer.out_channels if isinstance(layer, nn.Conv2d) else c
        elif isinstance(layer, nn.GlobalAvgPool):
            h = w = 1
    return -1


def _other_batch(inputs: list[Array]) -> list[Array] | None:
    """Return the inputs with one more row each; None if their batch sizes differ."""
    if any(not x.ndim or len(x) != len(inputs[0]) or not len(x) for x in inputs):
        return None
    return [np.concatenate([x, x[:1]]) for x in inputs]


def _write_traced(model: Module, path: str | os.PathLike[str], inputs: list[Array], others: list[Array] | None) -> None:
    """Trace a model at two batch sizes and write its operations; sizes that differ between the two stay open."""
    traced_model = _traced(model, inputs)
    other = None if others is None else _alike(model, traced_model, others)
    graph = OnnxWriter()
    ports = _input_ports(model, inputs, other is not None)
    written = _Values(graph, model, [graph.name(port.name) for port in ports])
    for index, call in enumerate(traced_model.nodes):
        emission = Emission(graph, call, [written.name(v) for v in call.inputs], written.name)
        emission.batch_input = ports[0].name
        emission.other_shape = None if other is None else other.nodes[index].shape
        written.names[Value(len(inputs) + index)] = _emit(emission)
    outputs = []
    for name, output in traced_model.outputs.items():
        result = graph.node("Identity", [written.name(traced_model.results[name])], [graph.name(name or "output")])
        other_shape = output.shape if other is None else other.outputs[name].shape
        free = tuple("N" if a != b else a for a, b in zip(output.shape, other_shape, strict=True))
        outputs.append(Port(result, output.dtype, free))
    graph.write(path, ports, outputs)


def _traced(model: Module, inputs: list[Array]) -> Trace:
    return trace(model, *inputs, always_record=("Expand",))  # spreading a constant may follow the batch


def _emit(emission: Emission) -> str:
    """Write one traced operation as ONNX nodes and return the name of its result."""
    name = emission.call.operation.__name__
    if name not in EMITTERS:
        raise ConfigurationError(f"the operation {name} has no form in ONNX")
    return EMITTERS[name](emission)


def _alike(model: Module, first: Trace, others: list[Array]) -> Trace | None:
    """Trace the model at another batch size; None unless the trace differs from `first` in sizes only."""
    try:
        second = _traced(model, others)
    except TilewiseError:
        return None
    same_operations = [c.operation for c in first.nodes] == [c.operation for c in second.nodes]
    return second if same_operations and all(map(_same_but_for_sizes, first.nodes, second.nodes)) else None


def _same_but_for_sizes(a: Node, b: Node) -> bool:
    """Tell whether two traced calls differ in sizes only, so that one node can represent both."""
    shapes = [v.shape if isinstance(v, np.ndarray) else None for v in (*a.inputs, *a.params.values())]
    other = [v.shape if isinstance(v, np.ndarray) else None for v in (*b.inputs, *b.params.values())]
    return len(a.shape) == len(b.shape) and shapes == other


def _input_ports(model: Module, inputs: Sequence[Array], free: bool) -> list[Port]:
    """Return names, dtypes and shapes of the file's inputs; the batch size is open ("N") if `free`."""
    own = [port.name for port in model.inputs] if isinstance(model, Network) else []
    names = own or (["input"] if len(inputs) == 1 else [f"input_{i}" for i in range(len(inputs))])
    return [
        Port(name, x.dtype, ("N", *x.shape[1:]) if free else x.shape) for name, x in zip(names, inputs, strict=True)
    ]


class _Values:
    """Assigns names in the file to values: results by number, constants by the parameter they come from."""

    def __init__(self, graph: OnnxWriter, model: Module, inputs: list[str]) -> None:
        self.graph = graph
        self.names: dict[Value, str] = {Value(i): name for i, name in enumerate(inputs)}
        self.parameters = {id(t.data): name for name, t in model.named_tensors()}

    def name(self, value: Any) -> str:
        """Return the name of a value in the file; arrays are added as weights or constants."""
        if isinstance(value, Value):
            return self.names[value]
        if isinstance(value, np.ndarray) and value.size > 16:
            return self.graph.weight(value, self.parameters.get(id(value), "weight"))
        return self.graph.constant(value, np.asarray(value).dtype)


# --- networks that were read from a file ---


# The tensors of a layer in the order in which its node reads them after the data.
_TENSORS = {
    "Conv": ("weight", "bias"),
    "BatchNormalization": ("weight", "bias", "running_mean", "running_var"),
    "LayerNormalization": ("weight", "bias"),
}


def save_network(network: Network, path: str | os.PathLike[str]) -> None:
    """Write a network that was loaded from a file, node by node, with its current weights."""
    graph, constants = OnnxWriter(network.opset), network.constants()
    results = (name for step in network.steps for name in step.outputs if name)
    for name in (*(port.name for port in network.inputs), *results, *constants):
        graph.name(name)
    for step in network.steps:
        layer = getattr(network, step.layer)
        if isinstance(layer, Operator):
            _write_node(graph, step.nodes[0], constants)
        else:
            _write_layers(graph, layer, step, constants)
    for port in network.outputs:
        if port.name in constants:
            graph.weights[port.name] = constants[port.name]
    graph.write(path, network.inputs, network.outputs)


def _write_node(graph: OnnxWriter, node: OnnxNode, constants: dict[str, Any]) -> None:
    """Write a node with its attributes, and the constants that it reads."""
    graph.weights |= {name: constants[name] for name in node.inputs if name in constants}
    as_tensor = graph.onnx.numpy_helper.from_array
    settings = {k: as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in node.attributes.items()}
    graph.node(node.op, node.inputs, node.outputs, **settings)


def _write_layers(graph: OnnxWriter, layer: Module, step: LayerCall, constants: dict[str, Any]) -> None:
    """Write a layer, or a chain of fused layers, as its original nodes with its current weights."""
    chain, value = list(layer) if isinstance(layer, Sequential) else [layer], step.inputs[0]
    # A sum became the bias of the linear layer before it.
    nodes = [node for node in step.nodes if node.op != "Add"]
    for index, (part, node) in enumerate(zip(chain, nodes, strict=True)):
        result = step.outputs[0] if index == len(chain) - 1 else graph.name(f"{step.layer}.{index}")
        if isinstance(part, nn.Linear):
            _write_linear(graph, part, value, result, step.layer)
        else:
            tensors = [(name, getattr(part, name)) for name in _TENSORS.get(node.op, ())]
            weights = [graph.weight(t.data, f"{step.layer}.{name}") for name, t in tensors if t is not None]
            attributes = node.attributes | ({"group": part.groups} if isinstance(part, nn.Conv2d) else {})
            inputs = (value, *(weights or node.inputs[1:]))
            _write_node(graph, replace(node, inputs=inputs, outputs=(result,), attributes=attributes), constants)
        value = result


def _write_linear(graph: OnnxWriter, layer: nn.Linear, x: str, out: str, name: str) -> None:
    """Write a linear layer as MatMul and Add, from the value `x` to the value `out`."""
    weight = graph.weight(np.ascontiguousarray(layer.weight.data.T), f"{name}.weight")
    product = graph.name(f"{name}.product") if layer.bias is not None else out
    graph.node("MatMul", [x, weight], [product])
    if layer.bias is not None:
        graph.node("Add", [product, graph.weight(layer.bias.data, f"{name}.bias")], [out])
