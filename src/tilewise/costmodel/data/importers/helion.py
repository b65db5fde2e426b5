"""Reads Helion's autotuning log: a CSV with a row per candidate, and a second file that describes each run.

``<run>.csv`` has the columns run_id, config_id, status, perf_ms, …, config. ``<run>.meta.jsonl`` has the kernel, the
device, the shapes and the configurations of each run. Every candidate has one row when it starts and one when it ends;
only the second is read. Without the second file the text in the column ``config`` is parsed as literals; it is never
evaluated.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tilewise._files import open_input
from tilewise.costmodel.data.importers.record import (
    MILLISECOND_NS,
    BadRecordError,
    LogRecord,
    Value,
    flat_values,
    runtime,
)
from tilewise.costmodel.data.importers.stream import MAX_FILE_BYTES, Source, csv_rows, lines, parse_line

_MAX_LITERAL_CHARS = 20_000
_MAX_RUNS = 100_000

_MAX_TEMPLATES = 1000
_FIRST_MARKER = 10**14  # markers are larger than any number that _INTEGER matches
_INTEGER = re.compile(r"(?<=[=\[ ])(-?(?:0|[1-9]\d{0,11}))(?=[,\])])")  # an integer that is a value of its own

# The differences between Helion's literals and JSON. Texts with other quotes or escapes take the slow path.
_NOT_JSON = re.compile(r"'([^'\"\\]*)'|\b(True|False|None)\b|\b([A-Za-z_]\w*)=")
_JSON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def read_records(source: Source, skip: Callable[[str], None], path: Path | None = None) -> Iterator[LogRecord]:
    """Yield the records of one CSV file; `path` is its location, from which the second file is found."""
    run_entries = _read_run_entries(path)
    rows = csv_rows(lines(source), skip)
    columns = next(rows, [])
    if not {"status", "perf_ms", "config"} <= set(columns):
        return skip("no columns called status, perf_ms and config")
    # An absent column gets the index after the last one, where every row is padded with an empty text.
    run_id, config_id, status, perf_ms, text = (
        columns.index(name) if name in columns else len(columns)
        for name in ("run_id", "config_id", "status", "perf_ms", "config")
    )
    kernel = source.name.rpartition("/")[2].partition(".")[0][:100] or "kernel"
    # Entries are parsed once per run, not once per row.
    runs: dict[str, _HelionRun] = {}
    parser = _ConfigParser()
    for row in rows:
        row += [""] * (len(columns) + 1 - len(row))
        if row[status] == "started":
            continue
        try:
            if (run := runs.get(row[run_id])) is None:
                if len(runs) >= _MAX_RUNS:
                    runs.clear()
                run = runs[row[run_id]] = _parse_run_entry(run_entries.get(row[run_id], {}), kernel)
            # The second file has the configuration as JSON; the CSV has its text only.
            entry = run.configs.get(row[config_id]) if run.configs else None
            times = _parse_runtime(row[perf_ms]) if row[status] == "ok" else ()
            yield LogRecord(
                kernel=run.kernel,
                sizes=run.sizes,
                config=flat_values(entry) if isinstance(entry, Mapping) else parser.parse(row[text]),
                runtimes_ns=times,
                device=run.device,
                failure="" if times else row[status][:100],
            )
        except BadRecordError as error:
            skip(str(error))


class _HelionRun(NamedTuple):
    """Properties that all records of one run share."""

    kernel: str
    sizes: Mapping[str, Value]
    device: str
    configs: Mapping[Any, Any]


def _read_run_entries(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Read the entry of each run from ``<run>.meta.jsonl``; return nothing if there is no such file."""
    meta_path = path.with_suffix(".meta.jsonl") if path is not None else None
    if meta_path is None or not os.path.lexists(meta_path):
        return {}
    entries: dict[str, Mapping[str, Any]] = {}
    with open_input(meta_path, MAX_FILE_BYTES) as stream:
        for line in lines(Source(meta_path.name, stream)):
            entry = parse_line(line)
            if isinstance(entry, Mapping) and isinstance(entry.get("run_id"), str) and len(entries) < _MAX_RUNS:
                entries[entry["run_id"]] = entry
    return entries


