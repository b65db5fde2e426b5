"""Numbers the distinct configurations of a log and stores each as a row of a file.

A log may have two million distinct configurations, most of which differ in numbers only. The sorted parameter names of
a configuration form its layout, which is kept in memory once. Its row in the file is its values as float64, where a
word is replaced by its number in the word list of that parameter. Rows are recognized by digests. Columns are read back
from the file many rows at a time.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.importers.record import Value
from tilewise.errors import FileFormatError

# Limits for untrusted logs.
MAX_CONFIGS = 2_000_000
MAX_WORDS = 4096  # different words of one parameter
MAX_NAMES = 8192  # different parameters
MAX_LAYOUT_NAMES = 1 << 22  # summed over all layouts
_CACHE_ENTRIES = 4096  # enough for logs that repeat themselves; configurations that are always new gain nothing
_CHUNK_ROWS = 10_000
_UNLISTED = 1 << 48  # offset of the numbers of words beyond MAX_WORDS: they tell rows apart and are in no list

Floats = npt.NDArray[np.float64]
_Pack = Any  # struct.Struct.pack: any number of floats to bytes


class Layout(NamedTuple):
    """Structure shared by rows: the sorted parameter names, and the positions of words with their word lists."""

    number: int
    names: tuple[str, ...]
    words: tuple[tuple[int, dict[str, int]], ...]
    pack: _Pack

    def encode(self, values: Iterable[Value]) -> bytes | None:
        """Encode the values of a row; None if a number stands where a word is expected or a word is new."""
        if self.words:
            numbers: list[Any] = list(values)
            for position, word_list in self.words:
                numbers[position] = word_list.get(numbers[position])
            values = numbers
        try:
            return bytes(self.pack(*values))
        except struct.error:
            return None


@dataclass
class _NameOrder:
    """Handling of one order of names: a function that sorts the values, and the layout used last for it."""

    sort: Callable[[tuple[Value, ...]], Any] | None
    layout: Layout


class ConfigIndex:
    """Assigns numbers to configurations, from 0 in the order of arrival, and returns columns over all of them."""

    def __init__(self, path: Path) -> None:
        """Create an empty index whose rows are written to the file `path`."""
        self._file: IO[bytes] = path.open("w+b")
        self._path = path
        self._number_of_digest: dict[bytes, int] = {}
        self._orders: dict[tuple[str, ...], _NameOrder] = {}
        self._layouts: dict[tuple[tuple[str, ...], tuple[int, ...]], Layout] = {}
        self._starts = array("q", [0])  # first value of each row, counted in values
        self._layout_of = array("i")  # layout number of each row
        # Cache by object identity; holding the object keeps its id from being reused.
        self._recent: dict[int, tuple[Mapping[str, Value], int]] = {}
        self._layout_names = 0
        self._last: tuple[int, dict[str, Value]] = -1, {}
        self.names: dict[str, str] = {}  # all parameter names, each kept once in memory
        self.words: dict[str, dict[str, int]] = {}  # per parameter: word -> number, from 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._layout_of)

    def number(self, config: Mapping[str, Value]) -> int:
        """Return the number of this configuration; add the configuration if it is new."""
        if (recent := self._recent.get(id(config))) is not None:
            return recent[1]
        order = self._orders.get(names := tuple(config)) or self._add_order(names)
        values = config.values() if order.sort is None else order.sort(tuple(config.values()))
        # Try the layout that the last configuration with these names had; words may require another one.
        if (row := order.layout.encode(values)) is None:
            order.layout, row = self._encode_words(config)
        digest = blake2b(row, digest_size=16, salt=order.layout.number.to_bytes(8, "little")).digest()
        if (number := self._number_of_digest.get(digest)) is None:
            number = self._append(digest, order.layout, row)
        if len(self._recent) >= _CACHE_ENTRIES:
            self._recent.clear()
        self._recent[id(config)] = config, number
        return number

    def _add_order(self, names: tuple[str, ...]) -> _NameOrder:
        """Register an order of names that was not met before."""
        sorted_names = tuple(sorted(names))
        sort = None if sorted_names == names else itemgetter(*(names.index(name) for name in sorted_names))
        order = _NameOrder(sort, self._layout(sorted_names, ()))
        if len(self._orders) >= _CACHE_ENTRIES:
            self._orders.clear()
        self._orders[names] = order
        return order

    def _layout(self, names: tuple[str, ...], word_positions: tuple[int, ...]) -> Layout:
        """Return the layout with these names and words at these positions; create it if it is new."""
        if (layout := self._layouts.get((names, word_positions))) is None:
            names = tuple(self.names.setdefault(name, name) for name in names)
            self._layout_names += len(names)
            if len(self.names) > MAX_NAMES or self._layout_names > MAX_LAYOUT_NAMES:
                raise FileFormatError("The configurations of the log have too many different sets of parameters.")
            words = tuple((position, self.words[names[position]]) for position in word_positions)
            layout = Layout(len(self._layouts), names, words, struct.Struct(f"{len(names)}d").pack)
            self._layouts[names, word_positions] = layout
        return layout

    def _encode_words(self, config: Mapping[str, Value]) -> tuple[Layout, bytes]:
        """Encode a configuration that may have words; return its layout and row."""
        names = tuple(sorted(config))
        numbers, word_positions = list[float](), list[int]()
        for position, name in enumerate(names):
            value = config[name]
            if isinstance(value, str):
                word_positions.append(position)
                value = self._word_number(name, value)
            numbers.append(value)
        layout = self._layout(names, tuple(word_positions))
        return layout, layout.pack(*numbers)

    def _word_number(self, name: str, word: str) -> float:
        """Return the number of a word in the list of parameter `name`, from 1; add the word if it is new."""
        word_list = self.words.setdefault(name, {})
        if (number := word_list.get(word)) is not None:
            return number
        if len(word_list) > MAX_WORDS:
            # The list is full: the parameter will be left out, but its rows must still differ.
            return _UNLISTED + int.from_bytes(blake2b(word.encode(), digest_size=6).digest(), "little")
        word_list[word] = number = 1 + len(word_list)
        return number

    def _append(self, digest: bytes, layout: Layout, row: bytes) -> int:
        """Write a new row and return its number."""
        number = len(self._layout_of)
        if number >= MAX_CONFIGS:
            raise FileFormatError(f"The log contains more than {MAX_CONFIGS:,} different configurations.")
        self._number_of_digest[digest] = number
        self._file.write(row)
        self._starts.append(self._starts[-1] + len(row) // 8)
        self._layout_of.append(layout.number)
        return number

    def config(self, number: int) -> dict[str, Value]:
        """Return one configuration. The last answer is cached: kernels often share their first configuration."""
        if self._last[0] != number:
            self._last = number, next(self._decode(number, number + 1))
        return self._last[1]

    def configs(self) -> Iterator[dict[str, Value]]:
        """Yield every configuration in the order of the numbers."""
        for low in range(0, len(self), _CHUNK_ROWS):
            yield from self._decode(low, min(low + _CHUNK_ROWS, len(self)))

    def _decode(self, low: int, high: int) -> Iterator[dict[str, Value]]:
        """Yield the configurations `low` to `high` with their names and words."""
        data, layouts = self._read_rows(low, high), list(self._layouts.values())
        for number in range(low, high):
            layout, start = layouts[self._layout_of[number]], self._starts[number] - self._starts[low]
            row = dict[str, Value](zip(layout.names, data[start : start + len(layout.names)].tolist(), strict=True))
            for position, _ in layout.words:
                name = layout.names[position]
                row[name] = next((w for w, n in self.words[name].items() if n == row[name]), "")
            yield row

    def _read_rows(self, low: int, high: int) -> Floats:
        """Read the values of the rows `low` to `high`, one row after the other."""
        self._file.flush()
        first = self._starts[low]
        return np.fromfile(self._path, np.float64, self._starts[high] - first, offset=8 * first)

    def columns(self, names: Sequence[str], numbers: Mapping[str, Mapping[str, float]]) -> Iterator[Floats]:
        """Yield the columns called `names` of all configurations as chunks of shape (rows, len(names)).

        `numbers` maps the words of a parameter to the numbers of the column. A configuration without a parameter has 0.
        """
        column_of = {name: column for column, name in enumerate(names)}
        # Per parameter: word number -> column value. Word numbers start at 1.
        replacements = {
            name: np.array([0.0, *(numbers[name][word] for word in word_list)])
            for name, word_list in self.words.items()
            if name in column_of
        }
        layouts = list(self._layouts.values())
        for low in range(0, len(self), _CHUNK_ROWS):
            high = min(low + _CHUNK_ROWS, len(self))
            data = self._read_rows(low, high)
            starts = np.array(self._starts[low:high]) - self._starts[low]
            layout_numbers = np.array(self._layout_of[low:high])
            chunk = np.zeros((high - low, len(names)))
            # Rows of one layout have equal positions, so each parameter is one gather.
            for layout_number in np.unique(layout_numbers):
                layout, rows = layouts[layout_number], np.flatnonzero(layout_numbers == layout_number)
                word_positions = {position for position, _ in layout.words}
                for position, name in enumerate(layout.names):
                    if (column := column_of.get(name)) is not None:
                        values = data[starts[rows] + position]
                        if position in word_positions:
                            values = replacements[name][values.astype(np.int64)]
                        chunk[rows, column] = values
            yield chunk
