"""Strided operands: a value or any view of it as steps through the memory of the native runtime.

The runtime stores values as pixels of channels; the distance between pixels is chosen by its memory planner. The step
of an axis is therefore a pair (pixels, channels). Reshapes, permutations, slices and broadcasts only change steps, so a
strided op reads them without a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.graph.ir import Op, Shape, Value
from tilewise.graph.passes.views import View, whole

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering

Step = tuple[int, int]  # pixels, channels


@dataclass(frozen=True)
class Factor:
    """One factor of an axis: a loop of `size` entries that are `step` apart in memory."""

    size: int
    step: Step


Factors = tuple[Factor, ...]  # of one axis, slowest first
LoopAxes = list[tuple[int, list[Step]]]  # size, and the step of every operand
Loop = tuple[list[int], list[tuple[int, int, list[Step]]], tuple[int, int, int, int]]


@dataclass(frozen=True)
class Strided:
    """A strided operand: value number, offset of its first entry, and the factors (size and stride) of each axis."""

    number: int
    first: Step
    axes: tuple[Factors, ...]

    @property
    def shape(self) -> Shape:
        return tuple(math.prod(f.size for f in strides) for strides in self.axes)

    def broadcast(self, shape: Shape) -> Strided:
        """Broadcast to a shape by NumPy's rules: axes of size 1 and new leading axes get stride 0."""
        lead = len(shape) - len(self.axes)
        axes = [
            strides if strides or size == 1 else (Factor(size, (0, 0)),)
            for strides, size in zip(((),) * lead + self.axes, shape, strict=True)
        ]
        return replace(self, axes=tuple(axes))


def native_shape(shape: Shape, channels_last: bool) -> tuple[int, int, int, int]:
    """Return the (N, C, H, W) under which the native runtime stores a value of this shape.

    Tokens (B, T, C) and rows (N, C) are images of one column or pixel; values of another rank are one pixel.
    """
    if len(shape) == 4:
        n, h, w, c = shape if channels_last else (shape[0], shape[2], shape[3], shape[1])
        return (n, c, h, w)
    if len(shape) == 3:
        return (shape[0], shape[2], 1, shape[1])
    return (shape[0], shape[1], 1, 1) if len(shape) == 2 else (1, math.prod(shape), 1, 1)


def _axis_steps(shape: Shape, channels_last: bool) -> list[Step]:
    """Return the stride of each axis of a stored value, as (pixels, channels)."""
    # Rows (N, C), tokens (B, T, C), channels-last images (N, H, W, C), images (N, C, H, W), one row of any shape.
    if len(shape) == 2:
        return [(1, 0), (0, 1)]
    if len(shape) == 3:
        return [(shape[1], 0), (1, 0), (0, 1)]
    if len(shape) == 4 and channels_last:
        return [(shape[1] * shape[2], 0), (shape[2], 0), (1, 0), (0, 1)]
    if len(shape) == 4:
        return [(shape[2] * shape[3], 0), (0, 1), (shape[3], 0), (1, 0)]
    return [(0, math.prod(shape[i + 1 :])) for i in range(len(shape))]


def offset(index: Shape, steps: list[Step]) -> Step:
    """Return the memory offset, as (pixels, channels), of the entry at an index of a value with these strides."""
    entries = list(zip(index, steps, strict=True))
    return sum(i * step[0] for i, step in entries), sum(i * step[1] for i, step in entries)


def _from_view(low: Lowering, view: View) -> Strided:
    """Express a view of a stored value as a strided operand."""
    source = low.resolve(view.source)
    # An undecided layout becomes channels-last, except for the network's inputs: those are images.
    if True in low.possible_layouts(source):
        low.fix_layout(source, not 0 <= source < len(low.trace.inputs))
    steps = _axis_steps(low.shapes[source], low.is_channels_last(source))

    def factor(size: int, along: int, step: int) -> Factor:
        pixel_step, channel_step = steps[along] if along >= 0 else (0, 0)
        return Factor(size, (step * pixel_step, step * channel_step))

    axes = tuple(tuple(factor(a.size, a.along, a.step) for a in group) for group in view.groups)
    return Strided(source, offset(view.first, steps), axes)


def strided_operand(low: Lowering, value: Any) -> Strided | None:
    """Return a node's operand in strided form; None for constants, empty arrays and dtypes but float32."""
    if isinstance(value, Value):
        number = low.resolve(value)
        if low.dtype(value) != np.float32 or not math.prod(low.shapes[value.number]):
            return None
        return _from_view(low, low.views.get(number) or whole(number, low.shapes[value.number]))
    # Constants are values that every run reads.
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" or not array.size:
        return None
    return _from_view(low, whole(low.constant(array.astype(np.float32, copy=False)), array.shape))


