"""Triton's cache of autotuning: one ``<kernel>.autotune.json`` a kernel and key.

It holds ``{"key": […], "configs_timings": [[config, milliseconds], …]}``. A configuration is a table (``kwargs``,
``num_warps``, …) or the text of one; a timing is one number or its quantiles, of which the first is the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import BadRecordError, Record, Value, flat_values, runtime
from tilewise.costmodel.data.importers.stream import JsonWalker, Source

_MILLISECOND = 1e6
_NOT_SETTINGS = ("kwargs", "pre_hook", "ir_override")


def read(source: Source, skip: Callable[[str], None]) -> Iterator[Record]:
    """The records of one cache file."""
    kernel = source.name.rpartition("/")[2].removesuffix(".json").removesuffix(".autotune")[:100] or "kernel"
    walker = JsonWalker(source)
    sizes: Mapping[str, Value] = {}
    for member in walker.members():
        if member == "configs_timings" and walker.next_char() == "[":
            for pair in walker.elements():
                try:
                    yield _record(kernel, sizes, pair)
                except BadRecordError as error:
                    skip(str(error))
                except (TypeError, ValueError):
                    skip("a timing that is no pair of a configuration and a time")
        else:
            value = walker.value()
            if member == "key" and isinstance(value, list):
                sizes = _key(value)


def _key(values: list[Any]) -> Mapping[str, Value]:
    try:
        return flat_values({"key": values})
    except BadRecordError:
        return {}


def _record(kernel: str, sizes: Mapping[str, Any], pair: Any) -> Record:
    config, timing = pair
    taken = runtime(timing[0] if isinstance(timing, list) and timing else timing, _MILLISECOND)
    return Record(kernel, sizes, _settings(config), taken, failure="" if taken else "no runtime")


def _settings(config: Any) -> Mapping[str, Value]:
    if isinstance(config, str):  # BLOCK_M: 64, num_warps: 4, …
        return flat_values(dict(part.strip().split(": ", 1) for part in config.split(",") if ": " in part))
    if not isinstance(config, Mapping):
        raise BadRecordError("a configuration that is no table")
    inner = config.get("kwargs")
    settings = {**inner, **config} if isinstance(inner, Mapping) else dict(config)
    for name in _NOT_SETTINGS:
        settings.pop(name, None)
    return flat_values(settings)
