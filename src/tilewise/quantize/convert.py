"""`quantize(model, data)`: a float model in, a runnable int8 model out.

Operators with integer kernels become integer layers that exchange int8 or int16 activations. All others stay in
float32, and the model's report says which and why. With `accuracy_drop` the noisiest layers return to float32 until the
loss of accuracy is within it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import AccuracyError, ConfigurationError, DtypeError, ShapeError, TilewiseError
from tilewise.graph.ir import Node, Op
from tilewise.graph.ir import Value as TracedValue
from tilewise.graph.trace import trace as trace_module
from tilewise.nn import Module
from tilewise.quantize.array import QuantizedArray, quantize_array
from tilewise.quantize.calibration import Calibration, EvaluatedBatch, calibrated_with_holdout, check_fits, check_model
from tilewise.quantize.checks import (
    check_same_integers,
    first_deviating_layer,
    state_dynamic_error,
    warn_if_slower,
)
from tilewise.quantize.equalization import EqualizationScales, equalization_scales, equalize
from tilewise.quantize.graph import FloatGraph, trace
from tilewise.quantize.layers import DynamicLinear, QuantizedLinear
from tilewise.quantize.lowering import FORMS, LayerCache, shared_parameters, tied_values, unsupported_reason
from tilewise.quantize.mixed_precision import (
    HOLDOUT_IMAGES,
    PrecisionSearch,
    assign_precision,
    int16_parameters,
    measured_error,
    stated_error,
)
from tilewise.quantize.parameters import AffineParameters, QuantizedWeights
from tilewise.quantize.plan import BytesResult, Product, Segment, segments
from tilewise.quantize.pooling import QuantizedFlatten
from tilewise.quantize.weight_rounding import GptqRounding
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
Value = QuantizedArray | Array
Evaluate = Callable[[Module], float]
_ONE = np.ones(1, np.float32)
# Ratios of the measured error to max_error, with 16 bits. Up to the first, layers are kept in float to reach max_error:
# beyond it there is a fault, which float layers would hide. Up to the second, a model is returned with a warning.
_LARGEST_FLOAT_EXCESS, _LARGEST_EXCESS = 10.0, 3.0
_FLOAT_LAYERS = (1, 2, 4, 8, 16)  # layers that are kept in float, one attempt after the other
_HARM_IMAGES = 4  # images that layers are compared on
_ATTENTION = ("Softmax", "LayerNormalization", "LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class StepReport:
    """The outcome for one operator: its form, the reason if it is not int8, its bytes, its signal-to-noise ratio in
    decibels, and for integer products how AVX2 without VNNI computes them (`tilewise.quantize.saturation`)."""

    name: str
    kind: str
    form: str  # of its result: "int8", "int16" or "float32"
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
        numbers: Mapping[int, AffineParameters] | None = None,
        layers: LayerCache | None = None,
    ) -> None:
        """Convert a traced graph.

        `stored` holds the arrays of a model that was read from a file, by operator; without it, weights come from the
        graph. `int16_reasons` maps the first member of each group of tied values that gets int16 to the reason.
        `rounding` rounds weights with respect to the inputs of their layer (GPTQ). `numbers` are the parameters of
        int16 groups; by default they follow from the calibration. `layers` are those of other candidates.
        """
        check_fits(calibration, graph)
        self._stored, self._rounding, self.layers = stored, rounding, layers or LayerCache()
        self.graph, self.calibration, self.float_reasons = graph, calibration, dict(keep_float)
        self.int16_reasons = dict(int16_reasons or {})
        self.numbers = dict(numbers or int16_parameters(graph, calibration, self.int16_reasons))
        self.affine = [
            self.numbers[family] if family in self.int16_reasons else p
            for p, family in zip(shared_parameters(graph, calibration), tied_values(graph), strict=True)
        ]
        self.training = False
        # Share of the largest result, set by quantize(max_error=...): the worst held-out image, and what is promised on
        # other images, at least max_error.
        self.measured_error: float | None = None
        self.stated_error: float | None = None
        self.integer: list[Any] = []
        self.equalization: EqualizationScales | None = None  # per step, the equalization scale of each channel
        if stored is None and calibration.spans:
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
        self.layers = LayerCache()
        self._segments: list[Segment | int] = segments(self)

    # --- running ---

    def forward(self, x: Any) -> Tensor:
        return Tensor(self.run(x.data if isinstance(x, Tensor) else np.asarray(x)))

    def run(self, x: Array, watch: Callable[[int, Value], None] | None = None) -> Array:
        """Run on float32 inputs and return float32 results. `watch` receives every operator's result; the integers are
        the same, computed one operator at a time."""
        values = self._checked(x)
        try:
            if watch is not None:
                self._run_watched(values, watch)
            else:
                self._run_segments(values)
        except TilewiseError:
            raise
        except ValueError as error:
            raise ShapeError(f"this model cannot work on inputs of shape {x.shape}: {error}") from None
        return self._as_float(values[len(self.graph.steps) - 1])

    def products(self, x: Array) -> list[Product]:
        """List the integer products that the native kernels compute for `x`, whose tiles can be tuned."""
        products: list[Product] = []
        values = self._checked(x)
        self._run_segments(values, lambda segment: products.extend(segment.products(values)))
        return products

    def _checked(self, x: Array) -> dict[int, Value]:
        """Check the input and return it as the first operator's result."""
        expected = self.calibration.shapes[0]
        if x.ndim != len(expected) + 1 or x.shape[1] != expected[0]:
            raise ShapeError(
                f"this model was calibrated on inputs of (N, {', '.join(map(str, expected))}), not {x.shape}"
            )
        if x.dtype.kind not in "fiub":
            raise DtypeError(f"this model takes numbers, not {x.dtype}")
        return {0: np.ascontiguousarray(x, np.float32)}

    def _run_segments(self, values: dict[int, Value], visit: Callable[[Segment], None] | None = None) -> None:
        """Run all native segments and the operators between them; `visit` receives each segment before it runs."""
        for segment in self._segments:
            if isinstance(segment, int):
                values[segment] = self._step(segment, values)
                continue
            if visit is not None:
                visit(segment)
            segment.run(values)

    def _run_watched(self, values: dict[int, Value], watch: Callable[[int, Value], None]) -> None:
        watch(0, values[0])
        for index in range(1, len(self.graph.steps)):
            values[index] = self._step(index, values)
            watch(index, values[index])

    def _step(self, index: int, values: dict[int, Value]) -> Value:
        step, layer = self.graph.steps[index], self.integer[index]
        inputs = [values[i] for i in step.inputs]
        if layer is None:
            with no_grad():
                return self.graph.run_float(step, [self._as_float(v) for v in inputs])
        result: Value = layer(*[self._as_bytes(v, i) for v, i in zip(inputs, step.inputs, strict=True)])
        return result

    @staticmethod
    def _as_float(value: Value) -> Array:
        return value.dequantize() if isinstance(value, QuantizedArray) else value

    def _unscaled(self, index: int, result: Array) -> Array:
        """Return an operator's result without the equalization scales of its channels."""
        if self.equalization is None or self.equalization[index].shape != result.shape[1:2]:
            return result
        return result / self.equalization[index].astype(np.float32).reshape(-1, *(1,) * (result.ndim - 2))

    def _as_bytes(self, value: Value, source: int) -> QuantizedArray:
        if isinstance(value, QuantizedArray):
            return value
        return quantize_array(value, self.affine[source], self.padding_of(source))

    def check_input(self, layer: Any, source: int) -> None:
        """Refuse a layer that was built for other quantization parameters than its input has."""
        if getattr(layer, "input", None) not in (None, self.affine[source]):
            raise ConfigurationError(f"a layer of this model reads {self.graph.steps[source].name} by another scale")

    def result_of(self, index: int) -> BytesResult | None:
        """Describe how an operator's integer result is stored; None for a float result."""
        layer, shape = self.integer[index], self.calibration.shapes[index]
        if layer is None or (isinstance(layer, QuantizedLinear) and layer.output is None):
            return None
        parameters = self.affine[index]
        image = self.channels_last_image(index)
        return BytesResult(parameters, shape[0], getattr(layer, "out_border", 0), image)

    # --- converting ---

    def _convert_all(self) -> None:
        self.integer = []
        for index in range(len(self.graph.steps)):
            self.integer.append(self._convert(index))

    def _equalize_and_convert(self) -> None:
        """Convert with equalized channels; without if a ReLU6 of equalized channels stays in float and clips at 6."""
        steps, float_reasons = self.graph.steps, dict(self.float_reasons)
        before = [(step.weight, step.bias) for step in steps]
        # 16 bits are fine enough without equalization, which would take away what they reach beyond the observed
        # values: a channel scaled up to the largest one saturates on other images, and ReLU6 clips it early.
        families_of = tied_values(self.graph)
        unscaled = {s.name for i, s in enumerate(steps) if families_of[i] in self.int16_reasons}
        parameters = shared_parameters(self.graph, self.calibration)
        self.equalization = equalization_scales(self.graph, self.calibration, parameters, {*float_reasons, *unscaled})
        equalize(self.graph, self.equalization)
        self._convert_all()
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
        """Whether weights are rounded with respect to the inputs of their layer."""
        return self._rounding is not None

    def rounded(self, index: int) -> QuantizedWeights | None:
        """Return a convolution's int8 weights from GPTQ; None if they are rounded to the nearest value."""
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
            return FORMS[step.kind](self, index, step, stored)
        except ConfigurationError as error:
            self.float_reasons[step.name] = str(error)
            return None

    def padding_of(self, index: int) -> int:
        """Return the largest padding of the convolutions that read this operator's result."""
        return max((max(u.padding) for u in self.graph.users(index) if u.kind == "conv"), default=0)

    def keeps_channels_last(self, index: int) -> bool:
        """Tell whether a flattened image may keep its stored order (H, W, C): only linear layers read it, whose weights
        are reordered. Any other integer operator would mix it up with rows in the module's order."""
        return all(user.kind == "linear" for user in self.graph.users(index))

    def channels_last_image(self, index: int) -> tuple[int, ...]:
        """Return the (C, H, W) of a flattened image that is stored as (H, W, C); () for every other value."""
        layer = self.integer[index]
        return layer.image if isinstance(layer, QuantizedFlatten) and layer.keeps_channels_last else ()

    # --- size and report ---

    @property
    def nbytes(self) -> int:
        """Count the bytes of all weights, biases and scales, integer and float."""
        return sum(_bytes_of(step, layer) for step, layer in zip(self.graph.steps, self.integer, strict=True))

    def layer_counts(self) -> tuple[int, int]:
        """Count the convolutions and linear layers that compute in integers, and all of them."""
        kinds = [_is_layer(step) for step in self.graph.steps]
        integers = [layer is not None and is_layer for layer, is_layer in zip(self.integer, kinds, strict=True)]
        return sum(integers), sum(kinds)

    def report(self, x: Array | None = None, reference: FloatGraph | None = None) -> list[StepReport]:
        """Report on every operator; given an input and the float graph, with each result's signal-to-noise ratio."""
        ratios = {} if x is None or reference is None else signal_to_noise(self, reference, x)
        out, families_of = [], tied_values(self.graph)
        for index, (step, layer) in enumerate(zip(self.graph.steps, self.integer, strict=True)):
            if step.kind == "input":
                continue
            form, reason = "float32" if layer is None else "int8", self.float_reasons.get(step.name, "")
            if layer is not None and self.affine[index].is_int16:
                form, reason = "int16", self.int16_reasons.get(families_of[index], "")
            size, path = _bytes_of(step, layer), getattr(layer, "avx2", "")
            out.append(StepReport(step.name, step.kind, form, reason, size, ratios.get(index), path))
        return out


