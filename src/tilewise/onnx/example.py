"""Inputs for a network: random numbers of the shapes that its file allows.

A size that the file fixes stays. A size with a name is the same wherever the name occurs, and a sum of names ("past +
length") is computed. The first size of an input is its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tilewise.errors import ShapeError, UnavailableError
from tilewise.onnx.graph import Array, Port
from tilewise.onnx.reader import one_line

_MAX_ELEMENTS = 1 << 20  # of one input without its batch; arbitrary, a file may claim to take anything
_PIXELS = 224  # height and width of images where the file leaves them open: the usual size of classifiers
Shape = tuple[int, ...]


def example_inputs(
    ports: Sequence[Port],
    batch: int | None = None,
    seed: int = 0,
    free: int = 8,
    pixels: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> list[Array]:
    """Draw standard normal numbers, or small integers, for every input.

    `batch` replaces the first size of every input, also where the file fixes it; without it a fixed size stays and an
    open one is 1. `free` is the size of other open dimensions, `pixels` that of the height and width of images (default
    224). `shapes` are shapes by the input's name; sizes with a name then have the value they have there.
    """
    shapes = dict(shapes or {})
    sizes = _named_sizes(ports, shapes)
    for port in ports:
        if port.name not in shapes:
            shapes[port.name] = _example_shape(port, sizes, batch, (free, pixels or _PIXELS))
    return [_draw(port, shapes[port.name], np.random.default_rng([seed, i])) for i, port in enumerate(ports)]


def fixed_dimension_error(port: Port, shape: Sequence[int], is_batch_free: bool = False) -> str:
    """Return what is wrong with a shape for an input, or ""; `is_batch_free` allows another batch than the file's."""
    if port.shape is None:
        return ""
    if len(shape) != len(port.shape):
        text = ", ".join("?" if n is None else str(n) for n in port.shape)
        return one_line(f"the input {port.name!r} takes shape ({text}), not {tuple(shape)}")
    for axis, (size, expected) in enumerate(zip(shape, port.shape, strict=True)):
        if isinstance(expected, int) and size != expected and not (is_batch_free and axis == 0):
            return one_line(
                f"the file fixes dimension {axis} of the input {port.name!r} at {expected}, and the "
                f"shape {tuple(shape)} has {size} there"
            )
    return ""


def _named_sizes(ports: Iterable[Port], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the values of named sizes that the shapes say, or raise an error where a shape does not fit."""
    sizes: dict[str, int] = {}
    for port in ports:
        shape = shapes.get(port.name)
        if shape is None:
            continue
        problem = fixed_dimension_error(port, shape, is_batch_free=True)
        if problem:
            raise ShapeError(problem)
        sizes |= {name: size for name, size in zip(port.shape or (), shape, strict=False) if isinstance(name, str)}
    return sizes


def _example_shape(port: Port, sizes: dict[str, int], batch: int | None, defaults: tuple[int, int]) -> Shape:
    """Choose a shape for an input, and remember the named sizes in it."""
    dimensions = port.shape or ()
    shape = []
    for axis, size in enumerate(dimensions):
        is_batch = axis == 0 and len(dimensions) > 1
        if is_batch and batch is not None:
            shape.append(batch)
        elif isinstance(size, int):
            shape.append(size)
        else:
            is_pixel = len(dimensions) == 4 and axis > 1 and port.dtype.kind == "f"
            default = 1 if is_batch else defaults[1] if is_pixel else defaults[0]
            shape.append(_size_of(size, sizes, default))
        if isinstance(size, str):
            sizes.setdefault(size, shape[-1])
    return tuple(shape)


def _size_of(name: str | None, sizes: Mapping[str, int], default: int) -> int:
    """Return the value of an open size: known by its name, or the sum of known sizes and numbers."""
    if name is None:
        return default
    terms = [part.strip() for part in name.split("+")]
    if all(term.isdigit() or term in sizes for term in terms):
        return sum(int(term) if term.isdigit() else sizes[term] for term in terms)
    return sizes.get(name, default)


def _draw(port: Port, shape: Shape, rng: np.random.Generator) -> Array:
    if math.prod(shape[1:]) > _MAX_ELEMENTS or math.prod(shape) > _MAX_ELEMENTS << 6:
        raise UnavailableError(one_line(f"the input {port.name} of shape {tuple(shape)} is too large to make up"))
    if port.dtype.kind == "f":
        return rng.standard_normal(shape).astype(port.dtype)
    return rng.integers(0, 2, shape).astype(port.dtype)


def batch_conflicts(ports: Iterable[Port], shapes: Iterable[Shape]) -> Iterator[str]:
    """Yield a sentence for every input whose batch is another than the one that the file fixes."""
    for port, shape in zip(ports, shapes, strict=True):
        problem = fixed_dimension_error(port, shape)
        if problem:
            yield problem
