"""The training loop: steps, a score after each epoch, early stopping, checkpoints, and resuming.

All state that changes from step to step is in `RunState`, the weights and the optimizer, and is written to the
checkpoint; everything else follows from the recipe. So a run that was killed continues from its last checkpoint and
reaches the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import optim
from tilewise._files import parse_json
from tilewise.errors import ConfigurationError, FileFormatError, GradientError
from tilewise.fit.tasks import Batch, FitRecipe, task_for
from tilewise.io import load_arrays, save

CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"
_MAX_GRADIENT_NORM = 1.0  # the usual value for transformers
_WARMUP_FRACTION = 0.05  # of all steps

Array = npt.NDArray[Any]
Groups = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Epoch:
    """One line of the training log."""

    epoch: int
    train_loss: float
    score: float  # validation accuracy, or validation loss for text
    best: bool


@dataclass(frozen=True)
class FitResult:
    """Result of a run."""

    finished: bool  # False: interrupted; run the same command to continue
    stopped_early: bool
    epochs: int
    steps: int
    best_epoch: int
    best_score: float
    scores: dict[str, float]  # on held-out data, with the best weights
    history: list[Epoch]
    model_path: Path | None
    checkpoint_path: Path


class Progress:
    """Observer of a run; its methods are called by the loop. This base class ignores all events."""

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None: ...
    def step(self, step: int, loss: float) -> None: ...
    def epoch(self, epoch: Epoch) -> None: ...
    def finish(self) -> None: ...


@dataclass
class RunState:
    """Counters of a run; with the weights and the optimizer they are its complete state."""

    epoch: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    best_score: float = math.nan
    best_epoch: int = 0
    finished: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a model by a recipe, with its checkpoint and results in the folder `out`."""

    def __init__(self, recipe: FitRecipe, out: Path, checkpoint_every: int) -> None:
        """Create the task and optimizer of a recipe; a checkpoint is written every `checkpoint_every` steps."""
        self.recipe, self.out, self.checkpoint_every = recipe, out, checkpoint_every
        self.task = task_for(recipe)
        self.run = RunState()
        self.params = list(self.task.model.parameters())
        self.optimizer = optim.AdamW(self.params, recipe.lr, weight_decay=recipe.weight_decay)
        self.best = self.weights()
        self.total_steps = recipe.epochs * self.task.steps_per_epoch

    def weights(self) -> dict[str, Any]:
        """Copy the model's current weights."""
        return {name: np.array(value) for name, value in self.task.model.state_dict().items()}

    # --- checkpoints ---

    @property
    def checkpoint_path(self) -> Path:
        return self.out / CHECKPOINT

    def save(self) -> None:
        """Write weights, optimizer state and counters to the checkpoint."""
        groups: dict[str, dict[str, Any]] = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
        }
        counters = {
            "recipe": dataclasses.asdict(self.recipe),
            "run": dataclasses.asdict(self.run),
            "task": self.task.state(),
        }
        write_checkpoint(self.checkpoint_path, groups, counters)

    def resume(self) -> None:
        """Restore the state from the folder's checkpoint, if there is one; its recipe must be the same."""
        if not os.path.lexists(self.checkpoint_path):
            return
        groups, counters = read_checkpoint(self.checkpoint_path)
        if counters.get("recipe") != dataclasses.asdict(self.recipe):
            raise ConfigurationError(
                f"{self.out} contains a run with other settings; choose another folder (--out), or pass --fresh"
            )
        try:
            self.task.model.load_state_dict(groups["model"])
            self.optimizer.load_state_dict(groups["optimizer"])
            self.run = RunState(**counters["run"])
            self._check_run()
            self.task.restore(counters["task"])
            self.best = groups["best"]
            if _signature(self.best) != _signature(self.weights()):
                raise ValueError("its best weights do not belong to this model")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FileFormatError(f"{self.checkpoint_path} is not a complete checkpoint: {error}") from None

    def _check_run(self) -> None:
        """Raise ValueError or TypeError if counters from a checkpoint are impossible."""
        run, recipe = self.run, self.recipe
        steps = range(recipe.epochs * self.task.steps_per_epoch + 1)
        if not (0 <= run.best_epoch <= run.epoch <= recipe.epochs and self.optimizer.steps in steps):
            raise ValueError("its counters are out of range")
        if not isinstance(run.finished, bool) or len([Epoch(**epoch) for epoch in run.history]) != run.epoch:
            raise ValueError("its history does not match its number of epochs")
        run.loss_sum, run.loss_count, run.best_score = float(run.loss_sum), int(run.loss_count), float(run.best_score)

    # --- training ---

    def step(self, batch: Batch) -> float:
        """Run one optimizer step and return its loss."""
        optimizer = self.optimizer
        optimizer.lr = optim.cosine_schedule(
            optimizer.steps,
            self.total_steps,
            peak=self.recipe.lr,
            warmup=int(_WARMUP_FRACTION * self.total_steps),
            floor=0.01 * self.recipe.lr,
        )
        optimizer.zero_grad()
        loss = self.task.loss(batch)
        value = float(loss.item())
        if not math.isfinite(value):
            raise GradientError(f"the loss became {value} at step {optimizer.steps}; try a smaller --lr")
        loss.backward()
        optim.clip_grad_norm(self.params, _MAX_GRADIENT_NORM)
        optimizer.step()
        self.run.loss_sum += value
        self.run.loss_count += 1
        return value

    def end_epoch(self) -> Epoch:
        """Validate the model, store the best weights, and determine whether the run is finished."""
        run = self.run
        score = self.task.validate()
        # Among equal scores the later epoch wins, because its learning rate is lower.
        better = math.isnan(run.best_score) or (
            score >= run.best_score if self.task.higher_is_better else score <= run.best_score
        )
        run.epoch += 1
        if better:
            run.best_score, run.best_epoch, self.best = score, run.epoch, self.weights()
        epoch = Epoch(run.epoch, run.loss_sum / max(run.loss_count, 1), score, better)
        run.history.append(dataclasses.asdict(epoch))
        run.loss_sum, run.loss_count = 0.0, 0
        run.finished = run.epoch >= self.recipe.epochs or run.epoch - run.best_epoch >= self.recipe.patience
        return epoch

    def train(self, observers: Sequence[Progress] = ()) -> bool:
        """Train until the run is finished (True) or interrupted (False); both write the checkpoint."""
        for observer in observers:
            observer.start(self.recipe.epochs, self.task.steps_per_epoch, self.optimizer.steps)
        with _interrupts() as interrupted:
            while not self.run.finished:
                for batch in self.task.batches():
                    loss = self.step(batch)
                    for observer in observers:
                        observer.step(self.optimizer.steps, loss)
                    if interrupted.is_set():
                        self.save()
                        return False
                    if self.optimizer.steps % self.checkpoint_every == 0:
                        self.save()
                epoch = self.end_epoch()
                for observer in observers:
                    observer.epoch(epoch)
                self.save()
        return True

    def result(self, finished: bool) -> FitResult:
        """Return the run's result; if it is finished, test and save the best weights."""
        run, model_path = self.run, None
        scores: dict[str, float] = {}
        if finished:
            self.task.model.load_state_dict(self.best)
            scores = self.task.test()
            model_path = self.out / MODEL
            facts = dataclasses.asdict(self.recipe) | scores | {"best_epoch": run.best_epoch}
            save(self.best, model_path, {name: str(value) for name, value in facts.items()})
        return FitResult(
            finished=finished,
            stopped_early=finished and run.epoch < self.recipe.epochs,
            epochs=run.epoch,
            steps=self.optimizer.steps,
            best_epoch=run.best_epoch,
            best_score=run.best_score,
            scores=scores,
            history=[Epoch(**epoch) for epoch in run.history],
            model_path=model_path,
            checkpoint_path=self.checkpoint_path,
        )


