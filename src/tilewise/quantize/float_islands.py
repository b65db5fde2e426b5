"""Float islands: operators without an integer form, run as a float plan instead of one Python call each.

An island is a run of consecutive traced operators of which only the last one's result is read elsewhere. For each shape
of its inputs it is lowered and partitioned like a float network (`graph/passes`), so that a quantized network runs its
float part as fast as the float network does. The plan's numbers are the result, however the model is run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.graph.executor import MAX_SPECIALIZATIONS, Call
from tilewise.graph.ir import Array, Node, Trace, Value
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.partition import WeightCache, partition
from tilewise.graph.passes.patterns import match_patterns
from tilewise.quantize.graph import FloatGraph, at_batch, run_node


@dataclass(frozen=True)
class _IslandPlan:
    """Compiled calls of an island for one set of input shapes, their constants, and the result's number."""

    calls: list[Call]
    constants: dict[int, Array]
    result: int

    def run(self, arrays: list[Array]) -> Array:
        """Run the calls on the island's inputs and return its result."""
        values = {**self.constants, **dict(enumerate(arrays))}
        for call in self.calls:
            call.run(values)
        return values[self.result]


class FloatIsland:
    """Consecutive operators that run in float as one compiled plan per set of input shapes."""

    def __init__(self, graph: FloatGraph, steps: tuple[int, ...]) -> None:
        """Store the operators (indices) of the island and find the operators whose results they read."""
        self.graph, self.steps = graph, steps
        self.sources = sorted({i for s in steps for i in graph.steps[s].inputs} - set(steps))
        # Copies of a graph have the same nodes, so they share plans: calibration converts a graph many times.
        self._plans: dict[Any, _IslandPlan] = graph.island_plans.setdefault(steps, {})

    def run(self, arrays: list[Array], batch: int) -> Array:
        """Compute the last operator's result; `arrays` are the results of the operators `sources`, in order."""
        assert native is not None
        key = native.isa(), batch, *((array.shape, array.dtype) for array in arrays)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_SPECIALIZATIONS:
                self._plans.clear()
            plan = self._plans[key] = self._compile(arrays, batch)
        return plan.run(arrays)

    def _compile(self, arrays: list[Array], batch: int) -> _IslandPlan:
        """Evaluate the operators once to learn the shapes of their results, and lower them to a plan."""
        values, nodes = dict(zip(self.sources, arrays, strict=True)), list[Node]()
        numbers = {source: number for number, source in enumerate(self.sources)}
        for index in self.steps:
            step = self.graph.steps[index]
            assert step.node is not None
            reads = [values[i] for i in step.inputs]
            node = at_batch(step.node, batch)
            values[index] = result = run_node(node, reads)
            renumbered = {v.number: Value(numbers[i]) for v, i in zip(node.reads(), step.inputs, strict=True)}
            node = _with_operands(node, renumbered)
            shapes = tuple(np.shape(values[i]) for i in step.inputs)
            nodes.append(replace(node, shape=result.shape, input_shapes=shapes, dtype=result.dtype))
            numbers[index] = len(arrays) + len(nodes) - 1
        last = Value(numbers[self.steps[-1]])
        # Lowering reads the shapes and types of the inputs only.
        inputs = [np.broadcast_to(np.zeros((), a.dtype), a.shape) for a in arrays]
        lowering = Lowering(match_patterns(Trace(inputs, nodes, {"": last})), is_float=True)
        return _IslandPlan(partition(lowering, WeightCache()), lowering.constants, lowering.resolve(lowering.result))


def _with_operands(node: Node, values: dict[int, Value]) -> Node:
    """Return a copy of a node whose operands are replaced by number; other operands and constants stay."""

    def operand(value: Any) -> Any:
        return values[value.number] if isinstance(value, Value) else value

    params = {name: operand(value) for name, value in node.params.items()}
    return replace(node, inputs=tuple(map(operand, node.inputs)), params=params)


def float_islands(graph: FloatGraph, integer: list[Any]) -> list[FloatIsland]:
    """Group consecutive operators that have no integer form into islands with one result each.

    `integer[i]` is the integer form of operator i, or None. The list is empty without the compiled extension.
    """
    if native is None:
        return []

    def in_python(index: int) -> bool:
        step = graph.steps[index]
        return integer[index] is None and step.kind == "python" and step.node is not None

    islands = []
    for is_python, run in groupby(range(len(graph.steps)), in_python):
        steps = list(run) if is_python else []
        while steps:
            count = next(n for n in range(len(steps), 0, -1) if _has_one_result(graph, steps[:n]))
            islands.append(FloatIsland(graph, tuple(steps[:count])))
            steps = steps[count:]
    return islands


def _has_one_result(graph: FloatGraph, steps: list[int]) -> bool:
    """Tell whether no operator outside `steps` reads the result of any of them but the last."""
    readers = [step for index, step in enumerate(graph.steps) if index not in steps]
    return not any(i in reader.inputs for reader in readers for i in steps[:-1])
