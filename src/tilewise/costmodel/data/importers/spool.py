"""Records on their way to kernels.

A log may name its kernels in any order and be larger than memory. So every kernel and every configuration (see `rows`)
is written down once, in a file of its own in a temporary folder, and has a number from then on; a repeat is a pair of
numbers and a time. Repeats are sorted a million at a time and merged when all are there, range by range.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.importers.record import Record, Value
from tilewise.costmodel.data.importers.rows import Configurations
from tilewise.errors import FileFormatError, UnavailableError

MAX_KERNELS = 2_000_000
_AT_ONCE = 1 << 20  # repeats that are sorted in memory, sixteen bytes each
_SAMPLED = 1 << 12  # one key in so many tells where to cut the sorted runs
_REMEMBERED = 50_000
_encoded, _decoded = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode

# A configuration and what is kept of its repeats. No repeat: it failed; a single one has no deviation (NaN).
TIMED = np.dtype([("number", "i8"), ("median_ns", "f8"), ("deviation", "f8"), ("repeats", "i8"), ("is_default", "?")])
Timed = npt.NDArray[Any]  # of TIMED


@dataclass(frozen=True)
class Spooled:
    """One kernel: who it is, and its configurations."""

    identity: Mapping[str, Any]  # device, kernel, sizes
    text: str  # the same as JSON
    configs: Timed


class Spool:
    """Takes records in any order, gives them back by kernel. A context: the folder goes when the block ends."""

    def __enter__(self) -> Spool:
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="tilewise-import-")
            self._path = Path(self._folder.name)
            self._kernels = _Kernels(self._path / "kernels")
            self.configurations = Configurations(self._path / "configs")
        except OSError as error:
            raise _unkept(error) from error
        self._runs = _Runs(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kernels.close()
        self.configurations.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Where more may be kept until the block ends."""
        return self._path

    def add(self, record: Record) -> None:
        name, sizes, config, times, device, _, is_default, _ = record
        try:
            kernel = self._kernels.number(sizes, device, name)
            self._runs.add(kernel, self.configurations.number(config), is_default, times)
        except OSError as error:
            raise _unkept(error) from error

    def __len__(self) -> int:
        """How many kernels there are."""
        return len(self._kernels)

    def identities(self) -> Iterator[str]:
        """Who the kernels are, as JSON with sorted keys."""
        return self._kernels.lines()

    def kernels(self) -> Iterator[Spooled]:
        """The kernels one after the other."""
        try:
            for text, configs in zip(self.identities(), self._runs.by_kernel(), strict=True):
                yield Spooled(_decoded(text)[0], text, configs)
        except OSError as error:
            raise _unkept(error) from error


def _unkept(error: OSError) -> UnavailableError:
    return UnavailableError(f"Records cannot be kept in a temporary folder ({error.strerror or error}).")


