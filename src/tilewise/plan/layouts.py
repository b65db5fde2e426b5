"""A view as steps of the native plan, wherever its channels stay together.

The plan keeps pixels of channels, one after the other. A view that leaves a pixel's channels side by side, or picks
some of them, is a list of pixels to be read in its order: an image as tokens and back, windows of an image, every
second pixel, the first token, a shuffle or a slice of channels. Where they lie in that order, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.steps import Shape, Step
from tilewise.plan.views import Axis, Group, View

if TYPE_CHECKING:
    from tilewise.plan.lower import Lowering

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Parts:
    """A view by its parts: where its channels are, which they are, and which pixels it reads, of every image `apart` or
    of all images together."""

    at: int
    channels: Indices
    pixels: Indices
    apart: bool


def image_of(shape: Shape, last: bool) -> tuple[int, int, int, int]:
    """(N, C, H, W) of a value; tokens (B, T, C) are an image of one row, and so is a row of numbers (N, C)."""
    if len(shape) == 4:
        n, h, w, c = shape if last else (shape[0], shape[2], shape[3], shape[1])
        return (n, c, h, w)
    return (shape[0], shape[2], 1, shape[1]) if len(shape) == 3 else (shape[0], shape[1], 1, 1)


def laid_out(low: Lowering, number: int) -> Step | None:
    """The step that makes a view; None where the native plan has none."""
    found = _read_by(low, number)
    if found is None:
        return None
    source, layer, chain = found.source, low.trace.node(number).layer, found.chain
    low.settle(source, found.last)
    rows = len(low.shapes[source]) == 2
    # An integer step keeps rows (N, C) rows and images images: changing that takes a step of its own.
    changes_rank = not low.is_float and rows != (len(low.shapes[number]) == 2)
    for made in chain if changes_rank else chain[:-1]:
        image = (made.size[0], found.channels, *made.size[1:])
        between = low.new_value(image[:2] if changes_rank and rows else image)
        low.steps[between] = Step(made.kind, (source,), low.shapes[between], layer, options=made.options)
        source = between
    if found.comes_last:
        low.last.add(number)
    kind, options = (chain[-1].kind, chain[-1].options) if chain and not changes_rank else ("same", {})
    return Step(kind, (source,), low.shapes[number], layer, options=options)


def lies_there(low: Lowering, number: int) -> bool:
    """Whether a view is tokens that a native value of rows or pixels has in this order already."""
    source = low.find(low.views[number].source)
    if len(low.shapes[number]) != 3 or len(low.shapes[source]) == 3 or not low.is_native(source):
        return False
    found = _read_by(low, number)
    return found is not None and all(made.kind == "pixels" and not made.options["index"] for made in found.chain)


@dataclass(frozen=True)
class _Made:
    """A step to be, and the images, rows and columns that it makes."""

    kind: str
    options: dict[str, Any]
    size: tuple[int, int, int]


@dataclass(frozen=True)
class _Chain:
    """The steps from a value to a view of it, and where the channels of both come."""

    source: int
    last: bool
    comes_last: bool
    channels: int
    chain: list[_Made]


def _read_by(low: Lowering, number: int) -> _Chain | None:
    view = low.views[number]
    source, shape = low.find(view.source), low.shapes[view.source]
    for last in low.forms(source):
        parts = _parts(view, shape, len(shape) - 1 if last else 1) if low.is_float or not last else None
        if parts is not None and (found := _chain(low, number, source, last, parts)) is not None:
            return found
    return None


def _chain(low: Lowering, number: int, source: int, last: bool, parts: _Parts) -> _Chain | None:
    shape, before = low.shapes[number], image_of(low.shapes[source], last)
    rank = len(shape)
    turned = rank == 3 and parts.at == 1  # (B, C, T): channels and pixels change places
    if rank not in (2, 3, 4) or parts.at not in (rank - 1, 1) or (turned and shape[0] != before[0]):
        return None
    comes_last = rank == 4 and parts.at == 3
    n, _, h, w = (shape[0], 0, 1, shape[2]) if turned else image_of(shape, comes_last)
    chain = [*_channel_steps(parts, before), *_pixel_steps(parts, before, (n, h, w))]
    chain += [_Made("transpose", {}, (n, h, w))] if turned else []
    moves_pixels = any(made.kind in ("pixels", "transpose") for made in chain)
    if not low.is_float and (rank == 3 or comes_last or moves_pixels):  # integer plans hold images and rows
        return None
    return _Chain(source, last, comes_last, len(parts.channels), chain)


def _parts(view: View, shape: Shape, axis: int) -> _Parts | None:
    at = _channels_at(view, axis)
    if at is None or not shape[0]:
        return None
    lead = [a for i, group in enumerate(view.groups) if i != at for a in group]
    apart = shape[0] == 1 or lead[:1] == [Axis(shape[0], 0, 1)]  # images stay one after the other
    lead = lead[1:] if apart and shape[0] > 1 else lead
    inside = [i for i in range(1 if apart else 0, len(shape)) if i != axis]
    steps = {i: int(np.prod([shape[j] for j in inside if j > i])) for i in inside}
    start = sum(view.first[i] * steps[i] for i in inside)
    pixels = _positions([Axis(a.size, a.along, a.step * steps[a.along]) for a in lead], start)
    return _Parts(at, _positions(view.groups[at], view.first[axis]), pixels, apart)


def _channels_at(view: View, axis: int) -> int | None:
    """Which of the view's axes runs over the channels, and over nothing else."""
    held = [i for i, group in enumerate(view.groups) if any(a.along == axis for a in group)]
    if not held:
        rank = len(view.groups)
        held = [i for i in (rank - 1, 1) if 0 < i < rank and not view.groups[i]][:1]
    if len(held) != 1 or any(a.along != axis for a in view.groups[held[0]]):
        return None
    return held[0]


def _positions(axes: Group | list[Axis], start: int) -> Indices:
    found = np.array([start], np.int64)
    for axis in axes:
        found = (found[:, None] + np.arange(axis.size) * axis.step).reshape(-1)
    return found


def _channel_steps(parts: _Parts, before: Shape) -> Iterator[_Made]:
    first, count = int(parts.channels[0]), len(parts.channels)
    size = (before[0], before[2], before[3])
    if np.array_equal(parts.channels, np.arange(first, first + count)):
        if count < before[1]:
            yield _Made("slice", {"first": first, "count": count}, size)
    else:
        yield _Made("take", {"channels": parts.channels.tolist()}, size)


def _pixel_steps(parts: _Parts, before: Shape, size: tuple[int, int, int]) -> Iterator[_Made]:
    images, height, width = before[0] if parts.apart else 1, before[2], before[3]
    together = images * height * width if parts.apart else before[0] * height * width
    if not np.array_equal(parts.pixels, np.arange(together // images)):
        if not parts.apart:
            yield _Made("pixels", {"index": [], "size": (1, together)}, (1, 1, together))
        yield _Made("pixels", {"index": parts.pixels.tolist(), "size": size[1:]}, size)
    elif size != (before[0], height, width):
        yield _Made("pixels", {"index": [], "size": size[1:]}, size)
