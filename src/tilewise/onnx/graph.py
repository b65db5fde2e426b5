"""An ONNX graph as plain records: nodes in an order in which they can run, constants as arrays, what goes in and out.

Nothing here knows an operation, and nothing holds a protobuf message: the reader makes these records, the network runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.errors import FileFormatError
from tilewise.tensor import Array


@dataclass(frozen=True)
class OnnxNode:
    """One operation: its type, the names of its input and output values, and its attributes."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    opset: int = 13

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, converted to the type of `default`, which is returned if it is missing."""
        value = self.attributes.get(name, default)
        if default is not None and value is not default:
            value = _as_type_of_default(value, default, name, self)
        return value

    def __str__(self) -> str:
        label = f"{self.op} ({self.name[:80]})"
        return "".join(c if c.isprintable() else "?" for c in label)


def _as_type_of_default(value: Any, default: Any, name: str, node: OnnxNode) -> Any:
    """Convert an attribute's value to the type of its default; FileFormatError if that is not possible."""
    expected_type = type(default)
    fits = isinstance(value, int | float) if expected_type is float else isinstance(value, expected_type)
    if not fits or (expected_type is tuple and not all(isinstance(v, int | float | str) for v in value)):
        raise FileFormatError(f"{node} has a setting {name} that is not a {expected_type.__name__}")
    return float(value) if expected_type is float else value


@dataclass(frozen=True)
class Port:
    """An input or output of the network: its name, dtype and shape; a size that is free is a name or None."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class OnnxGraph:
    nodes: tuple[OnnxNode, ...]
    constants: dict[str, Array]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    opset: int


def in_order(nodes: Sequence[OnnxNode], available: set[str], where: object) -> list[OnnxNode]:
    """Sort nodes so that each follows those whose results it reads; raise for cycles and missing values.

    `available` are the names of constants and inputs; `where` is named in errors.
    """
    produced = set(available)
    for node in nodes:
        for name in filter(None, node.outputs):
            if name in produced:
                raise FileFormatError(f"{where}: the value {name!r} is produced twice")
            produced.add(name)
    missing = {name for node in nodes for name in node.inputs if name and name not in produced}
    if missing:
        raise FileFormatError(f"{where}: no node produces the value {min(missing)!r} that another one reads")
    return _sorted(nodes, available, where)


def _sorted(nodes: Sequence[OnnxNode], available: set[str], where: object) -> list[OnnxNode]:
    """Sort nodes topologically (Kahn 1962), keeping the file's order where possible."""
    waiting = [len({n for n in node.inputs if n and n not in available}) for node in nodes]
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in {n for n in node.inputs if n and n not in available}:
            readers.setdefault(name, []).append(index)
    ready = [i for i in range(len(nodes) - 1, -1, -1) if not waiting[i]]
    order: list[OnnxNode] = []
    while ready:
        node = nodes[ready.pop()]
        order.append(node)
        for name in filter(None, node.outputs):
            for reader in readers.get(name, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append(reader)
    if len(order) != len(nodes):
        stuck = next(node for node, count in zip(nodes, waiting, strict=True) if count)
        raise FileFormatError(f"{where}: the nodes form a cycle at {stuck}")
    return order
