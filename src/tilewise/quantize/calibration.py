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

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.parameters) == len(self.ranges) == len(self.shapes):
            raise ConfigurationError("a calibration has parameters, a range and a shape for each of its steps")
        for name, p, span, shape in zip(self.names, self.parameters, self.ranges, self.shapes, strict=True):
            if not (_LEAST_SCALE <= p.scale <= _MOST_SCALE and 0 <= p.zero_point <= 255 and np.isfinite(span).all()):
                raise ConfigurationError(
                    f"the calibration of {name[:80]!r} has a scale or zero point that means nothing"
                )
            if not shape or not all(0 <= size < 1 << 31 for size in shape):
                raise ConfigurationError(f"the calibration of {name[:80]!r} has a shape that no activation has")

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON; `Calibration.load` reads it back."""
        steps = [
            {"name": n, "scale": p.scale, "zero_point": p.zero_point, "range": r, "shape": s}
            for n, p, r, s in zip(self.names, self.parameters, self.ranges, self.shapes, strict=True)
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
            )
        except TilewiseError:
            raise
        except (ValueError, LookupError, TypeError, OverflowError):
            raise FileFormatError(f"{path} is not a calibration written by tilewise") from None


def calibrate(
    model: Module, calibration_dataset: Iterable[Any], observer: str = "minmax", progress: bool = False
) -> Calibration:
    """Run the model in float over batches of inputs (arrays or Tensors) and keep the range of every activation."""
    if observer not in OBSERVERS:
        raise ConfigurationError(f"there is no observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    check_model(model)
    graph = trace(model)
    observers = [Observer() for _ in graph.steps]
    shapes: list[tuple[int, ...]] = [()] * len(observers)
    samples = 0

    def watch(index: int, result: Array) -> None:
        observers[index].see(result)
        shapes[index] = result.shape[1:]

    was_training = model.training
    model.eval()
    try:
        for batch in _with_progress(calibration_dataset, progress):
            x = _checked_batch(batch)
            if len(x):
                graph.run(x, watch)
            samples += len(x)
    finally:
        model.train(was_training)
    if not samples:
        raise ConfigurationError("the calibration data is empty: a range needs at least one input")
    return Calibration(
        observer,
        tuple(step.name for step in graph.steps),
        tuple(o.parameters(observer) for o in observers),
        tuple(o.range(observer) for o in observers),
        tuple(shapes),
        samples,
    )


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