class _Kernels:
    """Different kernels as lines of JSON in a file, numbered from 0 on in the order they came; digests tell them apart.

    Readers give the same object for the same sizes where they can (`record.remembered`), so a kernel that was just
    there is known by its identity and costs no text.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("w+b")
        self._path = path
        self._known: dict[bytes, int] = {}
        # Holds the sizes: their id stays.
        self._seen: dict[tuple[int, str, str], tuple[Mapping[str, Value], int]] = {}
        self._last: tuple[Mapping[str, Value], str, str, int] = {}, "", "", -1

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._known)

    def number(self, sizes: Mapping[str, Value], device: str, kernel: str) -> int:
        last = self._last
        if last[0] is sizes and last[1] == device and last[2] == kernel:
            return last[3]
        number = self._found(sizes, device, kernel)
        self._last = sizes, device, kernel, number
        return number

    def _found(self, sizes: Mapping[str, Value], device: str, kernel: str) -> int:
        key = id(sizes), device, kernel
        if (seen := self._seen.get(key)) is not None:
            return seen[1]
        text = _encoded({"device": device, "kernel": kernel, "sizes": sizes}).encode()
        digest = blake2b(text, digest_size=16).digest()
        if (number := self._known.get(digest)) is None:
            number = len(self._known)
            if number >= MAX_KERNELS:
                raise FileFormatError(f"The log holds more than {MAX_KERNELS:,} different kernels.")
            self._known[digest] = number
            self._file.write(text + b"\n")
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[key] = sizes, number
        return number

    def lines(self) -> Iterator[str]:
        self._file.flush()
        with self._path.open(encoding="ascii") as lines:
            for line in lines:
                yield line[:-1]


class _Runs:
    """Repeats, by a key of kernel (high half), configuration and whether it is the default (lowest bit)."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._written = folder, 0
        self._keys, self._times = array("q"), array("d")
        self._samples: list[npt.NDArray[np.int64]] = []

    def add(self, kernel: int, config: int, is_default: bool, times: tuple[float, ...]) -> None:
        key = kernel << 32 | config << 1 | is_default
        keys = self._keys
        if len(times) == 1:
            keys.append(key)
            self._times.append(times[0])
        else:  # a failure is a repeat that took no time at all
            keys.extend([key] * (len(times) or 1))
            self._times.extend(times or (np.nan,))
        if len(keys) >= _AT_ONCE:
            self._write()

    def _write(self) -> None:
        keys, times = np.array(self._keys), np.array(self._times)
        order = np.argsort(keys, kind="stable")
        keys[order].tofile(self._folder / f"keys{self._written}")
        times[order].tofile(self._folder / f"times{self._written}")
        self._samples.append(keys[order[::_SAMPLED]])
        self._written += 1
        self._keys, self._times = array("q"), array("d")

    def _ranges(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """All repeats, in ranges of keys that ascend, about as many at once as were sorted at once."""
        if not self._written and self._keys:
            yield np.array(self._keys), np.array(self._times)
        if not self._written:
            return
        if self._keys:
            self._write()
        samples = np.sort(np.concatenate(self._samples))
        cuts = np.unique(samples[_AT_ONCE // _SAMPLED :: _AT_ONCE // _SAMPLED] & ~1)  # never inside a configuration
        bounds = []
        for number in range(self._written):
            keys = np.memmap(self._folder / f"keys{number}", np.int64, "r")
            bounds.append([0, *np.searchsorted(keys, cuts).tolist(), len(keys)])
        for place in range(len(cuts) + 1):
            parts = [(number, *bound[place : place + 2]) for number, bound in enumerate(bounds)]
            if any(low < high for _, low, high in parts):
                yield self._part("keys", np.int64, parts), self._part("times", np.float64, parts)

    def _part(self, name: str, kind: Any, parts: list[tuple[int, int, int]]) -> npt.NDArray[Any]:
        return np.concatenate(
            [
                np.fromfile(self._folder / f"{name}{number}", kind, high - low, offset=low * 8)
                for number, low, high in parts
            ]
        )

    def by_kernel(self) -> Iterator[Timed]:
        """The configurations of every kernel, in the order of the kernels' numbers."""
        timed = itertools.chain.from_iterable(_split(*_timed(keys, times)) for keys, times in self._ranges())
        for _, pieces in itertools.groupby(timed, key=lambda piece: piece[0]):  # a range may end within a kernel
            parts = [part for _, part in pieces]
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)


def _timed(keys: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], Timed]:
    """Kernel and summary of every configuration."""
    order = np.lexsort((times, keys >> 1))  # NaN, a failure, comes last
    times, configs = times[order], keys[order] >> 1
    starts = np.flatnonzero(np.diff(configs, prepend=-1))
    found = np.empty(len(starts), TIMED)
    ran = ~np.isnan(times)
    repeats = np.add.reduceat(ran, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(ran, times, 0.0), starts) / repeats
        away = np.where(ran, times - np.repeat(mean, np.diff(starts, append=len(times))), 0.0)
        found["deviation"] = np.sqrt(np.add.reduceat(away * away, starts) / (repeats - 1)) / mean
    found["deviation"][repeats < 2] = np.nan
    found["median_ns"] = (times[starts + np.maximum(repeats - 1, 0) // 2] + times[starts + repeats // 2]) / 2
    found["repeats"], found["number"] = repeats, configs[starts] & 0x7FFFFFFF
    found["is_default"] = np.maximum.reduceat(keys[order] & 1, starts)
    return configs[starts] >> 31, found


def _split(kernels: npt.NDArray[np.int64], timed: Timed) -> Iterator[tuple[int, Timed]]:
    cuts = [0, *(np.flatnonzero(np.diff(kernels)) + 1).tolist(), len(kernels)]
    for low, high in itertools.pairwise(cuts):
        yield int(kernels[low]), timed[low:high]
