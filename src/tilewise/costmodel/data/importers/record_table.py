"""Groups the records of a log by kernel, in whatever order the log names its kernels.

Every distinct kernel and configuration is stored once and numbered in the order of arrival. A timing is then 16 bytes:
a key made of the two numbers, and a time. So the table of a log takes a fraction of the log's own size.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.importers.record import LogRecord, Value
from tilewise.errors import FileFormatError

# Limits for untrusted logs.
MAX_KERNELS = 2_000_000
MAX_CONFIGS = 2_000_000
MAX_TIMINGS = 1 << 28  # 4 GiB
MAX_WORDS = 4096  # different words of one parameter
MAX_LAYOUT_NAMES = 1 << 22  # summed over all sets of parameters
_CACHE_ENTRIES = 4096  # enough for logs that repeat themselves
_BATCH_TIMINGS = 1 << 20  # timings that are summarized at once; bounds the memory of intermediate arrays
_UNLISTED = 1 << 48  # offset of the numbers of words beyond MAX_WORDS: they tell rows apart and are in no list
_encode_json = json.JSONEncoder(sort_keys=True).encode

Floats = npt.NDArray[np.float64]

# Summary of the timings of one configuration. No repeats: it failed. A single repeat has no deviation (NaN).
CONFIG_TIMING = np.dtype(
    [("number", "i8"), ("median_ns", "f8"), ("deviation", "f8"), ("repeats", "i8"), ("is_default", "?")]
)
ConfigTimings = npt.NDArray[Any]  # of dtype CONFIG_TIMING


class RecordTable:
    """All records of an import; `kernels` returns them by kernel."""

    def __init__(self) -> None:
        """Create an empty table."""
        self.identities: dict[str, int] = {}  # device, kernel and sizes as JSON with sorted keys -> number
        self.configurations = LoggedConfigs()
        # A key has the kernel's number in the high 32 bits, then the configuration's number, and in the lowest bit
        # whether the configuration is the default.
        self._keys, self._times = array("q"), array("d")
        self._last: tuple[Mapping[str, Value], str, str, int] = {}, "", "", -1

    def add(self, record: LogRecord) -> None:
        """Add one record; a failure is stored as a timing of NaN."""
        key = self._kernel_number(record) << 32 | self.configurations.number(record.config) << 1 | record.is_default
        times = record.runtimes_ns or (np.nan,)
        self._keys.extend([key] * len(times))
        self._times.extend(times)
        if len(self._times) > MAX_TIMINGS:
            raise FileFormatError(f"The log contains more than {MAX_TIMINGS:,} timings.")

    def _kernel_number(self, record: LogRecord) -> int:
        """Return the number of a record's kernel; a new kernel gets the next number."""
        # Consecutive records usually belong to one kernel, and readers return the same object for equal sizes.
        sizes, device, kernel, number = self._last
        if sizes is not record.sizes or device != record.device or kernel != record.kernel:
            identity = {"device": record.device, "kernel": record.kernel, "sizes": record.sizes}
            number = self.identities.setdefault(_encode_json(identity), len(self.identities))
            if number >= MAX_KERNELS:
                raise FileFormatError(f"The log contains more than {MAX_KERNELS:,} different kernels.")
            self._last = record.sizes, record.device, record.kernel, number
        return number

    def kernels(self) -> Iterator[tuple[str, ConfigTimings]]:
        """Yield (identity, timings) of every kernel, in the order of its first record."""
        keys, times = np.frombuffer(self._keys, np.int64), np.frombuffer(self._times, np.float64)
        order = np.argsort(keys, kind="stable")
        ends = np.searchsorted(keys, np.arange(1, len(self.identities) + 1) << 32, sorter=order)  # of each kernel
        first = start = 0
        identities = iter(self.identities)
        while first < len(ends):
            # A batch is as many whole kernels as have about _BATCH_TIMINGS timings.
            last = max(first + 1, int(np.searchsorted(ends, start + _BATCH_TIMINGS)))
            rows = order[start : ends[last - 1]]
            kernels, timings = _merge_timings(keys[rows], times[rows])
            cuts = np.searchsorted(kernels, np.arange(first, last + 1)).tolist()
            for low, high in itertools.pairwise(cuts):
                yield next(identities), timings[low:high]
            first, start = last, int(ends[last - 1])


