"""The record of an operator: native form, NumPy reference, ONNX form, and what quantization does to its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from tilewise.graph.ir import Array, Op, Shape


class Quantization(Enum):
    """The quantization parameters of an operator's result in an integer graph."""

    OWN = "its own"
    INPUT = "those of its input: it only moves, compares or averages values"
    SHARED = "one pair for the result and all inputs"
    FLOAT = "none: it runs in float32 between integer operators of one native call"


@dataclass(frozen=True)
class EmitContext:
    """The native graph under construction: `weights(op)` returns a packed layer, `shape(i)` the shape of a value.

    In an integer graph, results get a `padding` that their readers need.
    """

    plan: Any
    weights: Callable[[Op], Any] = lambda _op: None
    shape: Callable[[int], Shape] = lambda _number: ()
    padding: int = 0
    is_integer: bool = False


# The writers of ONNX files, which are in a package above this one.
class OnnxNodes(Protocol):
    """The nodes of an ONNX file under construction; values are names."""

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its result."""

    def number(self, value: float) -> str:
        """Add a scalar float constant and return its name."""


class OnnxForm(OnnxNodes, Protocol):
    """An ONNX file under construction; `graph` writes constants and weights."""

    graph: Any

    def weights(self, op: Op) -> list[str]:
        """Add an operator's weight and bias (if any) as constants; return their names."""


@dataclass(frozen=True)
class OpSpec:
    """An operator. Only operators with `quantization` occur in integer graphs; they have all fields.

    `emit(context, op, operands)` adds it to a native graph and returns its value; `reference(op, *arrays)` computes it
    in NumPy on (N, C, H, W) or (N, C), floats or, if it only moves values, integers; `onnx(form, op, names)` writes it.
    `profile_name` is its name in profiles if that is not its kind.
    """

    emit: Callable[[EmitContext, Op, list[int]], int]
    profile_name: str = ""
    reference: Callable[..., Array] | None = None
    onnx: Callable[[OnnxForm, Op, list[str]], str] | None = None
    quantization: Quantization | None = None
