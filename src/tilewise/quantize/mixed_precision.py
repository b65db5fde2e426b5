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
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.graph.ir import Op
from tilewise.quantize.calibration import ACTIVATION_ENDS, Calibration, EvaluatedBatch
from tilewise.quantize.equalization import EqualizationScales, equalization_scales, equalize
from tilewise.quantize.graph import Graph
from tilewise.quantize.layers import corrected_bias, rounded_conv_weights
from tilewise.quantize.lowering import KEEPS, shared_parameters, tied_values
from tilewise.quantize.parameters import USUAL, WIDEST, AffineParameters, INT8Quantizer
from tilewise.quantize.reference import BENT_TO
from tilewise.quantize.weight_rounding import GptqRounding
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
Wide = dict[int, str]  # per group of tied values, by its first step: why it has int16
HOLDOUT_IMAGES = 32  # most images that are held out of calibration for validation; arbitrary
_BATCH = 32  # images whose results are to stay within the bound, also if fewer were given
# Activations to compute when searching, when validating, and for the sensitivity of each; at least one image's.
_RUN, _CHECKED, _LOOKED_AT = 1 << 25, 1 << 28, 1 << 22
# Standard deviation of the logarithm of the error between images, before any image was measured, and the images that it
# counts as. Networks exported from timm have 0.22 to 0.66. The search assumes the low end, so that few images do not
# lead to 16 bits everywhere; what is stated about other images assumes the high end.
_SPREAD_PRIOR, STATED_SPREAD_PRIOR, _PRIOR_IMAGES = 0.2, 0.66, 8
_TRIES = 6  # candidate models with fewer int16 activations, after the search
_TIGHTEN = 0.97  # if validation fails, retry with a target this much smaller
# Cost of int16 in cycles of an AVX2 core, roughly: per product, per product of a grouped layer, per stored value.
_PRODUCT, _GROUPED, _NUMBER = 1 / 60, 1 / 8, 1 / 16

# int16 ranges are wider than the observed ones: their levels are so fine that saturation would be most of their error.
# The fewer images were observed, the wider: 2.4 times after one, 1.5 times after 16.
_REACH, _REACH_FEW = 1.2, 1.0
_BALANCE = 20.0  # makes errors of activations (peak about 20 times their mean) and of weights equal


def int16_parameters(
    graph: Graph, calibration: Calibration, wide: Collection[int], reach_scale: float = 1.0
) -> dict[int, AffineParameters]:
    """Compute the int16 parameters of each group of tied values in `wide`, by its first step.

    A larger `reach_scale` widens the range: less precision, less saturation.
    """
    family_of, parameters = tied_values(graph), shared_parameters(graph, calibration)
    most, reach_by = (
        dict.fromkeys(wide, WIDEST),
        reach_scale * _REACH * (1 + _REACH_FEW / max(calibration.samples, 1) ** 0.5),
    )
    for index, step in enumerate(graph.steps):
        source = family_of[step.inputs[0]] if step.inputs else -1
        if source in most and step.weight is not None and step.kind in ("conv", "linear"):
            products = math.prod(step.weight.shape[1:])
            most[source] = min(most[source], int(math.sqrt(_BALANCE * 2**31 / max(products, 1))))
        if family_of[index] in most and step.activation in BENT_TO:
            p = parameters[index]
            reach = reach_by * max(p.zero_point, 255 - p.zero_point) * p.scale
            bent = int(min(0.99 * reach * WIDEST / BENT_TO[step.activation], WIDEST))
            most[family_of[index]] = min(most[family_of[index]], max(bent, USUAL))
    ends = _largest_values(graph, family_of)
    result = {}
    for family, size in most.items():
        p = parameters[family]
        observed = max(p.zero_point, 255 - p.zero_point) * p.scale
        reach = max(1.0, min(reach_by, ends[family] / max(observed, 1e-30)))
        result[family] = p.widened(reach, max(size, USUAL))
    return result


def _largest_values(graph: Graph, family_of: list[int]) -> dict[int, float]:
    """Return the upper limit of each group's activations (6 for ReLU6), or infinity."""
    ends: dict[int, float] = {}
    for index, step in enumerate(graph.steps):
        if step.kind not in (*KEEPS, "concat"):
            end = ACTIVATION_ENDS.get(step.activation, math.inf)
            ends[family_of[index]] = max(ends.get(family_of[index], 0.0), end)
    return ends


