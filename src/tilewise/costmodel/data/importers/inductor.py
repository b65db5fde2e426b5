"""Reads PyTorch Inductor's records (AutoHeuristic's text files, JSON lines from a feedback saver) and Triton's cache.

AutoHeuristic writes a line of JSON (the device, and which columns are numbers), then CSV: the problem's columns,
``choice``, and ``feedback`` in milliseconds. A choice is a name such as ``type=triton_BLOCK-M=64_…_numwarps=4``, or
``extern_mm`` for the vendor library, which counts as the default. A feedback line is ``{"name": "mm", "sizes": {…},
"device": …, "choices": [[{…configuration…}, milliseconds], …]}``.

Triton's autotuning cache has one ``<kernel>.autotune.json`` per kernel and key: ``{"key": […], "configs_timings":
[[config, milliseconds], …]}``. A configuration is a table (``kwargs``, ``num_warps``, …) or the text of one. A timing
is a number, or a list of quantiles with the median first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import (
    MILLISECOND_NS,
    BadRecordError,
    LogRecord,
    Skip,
    Value,
    cache_by_value,
    check_text,
    convert_entries,
    flat_values,
    plain_value,
    runtimes,
)
from tilewise.costmodel.data.importers.stream import JsonWalker, Source, csv_rows, lines, parse_line

_COLLECTION_NAMES = {"numwarps": "warps", "numstages": "stages", "GROUP-M": "group"}  # in tilewise's own collections
_GROUP_M = 8  # constant in Inductor's template, which does not log it

_NOT_TRITON_PARAMETERS = ("kwargs", "pre_hook", "ir_override")


def read_records(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of an AutoHeuristic log or of a feedback file; the first line decides which it is."""
    # A feedback file has a record in its first line; AutoHeuristic's has a header there.
    text = lines(source)
    head = parse_line(next(text, ""))
    if isinstance(head, Mapping) and "choices" in head:
        yield from _feedback_records(head, skip)
        for line in text:
            yield from _feedback_records(parse_line(line), skip)
        return
    if not isinstance(head, Mapping):
        return skip("no line of JSON at the start")
    columns = next(csv_rows([next(text, "")], skip), [])
    if not {"choice", "feedback"} <= set(columns):
        return skip("no columns called choice and feedback")
    device = _device(head)
    name = str(head.get("name", "kernel"))[:100] or "kernel"
    # Facts about the device go to the schema.
    details = {key: head[key] for key in ("shared_memory", "device_capa") if key in head}
    choice, feedback = columns.index("choice"), columns.index("feedback")
    # All columns but the choice and its time describe the problem.
    size_columns = [column for column in range(len(columns)) if column not in (choice, feedback)]
    size_names = [columns[column] for column in size_columns]

    def convert(row: list[str]) -> LogRecord:
        """Convert one CSV row to a record."""
        config, times = _parse_choice(row[choice]), runtimes([float(row[feedback])], MILLISECOND_NS)
        return LogRecord(
            kernel=name,
            sizes=_parse_sizes([size_names, [row[column] for column in size_columns]]),
            config=config,
            runtimes_ns=times,
            device=device,
            failure="" if times else "no runtime",
            is_default=config.get("type") == "extern",
            details=details,
        )

    yield from convert_entries(csv_rows(text, skip), convert, skip, "a row that lacks columns")


@cache_by_value
def _parse_sizes(row: list[list[str]]) -> Mapping[str, Value]:
    """Return the problem's sizes by name, from the CSV's name and value columns."""
    return {check_text(column, 100): plain_value(value) for column, value in zip(*row, strict=True)}


@cache_by_value
def _parse_choice(text: str) -> Mapping[str, Value]:
    """Parse the parameters in the name of a kernel choice; a name without parameters is a library call."""
    parameters = dict(entry.split("=", 1) for entry in text.split("_") if "=" in entry)
    # The same parameter must have the same name in all collections, so that a model can read both.
    parameters = {_COLLECTION_NAMES.get(name, name): value for name, value in parameters.items()}
    if not parameters:
        return flat_values({"type": "extern", "library": text})
    return flat_values({"group": _GROUP_M, **parameters} if parameters.get("type") == "triton" else parameters)


def _device(head: Mapping[str, Any]) -> str:
    """Name the device by its compute capability (``sm90``), or as the file does."""
    capability = head.get("device_capa")
    if isinstance(capability, list) and len(capability) == 2:
        return f"sm{capability[0]}{capability[1]}"[:20]
    return str(head.get("device", ""))[:100]


def _feedback_records(entry: Any, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of one parsed line of a feedback file."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("choices"), list):
        return skip("a line that is not a feedback record")
    try:
        name, sizes = check_text(entry.get("name"), 100), flat_values(entry.get("sizes", {}))
    except BadRecordError as error:
        return skip(str(error))
    device = str(entry.get("device", ""))[:100]

    def convert(choice: Any) -> LogRecord:
        config, milliseconds = choice
        parameters = flat_values(config if type(config) is dict else {"choice": config})
        return _timed_record(name, sizes, parameters, milliseconds)._replace(device=device)

    yield from convert_entries(
        entry["choices"], convert, skip, "a choice that is not a pair of a configuration and a time"
    )


def _timed_record(kernel: str, sizes: Mapping[str, Value], config: Mapping[str, Value], milliseconds: Any) -> LogRecord:
    times = runtimes([milliseconds], MILLISECOND_NS)
    return LogRecord(kernel, sizes, config, times, failure="" if times else "no runtime")


def read_triton_cache(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of one file of Triton's autotuning cache."""
    # The kernel's name is in the file's name only.
    kernel = source.name.rpartition("/")[2].removesuffix(".json").removesuffix(".autotune")[:100] or "kernel"
    walker = JsonWalker(source)
    sizes: Mapping[str, Value] = {}

    def convert(pair: Any) -> LogRecord:
        config, timing = pair
        milliseconds = timing[0] if isinstance(timing, list) and timing else timing
        return _timed_record(kernel, sizes, _triton_parameters(config), milliseconds)

    for member in walker.members():
        if member == "configs_timings" and walker.next_char() == "[":
            # The key precedes the timings in the files that Triton writes.
            malformed = "a timing that is not a pair of a configuration and a time"
            yield from convert_entries(walker.elements(), convert, skip, malformed)
        else:
            value = walker.value()
            if member == "key" and isinstance(value, list):
                sizes = _key_values(value)


def _key_values(values: list[Any]) -> Mapping[str, Value]:
    """Name the values of an autotuning key key_0, key_1, …; return {} if one of them is not a size or word."""
    try:
        return flat_values({"key": values})
    except BadRecordError:
        return {}


def _triton_parameters(config: Any) -> Mapping[str, Value]:
    """Flatten a Triton configuration: the entries of ``kwargs`` join the other parameters."""
    if isinstance(config, str):  # BLOCK_M: 64, num_warps: 4, …
        return flat_values(dict(entry.strip().split(": ", 1) for entry in config.split(",") if ": " in entry))
    if not isinstance(config, Mapping):
        raise BadRecordError("a configuration that is not a table")
    kwargs = config.get("kwargs")
    parameters = {**kwargs, **config} if isinstance(kwargs, Mapping) else dict(config)
    for name in _NOT_TRITON_PARAMETERS:
        parameters.pop(name, None)
    return flat_values(parameters)
