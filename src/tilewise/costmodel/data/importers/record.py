"""The common record of all log readers: one configuration of one kernel, as another autotuner measured it.

A record states the kernel, the device, the sizes, the configuration and the time of each repeat. A configuration that
failed has no runtimes but a reason. The values are checked here once for all readers: names are short, numbers are
finite, lists become numbered columns.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

Value = float | str
Skip = Callable[[str], None]  # called with the reason why a part of a log is not imported
Entry = TypeVar("Entry")
Result = TypeVar("Result")

MILLISECOND_NS = 1e6
# Limits for untrusted logs; lengths are in characters.
MAX_NAME = 200
MAX_WORD = 400
MAX_VALUES = 512
MAX_REPEATS = 10_000
MAX_RUNTIME_NS = 1e15  # eleven days: no repeat of a kernel takes that long
_MAX_NUMBER = 1e30
_MAX_DEPTH = 4  # nested lists and tables
_CACHE_BYTES = 1 << 20  # size of the keys in one cache
# Exceptions raised by entries that are JSON but not records, such as a text or an infinity in place of an integer.
_MALFORMED = (LookupError, TypeError, ValueError, OverflowError, AttributeError)


class LogRecord(NamedTuple):
    """One measured configuration; `runtimes_ns` is empty if the configuration failed."""

    kernel: str
    sizes: Mapping[str, Value]
    config: Mapping[str, Value]
    runtimes_ns: tuple[float, ...]
    device: str = ""
    failure: str = ""
    is_default: bool = False
    details: Mapping[str, Any] = MappingProxyType({})  # facts about the device, copied to the schema


class BadRecordError(ValueError):
    """Raised for a record that cannot be used; the message says why in a few words."""


def convert_entries(
    entries: Iterable[Entry], convert: Callable[[Entry], LogRecord | None], skip: Skip, malformed: str
) -> Iterator[LogRecord]:
    """Convert entries of a log to records; skip those for which `convert` raises or returns None.

    `skip` is called with the reason: a `BadRecordError`'s message, else `malformed`.
    """
    for entry in entries:
        try:
            record = convert(entry)
        except BadRecordError as error:
            skip(str(error))
        except _MALFORMED:
            skip(malformed)
        else:
            if record is not None:
                yield record


def cache_by_value(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Decorate a function of one JSON value so that equal values return the same object.

    Logs repeat themselves line by line. Values are compared by their marshalled bytes, which is far faster than
    traversing them in Python.
    """
    results: dict[bytes, Result] = {}
    key_bytes = 0

    @functools.wraps(function)
    def cached(values: Any) -> Result:
        """Return the cached result for an equal value, or compute and cache it."""
        nonlocal key_bytes
        try:
            key = marshal.dumps(values, 2)
        except ValueError:  # nested too deeply
            return function(values)
        if (cached_result := results.get(key)) is not None:
            return cached_result
        result = function(values)
        # Drop everything when the cache is full: logs repeat values close together.
        if key_bytes > _CACHE_BYTES:
            results.clear()
            key_bytes = 0
        key_bytes += len(key)
        results[key] = result
        return result

    return cached


@cache_by_value
def flat_values(values: Any) -> Mapping[str, Value]:
    """Flatten a table to names and plain values; entries of None are dropped.

    >>> flat_values({"block": [64, 32], "num_warps": "4", "extra": {"kind": "dot"}, "unset": None})
    {'block_0': 64.0, 'block_1': 32.0, 'num_warps': 4.0, 'extra.kind': 'dot'}
    """
    if not isinstance(values, Mapping):
        raise BadRecordError("the values have no names")
    result: dict[str, Value] = {}
    for name, value in values.items():
        _add_flattened(_check_name(name), value, result, 0)
    return result


def _add_flattened(name: str, value: Any, result: dict[str, Value], depth: int) -> None:
    """Add `value` to `result`: list items under names like `name_0`, dict items under `name.key`."""
    if len(result) >= MAX_VALUES or depth > _MAX_DEPTH:
        raise BadRecordError(f"more than {MAX_VALUES} values, or nested too deeply")
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _add_flattened(f"{name}_{position}", item, result, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add_flattened(f"{name}.{_check_name(key)}", item, result, depth + 1)
    elif value is not None:
        result[name[:MAX_NAME]] = plain_value(value)


def plain_value(value: Any) -> Value:
    """Return a finite number or a short word; a word that spells a number becomes that number."""
    if isinstance(value, int | float):
        return _check_number(value)
    if isinstance(value, str):
        return _parse_word(value)
    raise BadRecordError(f"a value of type {type(value).__name__}")


@functools.lru_cache(10_000)
def _parse_word(value: str) -> Value:
    """Parse a parameter's text: True and False become 1 and 0, numbers floats; other words stay text."""
    # Python's booleans appear as words in several tools' logs.
    if value in ("True", "False"):
        return float(value == "True")
    try:
        return _check_number(float(value))
    except ValueError:
        return check_text(value, MAX_WORD)


@functools.lru_cache(10_000)
def _check_name(name: Any) -> str:
    return check_text(name, MAX_NAME)


def _check_number(value: float) -> float:
    """Return the number if it is finite and not too large; raise `BadRecordError` otherwise."""
    if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise BadRecordError("a number that is not finite, or too large")
    return float(value)


def check_text(value: Any, max_length: int) -> str:
    """Return the value; raise `BadRecordError` unless it is a short text without line ends."""
    if not isinstance(value, str) or not 0 < len(value) <= max_length or "\n" in value or "\0" in value:
        raise BadRecordError("a name that is not a short text")
    return value


def runtimes(values: list[Any], unit_ns: float) -> tuple[float, ...]:
    """Convert repeated times (in units of `unit_ns`) to nanoseconds; drop zero, infinite and NaN values."""
    numbers = [value for value in values if type(value) is float or (type(value) is int and 0 < value < 1 << 60)]
    return tuple([ns for value in numbers if 0 < (ns := value * unit_ns) <= MAX_RUNTIME_NS])[:MAX_REPEATS]
