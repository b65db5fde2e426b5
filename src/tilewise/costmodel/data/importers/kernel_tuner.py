"""Reads Kernel Tuner's two kinds of files: T4, the community format of tuning results, and its cache files.

T4 is ``{"metadata": …, "results": [{"configuration": …, "times": {"runtimes": […]}, "invalidity": …}, …]}``. A cache is
``{"device_name": …, "kernel_name": …, "problem_size": …, "cache": {"16,1,…": {…, "time": …, "times": […]}, …}}``. A
cache that is still being written lacks its closing braces and is accepted. Times are milliseconds unless the file names
another unit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import (
    MILLISECOND_NS,
    BadRecordError,
    LogRecord,
    Skip,
    Value,
    convert_entries,
    flat_values,
    runtimes,
)
from tilewise.costmodel.data.importers.stream import JsonWalker, Source

_UNIT_NS = {"nanoseconds": 1.0, "microseconds": 1e3, "milliseconds": 1e6, "miliseconds": 1e6, "seconds": 1e9}
# Fields of a cache entry that are not tuning parameters.
_NOT_PARAMETERS = frozenset(
    (
        *("time", "times", "timestamp", "compile_time", "verification_time", "benchmark_time", "strategy_time"),
        *("framework_time", "GFLOP/s", "__error__", "objective", "energy", "clocks"),
    )
)


def read_records(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of a T4 file (which has ``results``) or of a cache file (which has ``cache``)."""
    walker = JsonWalker(source)
    head: dict[str, Any] = {}
    for key in walker.members():
        if key == "results" and walker.next_char() == "[":
            results, convert = walker.elements(), functools.partial(_t4_record, head, source)
            yield from convert_entries(results, convert, skip, "a result that cannot be read")
        elif key == "cache" and walker.next_char() == "{":
            entries, convert = (
                (walker.value() for _ in walker.members()),
                functools.partial(_cache_record, head, source),
            )
            yield from convert_entries(entries, convert, skip, "a cache entry that cannot be read")
        else:
            head[key] = walker.value()


def _t4_record(head: Mapping[str, Any], source: Source, result: Any) -> LogRecord:
    """Convert one entry of ``results`` of a T4 file to a record."""
    if not isinstance(result, Mapping):
        raise BadRecordError("a result that is not a table")
    times = result.get("times")
    unit = head["metadata"].get("timeunit") if isinstance(head.get("metadata"), Mapping) else None
    values = times.get("runtimes", []) if isinstance(times, Mapping) else []
    # T4 files mark failures by `invalidity`, by `correctness` 0, or by both.
    verdict = result.get("invalidity", "correct")
    failed = verdict != "correct" or result.get("correctness", 1) == 0
    unit_ns = _UNIT_NS.get(str(unit), MILLISECOND_NS)
    return _record(source, head, result.get("configuration"), [] if failed else values, verdict, unit_ns)


def _cache_record(head: Mapping[str, Any], source: Source, entry: Any) -> LogRecord:
    """Convert one entry of ``cache`` of a Kernel Tuner cache file to a record."""
    if not isinstance(entry, Mapping):
        raise BadRecordError("a cache entry that is not a table")
    names = head.get("tune_params_keys")
    parameters = set(map(str, names)) if isinstance(names, list) and names else entry.keys() - _NOT_PARAMETERS
    config = {name: value for name, value in entry.items() if name in parameters}
    # A failed configuration has the name of its error in place of the time.
    failure = entry.get("time") if isinstance(entry.get("time"), str) else entry.get("__error__", "")
    values = entry.get("times") or [entry.get("time")]
    return _record(source, head, config, [] if failure else values, failure)


def _record(
    source: Source, head: Mapping[str, Any], config: Any, times: Any, failure: Any, unit_ns: float = MILLISECOND_NS
) -> LogRecord:
    """Build the record of one configuration from its times, in units of `unit_ns`.

    Without usable times the record is a failure with the reason `failure`.
    """
    times_ns = runtimes(times if isinstance(times, list) else [], unit_ns)
    return LogRecord(
        kernel=_short_text(head.get("kernel_name")) or _file_stem(source.name),
        sizes=_problem_sizes(head.get("problem_size")),
        config=flat_values(config),
        runtimes_ns=times_ns,
        device=_short_text(head.get("device_name")),
        failure="" if times_ns else str(failure)[:100] or "no runtime",
    )


def _problem_sizes(value: Any) -> Mapping[str, Value]:
    return flat_values({"size": value} if isinstance(value, list | int | float | str) else {})


def _short_text(value: Any) -> str:
    return value[:100] if isinstance(value, str) else ""


def _file_stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0] or "kernel"