def _is_layer(step: Op) -> bool:
    """Whether a step is a convolution or a linear layer, also where it runs as a plain operation."""
    return step.kind in ("conv", "linear") or (step.node is not None and is_weighted(step.node))


def is_weighted(node: Node) -> bool:
    """Whether an operation multiplies by constant weights: a convolution, a linear layer or a matrix product."""
    name = node.operation.__name__
    if name == "MatMul":
        return any(isinstance(v, np.ndarray) and v.ndim == 2 for v in node.inputs)
    return name in ("Conv2d", "ConvTranspose2d", "Linear") and not isinstance(node.inputs[1], TracedValue)


def dynamic_layer_counts(model: Module, *examples: Array) -> tuple[int, int]:
    """Layers of a dynamically quantized model that compute in integers, and all convolutions and linear layers."""
    nodes = trace_module(model, *examples).nodes
    integers = sum(node.operation is DynamicLinear for node in nodes)
    return integers, integers + sum(is_weighted(node) for node in nodes)


def _bytes_of(step: Op, layer: Any) -> int:
    if hasattr(layer, "nbytes"):
        return int(layer.nbytes)
    arrays = [a for a in (step.weight, step.bias) if a is not None]
    if step.node is not None:
        arrays += [a for a in (*step.node.inputs, *step.node.params.values()) if isinstance(a, np.ndarray)]
    return int(sum(a.nbytes for a in arrays))


