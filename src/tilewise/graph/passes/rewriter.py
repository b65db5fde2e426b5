"""Rewriting of a trace in one forward walk: each rule sees the nodes that replaced the earlier ones.

Nodes without readers are dropped at the end, so a rule need not check whether other nodes read the operations it
replaces. Chains of reshapes, permutations and indices are tracked as views (views.py); a chain without effect is
replaced by its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.graph.ir import Array, Node, Shape, Trace, Value
from tilewise.graph.passes.views import VIEW_OPERATIONS, View, apply_node, whole
from tilewise.ops import Permute, Reshape

Operand = Value | Array
# A rule returns the operand that replaces a node, or None if it does not match.
Rule = Callable[["Rewriter", Node], Operand | None]


class Rewriter:
    """Applies one rule per operation name to a trace; `finish` returns the new trace."""

    def __init__(self, trace: Trace, rules: Mapping[str, Rule]) -> None:
        """Rewrite the trace node by node; operations on other dtypes than float32 are copied."""
        self.trace, self.nodes = trace, list[Node]()
        self.views: dict[int, View] = {}
        self.users = trace.users()
        self.readers: dict[int, int] = {}  # number of readers of a new value
        self.replacements: dict[int, Operand] = {i: Value(i) for i in range(len(trace.inputs))}
        for number, old in enumerate(trace.nodes, len(trace.inputs)):
            node = self._renumbered(old)
            rule = rules.get(old.operation.__name__)
            result = None if rule is None or old.dtype != np.float32 else rule(self, node)
            result = self.add(node) if result is None else result
            self.replacements[number] = result
            if isinstance(result, Value):
                self.readers[result.number] = self.users[number]

    def _current(self, value: Any) -> Any:
        """Return the value of the new trace that replaces a value of the old one; constants are unchanged."""
        return self.replacements[value.number] if isinstance(value, Value) else value

    def _renumbered(self, node: Node) -> Node:
        """Copy a node of the old trace with its operands and parameters replaced by new values."""
        inputs = tuple(self._current(v) for v in node.inputs)
        return replace(node, inputs=inputs, params={name: self._current(v) for name, v in node.params.items()})

    # --- the interface of rules ---

    def node(self, value: Any, *kinds: str) -> Node | None:
        """Return the node that computes a value if its operation is named in `kinds`, else None."""
        if not isinstance(value, Value) or value.number < len(self.trace.inputs):
            return None
        node = self.nodes[value.number - len(self.trace.inputs)]
        return node if node.operation.__name__ in kinds else None

    def shape(self, value: Operand) -> Shape:
        """Return the shape of a value or constant."""
        if not isinstance(value, Value):
            return np.shape(value)
        first = len(self.trace.inputs)
        return self.trace.inputs[value.number].shape if value.number < first else self.nodes[value.number - first].shape

    def view(self, value: Value) -> View:
        """Return a value as a view of the earliest value that it is a reordering of."""
        return self.views.get(value.number) or whole(value.number, self.shape(value))

    def add(self, node: Node) -> Value:
        """Append a node and return its value; a view without effect returns its source instead."""
        # Views compose: the view of a view is a view of the first source.
        value = Value(len(self.trace.inputs) + len(self.nodes))
        if node.operation.__name__ in VIEW_OPERATIONS and isinstance(x := node.inputs[0], Value):
            view = apply_node(self.view(x), node)
            if view is not None:
                if node.shape == self.shape(Value(view.source)) and view == whole(view.source, node.shape):
                    return Value(view.source)
                self.views[value.number] = view
        self.nodes.append(replace(node, input_shapes=tuple(self.shape(v) for v in node.inputs)))
        return value

    def make(self, like: Node, operation: type, shape: Shape, /, *inputs: Operand, **params: Any) -> Value:
        """Append a node of `operation` with the layer name and dtype of the node `like`; return its value."""
        return self.add(replace(like, operation=operation, inputs=inputs, params=params, shape=shape))

    def reshape(self, like: Node, x: Value, shape: Shape) -> Value:
        return self.make(like, Reshape, shape, x, shape=shape) if self.shape(x) != shape else x

    def permute(self, like: Node, x: Value, axes: Shape) -> Value:
        shape = tuple(self.shape(x)[a] for a in axes)
        return self.make(like, Permute, shape, x, axes=axes)

    # --- dead code elimination ---

    def finish(self) -> Trace:
        """Return the trace of the nodes that the results depend on, renumbered."""
        first = len(self.trace.inputs)
        results = {name: self._current(value) for name, value in self.trace.results.items()}
        # Walk backwards: a node is live if a live node or a result reads it.
        live = {v.number for v in results.values() if isinstance(v, Value)}
        for number in range(first + len(self.nodes) - 1, first - 1, -1):
            if number in live:
                live |= {v.number for v in self.nodes[number - first].reads()}
        order = [n for n in range(first, first + len(self.nodes)) if n in live]
        self.replacements = {number: Value(i) for i, number in enumerate([*range(first), *order])}
        nodes = [self._renumbered(self.nodes[n - first]) for n in order]
        renumbered = {name: self._current(value) for name, value in results.items()}
        return Trace(self.trace.inputs, nodes, renumbered, self.trace.outputs)


def scalar(value: Any) -> float | None:
    """Return the only element of a constant array as a float; None for other arrays and values."""
    if isinstance(value, Value) or np.size(value) != 1:
        return None
    return float(np.asarray(value).reshape(()))


def value_and_constant(node: Node) -> tuple[Value, Array] | None:
    """Return a binary node's operands as (value, constant); None if it does not have one of each."""
    a, b = node.inputs
    if isinstance(a, Value) and not isinstance(b, Value):
        return a, b
    return (b, a) if isinstance(b, Value) and not isinstance(a, Value) else None


def is_value(a: Any, b: Any) -> bool:
    """Tell whether two operands are the same traced value."""
    return isinstance(a, Value) and a == b


def per_channel(constant: Array, shape: Shape, axis: int) -> Array | None:
    """Return a constant as one number per channel (C,) if it varies only along `axis` of `shape`, else None."""
    aligned = (1,) * (len(shape) - constant.ndim) + constant.shape
    if constant.ndim > len(shape) or any(size != 1 for i, size in enumerate(aligned) if i != axis):
        return None
    return np.array(np.broadcast_to(constant.reshape(-1), (shape[axis],)), np.float32)
