"""What training writes for other tools is what the run said."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from tilewise.errors import UnavailableError
from tilewise.fit import fit, recipe_for
from tilewise.fit.logs import CsvLog, TensorBoardLog


def scalars(path: Path) -> list[tuple[int, str, float]]:
    """The (step, tag, value) triples of an event file, read with TensorBoard's own loader."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    events = [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]
    return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_both_logs_hold_every_epoch_and_tensorboards_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logs = [CsvLog(tmp_path / "log.csv"), TensorBoardLog(tmp_path / "board")]
    result = fit(recipe_for("mlp", epochs=2), tmp_path / "run", observers=logs)
    (file,) = (tmp_path / "board").glob("events.out.tfevents.*")
    values = scalars(file)
    assert [step for step, tag, _ in values if tag == "loss"] == list(range(1, result.steps + 1))
    losses = [value for _, tag, value in values if tag == "train_loss"]
    assert losses == pytest.approx([e.train_loss for e in result.history])


def test_a_csv_log_has_a_line_per_epoch(tmp_path: Path) -> None:
    result = fit(recipe_for("mlp", epochs=2), tmp_path / "run", observers=[CsvLog(tmp_path / "log.csv")])
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [(int(r["epoch"]), float(r["train_loss"]), float(r["score"])) for r in rows] == [
        (e.epoch, e.train_loss, e.score) for e in result.history
    ]


def test_a_missing_tensorboard_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UnavailableError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path / "board")


def test_a_run_that_goes_on_goes_on_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    for epochs in (1, 3):
        watcher = CsvLog(log)
        watcher.start(3, 10, 0 if epochs == 1 else 10)
        from tilewise.fit import Epoch

        watcher.epoch(Epoch(epochs, 0.5, 0.25, True))
    assert log.read_text() == "epoch,train_loss,score,best\n1,0.5,0.25,1\n3,0.5,0.25,1\n"
