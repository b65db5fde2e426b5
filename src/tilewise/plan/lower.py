"""From a trace to the steps of a plan: what the native plan can run, with as much as possible taken along.

A batch norm after a convolution goes into its weights, an addition after it becomes its residual, an activation its
last act (the rules are in rules.py). A node of another kind, or with sizes that the native steps do not have, stays an
operation that is called from Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.rules import RULES
from tilewise.plan.steps import Shape, Step
from tilewise.plan.tokens import Mixed
from tilewise.plan.trace import Node, Trace, Value
from tilewise.plan.views import View

Array = npt.NDArray[Any]


class Lowering:
    """The steps by the value they make, in the order they run. Tokens (B, T, C) become steps only where `tokens` says
    that who runs the steps has them."""

    def __init__(self, trace: Trace, tokens: bool = False) -> None:
        self.trace, self._tokens = trace, tokens
        self.users = trace.users()
        result = trace.result
        self.result = result.number if isinstance(result, Value) else -1
        self.shapes: dict[int, Shape] = {i: x.shape for i, x in enumerate(trace.inputs)}
        self.steps: dict[int, Step] = {}
        self.constants: dict[int, Array] = {}  # that steps read as values
        self.same_as: dict[int, int] = {}  # values that another step makes
        self.shuffles: dict[int, tuple[int, int, bool]] = {}  # channels seen as (groups, each), swapped or not
        self.views: dict[int, View] = {}  # values that no step makes, but steps may read in
        self.mixed: dict[int, Mixed] = {}  # attention that no step has asked for
        for number, node in enumerate(trace.nodes, len(trace.inputs)):
            self.shapes[number] = node.shape
            made = self._lowered(number, node)
            if made is None and self._refuse(node):
                made = self._lowered(number, node)  # what was a view is a value now
            if made is None:
                made = self._python(node)
            if isinstance(made, Step):
                self.steps[number] = made
        self.steps = {n: s for n, s in self.steps.items() if self._is_read(n)}

    def _is_read(self, number: int) -> bool:
        return self.users[number] > 0

    def find(self, value: Value | int) -> int:
        """The step that makes a value."""
        number = value.number if isinstance(value, Value) else value
        while number in self.same_as:
            number = self.same_as[number]
        return number

    def _values(self, node: Node) -> list[int]:
        return [self.find(v) for v in node.reads()]

    def _python(self, node: Node) -> Step:
        return Step("python", tuple(self._values(node)), node.shape, node.layer, node=node)

    def _lowered(self, number: int, node: Node) -> Step | bool | None:
        """A new step; True where an existing one took the node along; None where neither can be."""
        rule = RULES.get(node.operation.__name__)
        return None if rule is None else rule(self, number, node)

    def _refuse(self, node: Node) -> bool:
        """A half-read shuffle or a view that an unknown operation reads: its reshapes must run as they are."""
        found = False
        for value in self._values(node):
            if self.shuffles.pop(value, None) is not None or self.views.pop(value, None) is not None:
                unread, found = self.trace.node(value), True
                self._refuse(unread)
                self.steps[value] = self._python(unread)
        return found

    def image(self, value: Value | Array) -> int | None:
        """The step of a value that the native plan can hold: (N, C, H, W) or (N, C), none of them empty."""
        return self._held(value, 2, 4)

    def tokens(self, value: Value | Array) -> int | None:
        """The same of a value (B, T, C)."""
        return self._held(value, 3) if self._tokens else None

    def _held(self, value: Value | Array, *ranks: int) -> int | None:
        if not isinstance(value, Value):
            return None
        shape, number = self.shapes[value.number], self.find(value)
        usable = len(shape) in ranks and min(shape[1:]) > 0
        return number if usable and number not in self.shuffles and number not in self.views else None

    def new_value(self, shape: Shape) -> int:
        """A value between two steps of one node; the numbers below zero are free for them."""
        number = min(self.shapes) - 1 if min(self.shapes) < 0 else -1
        self.shapes[number], self.users[number] = shape, 1
        return number

    def constant(self, array: Array) -> int:
        """A value that is there from the start."""
        number = self.new_value(array.shape)
        self.constants[number] = np.ascontiguousarray(array)
        return number

    def dtype(self, value: Value) -> Any:
        first = len(self.trace.inputs)
        return (self.trace.inputs[value.number] if value.number < first else self.trace.node(value.number)).dtype

    def taken_along(self, number: int, into: int, **changes: Any) -> bool:
        """The step `into`, which nobody else reads, makes this value too, with these changes; it runs here."""
        step = self.steps.pop(into)
        for name, change in changes.items():
            setattr(step, name, change)
        step.shape = self.shapes[number]
        self.steps[number] = step
        self.same_as[into] = number
        return True

    def alone(self, number: int, *kinds: str) -> Step | None:
        """The step that makes this value, if it is one of these kinds and its only reader is the node at hand."""
        step = self.steps.get(number)
        single = step is not None and step.kind in kinds and self.readers(number) == 1
        return step if single and step is not None and not step.activation else None

    def readers(self, number: int) -> int:
        """How often the trace reads the value or one that is the same."""
        earlier = [n for n in self.same_as if self.find(n) == number]
        return self.users[number] + sum(self.users[n] - 1 for n in earlier if self.users[n] > 0)