def _parse_run_entry(entry: Mapping[str, Any], default_kernel: str) -> _HelionRun:
    """Read kernel, sizes, device and configurations of a run from its log entry."""
    shapes = {key: entry[key] for key in ("input_shapes", "shapes", "args", "dtypes") if key in entry}
    name = str(entry.get("kernel_name", default_kernel))[:100] or default_kernel
    device = str(entry.get("device_name", entry.get("hardware", "")))[:100]
    configs = entry.get("configs")
    return _HelionRun(name, flat_values(shapes), device, configs if isinstance(configs, Mapping) else {})


def _parse_runtime(text: str) -> tuple[float, ...]:
    try:
        return runtime(float(text), MILLISECOND_NS)
    except ValueError:
        return ()


class _ConfigTemplate(NamedTuple):
    """A parsed configuration text, and the parameter that each of its integers belongs to."""

    values: dict[str, Value]
    integer_names: list[str]


class _ConfigParser:
    """Parses the texts of configurations; texts that differ in integers only share one parsed template."""

    def __init__(self) -> None:
        # Keyed by the text around the integers. None: such texts have no template and are parsed in full.
        self._templates: dict[tuple[str, ...], _ConfigTemplate | None] = {}

    def parse(self, text: str) -> Mapping[str, Value]:
        """Return the parameters in the text of a configuration."""
        fields = _INTEGER.split(text)  # text, integer, text, integer, …, text
        around = tuple(fields[::2])
        if around not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[around] = self._make_template(around) if len(text) <= _MAX_LITERAL_CHARS else None
        if (template := self._templates[around]) is None:
            return flat_values(_parse_literals(text))
        values = template.values.copy()
        values.update(zip(template.integer_names, map(float, fields[1::2]), strict=True))
        return values

    def _make_template(self, around: tuple[str, ...]) -> _ConfigTemplate | None:
        """Parse the text with marker numbers in place of its integers to learn which parameter each one sets.

        Return None if a marker is not among the values: that integer is part of a word.
        """
        markers = [_FIRST_MARKER + position for position in range(len(around) - 1)]
        try:
            values = flat_values(_parse_literals("".join(map("{}{}".format, around, [*markers, ""]))))
        except BadRecordError:
            return None
        name_of = {value: name for name, value in values.items()}
        if not all(marker in name_of for marker in markers):
            return None
        return _ConfigTemplate(dict(values), [name_of[marker] for marker in markers])


def _parse_literals(text: str) -> dict[str, Any]:
    """Parse the named literals of ``Config(block_sizes=[64, 32], num_warps=4)`` or of a table."""
    # Python's parser is slow and may exhaust the stack on long nested texts.
    if len(text) > _MAX_LITERAL_CHARS:
        raise BadRecordError("a configuration of more than 20,000 characters")
    values = _parse_as_json(text)
    return _parse_as_python(text) if values is None else values


def _parse_as_json(text: str) -> dict[str, Any] | None:
    """Parse a call's literals as JSON, ten times as fast as Python's parser; None if the results might differ."""
    if not text.startswith("Config(") or not text.endswith(")") or '"' in text or "\\" in text:
        return None
    try:
        value: dict[str, Any] = json.loads("{" + _NOT_JSON.sub(_to_json, text[7:-1]) + "}")
    except (ValueError, RecursionError):
        return None
    return value


def _to_json(match: re.Match[str]) -> str:
    text, constant, name = match.groups()
    if name is not None:
        return f'"{name}":'
    return _JSON_CONSTANTS[constant] if constant is not None else f'"{text}"'


def _parse_as_python(text: str) -> dict[str, Any]:
    """Parse a call's literals, or a literal table, with Python's parser."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call):
            return {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        value = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRecordError("a configuration that is not a table of literals") from None
    if not isinstance(value, dict):
        raise BadRecordError("a configuration that is not a table")
    return {str(name): item for name, item in value.items()}
