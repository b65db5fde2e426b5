"""Lowering: from the nodes of a trace to the ops of the native runtime, fusing as many nodes as possible into each op.

The rule of each operation is in the `RULES` table of lower_layers.py. A batch norm is folded into the weights of the
convolution before it, an addition becomes its residual input, an activation its epilogue. A node without a rule, or
with a shape that the native ops do not support, becomes a "python" op that runs outside the native call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.graph.ir import Array, Node, Op, Shape, Trace, Value
from tilewise.graph.passes.layout import lower_view
from tilewise.graph.passes.lower_layers import RULES
from tilewise.graph.passes.lower_strided import STRIDED_RULES
from tilewise.graph.passes.strided import copy_op, strided_operand
from tilewise.graph.passes.views import View

# Ops whose result has the layout of their first input.
_LAYOUT_PRESERVING = ("layer_norm", "rms_norm", "linear", "int8_linear", "add", "sub", "mul", "affine", "concat")


class Lowering:
    """The ops of a trace by the value they make, in execution order.

    The float runtime supports tokens (B, T, C), channels-last images (N, H, W, C) and reordered pixels; the integer
    runtime (`is_float` false) supports images (N, C, H, W) and rows (N, C) only.
    """

    def __init__(self, trace: Trace, is_float: bool = False) -> None:
        """Lower every node of a trace in order, then drop ops without readers."""
        self.trace, self.is_float = trace, is_float
        self.users = trace.users()
        result = trace.result
        self.result = result.number if isinstance(result, Value) else -1
        self.shapes: dict[int, Shape] = {i: x.shape for i, x in enumerate(trace.inputs)}
        self.ops: dict[int, Op] = {}
        self.constants: dict[int, Array] = {}  # constants that ops read as values
        self.aliases: dict[int, int] = {}  # values that another op makes
        self._aliases_of: dict[int, list[int]] = {}  # the values that are directly another name of this one
        self.views: dict[int, View] = {}  # values that are not computed unless an op needs them
        self.channels_last: set[int] = set()  # values (N, H, W, C)
        self.cropped: dict[int, int] = {}  # images of transposed convolutions: the node that crops them
        self._constant_numbers: dict[int, tuple[Array, int]] = {}  # by identity: steps of a loop share weights
        self._converted: dict[tuple[int, bool], int] = {}  # copies of values in another layout
        self._channels_first: set[int] = set()  # values fixed as (N, C, H, W) that no native op makes
        for number, node in enumerate(trace.nodes, len(trace.inputs)):
            self._lower_node(number, node)
        self._materialize(self.resolve(self.result))
        self.ops = {n: op for n, op in self.ops.items() if self.reader_count(n) > 0}

    def _lower_node(self, number: int, node: Node) -> None:
        """Lower one node: add its op, fuse it into an earlier op, or add a "python" op."""
        self.shapes[number] = node.shape
        result = self._apply_rule(number, node)
        if result is None and self._materialize_operands(node):
            result = self._apply_rule(number, node)  # the operands were views and are values now
        if result is None:
            result = self._python_op(node)
        if isinstance(result, Op):
            self.ops[number] = result
            if result.kind in _LAYOUT_PRESERVING and result.inputs[0] in self.channels_last:
                self.channels_last.add(number)

    def _apply_rule(self, number: int, node: Node) -> Op | bool | None:
        """Apply the rule of a node's operation: a new op, True if it was fused, None if unsupported."""
        name = node.operation.__name__
        result = RULES[name](self, number, node) if name in RULES else None
        if result is None and self.is_float and node.dtype == np.float32 and name in STRIDED_RULES:
            result = STRIDED_RULES[name](self, number, node)
        return result

    def _operands(self, node: Node) -> list[int]:
        return [self.resolve(v) for v in node.reads()]

    def _python_op(self, node: Node) -> Op:
        """Return the op that evaluates an unsupported node in Python."""
        return Op("python", tuple(self._operands(node)), node.shape, node.layer, node=node)

    def resolve(self, value: Value | int) -> int:
        """Return the number of the op that computes a value, following aliases."""
        number = value.number if isinstance(value, Value) else value
        while number in self.aliases:
            number = self.aliases[number]
        return number

    def add_alias(self, number: int, target: int) -> None:
        """Declare that value `number` is the same as value `target`."""
        self.aliases[number] = target
        self._aliases_of.setdefault(target, []).append(number)

    # --- views become values where an op needs them ---

    def _materialize_operands(self, node: Node) -> bool:
        # max() and not any(), which would stop at the first view: every operand has to become a value.
        return max(map(self._materialize, self._operands(node)), default=False)

    def _materialize(self, value: int) -> bool:
        """Turn a view into a stored value, by a native op if possible; return False if it already is one."""
        if value not in self.views:
            return False
        is_native = self.is_native(self.resolve(self.views[value].source))
        if is_native and self._lower_view(value):
            return True
        operand = strided_operand(self, Value(value)) if is_native and self.is_float else None
        del self.views[value]
        node = self.trace.node(value)
        if operand is not None:
            channels_last = len(self.shapes[value]) == 4
            self.ops[value] = copy_op(operand, self.shapes[value], channels_last, node.layer)
            self.fix_layout(value, channels_last)
        else:
            self._materialize_operands(node)
            self.ops[value] = self._python_op(node)
        return True

    def _lower_view(self, value: int) -> bool:
        """Add a native op that computes a view; return False if there is none."""
        if (op := lower_view(self, value)) is None:
            return False
        del self.views[value]
        self.ops[value] = op
        return True

    # --- layouts ---

    def is_native(self, number: int) -> bool:
        """Tell whether a native op computes this value."""
        op = self.ops.get(number)
        return op is not None and op.kind != "python"

    def possible_layouts(self, number: int) -> tuple[bool, ...]:
        """Return the layouts that a value has or may be given: True is channels-last, False channels-first."""
        if len(self.shapes[number]) != 4:
            return (len(self.shapes[number]) == 3,) if len(self.shapes[number]) in (2, 3) else ()
        fixed = number in self.channels_last or number in self._channels_first or self.is_native(number)
        if fixed or not self.is_float:
            return (number in self.channels_last,)
        return (False, True)

    def is_channels_last(self, number: int) -> bool:
        """Tell whether the last axis of a value is its channels.

        Values that are not images count as one row of channels.
        """
        return number in self.channels_last or len(self.shapes[number]) not in (2, 4)

    def fix_layout(self, number: int, channels_last: bool) -> None:
        """Set the layout of an image value (four axes) to channels-last or channels-first."""
        if len(self.shapes[number]) == 4:
            (self.channels_last if channels_last else self._channels_first).add(number)

    def image(self, value: Value | Array) -> int | None:
        """Return the number of a non-empty image (N, C, H, W) or row (N, C); None for other operands."""
        return self._in_layout(value, False, 2, 4)

    def tokens(self, value: Value | Array) -> int | None:
        """Return the number of non-empty tokens (B, T, C) or pixels (N, H, W, C); None for other operands."""
        return self._in_layout(value, True, 3, 4)

    def last_axis_channels(self, value: Value | Array) -> int | None:
        """Return the number of a value of rank 2 to 4 with channels on its last axis; else None."""
        rows = isinstance(value, Value) and len(self.shapes[value.number]) == 2
        return self.image(value) if rows else self.tokens(value)

    def is_image(self, value: Value | Array) -> bool:
        """Tell whether a native op can read a value as (N, C, H, W) or (N, C) without a copy."""
        return False in self._readable_layouts(value)

    def any_layout(self, value: Value | Array) -> int | None:
        """Return the number of a value in whichever supported layout it has; None for other operands."""
        numbers = self.common_layout(value)
        return None if numbers is None else numbers[0]

    def common_layout(self, *values: Value | Array) -> list[int] | None:
        """Return the numbers of several values in one layout that all of them can have; else None."""
        for channels_last in (False, True):
            if all(channels_last in self._readable_layouts(value) for value in values):
                operands = [self._in_layout(v, channels_last, 2, 3, 4) for v in values]
                return [number for number in operands if number is not None]
        return None

    def _readable_layouts(self, value: Value | Array) -> tuple[bool, ...]:
        """Return the layouts in which native ops can read a value: True is channels-last, False channels-first."""
        if not isinstance(value, Value):
            return ()
        shape, number = self.shapes[value.number], self.resolve(value)
        if len(shape) not in (2, 3, 4) or min(shape[1:]) < 1 or (self.is_float and self.dtype(value) != np.float32):
            return ()
        if number in self.views and not self._lower_view(number):
            return ()
        return tuple(last for last in self.possible_layouts(number) if self.is_float or not last)

    def _in_layout(self, value: Value | Array, channels_last: bool, *ranks: int) -> int | None:
        """Return the number of a value in a layout, copied if needed.

        None if its rank is not in `ranks` or it cannot be.
        """
        if not isinstance(value, Value) or len(self.shapes[value.number]) not in ranks:
            return None
        if channels_last not in self._readable_layouts(value):
            return self._convert(value, channels_last) if self.is_float else None
        number = self.resolve(value)
        if not self.is_native(number):
            self.fix_layout(number, channels_last)
        return number

    def _convert(self, value: Value, channels_last: bool) -> int | None:
        """Return the number of a copy of a float value in another layout; None if it cannot be made."""
        key = (self.resolve(value), channels_last)
        if key not in self._converted:
            operand = strided_operand(self, value)
            if operand is None:
                return None
            shape = self.shapes[value.number]
            self._converted[key] = copy = self.new_value(shape)
            self.fix_layout(copy, channels_last)
            self.ops[copy] = copy_op(operand, shape, channels_last, "")
        return self._converted[key]

    # --- new values, fusion ---

    def new_value(self, shape: Shape) -> int:
        """Reserve a number (negative) for an intermediate value of this shape between two ops of one node."""
        number = min(self.shapes) - 1 if min(self.shapes) < 0 else -1
        self.shapes[number], self.users[number] = shape, 1
        return number

    def constant(self, array: Array) -> int:
        """Register an array as a constant and return its value number."""
        key = id(array)
        if key in self._constant_numbers:
            return self._constant_numbers[key][1]
        number = self.new_value(array.shape)
        self.constants[number] = np.ascontiguousarray(array)
        self._constant_numbers[key] = (array, number)  # the array is held, so that its identity stays its own
        if len(array.shape) == 2:
            self.channels_last.add(number)  # rows need no conversion
        return number

    def dtype(self, value: Value) -> Any:
        """Return the data type of a traced value."""
        if value.number < 0:
            return np.dtype(np.float32)  # values between the ops of one node
        first = len(self.trace.inputs)
        return (self.trace.inputs[value.number] if value.number < first else self.trace.node(value.number)).dtype

    def fuse_into(self, number: int, producer: int, **fields: Any) -> bool:
        """Make the op `producer`, whose result nothing else reads, compute value `number` instead, with new `fields`.

        Returns True, as a lowering rule does that has fused its node.
        """
        # The op moves to the end of the order: a residual input may be computed after the convolution.
        op = self.ops.pop(producer)
        for name, field in fields.items():
            setattr(op, name, field)
        op.shape = self.shapes[number]
        self.ops[number] = op
        self.add_alias(producer, number)
        if producer in self.channels_last:
            self.channels_last.add(number)
        return True

    def sole_consumer(self, number: int, *kinds: str) -> Op | None:
        """Return the op that computes value `number` if the current node may be fused into it, else None.

        The op must be of one of these kinds, without an activation, and the current node its only reader.
        """
        op = self.ops.get(number)
        fusable = op is not None and op.kind in kinds and self.reader_count(number) == 1
        return op if fusable and op is not None and not op.activation else None

    def convs_before_movement(self, number: int) -> tuple[list[Op], int]:
        """Return the convolutions whose results reach `number` through only depth-to-space and a crop, and a factor.

        Elementwise functions of `number` may be fused into them. The factor is how many convolution channels become one
        channel of `number`. The list is empty if there is no such convolution.
        """
        op, repeats, source = self.ops.get(number), 1, number
        if self.reader_count(number) != 1:
            return [], 1
        if op is not None and op.kind == "gather_spatial" and (node := self.cropped.get(op.inputs[0])) is not None:
            # The crop is the node itself or an index of it that nothing else reads.
            reads = number == node or [v.number for v in self.trace.node(number).reads()] == [node]
            source = op.inputs[0] if reads and self.users[node] == 1 else source
            op = self.ops.get(source)
        if op is None or op.kind != "depth_to_space":
            return [], 1
        repeats = op.options["by"][0] * op.options["by"][1]
        sources = [self.ops.get(op.inputs[0])]
        if sources[0] is not None and sources[0].kind == "concat":  # a convolution per phase
            repeats //= len(sources[0].inputs)
            sources = [self.ops.get(part) for part in sources[0].inputs]
        convs = [s for s in sources if s and s.kind == "conv" and len(s.inputs) == 1 and not s.activation]
        return (convs if len(convs) == len(sources) else []), repeats

    def reader_count(self, number: int) -> int:
        """Count how often the trace reads a value or its aliases."""
        # An alias reads its value once, which does not count as a reader.
        names = self._aliases_of.get(number, ())
        return self.users[number] + sum(max(self.reader_count(name) - 1, 0) for name in names)
