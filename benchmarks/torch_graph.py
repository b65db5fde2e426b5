"""A network that tilewise saved, in PyTorch: the file's nodes as PyTorch's functions, traced, frozen, channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.onnx.graph import OnnxGraph, OnnxNode


def _pool(node: OnnxNode, x: Tensor) -> Tensor:
    pads = node.get("pads", (0, 0, 0, 0))[:2]
    kernel, stride = node.attributes["kernel_shape"], node.attributes["strides"]
    pool = F.max_pool2d if node.op == "MaxPool" else F.avg_pool2d
    return pool(x, kernel, stride, pads)


def _conv(node: OnnxNode, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    how = {"stride": node.attributes["strides"], "padding": node.attributes["pads"][:2], "groups": node.get("group", 1)}
    return F.conv2d(x, w, b, **how) if node.op == "Conv" else F.conv_transpose2d(x, w, b, **how)


def _gemm(_node: OnnxNode, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def _slice(_node: OnnxNode, x: Tensor, starts: Any, ends: Any, axes: Any, steps: Any = None) -> Tensor:
    index, by = [slice(None)] * x.ndim, torch.ones_like(starts) if steps is None else steps
    for a, b, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(), by.tolist(), strict=True):
        index[axis] = slice(a, min(b, 1 << 30), step)
    return x[tuple(index)]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "Gemm": _gemm,
    "Slice": _slice,
    "Relu": lambda _, x: F.relu(x),
    "Clip": lambda _, x, low, high: x.clamp(float(low), float(high)),
    "HardSwish": lambda _, x: F.hardswish(x),
    "HardSigmoid": lambda _, x: F.hardsigmoid(x),
    "Sigmoid": lambda _, x: x.sigmoid(),
    "Erf": lambda _, x: x.erf(),
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "MatMul": lambda _, a, b: a @ b,
    "Softmax": lambda node, x: x.softmax(node.get("axis", -1)),
    "LayerNormalization": lambda node, x, w, b: F.layer_norm(x, w.shape, w, b, node.get("epsilon", 1e-5)),
    "BatchNormalization": lambda node, x, w, b, m, v: F.batch_norm(x, m, v, w, b, eps=node.get("epsilon", 1e-5)),
    "GlobalAveragePool": lambda _, x: x.mean((2, 3), keepdim=True),
    "Flatten": lambda _, x: x.flatten(1),
    "Reshape": lambda _, x, shape: x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape.tolist())]),
    "Transpose": lambda node, x: x.permute(node.attributes["perm"]),
    "Concat": lambda node, *xs: torch.cat([torch.as_tensor(x) for x in xs], node.attributes["axis"]),
    "Squeeze": lambda _, x, axes: x.squeeze(tuple(axes.tolist())),
    "Unsqueeze": lambda _, x, axes: x.unsqueeze(int(axes[0])),
    "Gather": lambda node, x, ids: x.index_select(node.get("axis", 0), ids.flatten()).reshape(
        *x.shape[: node.get("axis", 0)], *ids.shape, *x.shape[node.get("axis", 0) + 1 :]
    ),
    "Shape": lambda _, x: torch.tensor(x.shape),
    "Expand": lambda _, x, shape: x.expand(*torch.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    "Identity": lambda _, x: x,
    "Split": lambda node, x: x.split(x.shape[node.get("axis", 0)] // len(node.outputs), node.get("axis", 0)),
}


class TorchGraph(torch.nn.Module):
    """Runs a graph's nodes one after another."""

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self.nodes, self.inputs, self.outputs = graph.nodes, graph.inputs, graph.outputs
        self.constants = {name: torch.from_numpy(np.array(value)) for name, value in graph.constants.items()}
        for name, value in self.constants.items():
            self.constants[name] = value.to(memory_format=torch.channels_last) if value.ndim == 4 else value

    def forward(self, x: Tensor) -> Any:
        values: dict[str, Any] = {self.inputs[0].name: x, **self.constants}
        for node in self.nodes:
            result = FUNCTIONS[node.op](node, *(values[name] if name else None for name in node.inputs))
            for name, value in zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True):
                values[name] = value
        return values[self.outputs[0].name]


def frozen(graph: OnnxGraph, x: np.ndarray) -> Callable[[], Any]:
    """The network ready to run on `x`."""
    tensor = torch.from_numpy(x)
    tensor = tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
    with torch.inference_mode(False), torch.no_grad():
        traced = torch.jit.trace(TorchGraph(graph).eval(), tensor, check_trace=False)
        ready = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))
    return lambda: ready(tensor)
