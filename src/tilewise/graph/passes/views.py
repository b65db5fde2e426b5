"""Algebra of views: a chain of reshapes, permutations and indices of an array as one `View`.

An axis of a view runs over axes of its source, slowest first: heads split from channels, or a batch merged with its
heads. Axes of size 1 run over nothing. Views are canonical: two chains with equal results give equal views.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise.graph.ir import Node, Shape

VIEW_OPERATIONS = ("Reshape", "Permute", "GetItem", "Expand")


@dataclass(frozen=True)
class Axis:
    """Entries along one axis of the source: their count and their distance. A broadcast runs along axis -1 by 0."""

    size: int
    along: int
    step: int


Group = tuple[Axis, ...]


@dataclass(frozen=True)
class View:
    """A strided view of a value; `first` is its start on each axis of the source."""

    source: int
    groups: tuple[Group, ...]
    first: Shape

    @property
    def shape(self) -> Shape:
        return tuple(_size(group) for group in self.groups)


def _size(group: Group) -> int:
    return int(np.prod([axis.size for axis in group], dtype=np.int64))


def whole(source: int, shape: Shape) -> View:
    """Return the view of a complete value of this shape, in its own order."""
    groups = tuple((Axis(n, i, 1),) if n != 1 else () for i, n in enumerate(shape))
    return View(source, groups, (0,) * len(shape))


def reshaped(view: View, shape: Shape) -> View | None:
    """Reshape a view; None if an axis would be split at a size that does not divide it."""
    remaining = [axis for group in view.groups for axis in group]
    groups = []
    for size in shape:
        # Collect source axes until their product is `size`, splitting the last one if it is too long.
        group: list[Axis] = []
        while size != 1:
            if not remaining:
                return None
            axis = remaining.pop(0)
            if axis.size and size % axis.size == 0 and size:
                size //= axis.size
            elif axis.size == size == 0:
                size = 1
            elif size and axis.size and axis.size % size == 0:
                inner = axis.size // size
                remaining.insert(0, replace(axis, size=inner))
                axis, size = Axis(size, axis.along, axis.step * inner), 1
            else:
                return None
            group.append(axis)
        groups.append(_merge_contiguous(group))
    return replace(view, groups=tuple(groups)) if not remaining else None


def _merge_contiguous(group: list[Axis]) -> Group:
    """Merge adjacent axes that together run through the source with one stride."""
    merged: list[Axis] = []
    for axis in group:
        last = merged[-1] if merged else None
        if last is not None and last.along == axis.along and last.step == axis.step * axis.size:
            merged[-1] = Axis(last.size * axis.size, axis.along, axis.step)
        else:
            merged.append(axis)
    return tuple(merged)


def expanded(view: View, shape: Shape) -> View:
    """Broadcast axes of size 1 and add leading axes."""
    groups = ((),) * (len(shape) - len(view.groups)) + view.groups
    repeated = (group or ((Axis(n, -1, 0),) if n != 1 else ()) for group, n in zip(groups, shape, strict=True))
    return replace(view, groups=tuple(repeated))


def permuted(view: View, axes: Shape) -> View:
    return replace(view, groups=tuple(view.groups[a] for a in axes))


def indexed(view: View, index: Any) -> View | None:
    """Index a view by integers, slices with positive steps and None; return None for other indices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    missing = len(view.groups) - sum(entry is not None for entry in entries)
    if missing < 0 or any(entry is Ellipsis for entry in entries):
        return None
    first, groups, remaining = list(view.first), list[Group](), iter(view.groups)
    for entry in [*entries, *[slice(None)] * missing]:
        if entry is None:
            groups.append(())
            continue
        group = next(remaining)
        size = _size(group)
        if isinstance(entry, slice):
            start, stop, step = entry.indices(size)
            count = len(range(start, stop, step))
            if count == size and step > 0:
                groups.append(group)
                continue
        elif np.ndim(entry) == 0 and np.asarray(entry).dtype.kind in "iu":
            start, step, count = int(entry) % max(size, 1), 1, 1
        else:
            return None
        # A slice of an axis that runs over several source axes is not a strided view of either.
        if step < 1 or count < 1 or len(group) > 1:
            return None
        # An integer moves the start and removes the axis; a slice also multiplies its step.
        for axis in group:
            first[axis.along] += start * axis.step
        if isinstance(entry, slice):
            groups.append(tuple(Axis(count, a.along, a.step * step) for a in group if count > 1))
    return View(view.source, tuple(groups), tuple(first))


def apply_node(view: View, node: Node) -> View | None:
    """Apply a traced operation of `VIEW_OPERATIONS` to a view; None if the result is not a view."""
    kind, rank = node.operation.__name__, len(view.groups)
    if kind == "Reshape":
        return reshaped(view, node.shape)
    if kind == "Permute":
        axes = node.params["axes"]
        return permuted(view, tuple(int(a) % rank for a in (range(rank)[::-1] if axes is None else axes)))
    if kind == "Expand":
        return expanded(view, node.shape)
    return indexed(view, node.params["index"]) if kind == "GetItem" else None
