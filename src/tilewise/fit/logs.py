"""Training as other tools read it: a plain CSV file, or a folder that TensorBoard opens.

Both are filled as the run goes; a run that was interrupted goes on in the same CSV file, and beside the first file of
the folder. TensorBoard's files are records of a small protocol buffer, each with two checksums; writing them takes a
page of code and no library.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tilewise._files import write_atomic
from tilewise.errors import UnavailableError
from tilewise.fit.loop import Epoch, Progress

_HEADER = "epoch,train_loss,score,best\n"


class CsvLog(Progress):
    """A line per epoch: its number, mean training loss, validation score, and 1 where it is the best so far."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        if done == 0 or not self.path.is_file():
            write_atomic(self.path, _HEADER)

    def epoch(self, epoch: Epoch) -> None:
        try:
            with self.path.open("a", encoding="ascii") as stream:
                stream.write(f"{epoch.epoch},{epoch.train_loss!r},{epoch.score!r},{int(epoch.best)}\n")
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be written ({error.strerror or error}).") from error


class TensorBoardLog(Progress):
    """Scalars in an event file of the folder: `loss` of every step, `train_loss` and `score` of every epoch."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        self._stream: IO[bytes] | None = None
        self._step = 0

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        self._step = done
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.tilewise.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stream = (self.folder / name).open("wb")
        except OSError as error:
            raise UnavailableError(f"{self.folder} cannot be written ({error.strerror or error}).") from error
        self._write(_text(3, b"brain.Event:2"))

    def step(self, step: int, loss: float) -> None:
        self._step = step
        self._scalars(("loss", loss))

    def epoch(self, epoch: Epoch) -> None:
        self._scalars(("train_loss", epoch.train_loss), ("score", epoch.score))
        if self._stream is not None:
            self._stream.flush()

    def finish(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _scalars(self, *named: tuple[str, float]) -> None:
        values = b"".join(
            _text(1, _text(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, value)) for name, value in named
        )
        self._write(bytes([2 << 3]) + _varint(self._step) + _text(5, values))

    def _write(self, event: bytes) -> None:
        if self._stream is None:
            return
        event = struct.pack("<Bd", 1 << 3 | 1, time.time()) + event
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", _checksum(length)) + event + struct.pack("<I", _checksum(event))
        try:
            self._stream.write(record)
        except OSError as error:
            raise UnavailableError(f"{self.folder} cannot be written ({error.strerror or error}).") from error


class Together(Progress):
    """Several watchers of one run."""

    def __init__(self, watchers: Sequence[Progress]) -> None:
        self._watchers = watchers

    def start(self, epochs: int, steps_per_epoch: int, done: int) -> None:
        for watcher in self._watchers:
            watcher.start(epochs, steps_per_epoch, done)

    def step(self, step: int, loss: float) -> None:
        for watcher in self._watchers:
            watcher.step(step, loss)

    def epoch(self, epoch: Epoch) -> None:
        for watcher in self._watchers:
            watcher.epoch(epoch)

    def finish(self) -> None:
        for watcher in self._watchers:
            watcher.finish()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _text(field: int, content: bytes) -> bytes:
    """A field with a length before it: text, or another message."""
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _table() -> list[int]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return found


_CRC32C = _table()


def _checksum(content: bytes) -> int:
    """CRC-32C, turned and shifted as record files want it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
