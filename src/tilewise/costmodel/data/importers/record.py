"""One measurement of somebody else's autotuner, in the words that all of them share.

A reader of a format yields records and nothing else: which kernel on which device, at which sizes, with which
configuration, how long each repeat took. A configuration that failed has no runtimes and a reason. Values are checked
here, once, so that no reader has to: names are short, numbers finite, lists become numbered columns.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

Value = float | str
Result = TypeVar("Result")

MAX_NAME = 200
MAX_WORD = 400
MAX_VALUES = 512
MAX_REPEATS = 10_000
LONGEST_NS = 1e15  # eleven days: no repeat of a kernel takes that long
_REMEMBERED_BYTES = 1 << 20
_LARGEST = 1e30
_NUMBERS, _FLOAT = frozenset({int, float}), frozenset({float})


class Record(NamedTuple):
    """What one line of a log says. `runtimes_ns` is empty where the configuration failed."""

    kernel: str
    sizes: Mapping[str, Value]
    config: Mapping[str, Value]
    runtimes_ns: tuple[float, ...]
    device: str = ""
    failure: str = ""
    is_default: bool = False
    details: Mapping[str, Any] = MappingProxyType({})  # of the device, kept in the schema


class BadRecordError(ValueError):
    """A record that cannot be used; the message says why in a few words."""


def remembered(make: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """`make`, which gives the very same object where it was asked the same: a log repeats itself line by line.

    Numbers, texts, lists and tables are compared by their bytes, which is far quicker than walking through them here.
    """
    known: dict[bytes, Result] = {}
    held = 0

    @functools.wraps(make)
    def once(values: Any) -> Result:
        nonlocal held
        try:
            key = marshal.dumps(values, 2)
        except ValueError:  # nested too deeply
            return make(values)
        if (found := known.get(key)) is not None:
            return found
        made = make(values)
        if held > _REMEMBERED_BYTES:
            known.clear()
            held = 0
        held += len(key)
        known[key] = made
        return made

    return once


@remembered
def flat_values(values: Any) -> Mapping[str, Value]:
    """Names and plain values: lists are numbered, nested tables joined by dots, what is not said is left out."""
    if not isinstance(values, Mapping):
        raise BadRecordError("the values have no names")
    if None in values.values():
        values = {name: value for name, value in values.items() if value is not None}
    numbers = values.values()
    # Most configurations are a few numbers; NaN, infinities and what is too large fail the comparison.
    if _NUMBERS.issuperset(map(type, numbers)) and len(values) < MAX_VALUES and sum(map(abs, numbers)) <= _LARGEST:
        return dict(zip(map(_short, values), map(float, numbers), strict=True))
    found: dict[str, Value] = {}
    for name, value in values.items():
        _flatten(_short(name), value, found, 0)
    return found


def _flatten(name: str, value: Any, found: dict[str, Value], depth: int) -> None:
    if len(found) >= MAX_VALUES or depth > 4:
        raise BadRecordError(f"more than {MAX_VALUES} values, or nested too deeply")
    kind = type(value)
    if kind is int or kind is float:
        found[name[:MAX_NAME]] = _finite(value)
    elif kind is str:
        found[name[:MAX_NAME]] = _plain_word(value)
    elif value is None:
        return
    elif kind is list or kind is tuple:
        for position, item in enumerate(value):
            _flatten(f"{name}_{position}", item, found, depth + 1)
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            _flatten(f"{name}.{_short(inner)}", item, found, depth + 1)
    else:
        found[name[:MAX_NAME]] = plain(value)


def plain(value: Any) -> Value:
    """A finite number, or a short word; words that are numbers become numbers."""
    if isinstance(value, int | float):
        return _finite(value)
    if isinstance(value, str):
        return _plain_word(value)
    raise BadRecordError(f"a value of type {type(value).__name__}")


@functools.lru_cache(10_000)
def _plain_word(value: str) -> Value:
    if value in ("True", "False"):
        return float(value == "True")
    try:
        return _finite(float(value))
    except ValueError:
        return word(value, MAX_WORD)


@functools.lru_cache(10_000)
def _short(name: Any) -> str:
    return word(name, MAX_NAME)


def _finite(value: float) -> float:
    if not -_LARGEST <= value <= _LARGEST:
        raise BadRecordError("a number that is not finite, or too large")
    return float(value)


def word(value: Any, most: int) -> str:
    """A short text without line ends."""
    if not isinstance(value, str) or not 0 < len(value) <= most or "\n" in value or "\0" in value:
        raise BadRecordError("a name that is no short text")
    return value


def runtime(value: Any, unit_ns: float) -> tuple[float, ...]:
    """One repeat in nanoseconds, or none where the value is no time at all."""
    if type(value) is float and 0 < (ns := value * unit_ns) <= LONGEST_NS:
        return (ns,)
    return runtimes([value], unit_ns)


def runtimes(values: list[Any], unit_ns: float) -> tuple[float, ...]:
    """Repeats in nanoseconds; those that are no time at all (zero, infinite, no number) are left out."""
    if _FLOAT.issuperset(map(type, values)) and values and min(values) > 0 and sum(values) * unit_ns <= LONGEST_NS:
        return tuple([value * unit_ns for value in values[:MAX_REPEATS]])  # every one of them is a time
    numbers = [value for value in values if type(value) is float or (type(value) is int and 0 < value < 1 << 60)]
    return tuple([ns for value in numbers if 0 < (ns := value * unit_ns) <= LONGEST_NS])[:MAX_REPEATS]
