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
import numpy.typing as npt

from tilewise._files import read_json_input, write_atomic
from tilewise.errors import AccuracyError, ConfigurationError, FileFormatError, ShapeError, TilewiseError
from tilewise.graph.ir import Op
from tilewise.nn import Module
from tilewise.quantize.graph import FloatGraph, trace
from tilewise.quantize.observers import OBSERVERS, Observer
from tilewise.quantize.parameters import AffineParameters, affine_from_range
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
_SPREADS = 6  # standard deviations that a channel's values keep within, also where few were seen
# Of a range that is added to it after one image, half as much after four: of few values, and of what leaves the network
_FREE, _FREE_RESULT = 0.125, 0.5
# Share of the largest result by which the traced graph may differ from the module; reordered float32 sums of deep
# networks stay below 1e-4.
_LARGEST_GRAPH_DEVIATION = 1e-3
_FREE_CHANNEL = 2.0  # share of a channel's range that is added after one value, half as much after four
ACTIVATION_ENDS = {"sigmoid": 1.0, "hard_sigmoid": 1.0, "relu6": 6.0}
_LEAST_SCALE, _MOST_SCALE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
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
    means: tuple[tuple[float, ...], ...] = ()  # by channel; none where it was not kept
    spans: tuple[tuple[tuple[float, float], ...], ...] = ()  # what a channel may reach, likewise

    def __post_init__(self) -> None:
        counts = {
            len(part)
            for part in (self.names, self.parameters, self.ranges, self.shapes, self.means or self.names)
            + ((self.spans,) if self.spans else ())
        }
        if len(counts) != 1:
            raise ConfigurationError("a calibration has parameters, a range and a shape for each of its steps")
        for name, p, span, shape in zip(self.names, self.parameters, self.ranges, self.shapes, strict=True):
            if not (_LEAST_SCALE <= p.scale <= _MOST_SCALE and 0 <= p.zero_point <= 255 and np.isfinite(span).all()):
                raise ConfigurationError(
                    f"the calibration of {name[:80]!r} has a scale or zero point that means nothing"
                )
            if not all(0 <= size < 1 << 31 for size in shape):
                raise ConfigurationError(f"the calibration of {name[:80]!r} has a shape that no activation has")
        for name, mean, shape in zip(self.names, self.means, self.shapes, strict=False):
            if len(mean) not in (0, *shape[:1]) or not np.isfinite(mean).all():
                raise ConfigurationError(f"the calibration of {name[:80]!r} has means that are not its channels'")
        for name, spans, shape in zip(self.names, self.spans, self.shapes, strict=False):
            if len(spans) not in (0, *shape[:1]) or not np.isfinite(np.array(spans)).all():
                raise ConfigurationError(f"the calibration of {name[:80]!r} has spans that are not its channels'")

    def mean_of(self, step: int) -> Array | None:
        """Return the mean of each channel of an operator's result, or None if it was not observed."""
        return np.array(self.means[step]) if self.means and self.means[step] else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON, which `Calibration.load` reads."""
        means, spans = (part or ((),) * len(self.names) for part in (self.means, self.spans))
        every = zip(self.names, self.parameters, self.ranges, self.shapes, means, spans, strict=True)
        steps = [
            {"name": n, "scale": p.scale, "zero_point": p.zero_point, "range": r, "shape": s, "mean": m, "spans": c}
            for n, p, r, s, m, c in every
        ]
        text = json.dumps({"observer": self.observer, "samples": self.samples, "steps": steps}, indent=1)
        write_atomic(Path(path), text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        try:
            facts = read_json_input(path)
            steps = facts["steps"]
            return cls(
                str(facts["observer"]),
                tuple(str(s["name"]) for s in steps),
                tuple(AffineParameters(float(s["scale"]), int(s["zero_point"])) for s in steps),
                tuple((float(s["range"][0]), float(s["range"][1])) for s in steps),
                tuple(tuple(int(n) for n in s["shape"]) for s in steps),
                int(facts["samples"]),
                tuple(tuple(float(m) for m in s.get("mean", ())) for s in steps),
                tuple(tuple((float(low), float(high)) for low, high in s.get("spans", ())) for s in steps),
            )
        except TilewiseError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError):
            raise FileFormatError(f"{path} is not a calibration written by tilewise") from None


@dataclass(frozen=True)
class EvaluatedBatch:
    """A batch of inputs with the float model's results. Calibration did not observe the first `unseen` of them."""

    x: Array
    result: Array
    unseen: int = 0

    def first(self, count: int) -> EvaluatedBatch:
        return EvaluatedBatch(self.x[:count], self.result[:count], min(self.unseen, count))


