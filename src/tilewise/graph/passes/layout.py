"""Views as native ops, wherever the channels of a pixel stay together.

The native runtime stores images and tokens channels-last. A view that keeps a pixel's channels together, or selects
some of them, is a list of pixels in a new order: an image as tokens and back, windows of an image, every second pixel,
the first token, a shuffle or slice of channels. A view whose pixels keep their order costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.graph.ir import Op, Shape
from tilewise.graph.passes.strided import native_shape
from tilewise.graph.passes.views import Axis, Group, View

if TYPE_CHECKING:
    from tilewise.graph.passes.lower import Lowering

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Gather:
    """A view as indices: its channel axis, the channels, and the pixels it reads, per image or of the whole batch."""

    axis: int
    channels: Indices
    positions: Indices
    per_image: bool


@dataclass(frozen=True)
class _Move:
    """One op of a view and the size (N, H, W) of its result."""

    kind: str
    options: dict[str, Any]
    size: tuple[int, int, int]


@dataclass(frozen=True)
class _ViewOps:
    """The ops from a value to a view of it, and the layouts of both."""

    source: int
    source_channels_last: bool
    channels_last: bool
    channels: int
    moves: list[_Move]


def lower_view(low: Lowering, number: int) -> Op | None:
    """Return the op that computes a view, after adding the ops it needs; None if there is no native form."""
    view = _view_ops(low, number)
    if view is None:
        return None
    source, layer, moves = view.source, low.trace.node(number).layer, view.moves
    low.fix_layout(source, view.source_channels_last)
    rows = len(low.shapes[source]) == 2
    # Integer ops keep rows (N, C) rows and images images, so a change of rank needs an op.
    changes_rank = not low.is_float and rows != (len(low.shapes[number]) == 2)
    for move in moves if changes_rank else moves[:-1]:
        image = (move.size[0], view.channels, *move.size[1:])
        value = low.new_value(image[:2] if changes_rank and rows else image)
        low.ops[value] = Op(move.kind, (source,), low.shapes[value], layer, options=move.options)
        source = value
    if view.channels_last:
        low.channels_last.add(number)
    kind, options = (moves[-1].kind, moves[-1].options) if moves and not changes_rank else ("identity", {})
    return Op(kind, (source,), low.shapes[number], layer, options=options)


def is_token_reshape(low: Lowering, number: int) -> bool:
    """Tell whether a view turns pixels or rows into tokens (B, T, C) without changing the order in memory."""
    source = low.resolve(low.views[number].source)
    if len(low.shapes[number]) != 3 or len(low.shapes[source]) == 3 or not low.is_native(source):
        return False
    view = _view_ops(low, number)
    return view is not None and all(m.kind == "gather_spatial" and not m.options["index"] for m in view.moves)


def _view_ops(low: Lowering, number: int) -> _ViewOps | None:
    """Return the ops that compute a view, for the first possible layout of its source that allows it; or None."""
    view = low.views[number]
    source, shape = low.resolve(view.source), low.shapes[view.source]
    for channels_last in low.possible_layouts(source):
        if channels_last and not low.is_float:
            continue
        gather = _as_gather(view, shape, len(shape) - 1 if channels_last else 1)
        if gather is not None and (ops := _moves(low, number, source, channels_last, gather)) is not None:
            return ops
    return None


def _moves(low: Lowering, number: int, source: int, source_last: bool, gather: _Gather) -> _ViewOps | None:
    """Express a gather as ops that move channels and pixels; None if the result is not an image, tokens or rows.

    `source_last` tells whether the source is channels-last.
    """
    shape, before = low.shapes[number], native_shape(low.shapes[source], source_last)
    rank = len(shape)
    # (B, C, T): channels and positions are exchanged.
    transposed = rank == 3 and gather.axis == 1
    if rank not in (2, 3, 4) or gather.axis not in (rank - 1, 1) or (transposed and shape[0] != before[0]):
        return None
    channels_last = rank == 4 and gather.axis == 3
    n, _, h, w = (shape[0], 0, 1, shape[2]) if transposed else native_shape(shape, channels_last)
    moves = [*_channel_moves(gather, before), *_pixel_moves(gather, before, (n, h, w))]
    moves += [_Move("transpose", {}, (n, h, w))] if transposed else []
    moves_pixels = any(move.kind in ("gather_spatial", "transpose") for move in moves)
    # The integer runtime has images and rows only.
    if not low.is_float and (rank == 3 or channels_last or moves_pixels):
        return None
    return _ViewOps(source, source_last, channels_last, len(gather.channels), moves)


def _as_gather(view: View, shape: Shape, axis: int) -> _Gather | None:
    """Express a view as index lists of channels and pixels; `axis` is the source's channel axis. None if it cannot."""
    at = _channel_axis(view, axis)
    repeats = any(a.along < 0 for group in view.groups for a in group)
    if at is None or not shape[0] or repeats:
        return None
    lead = [a for i, group in enumerate(view.groups) if i != at for a in group]
    per_image = shape[0] == 1 or lead[:1] == [Axis(shape[0], 0, 1)]  # images keep their order
    lead = lead[1:] if per_image and shape[0] > 1 else lead
    # Position of a pixel = sum over the spatial axes of index times stride.
    spatial = [i for i in range(1 if per_image else 0, len(shape)) if i != axis]
    strides = {i: int(np.prod([shape[j] for j in spatial if j > i])) for i in spatial}
    start = sum(view.first[i] * strides[i] for i in spatial)
    positions = _positions([Axis(a.size, a.along, a.step * strides[a.along]) for a in lead], start)
    return _Gather(at, _positions(view.groups[at], view.first[axis]), positions, per_image)


