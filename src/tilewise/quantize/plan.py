"""A quantized model cut into segments, each run by one native call.

A segment is a run of steps that the native graph knows: integer layers (`add_to`), and float norms between them. Other
steps are called from Python between segments. A segment reads floats or bytes and returns, for every result that is
needed outside, floats where only float steps read it, else bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.graph.ops import NATIVE_OPS, EmitContext
from tilewise.quantize.array import QuantizedArray
from tilewise.quantize.graph import NATIVE_NORMS
from tilewise.quantize.parameters import AffineParameters
from tilewise.quantize.reference import NumpyInt8Layer

if TYPE_CHECKING:
    from tilewise.quantize.convert import QuantizedModel

Array = npt.NDArray[Any]
Value = QuantizedArray | Array


@dataclass(frozen=True)
class BytesResult:
    """What is known beforehand of bytes that leave a segment."""

    parameters: AffineParameters
    channels: int
    border: int
    image: tuple[int, ...]

    def wrap(self, data: Array) -> QuantizedArray:
        return QuantizedArray(data, self.parameters, self.channels, self.border, self.image)


@dataclass(frozen=True)
class Product:
    """A matrix product that a step makes of one batch: its sizes, and how many threads it is shared among."""

    step: int
    m: int
    n: int
    k: int
    threads: int


@dataclass(frozen=True)
class Segment:
    """A native plan, the values it reads, and the values it gives: as bytes, or (None) as floats. `steps` are the
    model's steps by the plan's values."""

    plan: Any
    sources: tuple[int, ...]
    results: tuple[tuple[int, BytesResult | None], ...]
    steps: dict[int, int]

    def products(self, values: dict[int, Value]) -> list[Product]:
        """The products of integers that `run` makes of these values, each once: chunks of a batch share theirs."""
        found = self.plan.products(self._arrays(values))
        return [Product(self.steps[value], *sizes) for value, *sizes in dict.fromkeys(found)]

    def _arrays(self, values: dict[int, Value]) -> list[Array]:
        return [_array(values[i]) for i in self.sources]

    def run(self, values: dict[int, Value]) -> None:
        arrays = self.plan.run(self._arrays(values), current_backend().tiles)
        for (index, wrapper), array in zip(self.results, arrays, strict=True):
            values[index] = array if wrapper is None else wrapper.wrap(array)


def _array(value: Value) -> Array:
    return value.data if isinstance(value, QuantizedArray) else np.ascontiguousarray(value, np.float32)


def segments(model: QuantizedModel) -> list[Segment | int]:
    """The model's steps after the input, in order: a segment, or the index of a step to run by itself."""
    parts: list[Segment | int] = []
    for planned, steps in _runs(model):
        parts += [_SegmentBuilder(model, steps).build()] if planned else steps
    return parts


def _runs(model: QuantizedModel) -> Iterator[tuple[bool, list[int]]]:
    """Maximal runs of steps that can be planned, and of steps that cannot. A float norm alone is not worth a plan."""
    run: list[int] = []
    for index in range(1, len(model.graph.steps)):
        if run and _is_planned(model, index) != _is_planned(model, run[-1]):
            yield _is_worth_a_plan(model, run), run
            run = []
        run.append(index)
    if run:
        yield _is_worth_a_plan(model, run), run


def _is_worth_a_plan(model: QuantizedModel, run: list[int]) -> bool:
    return _is_planned(model, run[0]) and any(model.integer[index] is not None for index in run)


def _is_planned(model: QuantizedModel, index: int) -> bool:
    """Whether a native call can run a step: an integer layer, or a float norm of images."""
    layer, step = model.integer[index], model.graph.steps[index]
    if native is None:
        return False
    if layer is None:
        return step.kind in NATIVE_NORMS and len(step.shape) == 4
    return hasattr(layer, "add_to") and not isinstance(getattr(layer, "kernel", None), NumpyInt8Layer)


class _SegmentBuilder:
    """Adds a run of steps to a native graph. A value exists as integers, as channels-last floats, or as both: it is
    converted where a step of the other kind reads it."""

    def __init__(self, model: QuantizedModel, steps: list[int]) -> None:
        assert native is not None
        self.model, self.steps, self.plan = model, steps, native.Graph()
        # Native values by step. Planes are floats in the layout of arrays: inputs, and rows of a linear layer.
        self.integers: dict[int, int] = {}
        self.pixels: dict[int, int] = {}
        self.planes: dict[int, int] = {}

    def build(self) -> Segment:
        model, members = self.model, set(self.steps)
        sources = sorted({i for s in self.steps for i in model.graph.steps[s].inputs} - members)
        for i in sources:
            self._add_source(i)
        for index in self.steps:
            self._add_step(index)
        results: list[tuple[int, BytesResult | None]] = []
        for index in self.steps:
            outside = [u for u, step in enumerate(model.graph.steps) if index in step.inputs and u not in members]
            if outside or index == len(model.graph.steps) - 1:
                results.append((index, self._add_result(index, outside)))
        products = {value: index for index, value in (self.integers | self.planes).items()}
        return Segment(self.plan, tuple(sources), tuple(results), products)

    def _add_source(self, index: int) -> None:
        shape, known = self.model.calibration.shapes[index], self.model.result_of(index)
        if known is None:
            self.planes[index] = self.plan.dynamic_input("float32", len(shape) == 1, shape[0])
            return
        p = known.parameters
        dtype = "int16" if p.is_int16 else "uint8"
        self.integers[index] = self.plan.dynamic_input(dtype, len(shape) == 1, shape[0], known.border, p.zero_point)

    def _add_step(self, index: int) -> None:
        layer, step = self.model.integer[index], self.model.graph.steps[index]
        if layer is None:
            context = EmitContext(self.plan)
            self.pixels[index] = NATIVE_OPS[step.kind].emit(context, step, [self._as_pixels(i) for i in step.inputs])
            return
        self.model.check_input(layer, step.inputs[0])
        parameters = [self.model.affine[i] for i in step.inputs]
        value = layer.add_to(self.plan, [self._as_integers(i) for i in step.inputs], parameters)
        (self.planes if self.model.result_of(index) is None else self.integers)[index] = value

    def _as_integers(self, index: int) -> int:
        if index not in self.integers:
            p, border = self.model.affine[index], self.model.padding_of(index)
            floats = self.pixels[index] if index in self.pixels else self.planes[index]
            self.integers[index] = self.plan.quantize(floats, p.scale, p.zero_point, border, p.most)
        return self.integers[index]

    def _as_pixels(self, index: int) -> int:
        if index not in self.pixels:
            if index in self.integers:
                scale = self.model.affine[index].scale
                self.pixels[index] = self.plan.dequantize(self.integers[index], scale, last=True)
            else:
                self.pixels[index] = self.plan.to_channels_last(self.planes[index])
        return self.pixels[index]

    def _add_result(self, index: int, outside: list[int]) -> BytesResult | None:
        """Make a step's result an output: integers where an integer step outside reads them, else floats."""
        known = self.model.result_of(index)
        if known is None:
            self.plan.output(self.planes[index] if index in self.planes else self.plan.to_planes(self.pixels[index]))
            return None
        read_as_bytes = any(self.model.integer[u] is not None for u in outside)
        value = self.integers[index]
        if not known.image and not read_as_bytes:
            value, known = self.plan.dequantize(value, known.parameters.scale), None
        self.plan.output(value)
        return known
