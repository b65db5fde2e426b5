"""Mixed precision: choose which activations get int16, as few as keep a model's error within a bound.

Sensitivity analysis: each activation is quantized alone, together with the weights that read it, and the error of the
network's result is measured. These errors add up like independent noise. Activations with the largest error per unit
of the time that int16 would cost get int16 first, until the measured error of the whole model is within the bound.

The range of an int16 activation depends on the layers that read it. Their accumulators have 32 bits, which
activations and weights share: with many products in a sum, both get about as many levels as make their errors equal;
with few, as in a depthwise layer, activations use all 16 bits. SiLU and GELU are approximated on int16 values, whose
range must reach to where the function is 0 or x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.quantize.calibration import ACTIVATION_ENDS, Calibration, EvaluatedBatch
from tilewise.quantize.equalization import EqualizationScales, equalization_scales, equalize
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.layers import corrected_bias, rounded_conv_weights
from tilewise.quantize.lowering import KEEPS_PARAMETERS, shared_parameters, tied_values
from tilewise.quantize.parameters import INT16_MAX, MIN_INT16_LIMIT, AffineParameters, INT8Quantizer
from tilewise.quantize.reference import APPROXIMATION_END
from tilewise.quantize.saturation import GptqRounding
from tilewise.tensor import no_grad

Int16Reasons = dict[int, str]  # per group of tied values, by its first step: why it has int16
Build = Callable[[Int16Reasons, GptqRounding | None], Any]
# Most images that are held out of calibration for validation, and images whose results must stay within the bound, also
# if fewer are available; arbitrary.
HOLDOUT_IMAGES = 32
# Activations to compute when searching, when validating, and per sensitivity; at least those of one image.
_SEARCH_ACTIVATIONS, _VALIDATION_ACTIVATIONS, _SENSITIVITY_ACTIVATIONS = 1 << 25, 1 << 28, 1 << 22
# Standard deviation of the logarithm of the error between images, before any image was measured, and the images that it
# counts as. Networks exported from timm have 0.22 to 0.66. The search assumes the low end, so that few images do not
# lead to 16 bits everywhere; what is stated about other images assumes the high end.
_SPREAD_PRIOR, STATED_SPREAD_PRIOR, _PRIOR_IMAGES = 0.2, 0.66, 8
_NORMAL_95 = NormalDist().inv_cdf(0.95)
_NEARLY_ALL = 0.9  # share of int16 activations from which on the others get int16 too; set by hand
_TRIES = 6  # candidate models with fewer int16 activations, after the search
_TIGHTEN = 0.97  # if validation fails, retry with a target this much smaller
# Cost of int16 in cycles of an AVX2 core, roughly: per product, per product of a grouped layer, per stored value.
_PRODUCT_CYCLES, _GROUPED_PRODUCT_CYCLES, _VALUE_CYCLES = 1 / 60, 1 / 8, 1 / 16

# int16 ranges are wider than the observed ones: their levels are so fine that saturation would be most of their error.
# The fewer images were observed, the wider: 3.6 times after one, 2.3 times after 12. In six networks of
# `benchmarks.int8_unseen`, calibrated on 12 images, 8 % of other images exceed 1.5 times the observed range of some
# activation, 2 % twice, and 0.4 % 2.5 times.
_REACH, _REACH_FEW = 1.8, 1.0
_BALANCE = 20.0  # makes errors of activations (peak about 20 times their mean) and of weights equal


def int16_parameters(
    graph: FloatGraph, calibration: Calibration, int16_groups: Collection[int], reach_scale: float = 1.0
) -> dict[int, AffineParameters]:
    """Compute the int16 parameters of the tied groups in `int16_groups`, by group (the index of its first operator).

    A larger `reach_scale` widens the range: less precision, less saturation.
    """
    group_of, parameters = tied_values(graph), shared_parameters(graph, calibration)
    limits = dict.fromkeys(int16_groups, INT16_MAX)
    reach_by = reach_scale * _REACH * (1 + _REACH_FEW / max(calibration.samples, 1) ** 0.5)
    for index, step in enumerate(graph.steps):
        source = group_of[step.inputs[0]] if step.inputs else -1
        # Activations and weights share the 32 bits of a sum of `products` products.
        if source in limits and step.weight is not None and step.kind in ("conv", "linear"):
            products = math.prod(step.weight.shape[1:])
            limits[source] = min(limits[source], int(math.sqrt(_BALANCE * 2**31 / max(products, 1))))
        # int16 values must reach to where the approximation of SiLU or GELU ends.
        if group_of[index] in limits and step.activation in APPROXIMATION_END:
            p = parameters[index]
            reach = reach_by * max(p.zero_point, 255 - p.zero_point) * p.scale
            limit = int(min(0.99 * reach * INT16_MAX / APPROXIMATION_END[step.activation], INT16_MAX))
            limits[group_of[index]] = min(limits[group_of[index]], max(limit, MIN_INT16_LIMIT))
    ends = _largest_values(graph, group_of)
    result = {}
    for group, limit in limits.items():
        p = parameters[group]
        observed = max(p.zero_point, 255 - p.zero_point) * p.scale
        reach = max(1.0, min(reach_by, ends[group] / max(observed, 1e-30)))
        result[group] = p.to_int16(reach, max(limit, MIN_INT16_LIMIT))
    return result


def _largest_values(graph: FloatGraph, group_of: list[int]) -> dict[int, float]:
    """Return each group's upper bound that its activations imply (6 for ReLU6), or infinity."""
    ends: dict[int, float] = {}
    for index, step in enumerate(graph.steps):
        if step.kind not in (*KEEPS_PARAMETERS, "concat"):
            end = ACTIVATION_ENDS.get(step.activation, math.inf)
            ends[group_of[index]] = max(ends.get(group_of[index], 0.0), end)
    return ends


