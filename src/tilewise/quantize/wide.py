"""Which activations need 16 bits: as few as keep a model's results within an error.

Every activation is rounded alone, with the weights that read it, and what that does to the result is kept: such errors
add up like independent noise. Those that do most harm for the time that 16 bits would cost are widened first, until the
rest stays within the bound: every model that is tried is run beside the float one.

How large the numbers of such an activation may be is up to those that read them. A sum of products has 32 bits,
whatever the activations. What they use of them, the weights lack: with many products in a sum both have about as many
steps as leave their errors alike; with few, as in a depthwise layer, all 16 bits are used. SiLU and GELU bend whole
numbers of 16 bits, which must reach to where they are 0 or x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.steps import Step
from tilewise.quantize.calibration import ACTIVATION_ENDS, Calibration, Seen
from tilewise.quantize.forms import KEEPS, families, shared_parameters
from tilewise.quantize.graph import Graph
from tilewise.quantize.layers import corrected_bias, rounded_conv_weights
from tilewise.quantize.magnify import Factors, factors, magnify
from tilewise.quantize.parameters import USUAL, WIDEST, AffineParameters, INT8Quantizer
from tilewise.quantize.reference import BENT_TO
from tilewise.quantize.rounding import Rounding
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
Wide = dict[int, str]  # by the first step of a family: why it has 16 bits
HOLDOUT_IMAGES = 32  # most images that are held out of calibration for the check
_BATCH = 32  # images whose results are to stay within the bound, also where fewer were given
# So many activations are run to search, to check what was found, and to look at every one of them; at least one image
_RUN, _CHECKED, _LOOKED_AT = 1 << 25, 1 << 28, 1 << 22
# Standard deviation of the logarithm of the error between images, before any image was measured, and the images that it
# counts as. Networks exported from timm have 0.22 to 0.66. The search assumes the low end, so that few images do not
# lead to 16 bits everywhere; what is stated about other images assumes the high end.
_SPREAD_PRIOR, _STATED_SPREAD_PRIOR, _PRIOR_IMAGES = 0.2, 0.66, 8
_TRIES = 6  # models with fewer, after the search
_NEARER = 0.97  # than what a search found must the next one come, where the check failed
# What 16 bits cost, in steps of a processor with AVX2, about: a product, one of a layer in groups, a number to store
_PRODUCT, _GROUPED, _NUMBER = 1 / 60, 1 / 8, 1 / 16

# Ranges of 16 bits reach farther than those of bytes: their steps are so fine that saturation would be most of their
# error. The fewer images were observed, the farther: 2.4 times after one, 1.5 times after 16.
_REACH, _REACH_FEW = 1.2, 1.0
_ALIKE = 20.0  # where errors of activations, whose largest is some twenty times the usual, and of weights are alike


def wide_parameters(
    graph: Graph, calibration: Calibration, wide: Collection[int], reach_scale: float = 1.0
) -> dict[int, AffineParameters]:
    """The parameters of every family that is to have 16 bits, by its first step. `reach_scale` times as far as usual
    costs precision and saturates less."""
    family_of, parameters = families(graph), shared_parameters(graph, calibration)
    most, reach_by = (
        dict.fromkeys(wide, WIDEST),
        reach_scale * _REACH * (1 + _REACH_FEW / max(calibration.samples, 1) ** 0.5),
    )
    for index, step in enumerate(graph.steps):
        read = family_of[step.inputs[0]] if step.inputs else -1
        if read in most and step.weight is not None and step.kind in ("conv", "linear"):
            products = math.prod(step.weight.shape[1:])
            most[read] = min(most[read], int(math.sqrt(_ALIKE * 2**31 / max(products, 1))))
        if family_of[index] in most and step.activation in BENT_TO:
            p = parameters[index]
            reach = reach_by * max(p.zero_point, 255 - p.zero_point) * p.scale
            bent = int(min(0.99 * reach * WIDEST / BENT_TO[step.activation], WIDEST))
            most[family_of[index]] = min(most[family_of[index]], max(bent, USUAL))
    ends = _largest_values(graph, family_of)
    found = {}
    for family, size in most.items():
        p = parameters[family]
        observed = max(p.zero_point, 255 - p.zero_point) * p.scale
        reach = max(1.0, min(reach_by, ends[family] / max(observed, 1e-30)))
        found[family] = p.widened(reach, max(size, USUAL))
    return found


def _largest_values(graph: Graph, family_of: list[int]) -> dict[int, float]:
    """By family: what its activations end at (6 for ReLU6), or infinity."""
    ends: dict[int, float] = {}
    for index, step in enumerate(graph.steps):
        if step.kind not in (*KEEPS, "concat"):
            end = ACTIVATION_ENDS.get(step.activation, math.inf)
            ends[family_of[index]] = max(ends.get(family_of[index], 0.0), end)
    return ends


@dataclass(frozen=True)
class Harm:
    """What an activation in bytes does: how far results are off by it alone, the mean square of that, and the time that
    16 bits take."""

    family: int
    share: float
    error: float
    cost: float


def off_by(result: Array, exact: Array, images: int = 0) -> float:
    """How far results may be off, as a share of the largest: those of the image that is worst, or of so many `images`
    as far as these tell."""
    if not result.size:
        return 0.0
    each = (_largest(r, e, 1.0) for r, e in zip(result, exact, strict=True))
    return max(_largest(result, exact, images / len(result)), *each)


def _largest(result: Array, exact: Array, times: float) -> float:
    """The largest error as a share of the largest result: the one there is, or the one that so many `times` as many
    results would have if they were spread like a bell, whichever is larger."""
    error = (result - exact).astype(np.float64)
    seen = np.log(max(error.size, 3))
    expected = seen + np.log(max(times, 1.0))
    usual = np.sqrt(np.square(error).mean() * 2 * expected)
    largest = float(np.abs(error).max()) * np.sqrt(expected / seen)
    return float(max(usual, largest) / max(float(np.abs(exact).max()), 1e-30))


def _count(calibration: Calibration, most: int) -> int:
    """Images that have `most` activations, about."""
    numbers = sum(int(np.prod(shape)) for shape in calibration.shapes)
    return max(1, min(_BATCH, most // max(numbers, 1)))


def images_to_check(graph: Graph, calibration: Calibration, batch: Seen, holdout: Seen | None) -> Seen:
    """Images for predictions: held-out ones, mirror images where there are few, then observed ones."""
    count = _count(calibration, _CHECKED)
    unseen = batch.first(0) if holdout is None else holdout.first(count)
    source = batch if holdout is None else holdout
    missing = min(count - len(unseen.x) - len(batch.x), 3 * len(source.x))
    parts = [unseen]
    if source.x.ndim == 4 and missing > 0:
        x = source.x
        mirrored = np.concatenate([x[..., ::-1], x[..., ::-1, :], x[..., ::-1, ::-1]])[:missing]
        parts.append(Seen(mirrored, graph.run(mirrored)))
    parts.append(batch.first(max(count - len(unseen.x), 0)))
    xs, results = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "result"))
    return Seen(xs, results, len(xs) - len(parts[-1].x))


def choose_wide(
    graph: Graph,
    calibration: Calibration,
    kept: dict[str, str],
    batch: Seen,
    bound: float,
    build: Callable[[Wide, Rounding | None], Any],
    holdout: Seen | None = None,
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
    rounding = Rounding(graph, batch.first(_count(calibration, _RUN)).x)
    harms = sorted(_harms(graph, calibration, kept, look), key=lambda h: -h.error / h.cost)
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
        least, most, target = most, len(harms), target * _NEARER * bound / found
    return model, _measured(model, at_hand), error


def _fewer(model: Any, most: int, build: Callable[[int], Any], check: Seen, bound: float) -> Any:
    """A model with fewer activations in 16 bits, where one keeps the bound too: how weights happen to be rounded
    together moves the error by a tenth to either side, so that the search may have passed it by."""
    step = max(1, most // _TRIES // 2)
    for count in range(most - step, max(most - (_TRIES + 1) * step, -1), -step):
        tried = build(count)
        if _error(tried, check) <= bound:
            model = tried
    return model


def _error(model: Any, seen: Seen) -> float:
    result = model.run(seen.x)
    new = seen.unseen or len(result)  # observed images would show too small errors
    return max(off_by(result, seen.result, _BATCH), predicted_error(result[:new], seen.result[:new]))


def images_at_hand(calibration: Calibration, batch: Seen, holdout: Seen | None) -> Seen:
    """The held-out images, or the first observed ones if none were held out: what `max_error` is judged on."""
    return (batch if holdout is None else holdout).first(_count(calibration, _CHECKED))


def _measured(model: Any, images: Seen) -> float:
    return measured_error(model.run(images.x), images.result)


def stated_error(model: Any, check: Seen) -> float:
    """The error that is stated about images other than `check`, whose first `unseen` images were not observed."""
    count = check.unseen or len(check.x)
    return predicted_error(model.run(check.x[:count]), check.result[:count], _STATED_SPREAD_PRIOR)


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


def _reasons(graph: Graph, chosen: list[Harm], error: float) -> Wide:
    off = f"results would be off by {100 * error:.2f} % in bytes"
    return closed(graph, {h.family: f"{off}, {100 * h.share:.2f} % by it alone" for h in chosen})


def closed(graph: Graph, wide: Wide) -> Wide:
    """With what must be wide along: the result of a layer that takes a sum along, where what is added has 16 bits."""
    family_of, found = families(graph), dict(wide)
    for index, step in enumerate(graph.steps):
        if step.kind == "conv" and len(step.inputs) > 1 and family_of[step.inputs[1]] in found:
            found.setdefault(family_of[index], f"it takes along {graph.steps[step.inputs[1]].name}, in 16 bits")
    return found


def _harms(graph: Graph, calibration: Calibration, kept: dict[str, str], seen: Seen) -> list[Harm]:
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
            out.append(Harm(family, off_by(moved, exact), error, costs[family]))
    return out


def _costs(graph: Graph, calibration: Calibration) -> dict[int, float]:
    family_of = families(graph)
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
        self.factors: Factors = [np.ones(shape[:1]) for shape in calibration.shapes]
        if calibration.spans:
            self.factors = factors(graph, calibration, self.parameters, kept)
            magnify(self.graph, self.factors)
        self.calibration, self.family_of = calibration, families(graph)
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

    def _run(self, index: int, step: Step, reads: list[Array]) -> Array:
        if step.activation != "relu6":
            return self.graph.run_float(step, reads)
        most = np.asarray(6 * self.factors[index], np.float32)  # of magnified channels, 6 is as much larger
        made = self.graph.run_float(replace(step, activation="relu"), reads)
        return np.minimum(made, most.reshape(-1, *(1,) * (made.ndim - 2)) if most.size == made.shape[1] else 6)

    def _rounded(self, step: Step) -> Step:
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
