"""A training run that can be killed at any moment: what every kind of model's training has in common.

The state at the end of an epoch is written whole; an epoch's randomness comes from (seed, epoch) alone; so a run that
was killed and resumed ends with the same weights as one that was not, bit for bit on one thread. The weights kept are
those that were best on the validation metric.
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

from tilewise.costmodel.models.files import read_tensors, write_tensors
from tilewise.costmodel.train.config import TrainSettings
from tilewise.errors import TilewiseError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tilewise.costmodel.train.optimizer import FlatAdam

CHECKPOINT = "checkpoint.safetensors"
Report = Callable[[dict[str, Any]], None]


@dataclass
class Progress:
    """What a checkpoint holds besides tensors."""

    epoch: int = 0
    steps: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_epoch: int = -1
    best_share: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class ResumableRun:
    """Goes through the epochs; what an epoch does, how it is measured and what makes a run the same is a subclass's."""

    module: nn.Module
    optimizer: FlatAdam
    average: Tensor | None
    best_values: Tensor
    validated: Tensor
    writes = True

    def __init__(self, settings: TrainSettings, device: str, folder: Path | None) -> None:
        self.settings, self.device, self.folder = settings, device, folder
        self.state = Progress()

    def _begin(self) -> None:
        """Once the module is there."""
        from tilewise.costmodel.train.optimizer import FlatAdam

        settings = self.settings
        self.optimizer = FlatAdam(
            self.module.parameters(), settings.learning_rate, settings.clip_norm, settings.weight_decay
        )
        self.average = self.optimizer.values.clone() if settings.average else None
        self.best_values = self.optimizer.values.clone()

    def _epoch(self, epoch: int, started: float = 0.0) -> dict[str, float]:
        """Learn for one epoch; gives at least ``epoch`` and ``train_loss``."""
        raise NotImplementedError

    def _measure(self) -> dict[str, float]:
        """The validation metrics of the module as it is, named ``val_*``."""
        raise NotImplementedError

    def _fingerprint(self) -> str:
        """What a checkpoint must share with a run for resuming to make sense."""
        raise NotImplementedError

    def learn(self, report: Report) -> None:
        settings, state = self.settings, self.state
        while state.epoch < settings.epochs:
            started = time.perf_counter()
            row = self._epoch(state.epoch, started)
            state.epoch += 1
            timed_out = 0 < settings.max_seconds < state.seconds + time.perf_counter() - started
            if state.epoch % settings.eval_every == 0 or state.epoch == settings.epochs or timed_out:
                row |= self._validate()
                self._keep_if_best(row, settings.share_done(state.epoch, self._seconds_since(started)))
            state.seconds += time.perf_counter() - started
            state.curve.append(row)
            report(row | {"epochs": settings.epochs, "seconds": state.seconds, "best_epoch": state.best_epoch})
            if self.folder and self.writes:
                self._write_checkpoint(self.folder / CHECKPOINT)
            if timed_out or (state.best is not None and state.epoch - 1 - state.best_epoch >= settings.early_stop):
                break

    def _validate(self) -> dict[str, float]:
        """Measure the running mean of the weights, where there is one."""
        live = self.optimizer.values.clone()
        if self.average is not None:
            self.optimizer.values.copy_(self.average)
        row = self._measure()
        self.validated = self.optimizer.values.clone()
        self.optimizer.values.copy_(live)
        return row

    def _seconds_since(self, started: float) -> float:
        return self.state.seconds + time.perf_counter() - started if started else 0.0

    def _update_average(self) -> None:
        if self.average is not None:
            # A plain mean at first, so that the initial weights do not linger.
            self.average.lerp_(self.optimizer.values, max(1 - self.settings.average, 1 / self.optimizer.step_count))

    def _keep_if_best(self, row: dict[str, float], share: float) -> None:
        """Weights from before the learning rate has come down are worse than their luck on few kernels may say."""
        value = selection_value(row, self.settings.select)
        first = share >= self.settings.settled > self.state.best_share
        if self.state.best is None or first or value > self.state.best:
            self.state.best, self.state.best_epoch, self.state.best_share = value, int(row["epoch"]), share
            self.best_values.copy_(self.validated)

    def _record(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a model's file tells of its training."""
        return {
            "model": self.settings.model,
            "model_kwargs": kwargs,
            "settings": self.settings.as_dict(),
            "curve": self.state.curve,
            "best_epoch": self.state.best_epoch,
            "seconds": self.state.seconds,
        }

    def _take_best(self) -> None:
        self.optimizer.values.copy_(self.best_values)
        for parameter in self.module.parameters():
            parameter.grad = None

    def _write_checkpoint(self, path: Path) -> None:
        tensors = {"values": self.optimizer.values, "best": self.best_values} | self.optimizer.state()
        if self.average is not None:
            tensors["average"] = self.average
        record = vars(self.state) | {"steps": self.optimizer.step_count, "fingerprint": self._fingerprint()}
        write_tensors(path, {name: tensor.cpu().numpy() for name, tensor in tensors.items()}, record)

    def _fits(self, arrays: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
        """Whether a checkpoint holds what this run would have written, by names, shapes and kinds."""
        size = tuple(self.optimizer.values.shape)
        names = {"values", "best", *self.optimizer.state(), *(["average"] if self.average is not None else [])}
        same = arrays.keys() == names and all(a.shape == size and a.dtype == np.float32 for a in arrays.values())
        numbers = ("epoch", "steps", "seconds", "best_epoch", "best_share")
        return (
            same
            and record.keys() == vars(self.state).keys()
            and all(type(record[name]) in (int, float) and math.isfinite(record[name]) for name in numbers)
            and isinstance(record["best"], int | float | None)
            and isinstance(record["curve"], list)
            and 0 <= record["epoch"] == len(record["curve"]) <= self.settings.epochs
        )

    def resume(self, progress: bool) -> None:
        """Continue from the folder's checkpoint if it belongs to this very run; else begin anew."""
        import torch

        path = self.folder / CHECKPOINT if self.folder else None
        if path is None or not path.is_file():
            return
        try:
            arrays, record = read_tensors(path)
        except TilewiseError as error:
            print(f"{str(error).rstrip('.')}. Training begins anew.", file=sys.stderr)
            return
        if record.pop("fingerprint", None) != self._fingerprint():
            print(f"{path} belongs to another run; training begins anew.", file=sys.stderr)
            return
        if not self._fits(arrays, record):
            print(f"{path} is damaged. Training begins anew.", file=sys.stderr)
            return
        tensors = {name: torch.from_numpy(array.copy()).to(self.device) for name, array in arrays.items()}
        self.optimizer.restore(tensors, int(record["steps"]))
        self.optimizer.values.copy_(tensors["values"])
        self.best_values.copy_(tensors["best"])
        if self.average is not None:
            self.average.copy_(tensors["average"])
        self.state = Progress(**record)
        if progress:
            print(f"resumed after epoch {self.state.epoch}", file=sys.stderr)


def selection_value(row: dict[str, float], select: str) -> float:
    """Larger is better; ``top`` weighs top-1 and top-5 error, the two that a tuner pays for."""
    if select in ("opa", "tau"):
        value = row[f"val_{select}"]
        return value if np.isfinite(value) else -1.0
    if select == "top":
        return -(row["val_top1"] + 2 * row["val_top5"])
    return -row[f"val_{select}"]


def print_epoch(row: dict[str, Any]) -> None:
    """One line on stderr."""
    line = f"epoch {row['epoch'] + 1}/{row['epochs']}  loss {row['train_loss']:.4f}  opa {row['train_opa']:.3f}"
    if "val_opa" in row:
        line += (
            f"  | valid: opa {row['val_opa']:.3f}  top-1 {row['val_top1']:.2%}  top-5 {row['val_top5']:.2%}"
            f"  best epoch {row['best_epoch'] + 1}"
        )
    print(f"{line}  {row['seconds']:.1f} s", file=sys.stderr, flush=True)


def silent(row: dict[str, Any]) -> None:
    del row