def signal_to_noise(model: QuantizedModel, reference: FloatGraph, x: Array) -> dict[int, float]:
    """Return the signal-to-noise ratio of every operator's result against the float model's, in decibels."""
    exact: list[Array] = []
    reference.run(x.astype(np.float32, copy=False), lambda _, result: exact.append(result))
    ratios: dict[int, float] = {}

    def watch(index: int, value: Value) -> None:
        result, expected = model._unscaled(index, model._as_float(value)), exact[index]
        noise = float(((result - expected) ** 2).sum(dtype=np.float64))
        signal = float((expected**2).sum(dtype=np.float64))
        ratios[index] = float("inf") if noise == 0 else 10 * np.log10(max(signal, 1e-300) / noise)

    model.run(x, watch)
    return ratios


def quantize(
    model: Module,
    calibration_dataset: Iterable[Any] | Calibration | None = None,
    *,
    bits: int = 8,
    symmetric: bool = True,
    observer: str = "minmax",
    accuracy_drop: float | None = None,
    evaluate: Evaluate | None = None,
    keep_float: Iterable[str] = (),
    max_error: float | None = 0.01,
    progress: bool = False,
) -> Module:
    """Return an int8 version of a trained model, or one whose linear layers have four-bit weights.

    `calibration_dataset` is any iterable of input batches, or a `Calibration` made before. Transformers need no data:
    their linear layers are quantized dynamically, and their error is measured on the first batch.

    With `accuracy_drop` (0.005 is half a point) and `evaluate`, a function from a model to its accuracy, layers go back
    to float32, the noisiest first, until the loss is within it. Otherwise `max_error` is the largest error on held-out
    images, as a share of the largest result: activations get int16, the most sensitive for their cost first, and
    finally a few layers stay in float32, until it is reached. Up to three times as much is a warning, and more is an
    AccuracyError. The model's `stated_error` is what it promises on other images. `max_error=None` uses int8 only.

    With `bits=4` every linear layer gets four-bit weights in blocks of 32, `symmetric` around zero or with a minimum
    for each block; calibration data, if there is any, decides how they are rounded. Other layers stay float32.

    >>> from tilewise import models
    >>> data = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    >>> quantize(models.cnn(), [data])(Tensor(data)).shape
    (8, 10)
    """
    check_model(model)
    if max_error is not None and not 0 < max_error < np.inf:
        raise ConfigurationError("max_error is a share of the largest result, such as 0.01, or None")
    if bits == 4:
        return _in_four_bits(model, calibration_dataset, symmetric, accuracy_drop is not None or bool(list(keep_float)))
    if bits != 8 or not symmetric:
        raise ConfigurationError("bits is 8 or 4, and weights with a minimum (symmetric=False) have four bits")
    if is_transformer(model):
        return _dynamic(model, calibration_dataset, tuple(keep_float), max_error, accuracy_drop, evaluate)
    float_reasons = dict.fromkeys(keep_float, "asked for")
    if not isinstance(calibration_dataset, Calibration) and accuracy_drop is not None:
        calibration_dataset = list(calibration_dataset or ())
    first: EvaluatedBatch | None = None
    holdout: EvaluatedBatch | None = None
    if isinstance(calibration_dataset, Calibration):
        calibration = calibration_dataset
        graph = trace(model, np.zeros((2, *calibration.shapes[0]), np.float32))
    else:
        batches = cast(Iterable[Any], calibration_dataset)  # what is none of that gets its sentence there
        count = HOLDOUT_IMAGES if max_error is not None and accuracy_drop is None else 0
        graph, calibration, first, holdout = calibrated_with_holdout(model, batches, observer, progress, count)
    unknown = set(float_reasons) - {step.name for step in graph.steps}
    if unknown:
        raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to keep in float")
    if accuracy_drop is None and first is None:
        return QuantizedModel(graph, calibration, float_reasons)
    if accuracy_drop is None:
        assert first is not None
        if max_error is None:
            copy = FloatGraph([replace(step) for step in graph.steps], graph.batch)
            quantized = QuantizedModel(copy, calibration, float_reasons)
        else:
            quantized = _within_error(graph, calibration, float_reasons, first, holdout, max_error)
        check_same_integers(quantized, first.x[:1])
        warn_if_slower(quantized, model, first.x[:1])
        return quantized
    if evaluate is None or isinstance(calibration_dataset, Calibration):
        raise ConfigurationError(
            "accuracy_drop needs calibration batches and `evaluate`, a function that measures accuracy"
        )
    batches = cast(list[Any], calibration_dataset)
    return _within_drop(model, calibration, float_reasons, accuracy_drop, evaluate, batches)


