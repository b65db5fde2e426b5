"""Reads Triton's autotuning cache: one ``<kernel>.autotune.json`` per kernel and key.

The file contains ``{"key": […], "configs_timings": [[config, milliseconds], …]}``. A configuration is a table
(``kwargs``, ``num_warps``, …) or the text of one. A timing is a number, or a list of quantiles with the median first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import (
    MILLISECOND_NS,
    BadRecordError,
    LogRecord,
    Value,
    flat_values,
    runtime,
)
from tilewise.costmodel.data.importers.stream import JsonWalker, Source

_NOT_PARAMETERS = ("kwargs", "pre_hook", "ir_override")


def read_records(source: Source, skip: Callable[[str], None]) -> Iterator[LogRecord]:
    """Yield the records of one cache file."""
    # The kernel's name is in the file's name only.
    kernel = source.name.rpartition("/")[2].removesuffix(".json").removesuffix(".autotune")[:100] or "kernel"
    walker = JsonWalker(source)
    sizes: Mapping[str, Value] = {}
    for member in walker.members():
        if member == "configs_timings" and walker.next_char() == "[":
            # The key precedes the timings in the files that Triton writes.
            for pair in walker.elements():
                try:
                    yield _record(kernel, sizes, pair)
                except BadRecordError as error:
                    skip(str(error))
                except (TypeError, ValueError):
                    skip("a timing that is not a pair of a configuration and a time")
        else:
            value = walker.value()
            if member == "key" and isinstance(value, list):
                sizes = _key_values(value)


def _key_values(values: list[Any]) -> Mapping[str, Value]:
    """Return the autotuning key as sizes, or nothing if it contains unusable values."""
    try:
        return flat_values({"key": values})
    except BadRecordError:
        return {}


def _record(kernel: str, sizes: Mapping[str, Any], pair: Any) -> LogRecord:
    config, timing = pair
    times = runtime(timing[0] if isinstance(timing, list) and timing else timing, MILLISECOND_NS)
    return LogRecord(kernel, sizes, _parameters(config), times, failure="" if times else "no runtime")


def _parameters(config: Any) -> Mapping[str, Value]:
    """Return the parameters of a configuration; the entries of ``kwargs`` become parameters like the others."""
    if isinstance(config, str):  # BLOCK_M: 64, num_warps: 4, …
        return flat_values(dict(entry.strip().split(": ", 1) for entry in config.split(",") if ": " in entry))
    if not isinstance(config, Mapping):
        raise BadRecordError("a configuration that is not a table")
    kwargs = config.get("kwargs")
    parameters = {**kwargs, **config} if isinstance(kwargs, Mapping) else dict(config)
    for name in _NOT_PARAMETERS:
        parameters.pop(name, None)
    return flat_values(parameters)
