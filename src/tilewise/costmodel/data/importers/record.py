"""One measurement of somebody else's autotuner, in the words that all of them share.

A reader of a format yields records and nothing else: which kernel on which device, at which sizes, with which
configuration, how long each repeat took. A configuration that failed has no runtimes and a reason. Values are checked
here, once, so that no reader has to: names are short, numbers finite, lists become numbered columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = float | str

MAX_NAME = 200
MAX_WORD = 400
MAX_VALUES = 512
MAX_REPEATS = 10_000
LONGEST_NS = 1e15  # eleven days: no repeat of a kernel takes that long


@dataclass(frozen=True)
class Record:
    """What one line of a log says. `runtimes_ns` is empty where the configuration failed."""

    kernel: str
    sizes: Mapping[str, Value]
    config: Mapping[str, Value]
    runtimes_ns: tuple[float, ...]
    device: str = ""
    failure: str = ""
    is_default: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)  # of the device, kept in the schema


class BadRecordError(ValueError):
    """A record that cannot be used; the message says why in a few words."""


def flat_values(values: Any) -> dict[str, Value]:
    """Names and plain values: lists are numbered, nested tables joined by dots, what is not said is left out."""
    if not isinstance(values, Mapping):
        raise BadRecordError("the values have no names")
    found: dict[str, Value] = {}
    for name, value in values.items():
        _flatten(word(name, MAX_NAME), value, found, 0)
    return found


def _flatten(name: str, value: Any, found: dict[str, Value], depth: int) -> None:
    if len(found) >= MAX_VALUES or depth > 4:
        raise BadRecordError(f"more than {MAX_VALUES} values, or nested too deeply")
    if value is None:
        return
    if isinstance(value, Mapping):
        for inner, item in value.items():
            _flatten(f"{name}.{word(inner, MAX_NAME)}", item, found, depth + 1)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _flatten(f"{name}_{position}", item, found, depth + 1)
    else:
        found[name[:MAX_NAME]] = plain(value)


def plain(value: Any) -> Value:
    """A finite number, or a short word; words that are numbers become numbers."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return _finite(value)
    if isinstance(value, str):
        if value in ("True", "False"):
            return float(value == "True")
        try:
            return _finite(float(value))
        except ValueError:
            return word(value, MAX_WORD)
    raise BadRecordError(f"a value of type {type(value).__name__}")


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise BadRecordError("a number that is too large") from None
    if not math.isfinite(number) or abs(number) > 1e30:
        raise BadRecordError("a number that is not finite")
    return number


def word(value: Any, most: int) -> str:
    """A short text without line ends."""
    if not isinstance(value, str) or not 0 < len(value) <= most or "\n" in value or "\0" in value:
        raise BadRecordError("a name that is no short text")
    return value


def runtimes(values: Iterable[Any], unit_ns: float) -> tuple[float, ...]:
    """Repeats in nanoseconds; those that are no time at all (zero, infinite, no number) are left out."""
    found = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        try:
            ns = float(value) * unit_ns
        except OverflowError:
            continue
        if math.isfinite(ns) and 0 < ns <= LONGEST_NS:
            found.append(ns)
        if len(found) >= MAX_REPEATS:
            break
    return tuple(found)
