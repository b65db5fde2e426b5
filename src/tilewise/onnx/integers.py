"""A loaded network as the steps that quantization works on.

Layers become the steps they are in any model; an addition behind a convolution is taken along as its residual, and the
mean of each channel is the integer step for it. Everything else stays an operation in float. Networks that compute
their shapes (as exporters write them for a free batch) are written down once with the shapes worked out, and read back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tilewise import nn
from tilewise.errors import TilewiseError
from tilewise.nn import Module
from tilewise.onnx.building import Step
from tilewise.onnx.layers import Operator
from tilewise.onnx.network import Network, load
from tilewise.onnx.operators import tensor
from tilewise.quantize.graph import Graph, traces
from tilewise.quantize.graph import Step as QuantizeStep
from tilewise.quantize.graph import _module as add_layer
from tilewise.tensor import Tensor

_SHAPES = ("Shape", "Size", "ConstantOfShape", "Range", "Split")


class Bound(Module):
    """An operation with those of its inputs that are constants already in place."""

    def __init__(self, layer: Operator, inputs: list[Any]) -> None:
        self.layer, self.held = layer, inputs  # None where a value comes in

    def forward(self, *values: Tensor) -> Tensor:
        coming = iter(values)
        result = self.layer(*(next(coming) if held is OPEN else held for held in self.held))
        return tensor(result[0] if isinstance(result, tuple) else result)


OPEN: Any = object()  # the place of an input that is computed


@traces(Network)
def _network(graph: Graph, network: Any, name: str, x: int) -> int:
    plain = _with_shapes_worked_out(network)
    steps = None if plain is None else _Steps(graph, plain, x)
    if steps is None or not steps.add_all():
        return graph.add(QuantizeStep("float", name or "network", (x,), module=network))
    return steps.result()


def _with_shapes_worked_out(network: Network) -> Network | None:
    """The network without arithmetic of shapes, or None where it cannot be written without."""
    if len(network.inputs) != 1 or len(network.outputs) != 1 or network.inputs[0].dtype.kind != "f":
        return None
    if not any(node.op in _SHAPES for step in network.steps for node in step.nodes):
        return network
    from tilewise.onnx.saving import save

    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        path = Path(folder) / "network.onnx"
        try:
            save(network, path, network.example(batch=2))
            return load(path)
        except TilewiseError:
            return None


class _Steps:
    """Adds a network's steps to a graph, knowing for each value the step that makes it."""

    def __init__(self, graph: Graph, network: Network, x: int) -> None:
        self.graph, self.network = graph, network
        self.made: dict[str, int] = {network.inputs[0].name: x}
        self.first = len(graph.steps)
        self.constants = network.constants()
        self.readers: dict[str, list[Step]] = {}
        for step in network.steps:
            for name in step.inputs:
                self.readers.setdefault(name, []).append(step)
        self.skipped: set[int] = set()

    def add_all(self) -> bool:
        """Whether every step could be added; if not, the graph is as it was."""
        for step in self.network.steps:
            if id(step) not in self.skipped and not self._add(step):
                del self.graph.steps[self.first :]
                return False
        return True

    def result(self) -> int:
        return self.made[self.network.outputs[0].name]

    def _add(self, step: Step) -> bool:
        layer = getattr(self.network, step.layer)
        values = [name for name in step.inputs if name in self.made]
        if not values or len(step.outputs) != 1:
            return False
        if step.nodes[0].op in ("Identity", "Dropout"):
            self.made[step.outputs[0]] = self.made[values[0]]
            return True
        if not isinstance(layer, Operator):
            self.made[step.outputs[0]] = add_layer(self.graph, layer, step.layer, self.made[values[0]])
            return True
        return self._residual(step, values) or self._mean(step, values) or self._float(step, layer, values)

    def _only_reader(self, value: str) -> Step | None:
        readers = self.readers.get(value, [])
        return readers[0] if len(readers) == 1 and value != self.network.outputs[0].name else None

    def _residual(self, step: Step, values: list[str]) -> bool:
        """An addition whose later side is a convolution that nothing else reads: that convolution takes it along."""
        if step.nodes[0].op != "Add" or len(values) != 2 or len(step.inputs) != 2:
            return False
        early, late = sorted(self.made[v] for v in values)
        conv = self.graph.steps[late]
        name = next(v for v in values if self.made[v] == late)
        alone = self._only_reader(name) is step and early != late
        if conv.kind != "conv" or conv.relu or len(conv.inputs) != 1 or not alone:
            return False
        conv.inputs = (conv.inputs[0], early)
        result, after = step.outputs[0], self._only_reader(step.outputs[0])
        if after is not None and type(getattr(self.network, after.layer)) is nn.ReLU:
            conv.relu, result = True, after.outputs[0]
            self.skipped.add(id(after))
        self.made[result] = late
        return True

    def _mean(self, step: Step, values: list[str]) -> bool:
        """The mean of each channel, where only the flattened result is read."""
        after = self._only_reader(step.outputs[0])
        if step.nodes[0].op != "GlobalAveragePool" or after is None:
            return False
        if type(getattr(self.network, after.layer)) is not nn.Flatten:
            return False
        added = self.graph.add(QuantizeStep("global_pool", step.layer, (self.made[values[0]],)))
        self.skipped.add(id(after))
        self.made[after.outputs[0]] = added
        return True

    def _float(self, step: Step, layer: Operator, values: list[str]) -> bool:
        held = [OPEN if n in self.made else self.constants.get(n) if n else None for n in step.inputs]
        if any(h is None and n for h, n in zip(held, step.inputs, strict=True)):
            return False
        module = Bound(layer, held)
        reads = tuple(self.made[n] for n in step.inputs if n in self.made)
        self.made[step.outputs[0]] = self.graph.add(QuantizeStep("float", step.layer, reads, module=module))
        return True
