"""Calibration: the ranges of a model's activations, observed in one pass over representative data."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise._files import read_json_input
from tilewise.errors import AccuracyError, ConfigurationError, FileFormatError, ShapeError, TilewiseError, type_name
from tilewise.graph.ir import Array, Op
from tilewise.nn import Embedding, Module
from tilewise.quantize.graph import FloatGraph, trace
from tilewise.quantize.parameters import AffineParameters, affine_from_range
from tilewise.tensor import Tensor

_DEVIATIONS = 6  # standard deviations around its mean that a channel's range covers at least; set by hand
# Share of a range that is added to it after one image, half as much after four: for results with one value per channel,
# and for the network's result. Set by hand.
_MARGIN, _RESULT_MARGIN = 0.125, 0.5
# Share of the largest result by which the traced graph may differ from the module; reordered float32 sums of deep
# networks stay below 1e-4.
_LARGEST_GRAPH_DEVIATION = 1e-3
_CHANNEL_MARGIN = 2.0  # share of a channel's range that is added after one value, half as much after four
# Largest value of bounded activations.
ACTIVATION_ENDS = {"sigmoid": 1.0, "hard_sigmoid": 1.0, "relu6": 6.0}
_MIN_SCALE, _MAX_SCALE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_ARRAY_BATCH = 64  # inputs per batch if the calibration data is one array; bounds the memory of a pass


@dataclass(frozen=True)
class Calibration:
    """The quantization parameters, observed range and shape (without the batch) of every operator's result."""

    observer: str
    names: tuple[str, ...]
    parameters: tuple[AffineParameters, ...]
    ranges: tuple[tuple[float, float], ...]
    shapes: tuple[tuple[int, ...], ...]
    samples: int
    means: tuple[tuple[float, ...], ...] = ()  # per channel; () if not observed
    channel_ranges: tuple[tuple[tuple[float, float], ...], ...] = ()  # range that each channel may reach, likewise

    def __post_init__(self) -> None:
        """Raise if the tuples differ in length or contain invalid numbers, as a damaged file may."""
        optional = (self.means or self.names, self.channel_ranges or self.names)
        if len({len(field) for field in (self.names, self.parameters, self.ranges, self.shapes, *optional)}) != 1:
            raise ConfigurationError("a calibration has parameters, a range and a shape for each of its steps")
        for name, p, limits, shape in zip(self.names, self.parameters, self.ranges, self.shapes, strict=True):
            if not (_MIN_SCALE <= p.scale <= _MAX_SCALE and 0 <= p.zero_point <= 255 and np.isfinite(limits).all()):
                raise ConfigurationError(f"the calibration of {name[:80]!r} has an invalid scale or zero point")
            if not all(0 <= size < 1 << 31 for size in shape):
                raise ConfigurationError(f"the calibration of {name[:80]!r} has an invalid shape")
        for name, mean, shape in zip(self.names, self.means, self.shapes, strict=False):
            if len(mean) not in (0, *shape[:1]) or not np.isfinite(mean).all():
                raise ConfigurationError(f"the calibration of {name[:80]!r} does not have one mean per channel")
        for name, channel_ranges, shape in zip(self.names, self.channel_ranges, self.shapes, strict=False):
            if len(channel_ranges) not in (0, *shape[:1]) or not np.isfinite(np.array(channel_ranges)).all():
                raise ConfigurationError(f"the calibration of {name[:80]!r} does not have one range per channel")

    def mean_of(self, op_index: int) -> Array | None:
        """Return the mean of each channel (C,) of an operator's result, or None if it was not observed."""
        return np.array(self.means[op_index]) if self.means and self.means[op_index] else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, which `Calibration.load` reads."""
        means, channel_ranges = (field or ((),) * len(self.names) for field in (self.means, self.channel_ranges))
        every = zip(self.names, self.parameters, self.ranges, self.shapes, means, channel_ranges, strict=True)
        steps = [
            {"name": n, "scale": p.scale, "zero_point": p.zero_point, "range": r, "shape": s, "mean": m, "spans": c}
            for n, p, r, s, m, c in every
        ]
        text = json.dumps({"observer": self.observer, "samples": self.samples, "steps": steps}, indent=1)
        write_atomic(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration that `save` wrote."""
        try:
            facts = read_json_input(path)
            steps = facts["steps"]
            return cls(
                observer=str(facts["observer"]),
                names=tuple(str(s["name"]) for s in steps),
                parameters=tuple(AffineParameters(float(s["scale"]), int(s["zero_point"])) for s in steps),
                ranges=tuple((float(s["range"][0]), float(s["range"][1])) for s in steps),
                shapes=tuple(tuple(int(n) for n in s["shape"]) for s in steps),
                samples=int(facts["samples"]),
                means=tuple(tuple(float(m) for m in s.get("mean", ())) for s in steps),
                channel_ranges=tuple(tuple((float(a), float(b)) for a, b in s.get("spans", ())) for s in steps),
            )
        except TilewiseError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError):
            raise FileFormatError(f"{path} is not a calibration written by tilewise") from None