@dataclass(frozen=True)
class ActivationSensitivity:
    """Sensitivity of the result to one int8 activation: its share of the error, its mean square, the cost of int16."""

    group: int
    share: float
    error: float
    cost: float


def normalized_max_error(result: Array, exact: Array, images: int = 0) -> float:
    """Return the largest error as a share of the largest result, of the worst image.

    If `images` is larger than the batch, extrapolate to the maximum that so many images would have.
    """
    if not result.size:
        return 0.0
    each = (_relative_max_error(r, e, 1.0) for r, e in zip(result, exact, strict=True))
    return max(_relative_max_error(result, exact, images / len(result)), *each)


def _relative_max_error(result: Array, exact: Array, times: float) -> float:
    """Return the largest absolute error divided by the largest absolute value of `exact`.

    If `times` is above 1, return instead the maximum to expect among `times` as many normally distributed errors.
    """
    # The maximum of n normal errors with standard deviation s is about s sqrt(2 ln n).
    error = (result - exact).astype(np.float64)
    log_count = np.log(max(error.size, 3))
    expected = log_count + np.log(max(times, 1.0))
    usual = np.sqrt(np.square(error).mean() * 2 * expected)
    largest = float(np.abs(error).max()) * np.sqrt(expected / log_count)
    return float(max(usual, largest) / max(float(np.abs(exact).max()), 1e-30))


