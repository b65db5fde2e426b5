"""Reshapes, permutations and indices of an array as one view of it, however many there are.

An axis of a view runs over axes of its source, slowest first: heads cut from channels, a batch and its heads as one.
Axes of size 1 run over nothing. Two chains that give the same view give the same numbers, whoever wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.plan.trace import Node

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """Entries along one axis of the source: how many, and how far apart."""

    size: int
    along: int
    step: int


Group = tuple[Axis, ...]


@dataclass(frozen=True)
class View:
    """A value seen otherwise; `first` is where it begins on each axis of the source."""

    source: int
    groups: tuple[Group, ...]
    first: Shape

    @property
    def shape(self) -> Shape:
        return tuple(_size(group) for group in self.groups)


def _size(group: Group) -> int:
    return int(np.prod([axis.size for axis in group], dtype=np.int64))


def whole(source: int, shape: Shape) -> View:
    groups = tuple((Axis(n, i, 1),) if n != 1 else () for i, n in enumerate(shape))
    return View(source, groups, (0,) * len(shape))


def reshaped(view: View, shape: Shape) -> View | None:
    """None where an axis would be cut at a place that no step reaches."""
    left = [axis for group in view.groups for axis in group]
    groups = []
    for size in shape:
        group: list[Axis] = []
        while size != 1:
            if not left:
                return None
            axis = left.pop(0)
            if axis.size and size % axis.size == 0 and size:
                size //= axis.size
            elif axis.size == size == 0:
                size = 1
            elif size and axis.size and axis.size % size == 0:
                inner = axis.size // size
                left.insert(0, replace(axis, size=inner))
                axis, size = Axis(size, axis.along, axis.step * inner), 1
            else:
                return None
            group.append(axis)
        groups.append(_joined(group))
    return replace(view, groups=tuple(groups)) if not left else None


def _joined(group: list[Axis]) -> Group:
    """Axes that follow each other on the source as one."""
    found: list[Axis] = []
    for axis in group:
        last = found[-1] if found else None
        if last is not None and last.along == axis.along and last.step == axis.step * axis.size:
            found[-1] = Axis(last.size * axis.size, axis.along, axis.step)
        else:
            found.append(axis)
    return tuple(found)


def permuted(view: View, axes: Shape) -> View:
    return replace(view, groups=tuple(view.groups[a] for a in axes))


def indexed(view: View, index: Any) -> View | None:
    """By whole numbers and slices that go forward; None for others."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) > len(view.groups):
        return None
    first, groups = list(view.first), []
    for group, part in zip(view.groups, [*parts, *[slice(None)] * (len(view.groups) - len(parts))], strict=True):
        size = _size(group)
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            count = len(range(start, stop, step))
            if count == size and step > 0:
                groups.append(group)
                continue
        elif np.ndim(part) == 0 and np.asarray(part).dtype.kind in "iu":
            start, step, count = int(part) % max(size, 1), 1, 1
        else:
            return None
        if step < 1 or count < 1 or len(group) > 1:
            return None
        for axis in group:
            first[axis.along] += start * axis.step
        if isinstance(part, slice):
            groups.append(tuple(Axis(count, a.along, a.step * step) for a in group if count > 1))
    return View(view.source, tuple(groups), tuple(first))


def seen(view: View, node: Node) -> View | None:
    """What a traced Reshape, Permute or GetItem makes of a view."""
    kind, rank = node.operation.__name__, len(view.groups)
    if kind == "Reshape":
        return reshaped(view, node.shape)
    if kind == "Permute":
        axes = node.params["axes"]
        return permuted(view, tuple(int(a) % rank for a in (range(rank)[::-1] if axes is None else axes)))
    return indexed(view, node.params["index"]) if kind == "GetItem" else None