def _channel_axis(view: View, axis: int) -> int | None:
    """Return the axis of the view that enumerates the source's channels (`axis`) and nothing else; or None."""
    candidates = [i for i, group in enumerate(view.groups) if any(a.along == axis for a in group)]
    if not candidates:
        # A single channel: the axis of size 1 at the usual place.
        rank = len(view.groups)
        candidates = [i for i in (rank - 1, 1) if 0 < i < rank and not view.groups[i]][:1]
    if len(candidates) != 1 or any(a.along != axis for a in view.groups[candidates[0]]):
        return None
    return candidates[0]


def _positions(axes: Group | list[Axis], start: int) -> Indices:
    """List the flat positions visited by nested loops over `axes`, beginning at `start`."""
    positions = np.array([start], np.int64)
    for axis in axes:
        positions = (positions[:, None] + np.arange(axis.size) * axis.step).reshape(-1)
    return positions


def _channel_moves(gather: _Gather, before: Shape) -> Iterator[_Move]:
    """Yield the ops that select the gathered channels: none, one slice, or one gather."""
    first, count = int(gather.channels[0]), len(gather.channels)
    size = (before[0], before[2], before[3])
    if np.array_equal(gather.channels, np.arange(first, first + count)):
        if count < before[1]:
            yield _Move("slice", {"first": first, "count": count}, size)
    else:
        yield _Move("gather_channels", {"channels": gather.channels.tolist()}, size)


def _pixel_moves(gather: _Gather, before: Shape, size: tuple[int, int, int]) -> Iterator[_Move]:
    """Yield the ops that select and reorder pixels; an empty index means that only the size changes."""
    images, height, width = before[0] if gather.per_image else 1, before[2], before[3]
    total = images * height * width if gather.per_image else before[0] * height * width
    if not np.array_equal(gather.positions, np.arange(total // images)):
        if not gather.per_image:
            yield _Move("gather_spatial", {"index": [], "size": (1, total)}, (1, 1, total))
        yield _Move("gather_spatial", {"index": gather.positions.tolist(), "size": size[1:]}, size)
    elif size != (before[0], height, width):
        yield _Move("gather_spatial", {"index": [], "size": size[1:]}, size)