def calibrate(
    model: Module, calibration_dataset: Iterable[Any], observer: str = "minmax", progress: bool = False
) -> Calibration:
    """Run the model in float over its inputs and store the range of every activation.

    The inputs are one array (N, ...) or an iterable of batches (arrays or Tensors).
    """
    return traced_and_calibrated(model, calibration_dataset, observer, progress)[1]


def traced_and_calibrated(
    model: Module, calibration_dataset: Iterable[Any], observer: str, progress: bool = False
) -> tuple[FloatGraph, Calibration, EvaluatedBatch]:
    """The steps of a model, traced with the first batch that holds something, their ranges, and what became of that
    batch."""
    graph, calibration, first, _ = calibrated_with_holdout(model, calibration_dataset, observer, progress, 0)
    return graph, calibration, first


class _HoldOut:
    """Splits batches into images to observe and images to hold out for the check: a quarter of each batch, or every
    fourth batch of a single image, until there are enough."""

    def __init__(self, count: int) -> None:
        self._missing, self._single_images, self.batches = count, 0, list[EvaluatedBatch]()

    def split(self, x: Array) -> tuple[Array, Array]:
        if len(x) == 1:
            self._single_images += 1
        held_out = len(x) // 4 if len(x) > 1 else int(self._single_images % 4 == 0)
        held_out = min(held_out, self._missing)
        self._missing -= held_out
        return x[: len(x) - held_out], x[len(x) - held_out :]

    def joined(self) -> EvaluatedBatch | None:
        if not self.batches:
            return None
        return EvaluatedBatch(
            np.concatenate([b.x for b in self.batches]), np.concatenate([b.result for b in self.batches])
        )


def calibrated_with_holdout(
    model: Module, calibration_dataset: Iterable[Any], observer: str, progress: bool, holdout: int
) -> tuple[FloatGraph, Calibration, EvaluatedBatch, EvaluatedBatch | None]:
    """The steps of a model, their ranges, the first batch that was observed with its float results, and up to
    `holdout` images that were not observed. None are held out of fewer than four."""
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
        if graph is None or statistics is None:
            graph = trace(model, x)
            statistics = _ActivationStatistics(len(graph.steps), observer != "minmax")
        observed, held_out = split.split(x)
        parts = []
        if len(observed):
            parts.append(graph.run(observed, statistics.observe))
            first = first if samples else EvaluatedBatch(observed, parts[0])
            samples += len(observed)
        if len(held_out):
            parts.append(graph.run(held_out))
            split.batches.append(EvaluatedBatch(held_out, parts[-1]))
        if graph.module_result is not None:
            _check_graph(model, np.concatenate(parts), graph.module_result)
            graph.module_result = None
    if graph is None or statistics is None:
        raise ConfigurationError("the calibration data is empty: a range needs at least one input")
    for index in statistics.masked:
        graph.steps[index].options["masked"] = True
    margins = [_range_margin(step, shape, samples) for step, shape in zip(graph.steps, statistics.shapes, strict=True)]
    margins[-1] = 1 + _FREE_RESULT / samples**0.5
    ranges = [
        _extended_range(o.range(observer), by, step.activation)
        for o, by, step in zip(statistics.observers, margins, graph.steps, strict=True)
    ]
    calibration = Calibration(
        observer,
        tuple(step.name for step in graph.steps),
        tuple(affine_from_range(*span) for span in ranges),
        tuple(ranges),
        tuple(statistics.shapes),
        samples,
        tuple(tuple(total / samples) for total in statistics.means),
        tuple(statistics.spans(i, samples, by) for i, by in enumerate(margins)),
    )
    return graph, calibration, first, split.joined()


def _check_graph(model: Module, result: Array, expected: Array) -> None:
    """The graph that is quantized must compute what the module does: float rounding apart, the same numbers."""
    finite = np.isfinite(expected)
    if result.shape != expected.shape or not np.array_equal(finite, np.isfinite(result)):
        deviation = np.inf
    else:
        largest = float(np.abs(expected, where=finite, out=np.zeros(expected.shape)).max(initial=0))
        difference = np.abs(np.where(finite, result - expected, 0)).max(initial=0)
        deviation = float(difference) / max(largest, 1e-30)
    if deviation > _LARGEST_GRAPH_DEVIATION:
        raise AccuracyError(
            f"{type(model).__name__} cannot be quantized: traced, it is off by {deviation:.2%} of its largest result"
        )


def _range_margin(step: Op, shape: tuple[int, ...], samples: int) -> float:
    """Return the factor by which a result's range exceeds the observed one.

    A few saturated values among an image's many do no harm. They would where a channel is a single value (behind a
    global mean), and in the network's result.
    """
    return 1.0 if step.kind == "input" or np.prod(shape[1:]) > 1 else 1 + _FREE / samples**0.5


