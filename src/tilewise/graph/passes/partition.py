"""Partition: runs of native ops become one native call each; what must run in Python stays between them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.graph.executor import Call, NativeCall, PythonCall
from tilewise.graph.ir import Array, Op, Shape
from tilewise.graph.ops import NATIVE_OPS, EmitContext
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.strided import native_shape


class WeightCache:
    """Native layers, shared by the plans of one module for several input sizes. They hold the only copy of weights."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[tuple[Any, ...], Any]] = {}  # (fingerprint, layer) by the op's number

    def get(self, number: int, op: Op) -> Any:
        """Return the packed layer of op `number`; it is built again only if weights or options have changed."""
        assert op.weight is not None
        entry, arrays = self._layers.get(number), (op.weight, op.gain, op.bias)
        fingerprint = (op.kind, op.activation, op.weight.shape, *op.options.values(), *map(_fingerprint, arrays))
        if entry and entry[0] == fingerprint and len(op.shape) == 2:
            return entry[1]
        weight = np.ascontiguousarray(op.scaled_weight(), np.float32)
        if entry and entry[0] == fingerprint:
            # Convolutions dropped their weights after packing; another size may pack them in another way.
            entry[1].restore(weight)
            return entry[1]
        layer = _native_layer(op, weight)
        self._layers[number] = (fingerprint, layer)
        return layer


class _MetaWeights(WeightCache):
    """Cache of layers without weights: a plan of them reports algorithms and memory but cannot run."""

    def get(self, number: int, op: Op) -> Any:
        return _native_layer(op, None)


_POINTWISE = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}


def _native_layer(op: Op, weight: Array | None) -> Any:
    """Create the packed layer of a convolution or linear op; without weights, a meta layer of shapes only."""
    assert native is not None and op.weight is not None
    bias = None if op.bias is None else np.ascontiguousarray(op.bias, np.float32)
    if len(op.shape) == 2:
        return native.FloatLinearLayer(weight, bias, op.activation, op.weight.shape)
    shape = (*op.weight.shape[:2], *op.kernel)
    filters = None if weight is None else weight.reshape(shape)
    return native.FloatConvLayer(filters, bias, activation=op.activation, meta=shape, **(op.options or _POINTWISE))


def _fingerprint(array: Array | None) -> int | None:
    """Hash weights, to compare them without holding a copy."""
    assert native is not None
    return None if array is None else native.fingerprint(np.ascontiguousarray(array, np.float32))


def _as_meta(op: Op) -> Op:
    """Return a copy of an op whose weights have shapes but no data."""
    weight = None if op.weight is None else np.broadcast_to(np.float32(0), op.weight.shape)
    return replace(op, weight=weight)


def partition(lowering: Lowering, weights: WeightCache) -> list[Call]:
    """Group the ops, in order, into native calls (adjacent native ops) and Python calls."""
    _limit_transformed_filters(lowering)
    return _partition(lowering, weights)


def _partition(lowering: Lowering, weights: WeightCache) -> list[Call]:
    """Group the ops into native and Python calls with the algorithms that they already have."""
    calls: list[Call] = []
    group: list[int] = []
    for number, op in lowering.ops.items():
        if op.kind != "python":
            group.append(number)
            continue
        calls += _native_calls(lowering, group, weights)
        group = []
        calls.append(PythonCall(number, op, lowering))
    return calls + _native_calls(lowering, group, weights)


def _native_calls(lowering: Lowering, group: list[int], weights: WeightCache) -> list[Call]:
    """Return the native call of a group of ops as a list; empty if nothing reads the group's results."""
    return [_native_call(lowering, group, weights)] if _read_outside(lowering, set(group)) else []


def _read_outside(lowering: Lowering, members: set[int]) -> set[int]:
    """Return those `members` (value numbers) that other calls read or that are results of the graph."""
    readers = {i for n, op in lowering.ops.items() if n not in members for i in op.inputs}
    return members & (readers | {lowering.resolve(lowering.result)})


