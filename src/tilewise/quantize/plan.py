"""Partition of a quantized model into segments, each run by one native call.

A segment is a run of steps that the native graph supports: integer layers (`add_to`), and float norms between them.
Other steps are called from Python between segments. A segment reads floats or integers and returns, for every result
that is needed outside, floats if only float steps read it, else integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.graph.ops import NATIVE_OPS, EmitContext
from tilewise.quantize.graph import NATIVE_NORMS
from tilewise.quantize.parameters import QuantizedArray
from tilewise.quantize.reference import NumpyInt8Layer
from tilewise.tensor import Array

if TYPE_CHECKING:
    from tilewise.quantize.model import QuantizedModel

Value = QuantizedArray | Array


@dataclass(frozen=True)
class Product:
    """A matrix product that a step computes for one batch: its sizes, and the number of threads that share it."""

    step: int
    m: int
    n: int
    k: int
    threads: int


@dataclass(frozen=True)
class Segment:
    """A native plan, the steps whose results it reads, and those it returns.

    A result is stored like an integer array without data, or (None) as floats. `steps` maps the plan's values to the
    model's steps.
    """

    plan: Any
    sources: tuple[int, ...]
    results: tuple[tuple[int, QuantizedArray | None], ...]
    steps: dict[int, int]

    def products(self, values: dict[int, Value]) -> list[Product]:
        """List the distinct integer products that `run` computes, for tuning; `values` are all results so far."""
        products = dict.fromkeys(self.plan.products(self._arrays(values)))
        return [Product(self.steps[value], *sizes) for value, *sizes in products]

    def _arrays(self, values: dict[int, Value]) -> list[Array]:
        return [_array(values[i]) for i in self.sources]

    def run(self, values: dict[int, Value]) -> None:
        """Run the native plan on results in `values`, and add its results to `values` by operator index."""
        arrays = self.plan.run(self._arrays(values), current_backend().tiles)
        for (index, storage), array in zip(self.results, arrays, strict=True):
            values[index] = array if storage is None else replace(storage, data=array)


def _array(value: Value) -> Array:
    return value.data if isinstance(value, QuantizedArray) else np.ascontiguousarray(value, np.float32)


def segments(model: QuantizedModel) -> list[Segment | int]:
    """Partition the operators after the input into native segments and single operators (indices), in order.

    Only the last operator of a float island is listed; it runs the whole island.
    """
    result: list[Segment | int] = []
    inner = {index for island in model.islands.values() for index in island.steps[:-1]}
    float_results: set[int] = set()
    for is_native, run in groupby(range(1, len(model.graph.steps)), partial(_is_native, model)):
        steps = list(run)
        # Float norms alone are not worth a native call.
        if not is_native or all(model.integer[index] is None for index in steps):
            result += [index for index in steps if index not in inner]
            continue
        segment = _SegmentBuilder(model, steps, float_results).build()
        float_results |= {index for index, wrapper in segment.results if wrapper is None}
        result.append(segment)
    return result


def _is_native(model: QuantizedModel, index: int) -> bool:
    """Tell whether operator `index` can run in a native plan: an integer layer, or a float norm of images."""
    layer, step = model.integer[index], model.graph.steps[index]
    if native is None:
        return False
    if layer is None:
        return step.kind in NATIVE_NORMS and len(step.shape) == 4
    return hasattr(layer, "add_to") and not isinstance(getattr(layer, "kernel", None), NumpyInt8Layer)


class _SegmentBuilder:
    """Builds the native plan of consecutive operators, with conversions between integers and floats."""

    def __init__(self, model: QuantizedModel, steps: list[int], float_results: set[int]) -> None:
        """Store the operators (`steps`, indices) to build a segment of.

        `float_results` are the operators whose results earlier segments return as floats.
        """
        assert native is not None
        self.model, self.steps, self.plan, self.float_results = model, steps, native.Graph(), float_results
        # Native values by step: integers, floats with channels last, and floats with channels first, which are inputs
        # and rows of a linear layer.
        self.integers: dict[int, int] = {}
        self.channels_last: dict[int, int] = {}
        self.planes: dict[int, int] = {}

    def build(self) -> Segment:
        """Build the native plan of a segment: its inputs, steps and results, in this order."""
        model, members = self.model, set(self.steps)
        # Inputs of the segment: results that its operators read and none of them computes.
        sources = sorted({i for s in self.steps for i in model.graph.steps[s].inputs} - members)
        for i in sources:
            self._add_source(i)
        for index in self.steps:
            self._add_step(index)
        results: list[tuple[int, QuantizedArray | None]] = []
        # A result leaves the segment if a step outside reads it, or if it is the model's.
        for index in self.steps:
            outside = [u for u, step in enumerate(model.graph.steps) if index in step.inputs and u not in members]
            if outside or index == len(model.graph.steps) - 1:
                results.append((index, self._add_result(index, outside)))
        products = {value: index for index, value in (self.integers | self.planes).items()}
        return Segment(self.plan, tuple(sources), tuple(results), products)

    def _add_source(self, index: int) -> None:
        """Add an earlier operator's result as an input of the plan, as integers or floats."""
        shape = self.model.calibration.shapes[index]
        storage = None if index in self.float_results else self.model.result_of(index)
        if storage is None:
            self.planes[index] = self.plan.dynamic_input("float32", len(shape) == 1, shape[0])
            return
        # int16 values are symmetric; uint8 values have a zero point, which also fills the padding.
        p = storage.parameters
        dtype = "int16" if p.is_int16 else "uint8"
        self.integers[index] = self.plan.dynamic_input(dtype, len(shape) == 1, shape[0], storage.padding, p.zero_point)

    def _add_step(self, index: int) -> None:
        """Add operator `index` to the native plan: an integer layer, or a float norm."""
        layer, step = self.model.integer[index], self.model.graph.steps[index]
        if layer is None:
            inputs = [self._as_channels_last(i) for i in step.inputs]
            self.channels_last[index] = NATIVE_OPS[step.kind].emit(EmitContext(self.plan), step, inputs)
            return
        # An integer layer returns integers, or float rows if it is the last layer or feeds float steps.
        self.model.check_input(layer, step.inputs[0])
        parameters = [self.model.affine[i] for i in step.inputs]
        value = layer.add_to(self.plan, [self._as_integers(i) for i in step.inputs], parameters)
        (self.planes if self.model.result_of(index) is None else self.integers)[index] = value

    def _as_integers(self, index: int) -> int:
        """Return the number, in the plan, of operator `index`'s result as integers, quantized if needed."""
        if index not in self.integers:
            # The padding of the next convolution is part of the buffer, so quantizing writes it too.
            p, padding = self.model.affine[index], self.model.padding_of(index)
            floats = self.channels_last.get(index, self.planes.get(index))
            self.integers[index] = self.plan.quantize(floats, p.scale, p.zero_point, padding, p.int16_limit)
        return self.integers[index]

    def _as_channels_last(self, index: int) -> int:
        """Return the number, in the plan, of operator `index`'s result as float NHWC, dequantized if needed."""
        if index not in self.channels_last:
            if index in self.integers:
                scale = self.model.affine[index].scale
                self.channels_last[index] = self.plan.dequantize(self.integers[index], scale, last=True)
            else:
                self.channels_last[index] = self.plan.to_channels_last(self.planes[index])
        return self.channels_last[index]

    def _add_result(self, index: int, outside: list[int]) -> QuantizedArray | None:
        """Make a result an output of the plan: integers if an integer operator in `outside` reads it, else floats.

        Returns the form of an integer output, without data, or None for floats.
        """
        storage = self.model.result_of(index)
        if storage is None:
            is_plane = index in self.planes
            self.plan.output(self.planes[index] if is_plane else self.plan.to_planes(self.channels_last[index]))
            return None
        is_read_as_integers = any(self.model.integer[u] is not None for u in outside)
        value = self.integers[index]
        if not storage.image and not is_read_as_integers:
            value, storage = self.plan.dequantize(value, storage.parameters.scale), None
        self.plan.output(value)
        return storage
