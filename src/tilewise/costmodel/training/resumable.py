"""Resumable training: the part of a training run that all kinds of models share.

The state after an epoch is written atomically, and an epoch's randomness comes from (seed, epoch) alone. So a run that
was killed and resumed ends with the same weights as an uninterrupted one, bit for bit on one thread. The result has the
weights with the best validation metric.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.costmodel.models.file_writer import write_tensors
from tilewise.costmodel.models.files import read_tensors
from tilewise.costmodel.training.config import TrainSettings
from tilewise.errors import TilewiseError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tilewise.costmodel.training.optimizer import FlatAdam

CHECKPOINT = "checkpoint.safetensors"
Report = Callable[[dict[str, Any]], None]


@dataclass
class TrainingState:
    """State of a checkpoint besides tensors."""

    epoch: int = 0
    steps: int = 0
    seconds: float = 0.0
    best: float | None = None  # selection value of the best weights
    best_epoch: int = -1
    best_share: float = 0.0  # share of the run that was finished at that epoch
    curve: list[dict[str, float]] = field(default_factory=list)


class ResumableRun:
    """Training run over epochs; subclasses implement the epoch, the validation and the fingerprint."""

    module: nn.Module
    optimizer: FlatAdam
    average: Tensor | None  # moving average of the weights
    best_values: Tensor
    validated: Tensor  # the weights of the last validation
    writes = True  # whether this process writes files

    def __init__(self, settings: TrainSettings, device: str, folder: Path | None) -> None:
        self.settings, self.device, self.folder = settings, device, folder
        self.state = TrainingState()

    def _create_optimizer(self) -> None:
        """Create the optimizer; subclasses call it after creating the module."""
        from tilewise.costmodel.training.optimizer import FlatAdam

        settings = self.settings
        self.optimizer = FlatAdam(
            self.module.parameters(), settings.learning_rate, settings.clip_norm, settings.weight_decay
        )
        self.average = self.optimizer.values.clone() if settings.average else None
        self.best_values = self.optimizer.values.clone()

    def _train_epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        """Train for one epoch; returns at least ``epoch`` and ``train_loss``."""
        raise NotImplementedError

    def _validation_metrics(self) -> dict[str, float]:
        """Return the validation metrics of the current weights, named ``val_*``."""
        raise NotImplementedError

    def _fingerprint(self) -> str:
        """Return a digest of settings and data; a checkpoint with another digest is not resumed."""
        raise NotImplementedError

    def learn(self, report: Report) -> None:
        """Train until the last epoch, the time limit or early stopping; `report` is called after every epoch."""
        settings, state = self.settings, self.state
        while state.epoch < settings.epochs:
            started = time.perf_counter()
            row = self._train_epoch(state.epoch, started)
            state.epoch += 1
            timed_out = 0 < settings.max_seconds < state.seconds + time.perf_counter() - started
            # Validate at intervals, and always at the end of the run.
            if state.epoch % settings.eval_every == 0 or state.epoch == settings.epochs or timed_out:
                row |= self._validate()
                self._update_best(row, settings.share_done(state.epoch, self._elapsed_seconds(started)))
            state.seconds += time.perf_counter() - started
            state.curve.append(row)
            report(row | {"epochs": settings.epochs, "seconds": state.seconds, "best_epoch": state.best_epoch})
            if self.folder and self.writes:
                self._write_checkpoint(self.folder / CHECKPOINT)
            # Stop after the time limit, or without improvement for `early_stop` epochs.
            if timed_out or (state.best is not None and state.epoch - 1 - state.best_epoch >= settings.early_stop):
                break

    def _validate(self) -> dict[str, float]:
        """Return the validation metrics, with the moving average of the weights if there is one."""
        current = self.optimizer.values.clone()
        if self.average is not None:
            self.optimizer.values.copy_(self.average)
        row = self._validation_metrics()
        self.validated = self.optimizer.values.clone()
        self.optimizer.values.copy_(current)
        return row

    def _elapsed_seconds(self, started: float) -> float:
        return self.state.seconds + time.perf_counter() - started if started else 0.0

    def _update_average(self) -> None:
        """Update the exponential moving average of the weights; the plain mean in the first steps."""
        if self.average is not None:
            # A plain mean during the first steps, so that the initial weights have no lasting influence.
            self.average.lerp_(self.optimizer.values, max(1 - self.settings.average, 1 / self.optimizer.step_count))

    def _update_best(self, row: dict[str, float], share: float) -> None:
        """Store the weights if the metrics `row` are the best so far; `share` is the completed share of training.

        Before the share `settled` the learning rate is still high, and good metrics on a few kernels are luck; so the
        first weights after it replace all earlier ones.
        """
        value = selection_value(row, self.settings.select)
        first_settled = share >= self.settings.settled > self.state.best_share
        if self.state.best is None or first_settled or value > self.state.best:
            self.state.best, self.state.best_epoch, self.state.best_share = value, int(row["epoch"]), share
            self.best_values.copy_(self.validated)

    def _record(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training record that a model file stores; `kwargs` are the model's arguments."""
        return {
            "model": self.settings.model,
            "model_kwargs": kwargs,
            "settings": self.settings.as_dict(),
            "curve": self.state.curve,
            "best_epoch": self.state.best_epoch,
            "seconds": self.state.seconds,
        }

    def _load_best(self) -> None:
        """Load the best weights into the module, and free its gradients."""
        self.optimizer.values.copy_(self.best_values)
        for parameter in self.module.parameters():
            parameter.grad = None

    def _write_checkpoint(self, path: Path) -> None:
        """Write weights, optimizer state and progress to `path`."""
        tensors = {"values": self.optimizer.values, "best": self.best_values} | self.optimizer.state()
        if self.average is not None:
            tensors["average"] = self.average
        record = vars(self.state) | {"steps": self.optimizer.step_count, "fingerprint": self._fingerprint()}
        write_tensors(path, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}, record)

    def _is_valid_checkpoint(self, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
        """Tell whether a checkpoint's names, shapes and types are those of this run."""
        size = tuple(self.optimizer.values.shape)
        names = {"values", "best", *self.optimizer.state(), *(["average"] if self.average is not None else [])}
        arrays_match = arrays.keys() == names and all(
            a.shape == size and a.dtype == np.float32 for a in arrays.values()
        )
        numbers = ("epoch", "steps", "seconds", "best_epoch", "best_share")
        return (
            arrays_match
            and record.keys() == vars(self.state).keys()
            and all(type(record[name]) in (int, float) and math.isfinite(record[name]) for name in numbers)
            and isinstance(record["best"], int | float | None)
            and isinstance(record["curve"], list)
            and 0 <= record["epoch"] == len(record["curve"]) <= self.settings.epochs
        )

    def resume(self, progress: bool) -> None:
        """Load the folder's checkpoint if it belongs to this run; otherwise training starts again."""
        import torch

        path = self.folder / CHECKPOINT if self.folder else None
        if path is None or not path.is_file():
            return
        try:
            arrays, record = read_tensors(path)
        except TilewiseError as error:
            print(f"{str(error).rstrip('.')}. Training starts again.", file=sys.stderr)
            return
        # A checkpoint of other data or settings would continue a different run.
        if record.pop("fingerprint", None) != self._fingerprint():
            print(f"{path} belongs to another run; training starts again.", file=sys.stderr)
            return
        if not self._is_valid_checkpoint(arrays, record):
            print(f"{path} is damaged. Training starts again.", file=sys.stderr)
            return
        tensors = {name: torch.from_numpy(array.copy()).to(self.device) for name, array in arrays.items()}
        # Restore optimizer, weights, best weights and average.
        self.optimizer.restore(tensors, int(record["steps"]))
        self.optimizer.values.copy_(tensors["values"])
        self.best_values.copy_(tensors["best"])
        if self.average is not None:
            self.average.copy_(tensors["average"])
        self.state = TrainingState(**record)
        if progress:
            print(f"resumed after epoch {self.state.epoch}", file=sys.stderr)


def selection_value(row: dict[str, float], select: str) -> float:
    """Return the metric `select` of an epoch (``top``: top-1 and top-5 error), signed so that larger is better."""
    if select in ("opa", "tau"):
        value = row[f"val_{select}"]
        return value if np.isfinite(value) else -1.0
    if select == "top":
        return -(row["val_top1"] + 2 * row["val_top5"])
    return -row[f"val_{select}"]


def print_epoch(row: dict[str, Any]) -> None:
    """Print one line about an epoch to stderr."""
    line = f"epoch {row['epoch'] + 1}/{row['epochs']}  loss {row['train_loss']:.4f}  opa {row['train_opa']:.3f}"
    if "val_opa" in row:
        line += (
            f"  | valid: opa {row['val_opa']:.3f}  top-1 {row['val_top1']:.2%}  top-5 {row['val_top5']:.2%}"
            f"  best epoch {row['best_epoch'] + 1}"
        )
    seconds_left = row["seconds"] / (row["epoch"] + 1) * (row["epochs"] - row["epoch"] - 1)
    print(f"{line}  {row['seconds']:.1f} s, at most {seconds_left:.0f} s left", file=sys.stderr, flush=True)


def silent(row: dict[str, Any]) -> None:
    """Discard an epoch's report."""