def _dynamic(
    model: Module,
    data: Any,
    keep_float: tuple[str, ...],
    max_error: float | None,
    accuracy_drop: float | None,
    evaluate: Evaluate | None,
) -> Module:
    """Quantize every linear layer row by row. The first two inputs are stored with the model for `save_quantized`."""
    from tilewise.quantize.dynamic import quantize_dynamic

    quantized = quantize_dynamic(model, keep_float)
    first = data[0] if isinstance(data, list | tuple) and data else None
    if isinstance(first, np.ndarray | Tensor):
        array = first.data if isinstance(first, Tensor) else first
        quantized.quantization_example = array[:2].copy()
        state_dynamic_error(quantized, model, array, max_error if accuracy_drop is None else None)
        warn_if_slower(quantized, model, array[:1], stacklevel=4)
    if accuracy_drop is not None and evaluate is not None:
        drop = evaluate(model) - evaluate(quantized)
        if drop > accuracy_drop:
            raise AccuracyError(
                f"INT8 loses {drop:.4f} of the accuracy, more than accuracy_drop={accuracy_drop:g} allows; "
                "name layers in keep_float, or allow more"
            )
    return quantized


def _in_four_bits(model: Module, data: Any, symmetric: bool, more: bool) -> Module:
    from tilewise.quantize.four_bits import quantize_four_bits

    if isinstance(data, Calibration):
        raise ConfigurationError("four bits are rounded by batches of inputs; a Calibration holds only their ranges")
    if more:
        raise ConfigurationError("accuracy_drop and keep_float are for bits=8")
    return quantize_four_bits(model, data, symmetric)


