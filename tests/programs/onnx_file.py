"""A program as an ONNX file, written node by node as other frameworks do it, without tilewise's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.programs.network import Network
from tests.programs.operations import KINDS
from tests.programs.program import Array, Program

_OPSET, _IR_VERSION = 20, 9  # the first opset with Gelu; both are read by ONNX Runtime 1.18


class Graph:
    """The nodes and constants of a file while it is written."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.result_shape: tuple[int, ...] = ()  # of the operation that is written now

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        from onnx import helper

        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, value: Array) -> str:
        from onnx import numpy_helper

        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def weights(self, *tensors: Any) -> list[str]:
        """Constants for a layer's tensors, those that are there."""
        return [self.constant(tensor.data) for tensor in tensors if tensor is not None]

    def scalar(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]


def can_be_written(program: Program) -> bool:
    return all(KINDS[op.kind].onnx is not None for op in program.ops)


def write(program: Program, network: Network, path: Path) -> None:
    """Write the program's ONNX file, for any batch unless the program mixes the images of a batch."""
    import onnx
    from onnx import helper

    graph = Graph()
    names = ["input"]
    graph.shapes["input"] = program.shape
    for op, layer, shape in zip(program.ops, network.layers.children(), network.shapes[1:], strict=True):
        graph.result_shape = shape
        write_nodes = KINDS[op.kind].onnx
        assert write_nodes is not None
        names.append(write_nodes(graph, op.settings, layer, *(names[i] for i in op.inputs)))
        graph.shapes[names[-1]] = shape
    # An output of its own name: the result may be the input itself.
    graph.nodes.append(helper.make_node("Identity", [names[-1]], ["output"]))
    batch = program.shape[0] if program.mixes_batch else "N"
    ports = [
        helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, [batch, *program.shape[1:]]),
        helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None),
    ]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "program", ports[:1], ports[1:], graph.initializers),
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
    )
    path.write_bytes(model.SerializeToString())
