"""Configurations as rows of numbers: written down once each, numbered from 0 on in the order they came.

A log may have two million of them, and most differ in numbers only. So the names of a configuration, in order, are its
layout, kept once; its row in a file is its values as eight bytes each, where a word is its number in a list that every
name has. Digests tell rows apart. Columns are then cut out of the file many rows at a time.
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

MAX_CONFIGS = 2_000_000
MAX_WORDS = 4096
MAX_NAMES = 8192
MAX_PLACES = 1 << 22  # of all layouts together
_REMEMBERED = 4096  # configurations that are new each time are not worth holding
_AT_ONCE = 10_000
_UNLISTED = 1 << 48  # numbers of the words of a name that has too many: they tell rows apart and are in no list

Floats = npt.NDArray[np.float64]
_Pack = Any  # of struct.Struct: any number of floats to bytes


class Layout(NamedTuple):
    """What rows have in common: sorted names, and at which places words stand, with the numbers of those listed."""

    number: int
    names: tuple[str, ...]
    words: tuple[tuple[int, dict[str, int]], ...]
    pack: _Pack

    def row(self, values: Iterable[Value]) -> bytes | None:
        """The bytes of such a row; None where a value is a number instead of a word, or a word that is new."""
        if self.words:
            numbers: list[Any] = list(values)
            for place, listed in self.words:
                numbers[place] = listed.get(numbers[place])
            values = numbers
        try:
            return bytes(self.pack(*values))
        except struct.error:
            return None


@dataclass
class _Order:
    """Names as some configuration has them: how to sort its values, and the layout that the last such one had."""

    sort: Callable[[tuple[Value, ...]], Any] | None
    layout: Layout


class Configurations:
    """Takes configurations, gives their numbers, and makes columns of them all."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("w+b")
        self._path = path
        self._known: dict[bytes, int] = {}
        self._orders: dict[tuple[str, ...], _Order] = {}
        self._layouts: dict[tuple[tuple[str, ...], tuple[int, ...]], Layout] = {}
        self._starts, self._layout_of = array("q", [0]), array("i")  # in values; of every row
        self._seen: dict[int, tuple[Mapping[str, Value], int]] = {}  # holds the object: its id stays
        self._places = 0
        self._last: tuple[int, dict[str, Value]] = -1, {}
        self.names: dict[str, str] = {}  # all that occur, each once in memory
        self.words: dict[str, dict[str, int]] = {}

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._layout_of)

    def number(self, config: Mapping[str, Value]) -> int:
        """The number of this configuration. Readers give the same object for the same values where they can."""
        if (seen := self._seen.get(id(config))) is not None:
            return seen[1]
        order = self._orders.get(names := tuple(config)) or self._order(names)
        values = config.values() if order.sort is None else order.sort(tuple(config.values()))
        if (row := order.layout.row(values)) is None:
            order.layout, row = self._worded(config)
        key = blake2b(row, digest_size=16, salt=order.layout.number.to_bytes(8, "little")).digest()
        if (number := self._known.get(key)) is None:
            number = self._append(key, order.layout, row)
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[id(config)] = config, number
        return number

    def _order(self, names: tuple[str, ...]) -> _Order:
        ordered = tuple(sorted(names))
        sort = None if ordered == names else itemgetter(*(names.index(name) for name in ordered))
        order = _Order(sort, self._layout(ordered, ()))
        if len(self._orders) >= _REMEMBERED:
            self._orders.clear()
        self._orders[names] = order
        return order

    def _layout(self, names: tuple[str, ...], words: tuple[int, ...]) -> Layout:
        if (found := self._layouts.get((names, words))) is None:
            names = tuple(self.names.setdefault(name, name) for name in names)
            self._places += len(names)
            if len(self.names) > MAX_NAMES or self._places > MAX_PLACES:
                raise FileFormatError("The configurations of the log have too many different sets of parameters.")
            listed = tuple((place, self.words[names[place]]) for place in words)
            found = Layout(len(self._layouts), names, listed, struct.Struct(f"{len(names)}d").pack)
            self._layouts[names, words] = found
        return found

    def _worded(self, config: Mapping[str, Value]) -> tuple[Layout, bytes]:
        """The layout of a configuration that may have words, and its row."""
        names = tuple(sorted(config))
        numbers, words = list[float](), list[int]()
        for place, name in enumerate(names):
            value = config[name]
            if isinstance(value, str):
                words.append(place)
                value = self._word(name, value)
            numbers.append(value)
        layout = self._layout(names, tuple(words))
        return layout, layout.pack(*numbers)

    def _word(self, name: str, word: str) -> float:
        """The word's number, from one on."""
        listed = self.words.setdefault(name, {})
        if (number := listed.get(word)) is not None:
            return number
        if len(listed) > MAX_WORDS:
            return _UNLISTED + int.from_bytes(blake2b(word.encode(), digest_size=6).digest(), "little")
        listed[word] = number = 1 + len(listed)
        return number

    def _append(self, key: bytes, layout: Layout, row: bytes) -> int:
        number = len(self._layout_of)
        if number >= MAX_CONFIGS:
            raise FileFormatError(f"The log holds more than {MAX_CONFIGS:,} different configurations.")
        self._known[key] = number
        self._file.write(row)
        self._starts.append(self._starts[-1] + len(row) // 8)
        self._layout_of.append(layout.number)
        return number

    def value(self, number: int) -> dict[str, Value]:
        """One configuration again; kernels often have the same first one."""
        if self._last[0] != number:
            self._last = number, next(self._values(number, number + 1))
        return self._last[1]

    def values(self) -> Iterator[dict[str, Value]]:
        """Every configuration, in the order of their numbers."""
        for low in range(0, len(self), _AT_ONCE):
            yield from self._values(low, min(low + _AT_ONCE, len(self)))

    def _values(self, low: int, high: int) -> Iterator[dict[str, Value]]:
        data, layouts = self._read(low, high), list(self._layouts.values())
        for number in range(low, high):
            layout, start = layouts[self._layout_of[number]], self._starts[number] - self._starts[low]
            row = dict[str, Value](zip(layout.names, data[start : start + len(layout.names)].tolist(), strict=True))
            for place, _ in layout.words:
                name = layout.names[place]
                row[name] = next((w for w, n in self.words[name].items() if n == row[name]), "")
            yield row

    def _read(self, low: int, high: int) -> Floats:
        self._file.flush()
        first = self._starts[low]
        return np.fromfile(self._path, np.float64, self._starts[high] - first, offset=8 * first)

    def columns(self, names: Sequence[str], numbers: Mapping[str, Mapping[str, float]]) -> Iterator[Floats]:
        """The columns called `names` of all configurations, some rows at a time: (rows, columns).

        `numbers` say which number a word becomes; 0 is where a configuration has no such name.
        """
        place_of = {name: place for place, name in enumerate(names)}
        become = {
            name: np.array([0.0, *(numbers[name][word] for word in listed)])
            for name, listed in self.words.items()
            if name in place_of
        }
        layouts = list(self._layouts.values())
        for low in range(0, len(self), _AT_ONCE):
            high = min(low + _AT_ONCE, len(self))
            data = self._read(low, high)
            starts = np.array(self._starts[low:high]) - self._starts[low]
            kinds = np.array(self._layout_of[low:high])
            found = np.zeros((high - low, len(names)))
            for kind in np.unique(kinds):
                layout, rows = layouts[kind], np.flatnonzero(kinds == kind)
                words = {place for place, _ in layout.words}
                for place, name in enumerate(layout.names):
                    if (column := place_of.get(name)) is not None:
                        values = data[starts[rows] + place]
                        found[rows, column] = become[name][values.astype(np.int64)] if place in words else values
            yield found