def _image_count(calibration: Calibration, activations: int) -> int:
    """Return how many calibration images have about `activations` activation values in total, at least one."""
    per_image = sum(int(np.prod(shape)) for shape in calibration.shapes)
    return max(1, min(HOLDOUT_IMAGES, activations // max(per_image, 1)))


def images_to_check(
    graph: FloatGraph, calibration: Calibration, batch: EvaluatedBatch, holdout: EvaluatedBatch | None
) -> EvaluatedBatch:
    """Collect images to predict the error on: held-out ones, their mirror images if few, then observed ones."""
    count = _image_count(calibration, _VALIDATION_ACTIVATIONS)
    unseen = batch.first(0) if holdout is None else holdout.first(count)
    source = batch if holdout is None else holdout
    missing = min(count - len(unseen.x) - len(batch.x), 3 * len(source.x))
    batches = [unseen]
    if source.x.ndim == 4 and missing > 0:
        x = source.x
        mirrored = np.concatenate([x[..., ::-1], x[..., ::-1, :], x[..., ::-1, ::-1]])[:missing]
        batches.append(EvaluatedBatch(mirrored, graph.run(mirrored)))
    batches.append(batch.first(max(count - len(unseen.x), 0)))
    xs, results = (np.concatenate([getattr(b, name) for b in batches]) for name in ("x", "result"))
    # Copies of an image have similar errors, so predictions use one form of each: the held-out images themselves, or
    # the first mirrored copy of each observed one.
    return EvaluatedBatch(xs, results, len(unseen.x) or min(len(source.x), len(xs) - len(batches[-1].x)))


class PrecisionSearch:
    """The images, sensitivities and GPTQ rounding that a search for int16 activations uses."""

    def __init__(
        self,
        graph: FloatGraph,
        calibration: Calibration,
        float_reasons: dict[str, str],
        batch: EvaluatedBatch,
        holdout: EvaluatedBatch | None,
    ) -> None:
        """Store the images: `batch` was observed by calibration, `holdout` was not.

        Without held-out images, mirror images of `batch` stand in for them.
        """
        self.graph, self.calibration, self.float_reasons, self._batch = graph, calibration, float_reasons, batch
        self.check = images_to_check(graph, calibration, batch, holdout)
        self.at_hand = images_at_hand(calibration, batch, holdout)

    @cached_property
    def few_images(self) -> EvaluatedBatch:
        """Return the first images to check, as many as can be evaluated in the search's budget."""
        return self.check.first(_image_count(self.calibration, _SEARCH_ACTIVATIONS))

    @cached_property
    def rounding(self) -> GptqRounding:
        """Return GPTQ rounding that uses a subset of the calibration images."""
        return GptqRounding(self.graph, self._batch.first(_image_count(self.calibration, _SEARCH_ACTIVATIONS)).x)

    @cached_property
    def sensitivities(self) -> list[ActivationSensitivity]:
        """List the activations that int8 adds an error to, the largest error per cost of int16 first."""
        images = self.check.first(_image_count(self.calibration, _SENSITIVITY_ACTIVATIONS))
        sensitivities = _sensitivities(self.graph, self.calibration, self.float_reasons, images)
        return sorted(sensitivities, key=lambda sensitivity: -sensitivity.error / sensitivity.cost)


def assign_precision(search: PrecisionSearch, bound: float, build: Build) -> Any:
    """Return the model with the fewest int16 activations whose predicted error on unseen images is within `bound`.

    If no choice keeps the prediction within `bound`, all activations are int16. `build` receives the int16 activations
    with their reasons.
    """
    model = build({}, None)
    error = validation_error(model, search.check)
    if error <= bound or not np.isfinite(error):
        return model
    sensitivities = search.sensitivities

    def with_int16(count: int) -> Any:
        """Build the model whose `count` most sensitive activations are int16 and the others uint8."""
        return build(_int16_explanations(search.graph, sensitivities[:count], error), search.rounding)

    # Bisection over the number of int16 activations, most sensitive first: `too_few` fail, `enough` suffice.
    too_few, enough, target = -1, len(sensitivities), bound
    while sensitivities:
        while too_few + 1 < enough:
            count = (too_few + enough) // 2
            suffices = validation_error(with_int16(count), search.few_images) <= target
            too_few, enough = (too_few, count) if suffices else (count, enough)
        model = with_int16(enough)
        validated = validation_error(model, search.check)
        # Where nearly all activations need int16, the others would save little time and saturate on other images.
        if validated <= bound and enough >= _NEARLY_ALL * len(sensitivities):
            return with_int16(len(sensitivities))
        if validated <= bound:
            return _try_fewer(model, enough, with_int16, search.check, bound)
        if enough == len(sensitivities):
            break
        # Validation on more images failed: search again for a smaller error.
        too_few, enough, target = enough, len(sensitivities), target * _TIGHTEN * bound / validated
    return model


def _try_fewer(model: Any, enough: int, build: Callable[[int], Any], check: EvaluatedBatch, bound: float) -> Any:
    """Try models with slightly fewer int16 activations than `enough`; return the smallest one within the bound.

    Rounding changes the error by up to a tenth at random, so the bisection may have skipped a smaller model. `model` is
    the one with `enough` int16 activations.
    """
    step = max(1, enough // _TRIES // 2)
    for count in range(enough - step, max(enough - (_TRIES + 1) * step, -1), -step):
        candidate = build(count)
        if validation_error(candidate, check) <= bound:
            model = candidate
    return model


def validation_error(model: Any, batch: EvaluatedBatch) -> float:
    """Return the error to expect on unseen images: the larger of two estimates from the results for `batch`.

    One extrapolates the largest observed error to HOLDOUT_IMAGES images, the other is `predicted_error`.
    """
    result = model.run(batch.x)
    count = batch.independent or len(result)  # observed images would show too small errors
    predicted = predicted_error(result[:count], batch.result[:count])
    return max(normalized_max_error(result, batch.result, HOLDOUT_IMAGES), predicted)


def images_at_hand(calibration: Calibration, batch: EvaluatedBatch, holdout: EvaluatedBatch | None) -> EvaluatedBatch:
    """Return the images that `max_error` applies to: held-out ones or, without any, the first observed ones."""
    return (batch if holdout is None else holdout).first(_image_count(calibration, _VALIDATION_ACTIVATIONS))


def stated_error(model: Any, check: EvaluatedBatch) -> float:
    """Predict the error on unseen images from the independent ones of `check`; at least the largest error on it."""
    result, count = model.run(check.x), check.independent or len(check.x)
    predicted = predicted_error(result[:count], check.result[:count], STATED_SPREAD_PRIOR)
    return max(predicted, measured_error(result, check.result))


def measured_error(result: Array, exact: Array) -> float:
    """Return the largest normalized error of these images: (images, ...) against the exact results."""
    return float(_image_errors(result, exact).max(initial=0.0))


def _image_errors(result: Array, exact: Array) -> Array:
    """Return every image's largest deviation divided by its largest result.

    Images whose results are all close to zero are compared with a hundredth of the largest result of all images.
    """
    axes = tuple(range(1, result.ndim))
    deviation, largest = np.abs(result - exact).max(axes), np.abs(exact).max(axes)
    errors: Array = deviation / np.maximum(largest, max(0.01 * float(largest.max(initial=0.0)), 1e-30))
    return errors


def predicted_error(result: Array, exact: Array, spread_prior: float = _SPREAD_PRIOR) -> float:
    """Predict the error that at least 95 % of other images keep, with 95 % confidence, from independent images.

    This is the one-sided tolerance bound of a normal distribution (Natrella 1963, section 2-2.2) for the logarithm of
    an image's error: few images widen it. The spread that few images show is shrunk towards `spread_prior`, which
    counts as `_PRIOR_IMAGES` more of them.
    """
    logs = np.log(np.maximum(_image_errors(result, exact), 1e-12))
    count = len(logs)
    if not count:
        return 0.0
    freedom = _PRIOR_IMAGES + count - 1
    squares = _PRIOR_IMAGES * spread_prior**2 + float(np.square(logs - logs.mean()).sum())
    a, b = 1 - _NORMAL_95**2 / (2 * freedom), _NORMAL_95**2 * (1 - 1 / count)
    factor = (_NORMAL_95 + math.sqrt(_NORMAL_95**2 - a * b)) / a
    return math.exp(float(logs.mean()) + factor * math.sqrt(squares / freedom))


def _int16_explanations(graph: FloatGraph, activations: list[ActivationSensitivity], error: float) -> Int16Reasons:
    """Explain, for each group of activations that becomes int16, why; returns the sentences by group.

    `error` is the network's relative error with int8 alone.
    """
    off = f"results would be off by {100 * error:.2f} % in bytes"
    groups = {a.group: f"{off}, {100 * a.share:.2f} % by it alone" for a in activations}
    return with_int16_residuals(graph, groups)


def with_int16_residuals(graph: FloatGraph, int16_groups: Int16Reasons) -> Int16Reasons:
    """Add to `int16_groups` the results of convolutions that add an int16 residual, which must be int16 too."""
    group_of, groups = tied_values(graph), dict(int16_groups)
    for index, step in enumerate(graph.steps):
        if step.kind == "conv" and len(step.inputs) > 1 and group_of[step.inputs[1]] in groups:
            groups.setdefault(group_of[index], f"its residual {graph.steps[step.inputs[1]].name} has 16 bits")
    return groups


def _sensitivities(
    graph: FloatGraph, calibration: Calibration, float_reasons: dict[str, str], batch: EvaluatedBatch
) -> list[ActivationSensitivity]:
    """Measure the error of the result with each group of activations alone in int8."""
    trial, exact = _SensitivityProbe(graph, calibration, float_reasons, batch.x), batch.result
    last = len(graph.steps) - 1
    gives_floats = graph.steps[last].kind == "linear" and graph.steps[last].activation in ("", "relu")
    costs = _costs(graph, calibration)
    out = []
    for group in sorted(costs):
        results = trial.result(group)
        error = 0.0 if results is None else float(np.square(results - exact).mean(dtype=np.float64))
        if error > 0 and not (group == last and gives_floats):
            assert results is not None
            out.append(ActivationSensitivity(group, normalized_max_error(results, exact), error, costs[group]))
    return out


def _costs(graph: FloatGraph, calibration: Calibration) -> dict[int, float]:
    """Estimate the cycles that int16 costs each group of activations, in itself and in the products that read it."""
    group_of = tied_values(graph)
    costs = dict.fromkeys(group_of, 1.0)
    for index, step in enumerate(graph.steps):
        values = float(np.prod(calibration.shapes[index]))
        if step.kind not in KEEPS_PARAMETERS:
            costs[group_of[index]] += _VALUE_CYCLES * values
        if step.kind in ("conv", "linear") and step.weight is not None:
            grouped = step.kind == "conv" and step.groups > 1
            products = values * step.weight[0].size
            costs[group_of[step.inputs[0]]] += (_GROUPED_PRODUCT_CYCLES if grouped else _PRODUCT_CYCLES) * products
            if grouped:  # they compute in int16 to return int16
                costs[group_of[index]] += _GROUPED_PRODUCT_CYCLES * products
    return costs


class _SensitivityProbe:
    """Evaluates the effect of rounding one group of activations to int8, with everything else in float."""

    def __init__(self, graph: FloatGraph, calibration: Calibration, float_reasons: dict[str, str], x: Array) -> None:
        """Run the float model on `x` with equalized weights, and store the result of every operator."""
        self.graph = graph.copy()
        self.parameters, self.float_reasons = shared_parameters(graph, calibration), float_reasons
        self.equalization: EqualizationScales = [np.ones(shape[:1]) for shape in calibration.shapes]
        if calibration.channel_ranges:
            self.equalization = equalization_scales(graph, calibration, self.parameters, float_reasons)
            equalize(self.graph, self.equalization)
        self.calibration, self.group_of = calibration, tied_values(graph)
        self.exact: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                reads = [self.exact[i] for i in step.inputs]
                self.exact.append(x if step.kind == "input" else self._run(index, step, reads))

    def result(self, group: int) -> Array | None:
        """Return the model's result with one group of activations, and the weights that read it, in int8.

        None if the model then computes the same as in float.
        """
        results: dict[int, Array] = {}
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                mine = self.group_of[index] == group and step.name not in self.float_reasons
                reads_it = step.kind in ("conv", "linear") and self.group_of[step.inputs[0]] == group
                if any(i in results for i in step.inputs) or (reads_it and step.name not in self.float_reasons):
                    reads = [results.get(i, self.exact[i]) for i in step.inputs]
                    results[index] = self._run(index, self._rounded(step) if reads_it else step, reads)
                if mine and step.kind not in (*KEEPS_PARAMETERS, "concat"):
                    value = results.get(index, self.exact[index])
                    p = self.parameters[index]
                    results[index] = p.dequantize(p.quantize(value))
        return results.get(len(self.graph.steps) - 1)

    def _run(self, index: int, step: Op, reads: list[Array]) -> Array:
        """Run operator `index` in float on the results that it reads; ReLU6 saturates at its equalized bound."""
        if step.activation != "relu6":
            return self.graph.run_float(step, reads, len(self.exact[0]))
        # ReLU6 clips equalized channels at 6 times their scale.
        end = np.asarray(6 * self.equalization[index], np.float32)
        result = self.graph.run_float(replace(step, activation="relu"), reads, len(self.exact[0]))
        return np.minimum(result, end.reshape(-1, *(1,) * (result.ndim - 2)) if end.size == result.shape[1] else 6)

    def _rounded(self, step: Op) -> Op:
        """Return a convolution or linear layer with weights rounded to int8 and its bias corrected for that."""
        assert step.weight is not None
        groups = 1 if step.kind == "linear" else step.groups
        is_linear = step.kind == "linear"
        weights = (
            INT8Quantizer().quantize_weights(step.weight) if is_linear else rounded_conv_weights(step.weight, groups)
        )
        rounded, source = weights.dequantize(), step.inputs[0]
        means, bias = self.calibration.mean_of(source), step.bias
        if means is not None:
            bias = corrected_bias(step.weight, rounded, bias, means * self.equalization[source], groups)
        return replace(step, weight=rounded, bias=bias)