@dataclass(frozen=True)
class ActivationSensitivity:
    """Sensitivity of the result to one int8 activation: its share of the error, its mean square, the cost of int16."""

    family: int
    share: float
    error: float
    cost: float


def normalized_max_error(result: Array, exact: Array, images: int = 0) -> float:
    """Return the largest error as a share of the largest result, of the worst image.

    If `images` is larger than the batch, extrapolate to the maximum that so many images would have.
    """
    if not result.size:
        return 0.0
    each = (_largest(r, e, 1.0) for r, e in zip(result, exact, strict=True))
    return max(_largest(result, exact, images / len(result)), *each)


def _largest(result: Array, exact: Array, times: float) -> float:
    """Return the largest error as a share of the largest result, or what `times` as many normal errors would reach."""
    error = (result - exact).astype(np.float64)
    log_count = np.log(max(error.size, 3))
    expected = log_count + np.log(max(times, 1.0))
    usual = np.sqrt(np.square(error).mean() * 2 * expected)
    largest = float(np.abs(error).max()) * np.sqrt(expected / log_count)
    return float(max(usual, largest) / max(float(np.abs(exact).max()), 1e-30))


def _count(calibration: Calibration, most: int) -> int:
    """Return the number of images that have about `most` activations."""
    numbers = sum(int(np.prod(shape)) for shape in calibration.shapes)
    return max(1, min(_BATCH, most // max(numbers, 1)))


def images_to_check(
    graph: Graph, calibration: Calibration, batch: EvaluatedBatch, holdout: EvaluatedBatch | None
) -> EvaluatedBatch:
    """Images for predictions: held-out ones, mirror images where there are few, then observed ones."""
    count = _count(calibration, _CHECKED)
    unseen = batch.first(0) if holdout is None else holdout.first(count)
    source = batch if holdout is None else holdout
    missing = min(count - len(unseen.x) - len(batch.x), 3 * len(source.x))
    parts = [unseen]
    if source.x.ndim == 4 and missing > 0:
        x = source.x
        mirrored = np.concatenate([x[..., ::-1], x[..., ::-1, :], x[..., ::-1, ::-1]])[:missing]
        parts.append(EvaluatedBatch(mirrored, graph.run(mirrored)))
    parts.append(batch.first(max(count - len(unseen.x), 0)))
    xs, results = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "result"))
    return EvaluatedBatch(xs, results, len(xs) - len(parts[-1].x))


def assign_precision(
    graph: Graph,
    calibration: Calibration,
    kept: dict[str, str],
    batch: EvaluatedBatch,
    bound: float,
    build: Callable[[Wide, GptqRounding | None], Any],
    holdout: EvaluatedBatch | None = None,
) -> tuple[Any, float, float]:
    """The model, by `build`, with the fewest activations in 16 bits whose results on images that calibration did not
    see, and on other images as far as these tell, are off by `bound` at most; its error measured on the images at hand;
    and the error predicted for other images. If no choice keeps the prediction within `bound`, all have 16 bits.

    `batch` was observed; `holdout` was not. Without held-out images, mirror images of `batch` stand in for them.
    `graph` is left as it is; `build` is given the activations to widen.
    """
    check = images_to_check(graph, calibration, batch, holdout)
    at_hand = images_at_hand(calibration, batch, holdout)
    search, look = (check.first(_count(calibration, most)) for most in (_RUN, _LOOKED_AT))
    model = build({}, None)
    error = _error(model, check)
    if error <= bound or not np.isfinite(error):
        return model, _measured(model, at_hand), error
    rounding = GptqRounding(graph, batch.first(_count(calibration, _RUN)).x)
    harms = sorted(_sensitivities(graph, calibration, kept, look), key=lambda h: -h.error / h.cost)
    least, most, target = -1, len(harms), bound  # too little, and enough where anything is
    while harms:
        while least + 1 < most:
            count = (least + most) // 2
            enough = _error(build(_reasons(graph, harms[:count], error), rounding), search) <= target
            least, most = (least, count) if enough else (count, most)
        model = build(_reasons(graph, harms[:most], error), rounding)
        found = _error(model, check)
        if found <= bound:
            smaller = _fewer(
                model, most, lambda count: build(_reasons(graph, harms[:count], error), rounding), check, bound
            )
            return smaller, _measured(smaller, at_hand), _error(smaller, check)
        if most == len(harms):
            return model, _measured(model, at_hand), found
        least, most, target = most, len(harms), target * _TIGHTEN * bound / found
    return model, _measured(model, at_hand), error


