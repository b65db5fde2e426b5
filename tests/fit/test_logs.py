"""What training writes for other tools is what the run said."""

from __future__ import annotations

import csv
import struct
from pathlib import Path

import pytest

from tilewise.fit import fit, recipe_for
from tilewise.fit.logs import CsvLog, TensorBoardLog, Together, _checksum


def scalars(path: Path) -> list[tuple[int, str, float]]:
    """The (step, tag, value) of an event file, its checksums looked at."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack_from("<Q", content)
        event = content[12 : 12 + length]
        assert struct.unpack_from("<I", content, 8)[0] == _checksum(content[:8])
        assert struct.unpack_from("<I", content, 12 + length)[0] == _checksum(event)
        content, rest = content[16 + length :], event[9:]
        if rest[0] == 3 << 3 | 2:
            assert rest[2:] == b"brain.Event:2"
            continue
        step, shift, at = 0, 0, 1
        while True:
            step, shift, at = step | (rest[at] & 0x7F) << shift, shift + 7, at + 1
            if not rest[at - 1] & 0x80:
                break
        values = rest[at + 2 :]
        while values:
            tag = values[4 : 4 + values[3]].decode()
            (value,) = struct.unpack_from("<f", values, 5 + values[3])
            found.append((step, tag, value))
            values = values[2 + values[1] :]
    return found


def test_the_checksum_is_crc32c() -> None:
    crc = 0xE3069283  # of these nine digits
    assert _checksum(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_both_logs_hold_every_epoch_and_tensorboards_every_step(tmp_path: Path) -> None:
    logs = Together([CsvLog(tmp_path / "log.csv"), TensorBoardLog(tmp_path / "board")])
    result = fit(recipe_for("mlp", epochs=2), tmp_path / "run", progress=logs)
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [(int(r["epoch"]), float(r["train_loss"]), float(r["score"])) for r in rows] == [
        (e.epoch, e.train_loss, e.score) for e in result.history
    ]
    (file,) = (tmp_path / "board").glob("events.out.tfevents.*")
    found = scalars(file)
    assert [step for step, tag, _ in found if tag == "loss"] == list(range(1, result.steps + 1))
    losses = [value for _, tag, value in found if tag == "train_loss"]
    assert losses == pytest.approx([e.train_loss for e in result.history])


def test_a_run_that_goes_on_goes_on_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    for epochs in (1, 3):
        watcher = CsvLog(log)
        watcher.start(3, 10, 0 if epochs == 1 else 10)
        from tilewise.fit import Epoch

        watcher.epoch(Epoch(epochs, 0.5, 0.25, True))
    assert log.read_text() == "epoch,train_loss,score,best\n1,0.5,0.25,1\n3,0.5,0.25,1\n"
