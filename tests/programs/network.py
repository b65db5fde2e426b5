"""A program as a module: its layers one by one, or chains of them in `Sequential`s, which fuse what they can."""

from __future__ import annotations

import numpy as np

from tests.programs.operations import KINDS
from tests.programs.program import Array, Op, Program
from tilewise import Tensor, nn, no_grad
from tilewise.backend import OptimizedBackend, current_backend, use_backend
from tilewise.backend.registry import named_backend
from tilewise.errors import ShapeError
from tilewise.nn.self_planning import layer_by_layer

NUMPY = named_backend("numpy")  # made once: it sorts all implementations


class Network(nn.Module):
    """One layer for every operation. `shapes` are those of all values for the program's own batch."""

    def __init__(self, program: Program) -> None:
        self.ops = program.ops
        self.shapes = [program.shape]
        self.layers = nn.ModuleList()
        values = [Tensor(np.zeros(program.shape, np.float32))]
        with no_grad(), use_backend(NUMPY):
            for index, op in enumerate(program.ops):
                layer = KINDS[op.kind].layer(op.settings, *(self.shapes[i] for i in op.inputs)).eval()
                setattr(self.layers, str(index), layer)
                values.append(layer(*(values[i] for i in op.inputs)))
                self.shapes.append(values[-1].shape)
                if not values[-1].size:
                    raise ShapeError(f"{op.kind} leaves nothing of {self.shapes[op.inputs[0]]}")
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for op, layer in zip(self.ops, self.layers.children(), strict=True):
            values.append(layer(*(values[i] for i in op.inputs)))
        return values[-1]


class FusedNetwork(nn.Module):
    """The layers of a network, those that only hand a value to the next one together in a `Sequential`."""

    def __init__(self, network: Network) -> None:
        layers = list(network.layers.children())
        self.chains = [(network.ops[chain[0]].inputs, chain[-1] + 1) for chain in chains(network.ops)]
        self.layers = nn.ModuleList(*(nn.Sequential(*(layers[i] for i in chain)) for chain in chains(network.ops)))
        self.result = len(network.ops)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        values = {0: x}
        for (inputs, result), chain in zip(self.chains, self.layers.children(), strict=True):
            operands = [values[i] for i in inputs]
            values[result] = chain(*operands) if len(operands) == 1 else chain[0](*operands)
        return values[self.result]


def chains(ops: tuple[Op, ...]) -> list[list[int]]:
    """Indices of operations, those of a chain together: each reads nothing but the one before, and alone does so."""
    readers = [0] * (len(ops) + 1)
    for op in ops:
        for value in op.inputs:
            readers[value] += 1
    patterns: list[list[int]] = []
    for index, op in enumerate(ops):
        follows = op.inputs == (index,) and readers[index] == 1 and patterns and len(ops[patterns[-1][0]].inputs) == 1
        if follows:
            patterns[-1].append(index)
        else:
            patterns.append([index])
    return patterns


def run_eagerly(module: nn.Module, x: Array, backend: OptimizedBackend | None = None) -> Array:
    """The module's result, operation by operation."""
    with no_grad(), layer_by_layer(), use_backend(backend or current_backend()):
        result: Array = module(Tensor(x)).data
        return result


def amplification(network: Network, x: Array, exact: Array, share: float) -> float:
    """How much larger noise gets: the relative change of the result if every value, the input included, is disturbed
    by `share` of its size, divided by `share`."""
    rng = np.random.default_rng(0)

    def disturbed(value: Tensor) -> Tensor:
        noise = rng.standard_normal(value.shape)
        return Tensor(value.data + share * root_mean_square(value.data) * noise)

    values = [disturbed(Tensor(x.astype(np.float64)))]
    with no_grad(), use_backend(NUMPY):
        for op, layer in zip(network.ops, network.layers.children(), strict=True):
            values.append(disturbed(layer(*(values[i] for i in op.inputs))))
    return root_mean_square(values[-1].data - exact) / (share * root_mean_square(exact))


def root_mean_square(x: Array) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))
