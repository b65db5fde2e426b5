"""Ranges of a model's activations, from representative data that streams by once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import read_json_input, write_whole
from tilewise.errors import ConfigurationError, FileFormatError, ShapeError, TilewiseError
from tilewise.nn import Module
from tilewise.quantize.graph import Graph, trace
from tilewise.quantize.observers import OBSERVERS, Observer
from tilewise.quantize.parameters import AffineParameters
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
_LEAST_SCALE, _MOST_SCALE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Calibration:
    """Per step of the model: the parameters its result gets, the range seen, and its shape without the batch."""

    observer: str
    names: tuple[str, ...]
    parameters: tuple[AffineParameters, ...]
    ranges: tuple[tuple[float, float], ...]
    shapes: tuple[tuple[int, ...], ...]
    samples: int
    means: tuple[tuple[float, ...], ...] = ()  # by channel; none where it was not kept

    def __post_init__(self) -> None:
        counts = {
            len(part) for part in (self.names, self.parameters, self.ranges, self.shapes, self.means or self.names)
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

    def mean_of(self, step: int) -> Array | None:
        """The mean of each channel of a step's result, where it is known."""
        return np.array(self.means[step]) if self.means and self.means[step] else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON; `Calibration.load` reads it back."""
        means = self.means or ((),) * len(self.names)
        steps = [
            {"name": n, "scale": p.scale, "zero_point": p.zero_point, "range": r, "shape": s, "mean": m}
            for n, p, r, s, m in zip(self.names, self.parameters, self.ranges, self.shapes, means, strict=True)
        ]
        text = json.dumps({"observer": self.observer, "samples": self.samples, "steps": steps}, indent=1)
        write_whole(Path(path), text.encode())

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
            )
        except TilewiseError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError):
            raise FileFormatError(f"{path} is not a calibration written by tilewise") from None


def calibrate(
    model: Module, calibration_dataset: Iterable[Any], observer: str = "minmax", progress: bool = False
) -> Calibration:
    """Run the model in float over batches of inputs (arrays or Tensors) and keep the range of every activation."""
    return traced_and_calibrated(model, calibration_dataset, observer, progress)[1]


def traced_and_calibrated(
    model: Module, calibration_dataset: Iterable[Any], observer: str, progress: bool = False
) -> tuple[Graph, Calibration]:
    """The steps of a model, traced with the first batch that holds something, and their ranges."""
    if observer not in OBSERVERS:
        raise ConfigurationError(f"there is no observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    check_model(model)
    graph: Graph | None = None
    watching: _Watching | None = None
    samples = 0
    for batch in _with_progress(calibration_dataset, progress):
        x = _checked_batch(batch)
        if not len(x):
            continue
        if graph is None or watching is None:
            graph = trace(model, x)
            watching = _Watching(len(graph.steps), observer != "minmax")
        graph.run(x, watching.see)
        samples += len(x)
    if graph is None or watching is None:
        raise ConfigurationError("the calibration data is empty: a range needs at least one input")
    return graph, Calibration(
        observer,
        tuple(step.name for step in graph.steps),
        tuple(o.parameters(observer) for o in watching.observers),
        tuple(o.range(observer) for o in watching.observers),
        tuple(watching.shapes),
        samples,
        tuple(tuple(total / samples) for total in watching.means),
    )


class _Watching:
    """What is kept of every step's result while batches go by."""

    def __init__(self, steps: int, histograms: bool) -> None:
        self.observers = [Observer(histograms) for _ in range(steps)]
        self.shapes: list[tuple[int, ...]] = [()] * steps
        self.means: list[Array] = [np.zeros(0)] * steps  # times the samples

    def see(self, index: int, result: Array) -> None:
        self.observers[index].see(result)
        self.shapes[index] = result.shape[1:]
        if result.ndim in (2, 4):
            mean = result.mean(tuple(range(2, result.ndim)), dtype=np.float64).sum(0)
            self.means[index] = mean if self.means[index].size == 0 else self.means[index] + mean


def check_fits(calibration: Calibration, graph: Graph) -> None:
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


def _checked_batch(batch: Any) -> Array:
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
    if not isinstance(batches, Iterable):
        raise ConfigurationError(f"the calibration data is an iterable of batches, not {type(batches).__name__}")
    if not progress:
        return batches
    from rich.progress import track

    return track(batches, description="calibrating")
