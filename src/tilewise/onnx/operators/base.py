"""The ONNX operations that are supported: functions of a node and its input values, in one table by name.

A value is a Tensor where it depends on the network's input, and a plain array where it does not: shapes, ranges.
Operations with a gradient go through the tensor's own operations; the others through `computed`, which runs NumPy. What
is made of arrays alone stays an array, so shape arithmetic never enters the graph of gradients or a trace.

A file may ask for results of any size, so operations whose result can exceed their inputs call `check_size` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from tilewise import ops
from tilewise.errors import DtypeError, FileFormatError, GradientError, ShapeError, UnavailableError
from tilewise.onnx.graph import OnnxNode
from tilewise.tensor import Array, Tensor, apply

Value = Tensor | Array
Run = Callable[..., Any]  # (node, *values) to a value, or a tuple of them

TABLE: dict[str, Run] = {}
# Bytes; small, because networks with weights or large inputs get a larger limit.
MIN_SIZE_LIMIT = 64 << 20
_size_limit: ContextVar[int] = ContextVar("size_limit", default=1 << 62)


def operator(*names: str) -> Callable[[Run], Run]:
    """Register a function that runs the ONNX operations of these names."""

    def mark(run: Run) -> Run:
        for name in names:
            TABLE[name] = run
        return run

    return mark


@contextmanager
def limit_sizes(held_bytes: int) -> Iterator[None]:
    """Limit the size of results inside the block to a multiple of the size of inputs and weights, `held_bytes`.

    It is a thousand times, or 64 times if those are large.
    """
    token = _size_limit.set(max(MIN_SIZE_LIMIT, min(1024 * held_bytes, 4 * MIN_SIZE_LIMIT + 64 * held_bytes)))
    try:
        yield
    finally:
        _size_limit.reset(token)


def most_alive() -> int:
    """Return the limit of the bytes that all live values of a network may occupy together."""
    return 8 * _size_limit.get()


def check_size(shape: Sequence[int], itemsize: int = 4) -> tuple[int, ...]:
    """Return a shape as a tuple; raise if a result of this shape would exceed the limit."""
    if any(n < 0 for n in shape):
        raise ShapeError(f"no tensor can have the shape {tuple(shape)}")
    # An axis of nothing counts as one: on the way to nothing there may be much.
    if math.prod(max(n, 1) for n in shape) * itemsize > _size_limit.get():
        raise UnavailableError(
            f"a result of shape {tuple(shape)} would be many times larger than the network and its inputs"
        )
    return tuple(int(n) for n in shape)


def tensor(value: Value) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor(value)


def array(value: Value) -> Array:
    return value._array if isinstance(value, Tensor) else value


def read_values(value: Value) -> Array:
    """Return the numbers of a value that controls the computation, which makes planning impossible."""
    return value.data if isinstance(value, Tensor) else value


def numbers(value: Value) -> list[int]:
    """Return a value of sizes, axes or positions as a list of integers."""
    values_read = read_values(value)
    if values_read.dtype.kind not in "iu" or values_read.ndim > 1 or values_read.size > 64:
        raise ShapeError(
            f"sizes and axes must be a short list of integers, not {values_read.dtype} of shape {values_read.shape}"
        )
    return [int(n) for n in values_read.reshape(-1)]


class Computed(ops.Operation):
    """Operation without a gradient that applies a function to arrays."""

    name = ""

    def forward(self, *arrays: Array, function: Callable[..., Any], name: str = "") -> Array:
        self.name = name
        return np.asarray(function(*arrays))

    def backward(self, grad: Array) -> Any:
        """Raise `GradientError`: operations computed in NumPy have no gradient."""
        raise GradientError(
            f"the operation {self.name or 'computed here'} has no gradient, so nothing before it can be trained"
        )


def computed(function: Callable[..., Any], *values: Value, name: str = "") -> Value:
    """Apply `function` to arrays; the result is an array if all values are constants, else a tensor."""
    if not any(isinstance(v, Tensor) for v in values):
        with np.errstate(all="ignore"):
            return np.asarray(function(*values))
    return apply(Computed, *map(tensor, values), function=function, name=name)


def is_float(*values: Value) -> bool:
    return all(array(v).dtype.kind == "f" for v in values)


def are_constants(*values: Value | None) -> bool:
    """Tell whether no value depends on the network's input."""
    return not any(isinstance(v, Tensor) for v in values)


def broadcast(*values: Value) -> tuple[int, ...]:
    """Return the shape to which several values broadcast; raise if it exceeds the size limit."""
    try:
        shape = np.broadcast_shapes(*(v.shape for v in values))
    except ValueError:
        raise ShapeError(f"shapes {' and '.join(str(v.shape) for v in values)} do not broadcast") from None
    return check_size(shape, max(array(v).itemsize for v in values))


def same_type(node: OnnxNode, *values: Value) -> None:
    """Raise DtypeError unless all values have the same data type."""
    kinds = {array(v).dtype for v in values}
    if len(kinds) > 1:
        raise DtypeError(f"{node} receives {' and '.join(sorted(map(str, kinds)))}, which must be the same")


def axis_of(axis: int, ndim: int, node: OnnxNode) -> int:
    """Convert a possibly negative axis to a non-negative one; ShapeError if it does not exist."""
    if not -max(ndim, 1) <= axis < max(ndim, 1):
        raise ShapeError(f"{node} works along axis {axis} of a tensor with {ndim} dimensions")
    return axis % max(ndim, 1)


def choice(node: OnnxNode, name: str, default: str, allowed: Sequence[str]) -> str:
    """Return a node's text attribute; FileFormatError unless it is one of `allowed`."""
    value: str = node.get(name, default)
    if value not in allowed:
        raise FileFormatError(f"{node} has {name} {value[:40]!r}, which is none of {', '.join(allowed)}")
    return value