def _refine(axes: list[Factors]) -> LoopAxes | None:
    """Split one axis of several operands into loops of common sizes; None if their factors do not divide each other."""
    stacks = [list(strides) for strides in axes]
    loop_axes: LoopAxes = []
    while all(stacks):
        # The fastest factors: the shortest one is a loop axis, longer ones are split by it.
        size = min(stack[-1].size for stack in stacks)
        steps = []
        for stack in stacks:
            factor = stack.pop()
            if factor.size % size:
                return None
            if factor.size > size:
                stack.append(Factor(factor.size // size, (factor.step[0] * size, factor.step[1] * size)))
            steps.append(factor.step)
        loop_axes.append((size, steps))
    return loop_axes[::-1]


def _merge(loop_axes: LoopAxes) -> LoopAxes:
    """Merge adjacent loops that are contiguous in every operand."""
    merged: LoopAxes = []
    for size, steps in loop_axes:
        # An outer axis continues an inner one if it steps over exactly all of it.
        if merged and merged[-1][1] == [(p * size, c * size) for p, c in steps]:
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    return merged


def merge_factors(strides: Factors) -> Factors:
    """Merge adjacent factors of one axis that are contiguous in memory."""
    return tuple(Factor(size, steps[0]) for size, steps in _merge([(f.size, [f.step]) for f in strides]))


def common_axes(operands: list[Strided], axes: list[int], merge: bool = True) -> LoopAxes | None:
    """Return one loop nest over these axes of several operands of equal shape, as (size, stride of each operand).

    None if their axes cannot be split into common sizes. `merge` joins loops that are contiguous in every operand.
    """
    loop_axes: LoopAxes = []
    # Axis by axis, because a loop axis never crosses the boundary of a result axis before merging.
    for axis in axes:
        refined = _refine([operand.axes[axis] for operand in operands])
        if refined is None:
            return None
        loop_axes += refined
    return _merge(loop_axes) if merge else loop_axes


def storage_order(shape: Shape, channels_last: bool) -> list[int]:
    """Return the axes of a value in the order of its memory, outermost first."""
    return [0, 2, 3, 1] if len(shape) == 4 and not channels_last else list(range(len(shape)))


def result_operand(shape: Shape, channels_last: bool) -> Strided:
    """Return the strided form of a new, contiguous value."""
    steps = _axis_steps(shape, channels_last)
    axes = tuple((Factor(n, step),) if n != 1 else () for n, step in zip(shape, steps, strict=True))
    return Strided(0, (0, 0), axes)


def make_loop(loop_axes: LoopAxes, operands: list[Strided], shape: tuple[int, int, int, int]) -> Loop:
    """Convert a loop nest to the native runtime's form; the last operand is the result, of (N, C, H, W) `shape`."""
    # The kernels write contiguous rows, so the last axis of the loop steps through the result's channels.
    if not loop_axes or loop_axes[-1][1][-1] != (0, 1):
        loop_axes = [*loop_axes, (1, [(0, 0)] * len(operands))]
    sizes = [size for size, _ in loop_axes]
    views = [(*operand.first, [steps[i] for _, steps in loop_axes]) for i, operand in enumerate(operands)]
    return sizes, views, shape


def materialized(low: Lowering, operand: Strided, layer: str) -> Strided:
    """Add an op that copies an operand to contiguous memory; return the copy's strided form."""
    shape = operand.shape
    number = low.new_value(shape)
    low.fix_layout(number, True)
    low.ops[number] = copy_op(operand, shape, True, layer)
    return _from_view(low, whole(number, shape))


def copy_op(operand: Strided, shape: Shape, channels_last: bool, layer: str) -> Op:
    """Return an op that copies an operand into a new value of this shape and layout."""
    operands = [operand, result_operand(shape, channels_last)]
    loop_axes = common_axes(operands, storage_order(shape, channels_last))
    assert loop_axes is not None  # the axes of a result have one factor each
    options = {"loop": make_loop(loop_axes, operands, native_shape(shape, channels_last)), "kind": "copy"}
    return Op("map", (operand.number,), shape, layer, options=options)


def flatten_op(low: Lowering, number: int, layer: str) -> Op:
    """Return an op that copies a value to contiguous memory in logical order, as one row."""
    shape = low.shapes[number]
    operand = _from_view(low, whole(number, shape))
    row = Strided(
        0, (0, 0), tuple((Factor(n, (0, math.prod(shape[i + 1 :]))),) if n != 1 else () for i, n in enumerate(shape))
    )
    loop_axes = common_axes([operand, row], list(range(len(shape))))
    assert loop_axes is not None
    options = {"loop": make_loop(loop_axes, [operand, row], (1, math.prod(shape), 1, 1)), "kind": "copy"}
    return Op("map", (number,), (math.prod(shape),), layer, options=options)
