"""A quantized model: integer layers that exchange int8 or int16 activations, run by native segments.

Operators with integer kernels become integer layers. All others stay in float32, and the model's report says which and
why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, DtypeError, ShapeError, TilewiseError
from tilewise.graph.ir import Array, Node, Op
from tilewise.graph.ir import Value as TracedValue
from tilewise.graph.trace import trace as trace_module
from tilewise.nn import Module
from tilewise.quantize.calibration import Calibration, check_fits
from tilewise.quantize.equalization import EqualizationScales, equalization_scales, equalize
from tilewise.quantize.float_islands import float_islands
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.layers import DynamicLinear, QuantizedLinear
from tilewise.quantize.lowering import (
    LOWERING_TABLE,
    IntegerLayerCache,
    shared_parameters,
    tied_values,
    unsupported_reason,
)
from tilewise.quantize.mixed_precision import int16_parameters
from tilewise.quantize.operators import QuantizedFlatten
from tilewise.quantize.parameters import AffineParameters, QuantizedArray, QuantizedWeights, quantize_array
from tilewise.quantize.plan import Product, Segment, segments
from tilewise.quantize.saturation import GptqRounding
from tilewise.tensor import Tensor, no_grad

Value = QuantizedArray | Array
_ONE = np.ones(1, np.float32)


@dataclass(frozen=True)
class StepReport:
    """The outcome for one operator.

    These are its form, the reason if it is not int8, its bytes, its signal-to-noise ratio in decibels, and for integer
    products how AVX2 without VNNI computes them (`tilewise.quantize.saturation`).
    """

    name: str
    kind: str
    form: str  # "int8", "int16" or "float32"
    reason: str
    nbytes: int
    snr_db: float | None = None
    avx2: str = ""


class QuantizedModel(Module):
    """A model of integer layers. Inputs and outputs are float32 Tensors; activations in between are int8 or int16."""

    computes_in_int8 = True

    def __init__(
        self,
        graph: FloatGraph,
        calibration: Calibration,
        keep_float: dict[str, str],
        stored: dict[int, dict[str, Array]] | None = None,
        int16_reasons: Mapping[int, str] | None = None,
        rounding: GptqRounding | None = None,
        int16_by_group: Mapping[int, AffineParameters] | None = None,
        layers: IntegerLayerCache | None = None,
    ) -> None:
        """Convert a traced graph.

        `stored` holds the arrays of a model that was read from a file, by operator; without it, weights come from the
        graph. `int16_reasons` maps the first member of each group of tied values that gets int16 to the reason.
        `rounding` rounds weights with respect to the inputs of their layer (GPTQ). `int16_by_group` are the parameters
        of int16 groups; by default they follow from the calibration. `layers` are those of other candidates.
        """
        check_fits(calibration, graph)
        self._stored, self._rounding, self.layers = stored, rounding, layers or IntegerLayerCache()
        self.graph, self.calibration, self.float_reasons = graph, calibration, dict(keep_float)
        self.int16_reasons = dict(int16_reasons or {})
        self.int16_by_group = dict(int16_by_group or int16_parameters(graph, calibration, self.int16_reasons))
        self.affine = [
            self.int16_by_group[group] if group in self.int16_reasons else p
            for p, group in zip(shared_parameters(graph, calibration), tied_values(graph), strict=True)
        ]
        self.training = False
        # Share of the largest result, set by quantize(max_error=...): the worst held-out image, and what is promised on
        # other images, at least max_error.
        self.measured_error: float | None = None
        self.stated_error: float | None = None
        self.integer: list[Any] = []
        self.equalization: EqualizationScales | None = None  # per step, the equalization scale of each channel
        # A file stores equalized weights and their scales; float weights are equalized here.
        if stored is None and calibration.channel_ranges:
            self._equalize_and_convert()
        else:
            self.equalization = (
                None if stored is None else [stored.get(i, {}).get("by", _ONE) for i in range(len(graph.steps))]
            )
            self._convert_all()
        for step, layer in zip(graph.steps, self.integer, strict=True):
            if layer is not None:  # no float copy of a weight is kept
                step.weight = step.bias = None
        self._stored = self._rounding = None
        self.layers = IntegerLayerCache()
        # By their last step, which runs the whole island.
        self.islands = {island.steps[-1]: island for island in float_islands(graph, self.integer)}
        self._segments: list[Segment | int] = segments(self)

    # --- running ---

    def forward(self, x: Any) -> Tensor:
        return Tensor(self.run(x.data if isinstance(x, Tensor) else np.asarray(x)))

    def run(self, x: Array, watch: Callable[[int, Value], None] | None = None) -> Array:
        """Run on float32 inputs and return float32 results.

        `watch` receives every operator's result; the integers are the same, computed one operator at a time.
        """
        values = self._checked_input(x)
        try:
            if watch is not None:
                for index in range(len(self.graph.steps)):
                    values[index] = self._run_op(index, values) if index else values[0]
                    watch(index, values[index])
            else:
                self.run_segments(values)
        except TilewiseError:
            raise
        except ValueError as error:
            raise ShapeError(f"this model cannot work on inputs of shape {x.shape}: {error}") from None
        return self._as_float(values[len(self.graph.steps) - 1])

    def results(self, x: Array) -> list[Array]:
        """Return every operator's result for `x` in float32, with equalization scales divided out."""
        results: list[Array] = []
        self.run(x, lambda index, value: results.append(self._unscaled(index, self._as_float(value))))
        return results

    def products(self, x: Array) -> list[Product]:
        """List the integer products that the native kernels compute for `x`, whose tiles can be tuned."""
        products: list[Product] = []
        values = self._checked_input(x)
        self.run_segments(values, lambda segment: products.extend(segment.products(values)))
        return products

    def _checked_input(self, x: Array) -> dict[int, Value]:
        """Check the shape of the input and return it, quantized, as {0: value}."""
        expected = self.calibration.shapes[0]
        if x.ndim != len(expected) + 1 or x.shape[1] != expected[0]:
            raise ShapeError(
                f"this model was calibrated on inputs of (N, {', '.join(map(str, expected))}), not {x.shape}"
            )
        if not self.graph.any_size and x.shape[1:] != expected:
            raise ShapeError(
                f"this model computes with the size of its calibration images, (N, {', '.join(map(str, expected))}), "
                f"and cannot take {x.shape}: quantize it with images of that size"
            )
        self.graph.check_batch(x)
        if x.dtype.kind not in "fiub":
            raise DtypeError(f"this model takes numbers, not {x.dtype}")
        return {0: np.ascontiguousarray(x, np.float32)}

    def run_segments(self, values: dict[int, Value], visit: Callable[[Segment], None] | None = None) -> None:
        """Run all native segments, and the operators between them, and add their results to `values` by operator index.

        `visit` receives each segment after it has run.
        """
        for segment in self._segments:
            if isinstance(segment, int):
                values[segment] = self._run_op(segment, values)
                continue
            segment.run(values)
            if visit is not None:
                visit(segment)

    def _run_op(self, index: int, values: dict[int, Value]) -> Value:
        """Run operator `index` alone, in integers or in float, on results in `values`; return its result."""
        step, layer, batch = self.graph.steps[index], self.integer[index], len(self._as_float(values[0]))
        if index in self.islands:
            island = self.islands[index]
            return island.run([self._as_float(values[i]) for i in island.sources], batch)
        inputs = [values[i] for i in step.inputs]
        if layer is None:
            with no_grad():
                return self.graph.run_float(step, [self._as_float(v) for v in inputs], batch)
        result: Value = layer(*[self._as_integers(v, i) for v, i in zip(inputs, step.inputs, strict=True)])
        return result

    @staticmethod
    def _as_float(value: Value) -> Array:
        return value.dequantize() if isinstance(value, QuantizedArray) else value

    def _unscaled(self, index: int, result: Array) -> Array:
        """Divide a result of operator `index` by the equalization scales of its channels, if any."""
        if self.equalization is None or self.equalization[index].shape != result.shape[1:2]:
            return result
        return result / self.equalization[index].astype(np.float32).reshape(-1, *(1,) * (result.ndim - 2))

    def _as_integers(self, value: Value, source: int) -> QuantizedArray:
        """Quantize a float value with the parameters of operator `source`; return integers unchanged."""
        if isinstance(value, QuantizedArray):
            return value
        return quantize_array(value, self.affine[source], self.padding_of(source))

    def check_input(self, layer: Any, source: int) -> None:
        """Raise if an integer layer expects other quantization parameters than operator `source` has."""
        if getattr(layer, "input", None) not in (None, self.affine[source]):
            raise ConfigurationError(f"a layer of this model reads {self.graph.steps[source].name} by another scale")

    def result_of(self, index: int) -> QuantizedArray | None:
        """Return an operator's integer result as a `QuantizedArray` without data; None if the result is float."""
        layer, shape = self.integer[index], self.calibration.shapes[index]
        if layer is None or (isinstance(layer, QuantizedLinear) and layer.output is None):
            return None
        padding, image = getattr(layer, "out_padding", 0), self.channels_last_image(index)
        return QuantizedArray(np.empty(0), self.affine[index], shape[0], padding, image)

    # --- converting ---

    def _convert_all(self) -> None:
        """Build the integer layer of every operator, in order."""
        self.integer = []
        for index in range(len(self.graph.steps)):
            self.integer.append(self._convert(index))

    def _equalize_and_convert(self) -> None:
        """Convert with equalized channels; without them if a ReLU6 that stays in float would clip them at 6."""
        steps, float_reasons = self.graph.steps, dict(self.float_reasons)
        before = [(step.weight, step.bias) for step in steps]
        # int16 values are fine enough without equalization, which would take away what they reach beyond the observed
        # values: a channel scaled up to the largest one saturates on other images, and ReLU6 clips it early.
        group_of = tied_values(self.graph)
        unscaled = {s.name for i, s in enumerate(steps) if group_of[i] in self.int16_reasons}
        parameters = shared_parameters(self.graph, self.calibration)
        self.equalization = equalization_scales(self.graph, self.calibration, parameters, {*float_reasons, *unscaled})
        equalize(self.graph, self.equalization)
        self._convert_all()
        # A float ReLU6 clips at 6 in unscaled channels only, so equalization has to be undone.
        every = zip(steps, self.integer, self.equalization, strict=True)
        if any(s.activation == "relu6" and layer is None and by.max(initial=1.0) > 1 for s, layer, by in every):
            self.equalization, self.float_reasons = None, float_reasons
            for step, (weight, bias) in zip(steps, before, strict=True):
                step.weight, step.bias = weight, bias
            self._convert_all()

    def mean_of(self, index: int) -> Array | None:
        """Return the mean of each channel of an operator's result, or None if it was not observed."""
        mean = self.calibration.mean_of(index)
        return mean if mean is None or self.equalization is None else mean * self.equalization[index]

    @property
    def uses_gptq(self) -> bool:
        """Tell whether weights are rounded with respect to the inputs of their layer."""
        return self._rounding is not None

    def rounded_weights(self, index: int) -> QuantizedWeights | None:
        """Return a convolution's GPTQ-rounded int8 weights, or None to round to the nearest value."""
        if self._rounding is None:
            return None
        step = self.graph.steps[index]
        scales = None if self.equalization is None else self.equalization[step.inputs[0]]
        return self._rounding.weights(index, step, scales)

    def _convert(self, index: int) -> Any:
        """Build the integer layer of an operator; None if it stays in float, which `float_reasons` then explains."""
        step = self.graph.steps[index]
        stored = None if self._stored is None else self._stored.get(index, {})
        if step.kind == "input" or step.name in self.float_reasons:
            if stored:
                step.weight, step.bias = stored.get("weight"), stored.get("bias")
            return None
        masked = step.options.get("masked")
        reason = "its results hold -infinity, as a mask does" if masked else unsupported_reason(self, step)
        if reason is not None:
            self.float_reasons[step.name] = reason
            return None
        try:
            # A layer whose sums might not fit into 32 bits stays in float.
            return LOWERING_TABLE[step.kind](self, index, step, stored)
        except ConfigurationError as error:
            self.float_reasons[step.name] = str(error)
            return None

    def padding_of(self, index: int) -> int:
        """Return the padding in pixels that the convolutions which read this result need at most."""
        return max((max(u.padding) for u in self.graph.users(index) if u.kind == "conv"), default=0)

    def keeps_channels_last(self, index: int) -> bool:
        """Tell whether a flattened image may stay in its stored order (H, W, C).

        That is the case if only linear layers read it, whose weights are then reordered to match.
        """
        return all(user.kind == "linear" for user in self.graph.users(index))

    def channels_last_image(self, index: int) -> tuple[int, ...]:
        """Return the (C, H, W) of a flattened image that is stored as (H, W, C); () for every other value."""
        layer = self.integer[index]
        return layer.image if isinstance(layer, QuantizedFlatten) and layer.keeps_channels_last else ()

    # --- size and report ---

    def __repr__(self) -> str:
        """Count the operators by their form; `report()` lists them."""
        counts = sorted(Counter(step.form for step in self.report()).items())
        operators = ", ".join(f"{count} {form}" for form, count in counts)
        return f"QuantizedModel: {operators} operators, {self.nbytes} bytes of weights"

    @property
    def nbytes(self) -> int:
        """Count the bytes of all weights, biases and scales, integer and float."""
        return sum(_weight_bytes(step, layer) for step, layer in zip(self.graph.steps, self.integer, strict=True))

    def layer_counts(self) -> tuple[int, int]:
        """Count the convolutions, linear and recurrent layers that compute in integers, and all of them."""
        kinds = [_is_layer(step) for step in self.graph.steps]
        integers = [layer is not None and is_layer for layer, is_layer in zip(self.integer, kinds, strict=True)]
        return sum(integers), sum(kinds)

    def report(self, x: Array | None = None, reference: FloatGraph | None = None) -> list[StepReport]:
        """Report on every operator; given an input and the float graph, with each result's signal-to-noise ratio."""
        ratios = {} if x is None or reference is None else signal_to_noise(self, reference, x)
        out, group_of = [], tied_values(self.graph)
        for index, (step, layer) in enumerate(zip(self.graph.steps, self.integer, strict=True)):
            if step.kind == "input":
                continue
            form, reason = "float32" if layer is None else "int8", self.float_reasons.get(step.name, "")
            if layer is not None and self.affine[index].is_int16:
                form, reason = "int16", self.int16_reasons.get(group_of[index], "")
            avx2, snr_db = getattr(layer, "avx2", ""), ratios.get(index)
            size = _weight_bytes(step, layer)
            out.append(StepReport(step.name, step.kind, form, reason, size, snr_db=snr_db, avx2=avx2))
        return out


