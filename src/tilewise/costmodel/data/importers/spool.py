"""Groups the records of a log by kernel, for logs larger than memory that name their kernels in any order.

Every kernel and every configuration (see `config_index`) is written to a temporary file once and numbered. A timing is
then a key made of two numbers, and a time. Timings are sorted a million at a time and merged at the end, range by
range (an external merge sort).
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

from tilewise.costmodel.data.importers.config_index import ConfigIndex
from tilewise.costmodel.data.importers.record import LogRecord, Value
from tilewise.errors import FileFormatError, UnavailableError

MAX_KERNELS = 2_000_000
_SORT_ENTRIES = 1 << 20  # timings that are sorted in memory, 16 bytes each
_SAMPLE_STRIDE = 1 << 12  # one key in so many is sampled to find the ranges of the merge
_CACHE_ENTRIES = 50_000
_encode_json, _decode_json = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode

# Summary of the timings of one configuration. No repeats: it failed. A single repeat has no deviation (NaN).
CONFIG_TIMING = np.dtype(
    [("number", "i8"), ("median_ns", "f8"), ("deviation", "f8"), ("repeats", "i8"), ("is_default", "?")]
)
ConfigTimings = npt.NDArray[Any]  # of dtype CONFIG_TIMING


@dataclass(frozen=True)
class SpooledKernel:
    """One kernel of the log and the timings of its configurations."""

    identity: Mapping[str, Any]  # device, kernel, sizes
    text: str  # the identity as JSON with sorted keys
    configs: ConfigTimings


class Spool:
    """Context manager that accepts records in any order and returns them by kernel.

    Its temporary folder is removed when the block ends.
    """

    def __enter__(self) -> Spool:
        """Create the temporary folder."""
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="tilewise-import-")
            self._path = Path(self._folder.name)
            self._kernels = _KernelTable(self._path / "kernels")
            self.configurations = ConfigIndex(self._path / "configs")
        except OSError as error:
            raise _folder_error(error) from error
        self._timings = _TimingSorter(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kernels.close()
        self.configurations.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Temporary folder, in which further files may be stored until the block ends."""
        return self._path

    def add(self, record: LogRecord) -> None:
        """Add one record."""
        # Unpacking is faster than attribute access, and this runs once per record.
        name, sizes, config, times, device, _, is_default, _ = record
        try:
            kernel = self._kernels.number(sizes, device, name)
            self._timings.add(kernel, self.configurations.number(config), is_default, times)
        except OSError as error:
            raise _folder_error(error) from error

    def __len__(self) -> int:
        """Return the number of kernels."""
        return len(self._kernels)

    def identities(self) -> Iterator[str]:
        """Yield the identity of every kernel as JSON with sorted keys, in the order of arrival."""
        return self._kernels.lines()

    def kernels(self) -> Iterator[SpooledKernel]:
        """Yield every kernel with its timings, in the order of arrival."""
        try:
            for text, configs in zip(self.identities(), self._timings.by_kernel(), strict=True):
                yield SpooledKernel(_decode_json(text)[0], text, configs)
        except OSError as error:
            raise _folder_error(error) from error


def _folder_error(error: OSError) -> UnavailableError:
    return UnavailableError(f"Records cannot be stored in a temporary folder ({error.strerror or error}).")


