"""Execution of a partitioned graph: native calls, and the operations that run in Python between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise._events import recorders
from tilewise.graph.ir import Array, Op, Shape
from tilewise.graph.ops import NATIVE_OPS
from tilewise.graph.passes.lower import Lowering

# Number of input sizes for which the calls of a network, or of a part of it, are stored; arbitrary.
MAX_SPECIALIZATIONS = 8


@dataclass(frozen=True)
class _PlanKernel:
    """The implementation of a native op, as a profile names it."""

    op: str
    name: str = "plan"
    describe: None = None


@dataclass
class NativeCall:
    """A native plan: the values it reads, the values it returns with their shapes, and the op of each native value."""

    plan: Any
    sources: list[int]
    results: list[tuple[int, Shape]]
    ops: dict[int, tuple[Op, list[Shape]]] = field(default_factory=dict)

    def algorithms(self) -> list[tuple[str, str]]:
        """List (layer name, algorithm) of every convolution and of every sparse linear layer."""
        return [(op.layer, op.algorithm) for op, _ in self.ops.values() if op.algorithm]

    def run(self, values: dict[int, Array]) -> None:
        """Run the native plan on arrays in `values` (by value number), and add its results to `values`."""
        arrays = [np.ascontiguousarray(values[i], np.float32) for i in self.sources]
        results = self._run_recorded(arrays) if recorders else self.plan.run(arrays)
        for (number, shape), array in zip(self.results, results, strict=True):
            values[number] = array.reshape(shape)

    def _run_recorded(self, arrays: list[Array]) -> Any:
        """Run the native plan with a timer around every op; report the times to the active profilers."""
        times_ns = np.zeros(self.plan.values, np.int64)
        start = recorders.hooks.now()
        results = self.plan.run(arrays, times=times_ns)
        returned = recorders.hooks.now()
        # Threads and fused tile groups interleave ops; each op's time is the mean over the threads. The times add up to
        # at most the duration of the call, so they are recorded one after the other.
        ends = start + np.cumsum(times_ns)
        kernels = [
            (NATIVE_OPS[op.kind].profile_name or op.kind, op.layer, int(ends[v] - times_ns[v]), int(ends[v]), *record)
            for v, (op, shapes) in self.ops.items()
            if times_ns[v]
            for record in [_kernel_record(op, shapes)]
        ]
        recorders.hooks.record_timed_kernels(kernels, returned)
        return results


def _kernel_record(op: Op, shapes: list[Shape]) -> tuple[list[Any], list[Any], Any]:
    """Describe an op for the profiler as a kernel call: operand shapes with dtypes, result, and (kernel, options).

    `shapes` are those of the op's inputs.
    """
    operands = list(shapes[:1] if op.kind in ("conv", "linear") else shapes)
    if op.kind == "attention":
        # Tokens (B, T, H · D) are recorded as heads (B, H, T, D).
        operands = [(s[0], op.options["heads"], s[1], op.options["dim"]) for s in shapes[:3]]
        operands[2] = (*operands[2][:3], op.options["value_dim"])
    # Weights (out, in) of a linear layer are recorded as the second operand (in, out) of a product.
    if op.weight is not None and op.kind not in ("affine", "layer_norm", "rms_norm"):
        operands.append(op.weight.shape if op.kind == "conv" else op.weight.shape[::-1])
    options = {"activation": op.activation or None, "kernel": op.options.get("kernel")}
    options |= {"bias": op.bias is not None or None, "residual": len(shapes) > 1 or None}
    dtype = np.dtype(np.float32)
    return [entry for s in operands for entry in (s, dtype)], [op.shape, dtype], (_PlanKernel(op.kind), options, None)


@dataclass(frozen=True)
class PythonCall:
    """A traced operation that runs outside the native calls."""

    number: int
    op: Op
    lowering: Lowering

    def run(self, values: dict[int, Array]) -> None:
        """Evaluate the operation in NumPy on arrays in `values` (by value number), and add its result to them."""
        assert self.op.node is not None
        values[self.number] = self.op.node.evaluate(lambda value: values[self.lowering.resolve(value)])


Call = NativeCall | PythonCall