def _native_call(lowering: Lowering, group: list[int], weights: WeightCache) -> NativeCall:
    """Build the native plan of a group of ops."""
    assert native is not None
    plan, ops, members = native.Graph(), lowering.ops, set(group)
    sources = sorted({i for n in group for i in ops[n].inputs} - members)
    values: dict[int, int] = {}  # native value by number
    for i in sources:
        channels_last = lowering.is_channels_last(i)
        values[i] = plan.input(*native_shape(lowering.shapes[i], channels_last), channels_last)
    native_ops: dict[int, tuple[Op, list[Shape]]] = {}
    for number in group:
        op = ops[number]

        def packed_layer(op: Op, number: int = number) -> Any:
            return weights.get(number, op)

        context = EmitContext(plan, packed_layer, lowering.shapes.__getitem__)
        values[number] = NATIVE_OPS[op.kind].emit(context, op, [values[i] for i in op.inputs])
        ops[number] = op = _as_meta(op)  # the native layer holds the weights now
        algorithm = plan.algorithm(values[number])
        if op.kind == "conv" or algorithm == "sparse":
            op.algorithm = algorithm
        # An op that changes nothing gets the value of its input, which belongs to the op that computes it.
        native_ops.setdefault(values[number], (op, [lowering.shapes[i] for i in op.inputs]))
    read_outside = _read_outside(lowering, members)
    results = [(n, lowering.shapes[n]) for n in group if n in read_outside]
    for number, _ in results:
        plan.output(values[number], lowering.is_channels_last(number))
    plan.finish()
    return NativeCall(plan, sources, results, native_ops)


def _meta_partition(lowering: Lowering) -> tuple[list[Call], dict[int, Op]]:
    """Partition without weights; also return the ops by number, with the algorithms that they would use."""
    meta = copy.copy(lowering)
    meta.ops = {number: _as_meta(op) for number, op in lowering.ops.items()}
    return _partition(meta, _MetaWeights()), meta.ops


# Transformed filters relative to plain ones: F(4×4, 3×3) has 6 · 6 / 9 entries, F(2×2, 3×3) has 4 · 4 / 9.
_TRANSFORMED_SIZE = {"winograd": 4.0, "winograd2": 16 / 9}
# Transformed filters may add this much memory and half of the convolutions' weights. Arbitrary: small networks
# should never be limited.
_FREE_FILTER_BYTES = 16 << 20


def _limit_transformed_filters(lowering: Lowering) -> None:
    """Make Winograd convolutions transform their filters at each use if the transformed ones take too much memory.

    A byte costs equal time to save in every layer, so the largest filters are switched first.
    """
    _, ops = _meta_partition(lowering)
    sizes = {n: op.weight.nbytes for n, op in ops.items() if op.kind == "conv" and op.weight is not None}
    extra = sum(size * (_TRANSFORMED_SIZE.get(ops[n].algorithm, 1) - 1) for n, size in sizes.items())
    for number in sorted(sizes, key=lambda n: -sizes[n]):
        if extra <= _FREE_FILTER_BYTES + sum(sizes.values()) / 2:
            return
        if ops[number].algorithm == "winograd":
            lowering.ops[number].algorithm = "winograd_late"
            extra -= 3 * sizes[number]


# --- batches ---


def chunk_size(lowering: Lowering, traced: int, images: int) -> int:
    """Return how many of a batch's `images` to run through all layers together.

    `lowering` has the ops for `traced` images. Activations of a chunk should fit this core's share of the last-level
    cache. Each chunk reads the weights again; if that costs more, chunks are so large that weights are an eighth of the
    activations' traffic. Images are independent, so results do not depend on the choice.
    """
    assert native is not None
    (call,), cache = _meta_partition(lowering)[0], int(native.l3_share())
    assert isinstance(call, NativeCall)
    fitting = max(1, cache * traced // max(1, int(call.plan.arena_bytes)))
    chunks = -(-images // fitting)
    ops = [op for op, _ in call.ops.values()]
    weight_bytes = sum(op.weight.nbytes for op in ops if op.weight is not None)
    activation_bytes = sum(2 * 4 * math.prod(op.shape) for op in ops) * images // traced
    if weight_bytes > cache and (chunks - 1) * weight_bytes >= activation_bytes:
        chunks = -(-activation_bytes // (8 * weight_bytes))
    return -(-images // chunks)


def is_batch_independent(lowering: Lowering, traced: int) -> bool:
    """Tell whether the ops, traced with `traced` images, are valid for any number of images.

    All ops must be native, which treats images independently, and read nothing but the images and each other.
    """
    ops = lowering.ops
    # The loops of strided ops contain the batch as a number; recurrent ops have the batch on their second axis.
    all_native = all(
        op.kind != "python" and not {"loop", "parts", "steps"} & set(op.options) and op.shape[0] == traced
        for op in ops.values()
    )
    self_contained = all(i in ops or i == 0 for op in ops.values() for i in op.inputs)
    return all_native and self_contained and lowering.resolve(lowering.result) in ops


def set_batch(lowering: Lowering, images: int) -> None:
    """Set the batch size (first dimension) of all ops' shapes to `images`."""
    for number in (0, *lowering.ops):
        lowering.shapes[number] = (images, *lowering.shapes[number][1:])
    for op in lowering.ops.values():
        op.shape = (images, *op.shape[1:])