@dataclass(frozen=True)
class EvaluatedBatch:
    """A batch of inputs with the float model's results.

    The first `independent` of them were not observed by calibration and are not copies of each other.
    """

    x: Array
    result: Array
    independent: int = 0

    def first(self, count: int) -> EvaluatedBatch:
        return EvaluatedBatch(self.x[:count], self.result[:count], min(self.independent, count))


def calibrate(
    model: Module, calibration_dataset: Iterable[Any], observer: str = "minmax", progress: bool = False
) -> Calibration:
    """Run the model in float over its inputs and store the range of every activation.

    The inputs are one array (N, ...) or an iterable of batches (arrays or Tensors).
    """
    if isinstance(model, Module) and any(isinstance(module, Embedding) for module in model.modules()):
        raise ConfigurationError("a model of token ids is quantized without calibration: use quantize(model)")
    return trace_and_calibrate(model, calibration_dataset, observer, progress)[1]


class _HoldOut:
    """Splits calibration batches into images to observe and images to hold out for validation."""

    def __init__(self, count: int) -> None:
        self._missing, self._single_images, self.batches = count, 0, list[EvaluatedBatch]()

    def split(self, x: Array) -> tuple[Array, Array]:
        """Split a batch into images to observe and images to hold out: (observed, held out).

        The last quarter of a batch is held out, or every fourth batch of a single image, until enough images are held
        out.
        """
        if len(x) == 1:
            self._single_images += 1
        # A quarter of a batch; of batches with one image, every fourth.
        held_out = len(x) // 4 if len(x) > 1 else int(self._single_images % 4 == 0)
        held_out = min(held_out, self._missing)
        self._missing -= held_out
        return x[: len(x) - held_out], x[len(x) - held_out :]

    def joined(self) -> EvaluatedBatch | None:
        """Concatenate all held-out images and their float results into one batch; None if there are none."""
        if not self.batches:
            return None
        return EvaluatedBatch(
            np.concatenate([b.x for b in self.batches]), np.concatenate([b.result for b in self.batches])
        )


