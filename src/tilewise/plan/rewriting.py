"""A trace written anew from its first node to its last: rules see what was made of the nodes before.

What nobody reads any more is left out at the end, so a rule never has to ask whether the parts of what it found are
also read by somebody else. Reshapes, permutations and indices are followed as views (views.py), and are their source
where nothing moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.ops import Permute, Reshape
from tilewise.plan.trace import Node, Trace, Value
from tilewise.plan.views import Shape, View, seen, whole

Array = npt.NDArray[Any]
Operand = Value | Array
Rule = Callable[["Rewriting", Node], Operand | None]


class Rewriting:
    def __init__(self, trace: Trace, rules: Mapping[str, Rule]) -> None:
        self.trace, self.nodes = trace, list[Node]()
        self.views: dict[int, View] = {}
        self.users = trace.users()
        self.readers: dict[int, int] = {}  # of a new value
        self.now: dict[int, Operand] = {i: Value(i) for i in range(len(trace.inputs))}
        for number, old in enumerate(trace.nodes, len(trace.inputs)):
            node = replace(
                old,
                inputs=tuple(self._renamed(v) for v in old.inputs),
                params={name: self._renamed(v) for name, v in old.params.items()},
            )
            rule = rules.get(old.operation.__name__)
            made = None if rule is None or old.dtype != np.float32 else rule(self, node)
            self.now[number] = self.add(node) if made is None else made
            if isinstance(made := self.now[number], Value):
                self.readers[made.number] = self.users[number]

    def _renamed(self, value: Any) -> Any:
        return self.now[value.number] if isinstance(value, Value) else value

    # --- what rules ask and do ---

    def node(self, value: Any, *kinds: str) -> Node | None:
        """The node that made a value, if it is of one of these kinds."""
        if not isinstance(value, Value) or value.number < len(self.trace.inputs):
            return None
        made = self.nodes[value.number - len(self.trace.inputs)]
        return made if made.operation.__name__ in kinds else None

    def shape(self, value: Operand) -> Shape:
        if not isinstance(value, Value):
            return np.shape(value)
        known = len(self.trace.inputs)
        return self.trace.inputs[value.number].shape if value.number < known else self.nodes[value.number - known].shape

    def add(self, node: Node) -> Value:
        """A new value; a view of an earlier one is known as that, and is that where nothing moved."""
        made = Value(len(self.trace.inputs) + len(self.nodes))
        if node.operation.__name__ in ("Reshape", "Permute", "GetItem") and isinstance(x := node.inputs[0], Value):
            before = self.views.get(x.number, whole(x.number, self.shape(x)))
            if (found := seen(before, node)) is not None:
                if node.shape == self.shape(Value(found.source)) and found == whole(found.source, node.shape):
                    return Value(found.source)
                self.views[made.number] = found
        self.nodes.append(replace(node, given=tuple(self.shape(v) for v in node.inputs)))
        return made

    def make(self, like: Node, operation: type, shape: Shape, /, *inputs: Operand, **params: Any) -> Value:
        return self.add(replace(like, operation=operation, inputs=inputs, params=params, shape=shape))

    def reshape(self, like: Node, x: Value, shape: Shape) -> Value:
        return self.make(like, Reshape, shape, x, shape=shape) if self.shape(x) != shape else x

    def permute(self, like: Node, x: Value, axes: Shape) -> Value:
        shape = tuple(self.shape(x)[a] for a in axes)
        return self.make(like, Permute, shape, x, axes=axes)

    # --- the end ---

    def finished(self) -> Trace:
        """Only what is read, numbered anew."""
        first = len(self.trace.inputs)
        results = {name: self._renamed(value) for name, value in self.trace.results.items()}
        wanted = {v.number for v in results.values() if isinstance(v, Value)}
        for number in range(first + len(self.nodes) - 1, first - 1, -1):
            if number in wanted:
                wanted |= {v.number for v in self.nodes[number - first].reads()}
        kept = [n for n in range(first, first + len(self.nodes)) if n in wanted]
        self.now = {}
        for number in [*range(first), *kept]:
            self.now[number] = Value(len(self.now))
        nodes = [
            replace(
                node,
                inputs=tuple(self._renamed(v) for v in node.inputs),
                params={name: self._renamed(v) for name, v in node.params.items()},
            )
            for node in (self.nodes[n - first] for n in kept)
        ]
        renamed = {name: self._renamed(value) for name, value in results.items()}
        return Trace(self.trace.inputs, nodes, renamed, self.trace.outputs)


def one_number(value: Any) -> float | None:
    """A constant that is one number."""
    if isinstance(value, Value) or np.size(value) != 1:
        return None
    return float(np.asarray(value).reshape(()))


def parted(node: Node) -> tuple[Value, Array] | None:
    """Of two operands, the value and the constant."""
    a, b = node.inputs
    if isinstance(a, Value) and not isinstance(b, Value):
        return a, b
    return (b, a) if isinstance(b, Value) and not isinstance(a, Value) else None


def same(a: Any, b: Any) -> bool:
    return isinstance(a, Value) and a == b


def by_channel(constant: Array, shape: Shape, axis: int) -> Array | None:
    """A constant that is one number a channel, which lie along this axis, as (C,)."""
    padded = (1,) * (len(shape) - constant.ndim) + constant.shape
    if constant.ndim > len(shape) or any(size != 1 for i, size in enumerate(padded) if i != axis):
        return None
    return np.array(np.broadcast_to(constant.reshape(-1), (shape[axis],)), np.float32)