def _is_layer(step: Op) -> bool:
    """Tell whether an operator is a convolution, linear or recurrent layer, including those that run in Python."""
    return step.kind in ("conv", "linear") or (step.node is not None and is_weighted(step.node))


def is_weighted(node: Node) -> bool:
    """Tell whether an operation multiplies by constant weights: a convolution, linear or recurrent layer, a product."""
    name = node.operation.__name__
    if name == "MatMul":
        return any(isinstance(v, np.ndarray) and v.ndim == 2 for v in node.inputs)
    return name in ("Conv2d", "ConvTranspose2d", "Linear", "Recurrent") and not isinstance(node.inputs[1], TracedValue)


def dynamic_layer_counts(model: Module, *examples: Array) -> tuple[int, int]:
    """Count the integer layers of a dynamically quantized model, and all its layers with weights."""
    nodes = trace_module(model, *examples).nodes
    integers = sum(node.operation is DynamicLinear for node in nodes)
    return integers, integers + sum(is_weighted(node) for node in nodes)


def _weight_bytes(step: Op, layer: Any) -> int:
    """Count the bytes of an operator's weights, as integers if it has an integer `layer`, else as floats."""
    if hasattr(layer, "nbytes"):
        return int(layer.nbytes)
    arrays = [a for a in (step.weight, step.bias) if a is not None]
    if step.node is not None:
        arrays += [a for a in (*step.node.inputs, *step.node.params.values()) if isinstance(a, np.ndarray)]
    return int(sum(a.nbytes for a in arrays))


def signal_to_noise(model: QuantizedModel, reference: FloatGraph, x: Array) -> dict[int, float]:
    """Return the signal-to-noise ratio of every operator's result against the float model's, in decibels."""
    ratios: dict[int, float] = {}
    exact = reference.results(x.astype(np.float32, copy=False))
    for index, (result, expected) in enumerate(zip(model.results(x), exact, strict=True)):
        noise = float(((result - expected) ** 2).sum(dtype=np.float64))
        signal = float((expected**2).sum(dtype=np.float64))
        ratios[index] = float("inf") if noise == 0 else 10 * np.log10(max(signal, 1e-300) / noise)
    return ratios