class _KernelTable:
    """Numbers distinct kernels in the order of arrival and writes each as a line of JSON.

    Kernels are recognized by digests. Readers return the same object for equal sizes where they can
    (`record.cache_by_value`), so a recent kernel is recognized by object identity without encoding it.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("w+b")
        self._path = path
        self._number_of_digest: dict[bytes, int] = {}
        # Cache by object identity; holding the sizes keeps their id from being reused.
        self._recent: dict[tuple[int, str, str], tuple[Mapping[str, Value], int]] = {}
        self._last: tuple[Mapping[str, Value], str, str, int] = {}, "", "", -1

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._number_of_digest)

    def number(self, sizes: Mapping[str, Value], device: str, kernel: str) -> int:
        """Return the number of this kernel; add the kernel if it is new."""
        # Consecutive records usually belong to one kernel.
        last = self._last
        if last[0] is sizes and last[1] == device and last[2] == kernel:
            return last[3]
        number = self._look_up(sizes, device, kernel)
        self._last = sizes, device, kernel, number
        return number

    def _look_up(self, sizes: Mapping[str, Value], device: str, kernel: str) -> int:
        """Find the number by object identity, then by digest; write a new kernel to the file."""
        key = id(sizes), device, kernel
        if (recent := self._recent.get(key)) is not None:
            return recent[1]
        text = _encode_json({"device": device, "kernel": kernel, "sizes": sizes}).encode()
        digest = blake2b(text, digest_size=16).digest()
        if (number := self._number_of_digest.get(digest)) is None:
            number = len(self._number_of_digest)
            if number >= MAX_KERNELS:
                raise FileFormatError(f"The log contains more than {MAX_KERNELS:,} different kernels.")
            self._number_of_digest[digest] = number
            self._file.write(text + b"\n")
        if len(self._recent) >= _CACHE_ENTRIES:
            self._recent.clear()
        self._recent[key] = sizes, number
        return number

    def lines(self) -> Iterator[str]:
        """Yield the kernels as JSON, in the order of their numbers."""
        self._file.flush()
        with self._path.open(encoding="ascii") as lines:
            for line in lines:
                yield line[:-1]


class _TimingSorter:
    """External merge sort of timings by kernel and configuration.

    A key has the kernel's number in the high 32 bits, then the configuration's number, and in the lowest bit whether
    the configuration is the default.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._run_count = folder, 0
        self._keys, self._times = array("q"), array("d")
        self._samples: list[npt.NDArray[np.int64]] = []

    def add(self, kernel: int, config: int, is_default: bool, times: tuple[float, ...]) -> None:
        """Add the repeats of one configuration; no repeats mean that it failed."""
        key = kernel << 32 | config << 1 | is_default
        keys = self._keys
        if len(times) == 1:
            keys.append(key)
            self._times.append(times[0])
        else:  # a failure is stored as a timing of NaN
            keys.extend([key] * (len(times) or 1))
            self._times.extend(times or (np.nan,))
        if len(keys) >= _SORT_ENTRIES:
            self._write_run()

    def _write_run(self) -> None:
        """Sort the timings in memory and write them as a run."""
        keys, times = np.array(self._keys), np.array(self._times)
        order = np.argsort(keys, kind="stable")
        keys[order].tofile(self._folder / f"keys{self._run_count}")
        times[order].tofile(self._folder / f"times{self._run_count}")
        self._samples.append(keys[order[::_SAMPLE_STRIDE]])
        self._run_count += 1
        self._keys, self._times = array("q"), array("d")

    def _ranges(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Yield all timings in ascending ranges of keys, each about as large as a run; a range is not sorted."""
        if not self._run_count and self._keys:
            yield np.array(self._keys), np.array(self._times)
        if not self._run_count:
            return
        if self._keys:
            self._write_run()
        # Quantiles of the sampled keys give ranges of about _SORT_ENTRIES timings. Clearing the lowest bit keeps the
        # timings of one configuration in one range.
        samples = np.sort(np.concatenate(self._samples))
        cuts = np.unique(samples[_SORT_ENTRIES // _SAMPLE_STRIDE :: _SORT_ENTRIES // _SAMPLE_STRIDE] & ~1)
        bounds = []
        for number in range(self._run_count):
            keys = np.memmap(self._folder / f"keys{number}", np.int64, "r")
            bounds.append([0, *np.searchsorted(keys, cuts).tolist(), len(keys)])
        for position in range(len(cuts) + 1):
            slices = [(number, *bound[position : position + 2]) for number, bound in enumerate(bounds)]
            if any(low < high for _, low, high in slices):
                yield self._read_slices("keys", np.int64, slices), self._read_slices("times", np.float64, slices)

    def _read_slices(self, name: str, dtype: Any, slices: list[tuple[int, int, int]]) -> npt.NDArray[Any]:
        """Read and concatenate (run, low, high) of the files called `name`."""
        return np.concatenate(
            [
                np.fromfile(self._folder / f"{name}{number}", dtype, high - low, offset=low * 8)
                for number, low, high in slices
            ]
        )

    def by_kernel(self) -> Iterator[ConfigTimings]:
        """Yield the configurations of every kernel, in the order of the kernels' numbers."""
        groups = itertools.chain.from_iterable(
            _split_by_kernel(*_summarize(keys, times)) for keys, times in self._ranges()
        )
        # A range may end within a kernel, so groups of the same kernel are joined.
        for _, kernel_groups in itertools.groupby(groups, key=lambda group: group[0]):
            chunks = [timings for _, timings in kernel_groups]
            yield chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _summarize(
    keys: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], ConfigTimings]:
    """Reduce timings to one entry per configuration; return the kernel of each entry, and the entries."""
    order = np.lexsort((times, keys >> 1))  # within a configuration by time; NaN, a failure, comes last
    times, configs = times[order], keys[order] >> 1
    starts = np.flatnonzero(np.diff(configs, prepend=-1))
    timings = np.empty(len(starts), CONFIG_TIMING)
    succeeded = ~np.isnan(times)
    repeats = np.add.reduceat(succeeded, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(succeeded, times, 0.0), starts) / repeats
        residual = np.where(succeeded, times - np.repeat(mean, np.diff(starts, append=len(times))), 0.0)
        timings["deviation"] = np.sqrt(np.add.reduceat(residual * residual, starts) / (repeats - 1)) / mean
    timings["deviation"][repeats < 2] = np.nan
    # The median is the mean of the two middle times, which are one and the same if the number is odd.
    timings["median_ns"] = (times[starts + np.maximum(repeats - 1, 0) // 2] + times[starts + repeats // 2]) / 2
    timings["repeats"], timings["number"] = repeats, configs[starts] & 0x7FFFFFFF
    timings["is_default"] = np.maximum.reduceat(keys[order] & 1, starts)
    return configs[starts] >> 31, timings


def _split_by_kernel(kernels: npt.NDArray[np.int64], timings: ConfigTimings) -> Iterator[tuple[int, ConfigTimings]]:
    """Yield each run of equal kernel numbers with its timings."""
    cuts = [0, *(np.flatnonzero(np.diff(kernels)) + 1).tolist(), len(kernels)]
    for low, high in itertools.pairwise(cuts):
        yield int(kernels[low]), timings[low:high]