def _within_error(
    graph: FloatGraph,
    calibration: Calibration,
    float_reasons: dict[str, str],
    first: EvaluatedBatch,
    holdout: EvaluatedBatch | None,
    bound: float,
) -> QuantizedModel:
    """A model whose measured error on held-out images is at most `bound`.

    Activations get 16 bits first; then the layers that harm the result most stay in float. If the error is still above
    the bound, a warning states it up to `_LARGEST_EXCESS` times the bound, and beyond that AccuracyError is raised.
    """
    common = PrecisionSearch(graph, calibration, float_reasons, first, holdout)
    images, layers = common.at_hand, LayerCache()

    def build(reach_scale: float, int16_reasons: Mapping[int, str], rounding: GptqRounding | None) -> QuantizedModel:
        copy = FloatGraph([replace(step) for step in graph.steps], graph.batch)  # conversion drops its float weights
        numbers = int16_parameters(graph, calibration, int16_reasons, reach_scale)
        return QuantizedModel(
            copy,
            calibration,
            float_reasons,
            int16_reasons=int16_reasons,
            rounding=rounding,
            numbers=numbers,
            layers=layers,
        )

    # If 16 bits everywhere exceed the bound, either values of unseen images saturated or the steps are too coarse:
    # search again with wider and with narrower ranges, and keep the smallest error.
    candidates: list[tuple[float, float, QuantizedModel]] = []
    for reach_scale in (1.0, 2.0, 0.6):
        candidate, error, predicted = assign_precision(common, bound, partial(build, reach_scale))
        candidates.append((error, predicted, candidate))
        if predicted <= bound:
            break
    within = [entry for entry in candidates if entry[0] <= bound]
    error, _, model = min(within, key=lambda e: e[1]) if within else min(candidates, key=lambda e: e[0])
    if bound < error <= _LARGEST_FLOAT_EXCESS * bound:
        error, model = _with_float_layers(model, graph, images, bound)
    if not np.isfinite(images.result).all():  # nothing can be promised about infinities
        return model
    if not error <= _LARGEST_EXCESS * bound:
        layer = first_deviating_layer(model, graph, images.x[:1], bound)
        raise AccuracyError(
            f"INT8 is off by {error:.2%} of the largest result, more than max_error={bound:g} allows; {layer}; "
            "pass more calibration images, a larger max_error, or max_error=None for no bound"
        )
    if error > bound:
        warnings.warn(
            f"INT8 is off by {error:.2%} of the largest result on held-out images, more than max_error={bound:g}, "
            "although activations have 16 bits and the most sensitive layers stay in float",
            stacklevel=3,
        )
    model.measured_error, model.stated_error = error, max(error, bound, stated_error(model, common.check))
    return model


