"""Comparison of two models on the same images, for `tilewise quantize` and `tilewise prune`.

Accuracy differences are paired: both models classify each image. The interval of the difference depends only on images
on which they disagree, so it is much narrower than the intervals of two separate accuracies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import Tensor, data, models, no_grad
from tilewise._wording import with_interval
from tilewise.cli.optimize.own_network import float_bytes
from tilewise.cli.tables import show, table
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.io import load
from tilewise.nn import Module
from tilewise.profile import Timer
from tilewise.profile.compare import Ratio
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
class ModelVariant:
    """One form of a model: a function that runs it once, its bytes, and how many answers of each group are correct.

    A group is a test image (0 or 1 correct answers) or a window of text (the share of correct answers).
    """

    run: Callable[[], Any]
    bytes_in_memory: int
    correct: Array


@dataclass(frozen=True)
class Outcome:
    """Accuracy, size and latency of one form of a model, compared with the first form.

    `doubts` are the reasons of the timer not to trust the latencies.
    """

    name: str
    correct: Array
    bytes_in_memory: int
    latency_s: float
    speedup: float
    speedup_interval: tuple[float, float]
    drop_points: float
    drop_interval: tuple[float, float]
    doubts: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of `--json`."""
        return {name: value for name, value in vars(self).items() if name != "correct"} | {"accuracy": self.accuracy}


def load_image_task(name: str, folder: str | None, weights: Path | None) -> Task:
    """Load `cnn`, `mlp`, `resnet8` or an ONNX file with the digits that ship with the package, or with MNIST files."""
    images = data.digits() if folder is None else data.mnist(folder)
    if name.endswith(".onnx"):
        return _onnx_task(name, images)
    if name not in ("cnn", "mlp", "resnet8"):
        raise ConfigurationError(f"this command takes cnn, mlp, resnet8 or an ONNX file, not {name!r}")
    if folder is None and weights is None:
        model = models.pretrained(name)
    elif weights is None:
        raise ConfigurationError("MNIST needs --weights, a model written by `tilewise fit cnn --data FOLDER`")
    else:
        model = models.image_model(name, images.x_train.shape[-1])
        model.load_state_dict(load(weights))
        model.eval()
    return Task(name, model, images.for_model(name))


def _onnx_task(name: str, images: data.ImageData) -> Task:
    """Load an ONNX file as a task, after checking that it classifies these images."""
    from tilewise import onnx

    network = onnx.load(name)
    shape = network.inputs[0].shape if len(network.inputs) == 1 else None
    flat = shape is not None and len(shape) == 2
    inputs = images.flat() if flat else images
    try:
        with no_grad():
            scores = network(inputs.x_test[:2])
    except TilewiseError as error:
        raise ConfigurationError(
            f"{name} does not take the digits, which are used without --calibration ({error}); give inputs of the "
            "network with --calibration FILE.npy"
        ) from None
    if isinstance(scores, dict) or scores.ndim != 2:
        raise ConfigurationError(f"{name} does not give one row of scores for each image")
    return Task(Path(name).stem, network, inputs)


def answers(model: Module, x: Array) -> Array:
    """Return the predicted class of each image of x (N, C, H, W)."""
    with no_grad():
        labels = [np.asarray(model(Tensor(x[i : i + _CHUNK]))).argmax(1) for i in range(0, len(x), _CHUNK)]
    return np.concatenate(labels)


def accuracy(model: Module, images: data.ImageData) -> float:
    return float((answers(model, images.x_test) == images.y_test).mean())


def outcomes(task: Task, candidates: dict[str, tuple[Module, int]], batch: int, runs: int, seed: int) -> list[Outcome]:
    """Evaluate models, given with their bytes, against the first one: accuracy, latency (interleaved) and size.

    Float networks are timed planned, in one native call, because quantized ones are: like is compared with like.
    """
    batch_x = Tensor(task.data.x_test[:batch])

    @no_grad()
    def run(model: Module) -> Any:
        return model(batch_x)

    forms = {
        name: ModelVariant(
            partial(run, _planned(model, batch_x)), size, answers(model, task.data.x_test) == task.data.y_test
        )
        for name, (model, size) in candidates.items()
    }
    return compare(forms, runs, seed)


def _planned(model: Module, batch: Tensor) -> Any:
    """Return a plan of a float network; the model itself if it is quantized or cannot be planned."""
    from tilewise.graph.plan import compile
    from tilewise.quantize.calibration import is_quantized

    try:
        return model if is_quantized(model) else compile(model, batch)
    except TilewiseError:
        return model


def compare(candidates: dict[str, ModelVariant], runs: int, seed: int) -> list[Outcome]:
    """Time candidates interleaved and compare each with the first one."""
    timing = Timer(time_limit=60.0).compare({name: c.run for name, c in candidates.items()}, runs=runs)
    first = next(iter(candidates))
    return [
        Outcome(
            name,
            candidate.correct,
            candidate.bytes_in_memory,
            timing.measurements[name].p50,
            *_speedup(timing.ratios.get(name)),
            *paired_drop(candidates[first].correct, candidate.correct, seed),
            doubts=list(timing.reasons),
        )
        for name, candidate in candidates.items()
    ]


def _speedup(ratio: Ratio | None) -> tuple[float, tuple[float, float]]:
    """Return a ratio's speed-up with its 95 % interval; 1 for the first model itself (None)."""
    if ratio is None:
        return 1.0, (1.0, 1.0)
    return 1 / ratio.ratio, (1 / ratio.interval.high, 1 / ratio.interval.low)


def paired_drop(before: Array, after: Array, seed: int) -> tuple[float, tuple[float, float]]:
    """Return the loss in points and its 95 % bootstrap interval; both arrays hold the share correct per sample."""
    difference = before.astype(np.float64) - after.astype(np.float64)
    low, high = np.quantile(resampled_means(difference, 1000, seed), [0.025, 0.975])
    return 100 * float(difference.mean()), (100 * float(low), 100 * float(high))


def bytes_with_kernels(model: Module) -> int:
    """Return the bytes of a model whose layers may be sparse."""
    from tilewise.prune import SparseConv2d, SparseLinear

    sparse = [layer.nbytes for layer in model.modules() if isinstance(layer, SparseConv2d | SparseLinear)]
    return float_bytes(model) + sum(sparse)


def print_table(title: str, rows: list[Outcome], timed_call: str) -> None:
    """Print a table of model versions, and reasons to distrust the times; `timed_call` says what was timed."""
    headings = ("", "accuracy", "points lost (95 % interval)", "in memory", f"p50 of {timed_call}", "speed-up")
    show(table(headings, map(_cells, rows), title))
    for doubt in rows[0].doubts:
        print(f"  Unsteady times: {doubt}.")


def _cells(row: Outcome) -> tuple[str, ...]:
    """Format one row: name, accuracy, accuracy lost, size, latency and speedup, the last with 95 % intervals."""
    low, high = row.drop_interval
    accuracy_loss = "none" if low == high == 0 else with_interval(*(f"{v:+.2f}" for v in (row.drop_points, low, high)))
    size, latency = f"{row.bytes_in_memory / 1024:,.1f} KiB", f"{row.latency_s * 1e3:.3f} ms"
    speedup = with_interval(*(f"{value:.2f}" for value in (row.speedup, *row.speedup_interval)))
    return row.name, f"{100 * row.accuracy:.2f} %", accuracy_loss, size, latency, speedup