def trace_and_calibrate(
    model: Module,
    calibration_dataset: Iterable[Any],
    observer: str = "minmax",
    progress: bool = False,
    holdout: int = 0,
) -> tuple[FloatGraph, Calibration, EvaluatedBatch, EvaluatedBatch | None]:
    """Trace a model and calibrate it; return (graph, calibration, first observed batch, held-out images or None).

    Both batches contain the float model's results. Up to `holdout` images, a quarter of each batch, are not observed
    and are returned as held-out images instead.
    """
    if observer not in OBSERVERS:
        raise ConfigurationError(f"there is no observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    check_model(model)
    graph: FloatGraph | None = None
    statistics: _ActivationStatistics | None = None
    samples, first, split = 0, EvaluatedBatch(np.zeros(0, np.float32), np.zeros(0, np.float32)), _HoldOut(holdout)
    for batch in _with_progress(calibration_dataset, progress):
        x = _checked_batch(batch)
        if not len(x):
            continue
        if graph is None or statistics is None:  # the first batch that is not empty
            graph = trace(model, x)
            statistics = _ActivationStatistics(len(graph.steps), observer != "minmax")
        # Observers never see held-out images, so that the error on them is an honest estimate.
        observed, held_out = split.split(x)
        results = []
        if len(observed):
            results.append(graph.run(observed, statistics.observe))
            first = first if samples else EvaluatedBatch(observed, results[0])
            samples += len(observed)
        if len(held_out):
            results.append(graph.run(held_out))
            split.batches.append(EvaluatedBatch(held_out, results[-1]))
        # The first batch is the traced one, for which the module's own result is known.
        if graph.module_result is not None:
            _check_graph(model, np.concatenate(results), graph.module_result)
            graph.module_result = None
    if graph is None or statistics is None:
        raise ConfigurationError("the calibration data is empty: a range needs at least one input")
    for index in statistics.masked:
        graph.steps[index].options["masked"] = True
    return graph, statistics.calibration(graph, observer, samples), first, split.joined()


def _check_graph(model: Module, result: Array, expected: Array) -> None:
    """Raise AccuracyError unless the graph computes the module's result up to float32 rounding."""
    finite = np.isfinite(expected)
    if result.shape != expected.shape or not np.array_equal(finite, np.isfinite(result)):
        deviation = np.inf
    else:
        largest = float(np.abs(expected, where=finite, out=np.zeros(expected.shape)).max(initial=0))
        difference = np.abs(np.where(finite, result - expected, 0)).max(initial=0)
        deviation = float(difference) / max(largest, 1e-30)
    if deviation > _LARGEST_GRAPH_DEVIATION:
        raise AccuracyError(
            f"{type_name(model)} cannot be quantized: traced, it is off by {deviation:.2%} of its largest result"
        )


def _range_margin(step: Op, shape: tuple[int, ...], samples: int) -> float:
    """Return the factor (at least 1) by which an operator's observed range is extended, given the number of `samples`.

    A few saturated values in an image do no harm, so only results with one value per channel are extended: those after
    a global mean, and the network's result.
    """
    return 1.0 if step.kind == "input" or np.prod(shape[1:]) > 1 else 1 + _MARGIN / samples**0.5


def _extended_range(observed: tuple[float, float], margin: float, activation: str) -> tuple[float, float]:
    """Multiply both ends of an observed range (low, high) by `margin`.

    The upper end stays within the bound of the activation, such as 6 for ReLU6, unless a larger value was observed.
    """
    low, high = observed
    return low * margin, min(high * margin, max(high, ACTIVATION_ENDS.get(activation, np.inf)))


class _ActivationStatistics:
    """Statistics of every operator's result over the batches of a calibration."""

    def __init__(self, steps: int, histograms: bool) -> None:
        """Start without observations of the operators; `histograms` collects whole distributions."""
        self.observers = [Observer(histograms) for _ in range(steps)]
        self.shapes: list[tuple[int, ...]] = [()] * steps
        self.means: list[Array] = [np.zeros(0)] * steps  # sums over the samples of each channel's mean
        self.squares: list[Array] = [np.zeros(0)] * steps  # sums of the mean squares
        self.ends: list[Array] = [np.zeros((2, 0))] * steps  # the channels' smallest and largest values
        self.masked: set[int] = set()  # operators whose results hold -inf

    def observe(self, op_index: int, result: Array) -> None:
        """Add one operator's result for a batch (N, ...) to its statistics."""
        # Attention scores may be masked with -inf, of which softmax makes zeros: the range is that of the other scores.
        if np.isneginf(result.min(initial=0)) and -np.inf < result.max() < np.inf:
            self.masked.add(op_index)
            result = np.maximum(result, result[np.isfinite(result)].min())
        self.observers[op_index].observe(result)
        self.shapes[op_index] = result.shape[1:]
        if result.ndim in (2, 4):
            self._observe_channels(op_index, result.reshape(*result.shape[:2], -1))

    def _observe_channels(self, index: int, x: Array) -> None:
        """Update the range, mean and mean square of each channel with a result (N, C, values)."""
        # Sums over images of each channel's mean and mean square: (C)
        mean, square = x.mean(2, dtype=np.float64).sum(0), np.square(x).mean(2, dtype=np.float64).sum(0)
        ends = np.stack([x.min((0, 2)), x.max((0, 2))])
        if self.means[index].size:
            mean, square = self.means[index] + mean, self.squares[index] + square
            ends = np.stack([np.minimum(self.ends[index][0], ends[0]), np.maximum(self.ends[index][1], ends[1])])
        self.means[index], self.squares[index], self.ends[index] = mean, square, ends

    def calibration(self, graph: FloatGraph, observer: str, samples: int) -> Calibration:
        """Compute the calibration from the statistics of `samples` images.

        `observer` is the method that chooses each range, such as "minmax". Ranges are extended if there are few images.
        """
        margins = [_range_margin(step, shape, samples) for step, shape in zip(graph.steps, self.shapes, strict=True)]
        margins[-1] = 1 + _RESULT_MARGIN / samples**0.5
        ranges = [
            _extended_range(statistics.range(observer), margin, step.activation)
            for statistics, margin, step in zip(self.observers, margins, graph.steps, strict=True)
        ]
        return Calibration(
            observer=observer,
            names=tuple(step.name for step in graph.steps),
            parameters=tuple(affine_from_range(*limits) for limits in ranges),
            ranges=tuple(ranges),
            shapes=tuple(self.shapes),
            samples=samples,
            means=tuple(tuple(total / samples) for total in self.means),
            channel_ranges=tuple(self._channel_ranges(i, samples, margin) for i, margin in enumerate(margins)),
        )

    def _channel_ranges(self, index: int, samples: int, margin: float) -> tuple[tuple[float, float], ...]:
        """Return the (low, high) that each channel of a result may reach on unseen images.

        It is the wider of `margin` times the observed range and six standard deviations around the mean. Both are
        extended if few values of a channel were observed.
        """
        mean = self.means[index] / samples
        extension = 1 + _CHANNEL_MARGIN / math.sqrt(samples * math.prod(self.shapes[index][1:]))
        margin *= extension
        reach = extension * _DEVIATIONS * np.sqrt(np.maximum(self.squares[index] / samples - mean**2, 0))
        low, high = margin * self.ends[index]
        # A channel after ReLU cannot be negative, although mean minus deviations may be.
        is_signed = self.observers[index].low < 0
        low = np.minimum(low, mean - reach) if is_signed else np.zeros_like(mean)
        return tuple(zip(low.tolist(), np.maximum(high, mean + reach).tolist(), strict=True))


def check_fits(calibration: Calibration, graph: FloatGraph) -> None:
    """Raise ConfigurationError if a calibration belongs to a graph with other operators."""
    if calibration.names != tuple(step.name for step in graph.steps):
        raise ConfigurationError("this calibration was made for another model")


def check_model(model: Any) -> None:
    """Raise ConfigurationError unless this is a module that is not quantized yet."""
    if not isinstance(model, Module):
        raise ConfigurationError(f"a model is an nn.Module, not {type_name(model)}")
    if is_quantized(model):
        raise ConfigurationError("this model is quantized already")


def is_quantized(model: Module) -> bool:
    """Tell whether any layer of a model computes in int8."""
    return any(getattr(m, "computes_in_int8", False) for m in model.modules())


def _as_batches(dataset: Any) -> Iterable[Any]:
    """Return an iterable of batches; a single array (N, ...) of inputs is split into batches."""
    if hasattr(dataset, "__array__"):
        x = _checked_batch(dataset)
        return [x[i : i + _ARRAY_BATCH] for i in range(0, len(x), _ARRAY_BATCH)]
    if isinstance(dataset, Iterable) and not isinstance(dataset, str):
        return dataset
    if dataset is None:
        raise ConfigurationError(
            "there is no calibration data: pass an array of inputs or an iterable of batches of them"
        )
    hint = "pass its x_train" if hasattr(dataset, "x_train") else "pass an array of inputs or an iterable of batches"
    raise ConfigurationError(f"{type(dataset).__name__} is not calibration data; {hint}")


def _checked_batch(batch: Any) -> Array:
    """Convert a calibration batch to a float32 array; raise ConfigurationError if it is not one."""
    if isinstance(batch, tuple) and len(batch) == 2 and np.ndim(batch[0]) > np.ndim(batch[1]):
        raise ShapeError("a calibration batch has no labels; pass [x for x, _ in batches] instead of (x, label) pairs")
    try:
        x = batch.data if isinstance(batch, Tensor) else np.asarray(batch)
    except ValueError:  # arrays of different shapes, such as inputs with their labels
        raise ShapeError(
            f"a calibration batch is one array of inputs, not a {type(batch).__name__} of arrays"
        ) from None
    if x.dtype.kind not in "fiu" or x.ndim < 2:
        raise ShapeError(f"a calibration batch is an array of inputs, not {x.dtype} of shape {x.shape}")
    with np.errstate(over="ignore"):  # infinity is refused below
        x = x.astype(np.float32, copy=False)
    if not np.isfinite(x).all():
        raise ConfigurationError("the calibration data holds NaN or infinity")
    return x


def _with_progress(batches: Iterable[Any], progress: bool) -> Iterable[Any]:
    """Yield the batches unchanged, with a progress bar on the terminal if `progress` is set."""
    batches = _as_batches(batches)
    if not progress:
        return batches
    from rich.progress import track

    return track(batches, description="calibrating")


# --- observers ---


OBSERVERS = ("minmax", "percentile", "mse", "entropy")
_BINS = 2048  # of a histogram, as in TensorRT's calibration
_OUTLIERS = 1e-4  # share of the values that "percentile" lets saturate
_MAX_SATURATED = 1e-3  # share of the values that "entropy" may let saturate


class Observer:
    """Histogram of the values of one activation; its range grows when larger values are observed."""

    def __init__(self, histogram: bool = True) -> None:
        self.low, self.high, self.count, self._has_histogram = np.inf, -np.inf, 0, histogram
        self.histogram: Array = np.zeros(_BINS, np.float64)

    def observe(self, x: Array) -> None:
        """Add the values of a batch to the histogram; raise for NaN and infinity."""
        if x.size == 0:
            return
        low, high = float(x.min()), float(x.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ConfigurationError("the calibration data gives NaN or infinite activations")
        if self.count == 0:
            self.low, self.high = low, high
        elif low < self.low or high > self.high:
            self._extend(min(low, self.low), max(high, self.high))
        self.count += x.size
        if not self._has_histogram:
            return
        # In float64: there may be fewer than 2048 float32 numbers between the lowest and the highest.
        self.histogram += np.histogram(x.astype(np.float64, copy=False), _BINS, self._span())[0]

    def parameters(self, method: str) -> AffineParameters:
        """Return the uint8 quantization parameters for the range that `method` (a key of OBSERVERS) chooses."""
        if self.count == 0:
            raise ConfigurationError("there is no calibration data")
        low, high = self.range(method)
        return affine_from_range(low, high)

    def range(self, method: str) -> tuple[float, float]:
        """Return the range (low, high) that `method` chooses: "minmax", or another key of OBSERVERS."""
        if method not in OBSERVERS:
            raise ConfigurationError(f"there is no observer {method!r}; choose one of {', '.join(OBSERVERS)}")
        if method == "minmax" or self.low == self.high:
            return self.low, self.high
        if method == "percentile":
            return self._percentile()
        # Candidates: the observed range, narrowed in steps of 1 %.
        ranges = [(self.low * share, self.high * share) for share in np.linspace(1.0, 0.2, 81)]
        if method == "mse":
            return min(ranges, key=lambda r: self._squared_error(*r))
        p = self.histogram / self.histogram.sum()
        candidates = (r for r in ranges if self._saturated_share(p, *r) <= _MAX_SATURATED)
        return min(candidates, key=lambda r: self._divergence(*r))

    def _span(self) -> tuple[float, float]:
        """Return the histogram's range; one of width 1 if all observed values are equal."""
        return (self.low, self.high) if self.high > self.low else (self.low - 0.5, self.high + 0.5)

    def _centres(self) -> Array:
        low, high = self._span()
        return low + (np.arange(_BINS) + 0.5) * ((high - low) / _BINS)

    def _extend(self, low: float, high: float) -> None:
        """Change the histogram's range to [low, high] and redistribute its counts into the new bins."""
        centres, weights = self._centres(), self.histogram
        self.low, self.high = low, high
        self.histogram = np.histogram(centres, _BINS, self._span(), weights=weights)[0].astype(np.float64)

    def _percentile(self) -> tuple[float, float]:
        """Return the range that leaves out a small share of values at each end (percentile calibration)."""
        share = np.cumsum(self.histogram) / self.histogram.sum()
        centres = self._centres()
        low = int(np.searchsorted(share, _OUTLIERS / 2))
        high = min(int(np.searchsorted(share, 1 - _OUTLIERS / 2)), _BINS - 1)
        return float(centres[low]), float(centres[high])

    def _squared_error(self, low: float, high: float) -> float:
        """Return the squared quantization error, summed over all values, of the range [low, high]."""
        parameters, centres = affine_from_range(low, high), self._centres()
        error = centres - parameters.dequantize(parameters.quantize(centres))
        return float((self.histogram * error**2).sum())

    def _divergence(self, low: float, high: float) -> float:
        """Return the Kullback-Leibler divergence of the histogram from itself quantized to [low, high]."""
        parameters, centres = affine_from_range(low, high), self._centres()
        step = parameters.quantize(centres).astype(np.int64)
        p = self.histogram / self.histogram.sum()
        occupied = p > 0
        # Quantization spreads the mass of a step evenly over its occupied bins.
        mass, bins = np.bincount(step, p, 256), np.bincount(step, occupied, 256)
        q = np.where(occupied, mass[step] / np.maximum(bins[step], 1), 0.0)
        divergence = (p[occupied] * np.log(p[occupied] / np.maximum(q[occupied], 1e-300))).sum()
        # Saturated values end up in the outermost step, whose bins then misrepresent them.
        return float(divergence + self._saturated_share(p, low, high))

    def _saturated_share(self, p: Array, low: float, high: float) -> float:
        """Return the share of the distribution `p` (one probability per bin) outside [low, high]."""
        centres = self._centres()
        return float(p[(centres < min(low, 0.0)) | (centres > max(high, 0.0))].sum())
