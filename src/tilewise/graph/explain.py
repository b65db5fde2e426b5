"""Explanation of a plan: its ops with shapes and dtypes, its memory, and what runs outside the native call and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilewise.graph.executor import Call, NativeCall, PythonCall
from tilewise.graph.ir import Op, Shape, Value
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.lower_layers import RULES
from tilewise.graph.passes.lower_strided import STRIDED_RULES


@dataclass(frozen=True)
class OpRecord:
    """One op: where it runs, its kind, layer, result, and for an op outside the native call the reason."""

    call: int
    kind: str
    layer: str
    shape: Shape
    dtype: str
    detail: str = ""
    outside_reason: str = ""


@dataclass(frozen=True)
class PlanExplanation:
    """The ops of a plan in execution order, and the bytes of its activations with and without reuse of memory."""

    ops: tuple[OpRecord, ...]
    native_calls: int
    arena_bytes: int
    unshared_bytes: int

    @property
    def outside(self) -> tuple[OpRecord, ...]:
        """The operations that run in Python between native calls."""
        return tuple(op for op in self.ops if op.outside_reason)

    def __str__(self) -> str:
        return "\n".join(self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        """Yield a summary and a line for each operator."""
        yield f"{self.native_calls} native call(s), {len(self.outside)} operation(s) outside"
        yield f"activations: {self.arena_bytes / 1024:.0f} KiB, without sharing {self.unshared_bytes / 1024:.0f} KiB"
        for op in self.ops:
            shape = "×".join(map(str, op.shape)) or "scalar"
            note = f"  outside: {op.outside_reason}" if op.outside_reason else f"  {op.detail}".rstrip()
            yield f"{op.call:3d}  {op.kind:18s} {shape:16s} {op.dtype:8s} {op.layer}{note}"


def explain(calls: list[Call]) -> PlanExplanation:
    """Describe the calls of one specialization of a plan."""
    records: list[OpRecord] = []
    arena_bytes = unshared_bytes = 0
    for index, call in enumerate(calls):
        # A call is one op in Python, or many ops that share one native call and its memory.
        if isinstance(call, PythonCall):
            records.append(_outside_record(index, call))
            continue
        # The memory planner lets values with disjoint lifetimes share the arena of their call.
        arena_bytes += int(call.plan.arena_bytes)
        for op, _ in call.ops.values():
            # Native results are float32; views and slices occupy no memory but count here.
            unshared_bytes += 4 * math.prod(op.shape)
            records.append(OpRecord(index, op.kind, op.layer, op.shape, "float32", _detail(op)))
    native_calls = sum(isinstance(call, NativeCall) for call in calls)
    return PlanExplanation(tuple(records), native_calls, arena_bytes, unshared_bytes)


def _detail(op: Op) -> str:
    """Describe an op's variant in a few words: its function, algorithm, fused residual and activation."""
    notes = [str(op.options.get("kind", "")), op.algorithm, op.activation]
    # The second operand of a convolution or linear layer is the residual that was fused into it.
    if op.kind in ("conv", "linear") and len(op.inputs) > 1:
        notes.append("residual")
    return ", ".join(filter(None, notes))


def _outside_record(index: int, call: PythonCall) -> OpRecord:
    """Describe operation `index` of a plan, which runs in Python, and why it has no native form."""
    node = call.op.node
    assert node is not None
    reason = unsupported_reason(call.lowering, call.op)
    return OpRecord(index, node.name, call.op.layer, node.shape, str(node.dtype), outside_reason=reason)


def unsupported_reason(lowering: Lowering, op: Op) -> str:
    """Explain in a clause why an operation runs in Python and not in a native call."""
    node = op.node
    assert node is not None
    name = node.operation.__name__
    if name not in RULES and name not in STRIDED_RULES:
        return "there is no native op for it"
    if node.dtype != np.float32:
        return f"its result is {node.dtype}"
    dtypes = {str(lowering.dtype(v)) for v in node.reads()} - {"float32"}
    if dtypes:
        return f"it reads {' and '.join(sorted(dtypes))}"
    # Native layers pack their weights once, so weights that the graph computes have to stay in Python.
    if any(isinstance(v, Value) for v in node.inputs[1:]) and name in ("Conv2d", "Linear", "LayerNorm"):
        return "its weights are computed"
    return "the native op does not support these shapes or parameters"
