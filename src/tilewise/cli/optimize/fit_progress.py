"""How far `tilewise fit` is: a bar on a terminal, a line per epoch in a log."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from tilewise.fit import Epoch, Progress


def _line(epoch: Epoch) -> str:
    mark = " *" if epoch.best else ""
    return f"epoch {epoch.epoch}: training loss {epoch.train_loss:.4f}, validation {epoch.score:.4f}{mark}"


class Lines(Progress):
    """For a log: a line per epoch."""

    def epoch(self, epoch: Epoch) -> None:
        print(_line(epoch), file=sys.stderr, flush=True)


class Bar(Progress):
    """For a terminal: a bar over all steps, with the epochs above it."""

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("training", total=epochs * steps_per_epoch, completed=done)
        self.bar.start()

    def step(self, step: int, loss: float) -> None:
        self.bar.update(self.task, completed=step, description=f"loss {loss:.3f}")

    def epoch(self, epoch: Epoch) -> None:
        self.bar.console.print(_line(epoch), highlight=False)

    def finish(self) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()