def _extended_range(seen: tuple[float, float], by: float, activation: str) -> tuple[float, float]:
    return seen[0] * by, min(seen[1] * by, max(seen[1], ACTIVATION_ENDS.get(activation, np.inf)))


class _ActivationStatistics:
    """Statistics of every operator's result over the batches of a calibration."""

    def __init__(self, steps: int, histograms: bool) -> None:
        self.observers = [Observer(histograms) for _ in range(steps)]
        self.shapes: list[tuple[int, ...]] = [()] * steps
        self.means: list[Array] = [np.zeros(0)] * steps  # times the samples
        self.squares: list[Array] = [np.zeros(0)] * steps
        self.ends: list[Array] = [np.zeros((2, 0))] * steps  # the channels' smallest and largest values
        self.masked: set[int] = set()  # steps whose results hold -inf

    def observe(self, index: int, result: Array) -> None:
        finite = np.isfinite(result)
        if not finite.all() and finite.any() and np.isneginf(result[~finite]).all():
            # Masked scores of attention, of which softmax makes zeros: the range is that of the other scores.
            self.masked.add(index)
            result = np.maximum(result, result[finite].min())
        self.observers[index].observe(result)
        self.shapes[index] = result.shape[1:]
        if result.ndim in (2, 4):
            self._observe_channels(index, result.reshape(*result.shape[:2], -1))

    def _observe_channels(self, index: int, x: Array) -> None:
        mean, square = x.mean(2, dtype=np.float64).sum(0), np.square(x).mean(2, dtype=np.float64).sum(0)
        ends = np.stack([x.min((0, 2)), x.max((0, 2))])
        if self.means[index].size:
            mean, square = self.means[index] + mean, self.squares[index] + square
            ends = np.stack([np.minimum(self.ends[index][0], ends[0]), np.maximum(self.ends[index][1], ends[1])])
        self.means[index], self.squares[index], self.ends[index] = mean, square, ends

    def spans(self, index: int, samples: int, by: float) -> tuple[tuple[float, float], ...]:
        """Return the range that each channel may reach: `by` times the observed one, or six standard deviations around
        the mean if that is wider. Both are extended where few values of a channel were observed."""
        mean = self.means[index] / samples
        few = 1 + _FREE_CHANNEL / math.sqrt(samples * math.prod(self.shapes[index][1:]))
        by *= few
        margin = few * _SPREADS * np.sqrt(np.maximum(self.squares[index] / samples - mean**2, 0))
        (low, high), least = by * self.ends[index], min(self.observers[index].low, 0.0)
        low = np.minimum(low, mean - margin) if least < 0 else np.zeros_like(mean)
        return tuple(zip(low.tolist(), np.maximum(high, mean + margin).tolist(), strict=True))


def check_fits(calibration: Calibration, graph: FloatGraph) -> None:
    if calibration.names != tuple(step.name for step in graph.steps):
        raise ConfigurationError("this calibration was made for another model")


def check_model(model: Any) -> None:
    if not isinstance(model, Module):
        raise ConfigurationError(f"a model is an nn.Module, not {type(model).__name__}")
    if is_quantized(model):
        raise ConfigurationError("this model is quantized already")


def is_quantized(model: Module) -> bool:
    """Whether any layer of it computes in int8."""
    return any(getattr(m, "computes_in_int8", False) for m in model.modules())


def _as_batches(dataset: Any) -> Iterable[Any]:
    """Return the batches of a calibration dataset; a single array of inputs is split into batches."""
    if isinstance(dataset, Tensor | np.ndarray):
        x = _checked_batch(dataset)
        return [x[i : i + _ARRAY_BATCH] for i in range(0, len(x), _ARRAY_BATCH)]
    if isinstance(dataset, Iterable):
        return dataset
    if dataset is None:
        raise ConfigurationError(
            "there is no calibration data: pass an array of inputs or an iterable of batches of them"
        )
    hint = "pass its x_train" if hasattr(dataset, "x_train") else "pass an array of inputs or an iterable of batches"
    raise ConfigurationError(f"{type(dataset).__name__} is not calibration data; {hint}")


def _checked_batch(batch: Any) -> Array:
    if isinstance(batch, tuple) and len(batch) == 2 and np.ndim(batch[0]) > np.ndim(batch[1]):
        raise ShapeError("a calibration batch has no labels; pass [x for x, _ in batches] instead of (x, label) pairs")
    try:
        x = batch.data if isinstance(batch, Tensor) else np.asarray(batch)
    except ValueError:  # parts of different shapes, such as inputs with their labels
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
    batches = _as_batches(batches)
    if not progress:
        return batches
    from rich.progress import track

    return track(batches, description="calibrating")
