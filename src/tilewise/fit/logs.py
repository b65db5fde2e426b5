"""Training logs for other tools: a CSV file, or event files for TensorBoard if it is installed.

A resumed run appends to the same CSV file, and adds an event file to the same TensorBoard folder.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewise._atomic import convert_write_errors, write_atomic
from tilewise.errors import UnavailableError
from tilewise.fit.loop import Epoch, Progress

_HEADER = "epoch,train_loss,score,best\n"


class CsvLog(Progress):
    """One line per epoch: number, mean training loss, validation score, and 1 if it is the best so far."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        if done == 0 or not self.path.is_file():
            write_atomic(self.path, _HEADER)

    def epoch(self, epoch: Epoch) -> None:
        with convert_write_errors(self.path), self.path.open("a", encoding="ascii") as stream:
            stream.write(f"{epoch.epoch},{epoch.train_loss!r},{epoch.score!r},{int(epoch.best)}\n")


class TensorBoardLog(Progress):
    """Scalars for TensorBoard: `loss` of every step, `train_loss` and `score` of every epoch."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Import TensorBoard's writer; raise UnavailableError if it is not installed."""
        self.folder = Path(folder).expanduser()
        self._writer: Any = None
        self._step = 0
        try:
            self._writer_module = import_module("tensorboard.summary.writer.event_file_writer")
            self._event_type = import_module("tensorboard.compat.proto.event_pb2").Event
        except ImportError:
            raise UnavailableError("TensorBoard is not installed: pip install tensorboard") from None

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Open the event file; `done` is the number of steps already trained."""
        self._step = done
        with convert_write_errors(self.folder):
            self._writer = self._writer_module.EventFileWriter(str(self.folder))

    def step(self, step: int, loss: float) -> None:
        self._step = step
        self._add("loss", loss)

    def epoch(self, epoch: Epoch) -> None:
        """Write the epoch's training loss and score."""
        self._add("train_loss", epoch.train_loss)
        self._add("score", epoch.score)
        with convert_write_errors(self.folder):
            self._writer.flush()

    def finish(self) -> None:
        """Close the event file if it was opened."""
        if self._writer is not None:
            with convert_write_errors(self.folder):
                self._writer.close()

    def _add(self, tag: str, value: float) -> None:
        """Write one scalar under `tag` at the current step."""
        event = self._event_type(wall_time=time.time(), step=self._step)
        event.summary.value.add(tag=tag, simple_value=value)
        with convert_write_errors(self.folder):
            self._writer.add_event(event)
