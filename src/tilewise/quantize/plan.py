"""A quantized model cut into segments, each run by one native call.

A segment is a run of steps that have an integer form the native plan knows (`add_to`). Steps in float, and integer
layers of other kinds, stand between segments and are called from Python. A segment reads floats or bytes and gives, for
every result that is needed outside, floats where only float steps read it, else bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.quantize.array import QuantizedArray
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
        parts += [_segment(model, steps)] if planned else steps
    return parts


def _runs(model: QuantizedModel) -> Iterator[tuple[bool, list[int]]]:
    """Maximal runs of steps that can be planned, and of steps that cannot."""
    run: list[int] = []
    for index in range(1, len(model.graph.steps)):
        if run and _planned(model.integer[index]) != _planned(model.integer[run[-1]]):
            yield _planned(model.integer[run[-1]]), run
            run = []
        run.append(index)
    if run:
        yield _planned(model.integer[run[-1]]), run


def _planned(layer: Any) -> bool:
    in_numpy = isinstance(getattr(layer, "kernel", None), NumpyInt8Layer)
    return native is not None and hasattr(layer, "add_to") and not in_numpy


def _segment(model: QuantizedModel, steps: list[int]) -> Segment:
    assert native is not None
    plan, inside = native.Graph(), set(steps)
    sources = sorted({i for s in steps for i in model.graph.steps[s].inputs} - inside)
    values = _add_sources(model, plan, sources)
    for index in steps:
        layer, reads = model.integer[index], model.graph.steps[index].inputs
        model.check_input(layer, reads[0])
        values[index] = layer.add_to(plan, [values[i] for i in reads], [model.affine[i] for i in reads])
    results: list[tuple[int, BytesResult | None]] = []
    for index in steps:
        outside = [u for u, step in enumerate(model.graph.steps) if index in step.inputs and u not in inside]
        if outside or index == len(model.graph.steps) - 1:
            results.append((index, _add_result(model, plan, index, values[index], outside)))
    return Segment(plan, tuple(sources), tuple(results), {values[index]: index for index in steps})


def _add_sources(model: QuantizedModel, plan: Any, sources: list[int]) -> dict[int, int]:
    """What comes from outside: floats are quantized first thing. The native plan wants all inputs before any step."""
    values: dict[int, int] = {}
    for i in sources:
        shape, known = model.calibration.shapes[i], model.result_of(i)
        if known is None:
            values[i] = plan.dynamic_input("float32", len(shape) == 1, shape[0])
        else:
            p = known.parameters
            values[i] = plan.dynamic_input(
                "int16" if p.wide else "uint8", len(shape) == 1, shape[0], known.border, p.zero_point
            )
    for i in sources:
        if model.result_of(i) is None:
            p, border = model.affine[i], model.border_of(i)
            values[i] = plan.quantize(values[i], p.scale, p.zero_point, border, p.most)
    return values


def _add_result(model: QuantizedModel, plan: Any, index: int, value: int, outside: list[int]) -> BytesResult | None:
    known = model.result_of(index)
    read_as_bytes = any(model.integer[u] is not None for u in outside)
    if known is not None and not known.image and not read_as_bytes:
        value, known = plan.dequantize(value, known.parameters.scale), None
    plan.output(value)
    return known