def _with_float_layers(
    model: QuantizedModel, graph: FloatGraph, images: EvaluatedBatch, bound: float
) -> tuple[float, QuantizedModel]:
    """Keep the layers that harm the result most in float, as few as reach the bound. Return the measured error and
    the model; the given model if float layers do not help."""
    harms, rounding = _layer_harms(model, graph, images), GptqRounding(graph, images.x)
    best = measured_error(model.run(images.x), images.result), model
    for count in _FLOAT_LAYERS:
        reasons = {name: f"results are off by {harm:.2%} by it alone, in 16 bits" for name, harm in harms[:count]}
        copy = FloatGraph([replace(step) for step in graph.steps], graph.batch)
        candidate = QuantizedModel(
            copy,
            model.calibration,
            model.float_reasons | reasons,
            int16_reasons=model.int16_reasons,
            rounding=rounding,
            numbers=model.numbers,
        )
        error = measured_error(candidate.run(images.x), images.result)
        if error < best[0]:
            best = error, candidate
        if error <= bound or count >= len(harms):
            break
    return best


def _layer_harms(model: QuantizedModel, graph: FloatGraph, images: EvaluatedBatch) -> list[tuple[str, float]]:
    """Convolutions and linear layers in integers, and the error of the result if only that layer computed in integers;
    the largest error first."""
    x, exact, rounded = images.x[:_HARM_IMAGES], list[Array](), list[Array]()
    graph.run(x, lambda _, value: exact.append(value))
    model.run(x, lambda index, value: rounded.append(model._unscaled(index, model._as_float(value))))
    harms = []
    for index, step in enumerate(graph.steps):
        if model.integer[index] is None or step.kind not in ("conv", "linear"):
            continue
        # The layer's own rounding error: its integer result less the float result for the same inputs.
        with no_grad():
            noise = rounded[index] - graph.run_float(step, [rounded[i] for i in step.inputs])
            changed = {index: exact[index] + noise}
            for later in range(index + 1, len(graph.steps)):
                reads = graph.steps[later].inputs
                if any(i in changed for i in reads):
                    changed[later] = graph.run_float(graph.steps[later], [changed.get(i, exact[i]) for i in reads])
        result = changed.get(len(graph.steps) - 1, exact[-1])
        harms.append((step.name, measured_error(result, exact[-1])))
    return sorted(harms, key=lambda entry: -entry[1])


def _within_drop(
    model: Module,
    calibration: Calibration,
    float_reasons: dict[str, str],
    accuracy_drop: float,
    evaluate: Evaluate,
    batches: list[Any],
) -> QuantizedModel:
    """Keep the layers with the lowest signal-to-noise ratio in float until the loss of accuracy is within the limit."""
    baseline = evaluate(model)
    x = np.asarray(batches[0].data if isinstance(batches[0], Tensor) else batches[0], np.float32)
    while True:
        candidate = QuantizedModel(trace(model, x), calibration, float_reasons)
        drop = baseline - evaluate(candidate)
        noisy = [r for r in candidate.report(x, trace(model, x)) if r.form == "int8" and r.kind in ("conv", "linear")]
        if drop <= accuracy_drop or not noisy:
            return candidate
        worst = min(noisy, key=lambda r: r.snr_db if r.snr_db is not None else np.inf)
        reason = f"lowest signal-to-noise ratio ({worst.snr_db:.1f} dB) while accuracy fell by {drop:.4f}"
        float_reasons[worst.name] = reason


def is_transformer(model: Module) -> bool:
    """Tell whether a model has attention and most weights in linear layers; these are quantized dynamically."""
    layers = list(model.modules())
    attends = any(isinstance(m, nn.MultiHeadAttention) or type(m).__name__ in _ATTENTION for m in layers)
    linear = sum(
        t.data.nbytes for m in layers if isinstance(m, nn.Linear | nn.MultiHeadAttention) for _, t in m.named_tensors()
    )
    convolved = sum(t.data.nbytes for m in layers if isinstance(m, nn.Conv2d) for _, t in m.named_tensors())
    return attends and linear > convolved
