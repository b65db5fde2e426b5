"""From a trace to the steps of a plan: what the native plan can run, with as much as possible taken along.

A batch norm after a convolution goes into its weights, an addition after it becomes its residual, an activation its
last act (the rules are in rules.py). A node of another kind, or with sizes that the native steps do not have, stays an
operation that is called from Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.layouts import laid_out
from tilewise.plan.rules import RULES
from tilewise.plan.steps import Shape, Step
from tilewise.plan.tokens import Mixed
from tilewise.plan.trace import Node, Trace, Value
from tilewise.plan.views import View

Array = npt.NDArray[Any]

_KEEPS_LAYOUT = ("layer_norm", "linear", "add", "sub", "mul", "affine", "concat")


class Lowering:
    """The steps by the value they make, in the order they run. Tokens (B, T, C), images with their channels last
    (N, H, W, C) and pixels in another order become steps only where `tokens` says that who runs the steps has them."""

    def __init__(self, trace: Trace, tokens: bool = False) -> None:
        self.trace, self.is_float = trace, tokens
        self.users = trace.users()
        result = trace.result
        self.result = result.number if isinstance(result, Value) else -1
        self.shapes: dict[int, Shape] = {i: x.shape for i, x in enumerate(trace.inputs)}
        self.steps: dict[int, Step] = {}
        self.constants: dict[int, Array] = {}  # that steps read as values
        self.same_as: dict[int, int] = {}  # values that another step makes
        self.views: dict[int, View] = {}  # values that no step makes, but steps may read in
        self.mixed: dict[int, Mixed] = {}  # attention that no step has asked for
        self.last: set[int] = set()  # values (N, H, W, C)
        self._planes: set[int] = set()  # values (N, C, H, W) that no native step makes
        for number, node in enumerate(trace.nodes, len(trace.inputs)):
            self.shapes[number] = node.shape
            made = self._lowered(number, node)
            if made is None and self._refuse(node):
                made = self._lowered(number, node)  # what was a view is a value now
            if made is None:
                made = self._python(node)
            if isinstance(made, Step):
                self.steps[number] = made
                if made.kind in _KEEPS_LAYOUT and made.inputs[0] in self.last:
                    self.last.add(number)
        self._ask_for(self.find(self.result))
        self.steps = {n: s for n, s in self.steps.items() if self._is_read(n)}

    def _is_read(self, number: int) -> bool:
        return self.readers(number) > 0

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
        """Views that an unknown operation reads become values."""
        return max(map(self._ask_for, self._values(node)), default=False)  # all of them, not only up to the first

    def _ask_for(self, value: int) -> bool:
        """Makes a step of a view that an operation in Python, or nobody else, reads; whether there was need to."""
        if value not in self.views:
            return False
        if not (self.is_native(self.find(self.views[value].source)) and self._make(value)):
            del self.views[value]
            unread = self.trace.node(value)
            self._refuse(unread)
            self.steps[value] = self._python(unread)
        return True

    def _make(self, value: int) -> bool:
        """Makes a native step of a view, where there is one."""
        if self.views[value].source in self.mixed or (step := laid_out(self, value)) is None:
            return False
        del self.views[value]
        self.steps[value] = step
        return True

    # --- how values lie ---

    def is_native(self, number: int) -> bool:
        """Whether a native step makes this value."""
        step = self.steps.get(number)
        return step is not None and step.kind != "python"

    def forms(self, number: int) -> tuple[bool, ...]:
        """Whether a value's channels come last: as it is, or as it may still be said."""
        if len(self.shapes[number]) != 4:
            return (len(self.shapes[number]) == 3,) if len(self.shapes[number]) in (2, 3) else ()
        if number in self.last or number in self._planes or self.is_native(number) or not self.is_float:
            return (number in self.last,)
        return (False, True)

    def comes_last(self, number: int) -> bool:
        """Whether a value's channels are the last of its axes."""
        return number in self.last or len(self.shapes[number]) == 3

    def settle(self, number: int, last: bool) -> None:
        """A value whose channels may be the first or the last of its axes has them there from now on."""
        if len(self.shapes[number]) == 4:
            (self.last if last else self._planes).add(number)

    def image(self, value: Value | Array) -> int | None:
        """The step of a value that the native plan can hold: (N, C, H, W) or (N, C), none of them empty."""
        return self._held(value, False, 2, 4)

    def tokens(self, value: Value | Array) -> int | None:
        """The same of a value (B, T, C) or (N, H, W, C)."""
        return self._held(value, True, 3, 4)

    def pixels(self, value: Value | Array) -> int | None:
        """The same of a value whose channels are the last of its axes, of which there are two, three or four."""
        rows = isinstance(value, Value) and len(self.shapes[value.number]) == 2
        return self.image(value) if rows else self.tokens(value)

    def either(self, value: Value | Array) -> int | None:
        """The step of a value, however it lies."""
        found = self.alike(value)
        return None if found is None else found[0]

    def alike(self, *values: Value | Array) -> list[int] | None:
        """The steps of several values that all lie one way."""
        for last in (False, True):
            if all(last in self._ways(value) for value in values):
                return [number for v in values if (number := self._held(v, last, 2, 3, 4)) is not None]
        return None

    def _ways(self, value: Value | Array) -> tuple[bool, ...]:
        """How a value can be read: with its channels before its pixels, after them, or either way."""
        if not isinstance(value, Value):
            return ()
        shape, number = self.shapes[value.number], self.find(value)
        if len(shape) not in (2, 3, 4) or min(shape[1:]) < 1 or (self.is_float and self.dtype(value) != np.float32):
            return ()
        if number in self.views and not self._make(number):
            return ()
        return tuple(last for last in self.forms(number) if self.is_float or not last)

    def _held(self, value: Value | Array, last: bool, *ranks: int) -> int | None:
        if not isinstance(value, Value) or len(self.shapes[value.number]) not in ranks or last not in self._ways(value):
            return None
        number = self.find(value)
        if not self.is_native(number):
            self.settle(number, last)
        return number

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
        if into in self.last:
            self.last.add(number)
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
