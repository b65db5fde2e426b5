"""Comparison of two models on the same images, for `tilewise quantize` and `tilewise prune`.

Accuracy differences are paired: both models classify each image. The interval of the difference depends only on images
on which they disagree, so it is much narrower than the intervals of two separate accuracies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import Tensor, data, models, no_grad
from tilewise._wording import with_interval
from tilewise.cli.tables import show, table
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.io import load
from tilewise.nn import Module
from tilewise.profile import Timer
from tilewise.profile.timing.statistics import resampled_means

Array = npt.NDArray[Any]
_CHUNK = 500  # images per call; arbitrary, bounds the memory of a pass


@dataclass(frozen=True)
class Task:
    """A trained model with the images to evaluate it on."""

    name: str
    model: Module
    data: data.ImageData


@dataclass(frozen=True)
class Outcome:
    """Accuracy, size and latency of one model on one task."""

    name: str
    correct: npt.NDArray[np.bool_]
    bytes_in_memory: int
    latency_s: float
    speedup: float
    drop_points: float
    drop_interval: tuple[float, float]

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("name", "accuracy", "bytes_in_memory")}
        facts |= {name: getattr(self, name) for name in ("latency_s", "speedup", "drop_points", "drop_interval")}
        return facts


def image_task(name: str, folder: str | None, weights: Path | None) -> Task:
    """Load `cnn`, `mlp` or an ONNX file with the digits that ship with the package, or with MNIST files."""
    images = data.digits() if folder is None else data.mnist(folder)
    if name.endswith(".onnx"):
        return _onnx_task(name, images)
    if name not in ("cnn", "mlp"):
        raise ConfigurationError(f"this command takes cnn, mlp or an ONNX file, not {name!r}")
    if folder is None and weights is None:
        model = models.pretrained(name)
    elif weights is None:
        raise ConfigurationError("MNIST needs --weights, a model written by `tilewise fit cnn --data FOLDER`")
    else:
        size = images.x_train.shape[-1]
        model = models.cnn(size=size) if name == "cnn" else models.mlp(inputs=size * size)
        model.load_state_dict(load(weights))
        model.eval()
    return Task(name, model, images.flat() if name == "mlp" else images)


def _onnx_task(name: str, images: data.ImageData) -> Task:
    """Load an ONNX file and check that it classifies these images."""
    from tilewise import onnx

    network = onnx.load(name)
    shape = network.inputs[0].shape if len(network.inputs) == 1 else None
    flat = shape is not None and len(shape) == 2
    inputs = images.flat() if flat else images
    try:
        with no_grad():
            scores = network(inputs.x_test[:2])
    except TilewiseError as error:
        raise ConfigurationError(f"{name} does not take these images: {error}") from None
    if isinstance(scores, dict) or scores.ndim != 2:
        raise ConfigurationError(f"{name} does not give one row of scores for each image")
    return Task(Path(name).stem, network, inputs)


def answers(model: Module, x: Array) -> Array:
    with no_grad():
        labels = [np.asarray(model(Tensor(x[i : i + _CHUNK]))).argmax(1) for i in range(0, len(x), _CHUNK)]
    return np.concatenate(labels)


def accuracy(model: Module, images: data.ImageData) -> float:
    return float((answers(model, images.x_test) == images.y_test).mean())


def outcomes(task: Task, candidates: dict[str, tuple[Module, int]], batch: int, runs: int, seed: int) -> list[Outcome]:
    """Evaluate models, given with their bytes, against the first one; timings on one batch are interleaved."""
    x, batch_x = task.data.x_test, Tensor(task.data.x_test[:batch])

    @no_grad()
    def run(model: Module) -> Any:
        return model(batch_x)

    timing = Timer().compare({name: partial(run, model) for name, (model, _) in candidates.items()}, runs=runs)
    correct = {name: answers(model, x) == task.data.y_test for name, (model, _) in candidates.items()}
    first = next(iter(candidates))
    return [
        Outcome(
            name,
            correct[name],
            size,
            timing.measurements[name].p50,
            timing.measurements[first].p50 / timing.measurements[name].p50,
            *paired_drop(correct[first], correct[name], seed),
        )
        for name, (_, size) in candidates.items()
    ]


def paired_drop(before: Array, after: Array, seed: int) -> tuple[float, tuple[float, float]]:
    """Return the loss of accuracy in percentage points and its 95 % bootstrap interval over images."""
    difference = before.astype(np.int8) - after.astype(np.int8)
    low, high = np.quantile(resampled_means(difference, 1000, seed), [0.025, 0.975])
    return 100 * float(difference.mean()), (100 * float(low), 100 * float(high))


def float_bytes(model: Module) -> int:
    return sum(t.data.nbytes for _, t in model.named_tensors())


def print_table(title: str, rows: list[Outcome], batch: int) -> None:
    headings = ("", "accuracy", "points lost (95 % interval)", "in memory", f"p50 of {batch} images", "speed-up")
    show(table(headings, map(_cells, rows), title))


def _cells(row: Outcome) -> tuple[str, ...]:
    low, high = row.drop_interval
    accuracy_loss = "none" if low == high == 0 else with_interval(*(f"{v:+.2f}" for v in (row.drop_points, low, high)))
    size, latency = f"{row.bytes_in_memory / 1024:,.1f} KiB", f"{row.latency_s * 1e3:.3f} ms"
    return row.name, f"{100 * row.accuracy:.2f} %", accuracy_loss, size, latency, f"{row.speedup:.2f}×"