def _merge_timings(keys: npt.NDArray[np.int64], times: Floats) -> tuple[npt.NDArray[np.int64], ConfigTimings]:
    """Merge repeated timings: return the kernel number of each (kernel, configuration) pair, and the pairs' statistics.

    `keys` encode kernel and configuration of each timing in `times`.
    """
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


@dataclass(frozen=True)
class _Layout:
    """Configurations with the same parameter names, of which the same ones are words; a row has their values."""

    names: tuple[str, ...]
    word_positions: tuple[int, ...]
    numbers: dict[bytes, int] = field(default_factory=dict)  # row -> number of the configuration


class LoggedConfigs:
    """The distinct configurations of a log; words are stored as their number in the word list of their parameter."""

    def __init__(self) -> None:
        """Create an empty list of configurations."""
        self.words: dict[str, dict[str, int]] = {}  # per parameter: word -> number, from 1
        self._layouts: dict[tuple[tuple[str, ...], tuple[int, ...]], _Layout] = {}
        self._rows: list[tuple[_Layout, bytes]] = []  # by number
        # Cache by object identity; holding the object keeps its id from being reused.
        self._recent: dict[int, tuple[Mapping[str, Value], int]] = {}
        self._layout_names = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> set[str]:
        """All parameter names."""
        return {name for layout in self._layouts.values() for name in layout.names}

    def number(self, config: Mapping[str, Value]) -> int:
        """Return the number of a configuration; a new one gets the next number."""
        if (recent := self._recent.get(id(config))) is not None:
            return recent[1]
        names = tuple(sorted(config))
        word_positions = tuple([position for position, name in enumerate(names) if isinstance(config[name], str)])
        values: list[Any] = [config[name] for name in names]
        for position in word_positions:
            values[position] = self._word_number(names[position], values[position])
        layout = self._layouts.get((names, word_positions)) or self._add_layout(names, word_positions)
        row = array("d", values).tobytes()
        number = layout.numbers.setdefault(row, len(self._rows))
        if number == len(self._rows):
            if number >= MAX_CONFIGS:
                raise FileFormatError(f"The log contains more than {MAX_CONFIGS:,} different configurations.")
            self._rows.append((layout, row))
        if len(self._recent) >= _CACHE_ENTRIES:
            self._recent.clear()
        self._recent[id(config)] = config, number
        return number

    def _add_layout(self, names: tuple[str, ...], word_positions: tuple[int, ...]) -> _Layout:
        """Register a new set of parameter names and which of them are words; raise if there are too many."""
        self._layout_names += len(names)
        layout = self._layouts[names, word_positions] = _Layout(names, word_positions)
        if self._layout_names > MAX_LAYOUT_NAMES:
            raise FileFormatError("The configurations of the log have too many different sets of parameters.")
        return layout

    def _word_number(self, name: str, word: str) -> float:
        """Return the number, from 1, of a word among the values of parameter `name`; add a new word."""
        word_list = self.words.setdefault(name, {})
        if word not in word_list and len(word_list) > MAX_WORDS:
            # The list is full: the parameter will be left out, but its rows must still differ.
            return _UNLISTED + int.from_bytes(blake2b(word.encode(), digest_size=6).digest(), "little")
        return word_list.setdefault(word, 1 + len(word_list))

    def numeric_parameters(self, number: int) -> dict[str, Value]:
        """Return the parameters of one configuration that are numbers."""
        layout, row = self._rows[number]
        values = dict[str, Value](zip(layout.names, np.frombuffer(row).tolist(), strict=True))
        for position in layout.word_positions:
            del values[layout.names[position]]
        return values

    def columns(self, names: Sequence[str], numbers: Mapping[str, Mapping[str, float]]) -> npt.NDArray[np.float32]:
        """Return the parameters `names` of all configurations as float32 columns: (configurations, names).

        `numbers` maps the words of a parameter to the numbers of the column. A configuration without a parameter has 0.
        """
        column_of = {name: column for column, name in enumerate(names)}
        table = np.zeros((len(self), len(names)), np.float32)
        for layout in self._layouts.values():
            rows = np.fromiter(layout.numbers.values(), np.int64)
            data = np.frombuffer(b"".join(layout.numbers)).reshape(len(rows), -1)
            for position, name in enumerate(layout.names):
                if name not in column_of:
                    continue
                values = data[:, position]
                if position in layout.word_positions:
                    # Word numbers start at 1.
                    replacements = np.array([0.0, *(numbers[name][word] for word in self.words[name])])
                    values = replacements[values.astype(np.int64)]
                table[rows, column_of[name]] = values
        return table
