"""Kernel Tuner's two files: T4, the community's format of tuning results, and the cache that it writes while it tunes.

T4 is ``{"metadata": …, "results": [{"configuration": …, "times": {"runtimes": […]}, "invalidity": …}, …]}``. A cache is
``{"device_name": …, "kernel_name": …, "problem_size": …, "cache": {"16,1,…": {…, "time": …, "times": […]}, …}}``; while
it is being written it lacks its closing braces, which is forgiven. Times are milliseconds unless the file says else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import BadRecordError, Record, Value, flat_values, runtimes
from tilewise.costmodel.data.importers.stream import JsonWalker, Source

_UNITS = {"nanoseconds": 1.0, "microseconds": 1e3, "milliseconds": 1e6, "miliseconds": 1e6, "seconds": 1e9}
_MILLISECOND = 1e6
# What a cache entry says beside its parameters.
_NOT_PARAMETERS = frozenset(
    (
        *("time", "times", "timestamp", "compile_time", "verification_time", "benchmark_time", "strategy_time"),
        *("framework_time", "GFLOP/s", "__error__", "objective", "energy", "clocks"),
    )
)


def read(source: Source, skip: Callable[[str], None]) -> Iterator[Record]:
    """The records of a T4 file or of a cache; which it is shows in its members."""
    walker = JsonWalker(source)
    head: dict[str, Any] = {}
    for key in walker.members():
        if key == "results" and walker.next_char() == "[":
            yield from _usable((_t4(result, head, source) for result in walker.elements()), skip)
        elif key == "cache" and walker.next_char() == "{":
            yield from _usable((_cached(walker.value(), head, source) for _ in walker.members()), skip)
        else:
            head[key] = walker.value()


def _usable(records: Iterator[Record | str], skip: Callable[[str], None]) -> Iterator[Record]:
    for record in records:
        if isinstance(record, str):
            skip(record)
        else:
            yield record


def _t4(result: Any, head: Mapping[str, Any], source: Source) -> Record | str:
    if not isinstance(result, Mapping):
        return "a result that is no table"
    times = result.get("times")
    unit = head["metadata"].get("timeunit") if isinstance(head.get("metadata"), Mapping) else None
    values = times.get("runtimes", []) if isinstance(times, Mapping) else []
    verdict = result.get("invalidity", "correct")
    failed = verdict != "correct" or result.get("correctness", 1) == 0
    return _record(
        source,
        head,
        result.get("configuration"),
        [] if failed else values,
        _UNITS.get(unit, _MILLISECOND) if isinstance(unit, str) else _MILLISECOND,
        verdict,
    )


def _cached(entry: Any, head: Mapping[str, Any], source: Source) -> Record | str:
    if not isinstance(entry, Mapping):
        return "a cache entry that is no table"
    names = head.get("tune_params_keys")
    known = set(map(str, names)) if isinstance(names, list) and names else entry.keys() - _NOT_PARAMETERS
    config = {name: value for name, value in entry.items() if name in known}
    failure = entry.get("time") if isinstance(entry.get("time"), str) else entry.get("__error__", "")
    values = entry.get("times") or [entry.get("time")]
    return _record(
        source, head, config, [] if failure or not isinstance(values, list) else values, _MILLISECOND, failure
    )


def _record(
    source: Source, head: Mapping[str, Any], config: Any, times: Any, unit_ns: float, failure: Any
) -> Record | str:
    """A record, or in a few words why there is none."""
    try:
        taken = runtimes(times if isinstance(times, list) else [], unit_ns)
        return Record(
            kernel=_text(head.get("kernel_name")) or _stem(source.name),
            sizes=_sizes(head.get("problem_size")),
            config=flat_values(config),
            runtimes_ns=taken,
            device=_text(head.get("device_name")),
            failure="" if taken else str(failure)[:100] or "no runtime",
        )
    except BadRecordError as error:
        return str(error)


def _sizes(value: Any) -> Mapping[str, Value]:
    return flat_values({"size": value} if isinstance(value, list | int | float | str) else {})


def _text(value: Any) -> str:
    return value[:100] if isinstance(value, str) else ""


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0] or "kernel"