def fit(
    recipe: FitRecipe,
    out: str | Path,
    checkpoint_every: int = 50,
    fresh: bool = False,
    observers: Sequence[Progress] = (),
) -> FitResult:
    """Train by a recipe in the folder `out`, continuing from its checkpoint if there is one."""
    trainer = Trainer(recipe, Path(out), checkpoint_every)
    if not fresh:
        trainer.resume()
    try:
        finished = trainer.train(observers)
    finally:
        for observer in observers:
            observer.finish()
    return trainer.result(finished)


def _signature(weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape, array.dtype) for name, array in weights.items()}


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Make Ctrl-C set the event it yields, so that a training step always completes; a second Ctrl-C acts at once.

    A process that was started with SIGINT ignored (nohup, `&` in a script) continues to ignore it.
    """
    interrupted = threading.Event()
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous_handler in (signal.SIG_IGN, None):
        yield interrupted
        return

    def on_interrupt(_number: int, _frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous_handler)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def write_checkpoint(path: Path, groups: Mapping[str, Mapping[str, Any]], counters: Mapping[str, Any]) -> None:
    """Store groups of named arrays ("model", "optimizer", ...) and JSON counters as one file."""
    flat = {f"{group}/{name}": np.asarray(value) for group, arrays in groups.items() for name, value in arrays.items()}
    save(flat, path, {"tilewise": json.dumps(counters)})


def read_checkpoint(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Read a checkpoint's groups of arrays (model, optimizer, best weights) and its counters."""
    arrays, metadata = load_arrays(path)
    counters = parse_json(metadata.get("tilewise", "null"), f"The record in {path}")
    if not isinstance(counters, dict):
        raise FileFormatError(f"{path} is not a checkpoint of tilewise fit")
    groups: Groups = {}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        groups.setdefault(group, {})[key] = array
    return groups, counters