def _fewer(model: Any, most: int, build: Callable[[int], Any], check: EvaluatedBatch, bound: float) -> Any:
    """A model with fewer activations in 16 bits, where one keeps the bound too: how weights happen to be rounded
    together moves the error by a tenth to either side, so that the search may have passed it by."""
    step = max(1, most // _TRIES // 2)
    for count in range(most - step, max(most - (_TRIES + 1) * step, -1), -step):
        tried = build(count)
        if _error(tried, check) <= bound:
            model = tried
    return model


def _error(model: Any, seen: EvaluatedBatch) -> float:
    result = model.run(seen.x)
    new = seen.unseen or len(result)  # observed images would show too small errors
    return max(normalized_max_error(result, seen.result, _BATCH), predicted_error(result[:new], seen.result[:new]))


def images_at_hand(calibration: Calibration, batch: EvaluatedBatch, holdout: EvaluatedBatch | None) -> EvaluatedBatch:
    """The held-out images, or the first observed ones if none were held out: what `max_error` is judged on."""
    return (batch if holdout is None else holdout).first(_count(calibration, _CHECKED))


def _measured(model: Any, images: EvaluatedBatch) -> float:
    return measured_error(model.run(images.x), images.result)


def stated_error(model: Any, check: EvaluatedBatch) -> float:
    """The error that is stated about images other than `check`, whose first `unseen` images were not observed."""
    count = check.unseen or len(check.x)
    return predicted_error(model.run(check.x[:count]), check.result[:count], STATED_SPREAD_PRIOR)


def measured_error(result: Array, exact: Array) -> float:
    """The error of the worst of these images, without any prediction."""
    return float(_image_errors(result, exact).max(initial=0.0))


def _image_errors(result: Array, exact: Array) -> Array:
    """The error of every image: its largest deviation divided by its largest result. Images whose results are all close
    to zero are compared with a hundredth of the largest result of all images."""
    axes = tuple(range(1, result.ndim))
    deviation, largest = np.abs(result - exact).max(axes), np.abs(exact).max(axes)
    errors: Array = deviation / np.maximum(largest, max(0.01 * float(largest.max(initial=0.0)), 1e-30))
    return errors


def predicted_error(result: Array, exact: Array, spread_prior: float = _SPREAD_PRIOR) -> float:
    """The error that one more image exceeds with a probability of 1 %.

    The logarithm of an image's error is taken as normal over images, which gives Student's prediction interval: few
    images widen it. The spread that few images show is shrunk towards `spread_prior`, which counts as `_PRIOR_IMAGES`
    more of them.
    """
    logs = np.log(np.maximum(_image_errors(result, exact), 1e-12))
    count = len(logs)
    if not count:
        return 0.0
    freedom = _PRIOR_IMAGES + count - 1
    spread = math.sqrt((_PRIOR_IMAGES * spread_prior**2 + float(np.square(logs - logs.mean()).sum())) / freedom)
    return math.exp(float(logs.mean()) + _student(freedom) * spread * math.sqrt(1 + 1 / count))


def _student(freedom: int) -> float:
    """The 99 % quantile of Student's distribution, by its Cornish-Fisher expansion around the normal one (Abramowitz
    and Stegun 26.7.5)."""
    z = 2.3263478740408408
    return float(z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2))


def _reasons(graph: Graph, chosen: list[ActivationSensitivity], error: float) -> Wide:
    off = f"results would be off by {100 * error:.2f} % in bytes"
    return closed(graph, {h.family: f"{off}, {100 * h.share:.2f} % by it alone" for h in chosen})


def closed(graph: Graph, wide: Wide) -> Wide:
    """With what must be wide along: the result of a layer that takes a sum along, where what is added has 16 bits."""
    family_of, found = tied_values(graph), dict(wide)
    for index, step in enumerate(graph.steps):
        if step.kind == "conv" and len(step.inputs) > 1 and family_of[step.inputs[1]] in found:
            found.setdefault(family_of[index], f"it takes along {graph.steps[step.inputs[1]].name}, in 16 bits")
    return found


def _sensitivities(
    graph: Graph, calibration: Calibration, kept: dict[str, str], seen: EvaluatedBatch
) -> list[ActivationSensitivity]:
    trial, exact = _Trial(graph, calibration, kept, seen.x), seen.result
    last = len(graph.steps) - 1
    gives_floats = graph.steps[last].kind == "linear" and graph.steps[last].activation in ("", "relu")
    costs = _costs(graph, calibration)
    out = []
    for family in sorted(costs):
        moved = trial.result(family)
        error = 0.0 if moved is None else float(np.square(moved - exact).mean(dtype=np.float64))
        if error > 0 and not (family == last and gives_floats):
            assert moved is not None
            out.append(ActivationSensitivity(family, normalized_max_error(moved, exact), error, costs[family]))
    return out


def _costs(graph: Graph, calibration: Calibration) -> dict[int, float]:
    family_of = tied_values(graph)
    costs = dict.fromkeys(family_of, 1.0)
    for index, step in enumerate(graph.steps):
        numbers = float(np.prod(calibration.shapes[index]))
        if step.kind not in KEEPS:
            costs[family_of[index]] += _NUMBER * numbers
        if step.kind in ("conv", "linear") and step.weight is not None:
            grouped = step.kind == "conv" and step.groups > 1
            products = numbers * step.weight[0].size
            costs[family_of[step.inputs[0]]] += (_GROUPED if grouped else _PRODUCT) * products
            costs[family_of[index]] += _GROUPED * products if grouped else 0.0  # which multiply 16 bits to give them
    return costs


class _Trial:
    """The model in float, run again from where one activation is rounded to bytes."""

    def __init__(self, graph: Graph, calibration: Calibration, kept: dict[str, str], x: Array) -> None:
        self.graph = Graph([replace(step) for step in graph.steps], graph.batch)
        self.parameters, self.kept = shared_parameters(graph, calibration), kept
        self.factors: EqualizationScales = [np.ones(shape[:1]) for shape in calibration.shapes]
        if calibration.spans:
            self.factors = equalization_scales(graph, calibration, self.parameters, kept)
            equalize(self.graph, self.factors)
        self.calibration, self.family_of = calibration, tied_values(graph)
        self.exact: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                reads = [self.exact[i] for i in step.inputs]
                self.exact.append(x if step.kind == "input" else self._run(index, step, reads))

    def result(self, family: int) -> Array | None:
        """The model's result where this family is in bytes and its readers' weights too; None where it is as before."""
        moved: dict[int, Array] = {}
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                mine = self.family_of[index] == family and step.name not in self.kept
                reads_it = step.kind in ("conv", "linear") and self.family_of[step.inputs[0]] == family
                if any(i in moved for i in step.inputs) or (reads_it and step.name not in self.kept):
                    reads = [moved.get(i, self.exact[i]) for i in step.inputs]
                    moved[index] = self._run(index, self._rounded(step) if reads_it else step, reads)
                if mine and step.kind not in (*KEEPS, "concat"):
                    value = moved.get(index, self.exact[index])
                    p = self.parameters[index]
                    moved[index] = p.dequantize(p.quantize(value))
        return moved.get(len(self.graph.steps) - 1)

    def _run(self, index: int, step: Op, reads: list[Array]) -> Array:
        if step.activation != "relu6":
            return self.graph.run_float(step, reads)
        most = np.asarray(6 * self.factors[index], np.float32)  # of equalized channels, 6 is as much larger
        made = self.graph.run_float(replace(step, activation="relu"), reads)
        return np.minimum(made, most.reshape(-1, *(1,) * (made.ndim - 2)) if most.size == made.shape[1] else 6)

    def _rounded(self, step: Op) -> Op:
        assert step.weight is not None
        linear = step.kind == "linear"
        rounded = (
            INT8Quantizer().quantize_weights(step.weight) if linear else rounded_conv_weights(step.weight, step.groups)
        ).dequantize()
        source = step.inputs[0]
        means, bias = self.calibration.mean_of(source), step.bias
        if means is not None:
            bias = corrected_bias(
                step.weight, rounded, bias, means * self.factors[source], 1 if linear else step.groups
            )
        return replace(step, weight=rounded, bias=bias)
