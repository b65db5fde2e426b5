"""Helion's autotuning log: a CSV with a row a candidate, and beside it what each run was about.

``<run>.csv`` has the columns run_id, config_id, status, perf_ms, …, config; ``<run>.meta.jsonl`` has the kernel, the
device, the shapes and the configurations of each run. Every candidate has a row when it starts and one when it ends;
only the latter counts. Without the second file the text in the column ``config`` is read, as literals, never evaluated.
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
from tilewise.costmodel.data.importers.record import BadRecordError, Record, Value, flat_values, runtime
from tilewise.costmodel.data.importers.stream import MAX_FILE_BYTES, Source, csv_rows, lines, parse_line

_MILLISECOND = 1e6
_MAX_LITERAL = 20_000
_RUNS = 100_000

_PATTERNS, _MARK = 1000, 10**14
_NUMBER = re.compile(r"(?<=[=\[ ])(-?(?:0|[1-9]\d{0,11}))(?=[,\])])")  # a whole number by itself

# What differs between the literals that Helion writes and JSON; a text with other quotes or escapes is none of these.
_SIMPLE = re.compile(r"'([^'\"\\]*)'|\b(True|False|None)\b|\b([A-Za-z_]\w*)=")
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def read(source: Source, skip: Callable[[str], None], path: Path | None = None) -> Iterator[Record]:
    """The records of one CSV file; `path` is where it lies, so that the file beside it is found."""
    runs = _runs(path)
    rows = csv_rows(lines(source), skip)
    columns = next(rows, [])
    if not {"status", "perf_ms", "config"} <= set(columns):
        return skip("no columns called status, perf_ms and config")
    # Columns that are not there are read as the empty text behind the last one.
    run_id, config_id, status, perf_ms, text = (
        columns.index(name) if name in columns else len(columns)
        for name in ("run_id", "config_id", "status", "perf_ms", "config")
    )
    kernel = source.name.rpartition("/")[2].partition(".")[0][:100] or "kernel"
    known: dict[str, _Run] = {}
    settings = _Settings()
    for row in rows:
        row += [""] * (len(columns) + 1 - len(row))
        if row[status] == "started":
            continue
        try:
            if (run := known.get(row[run_id])) is None:
                if len(known) >= _RUNS:
                    known.clear()
                run = known[row[run_id]] = _run(runs.get(row[run_id], {}), kernel)
            told = run.configs.get(row[config_id]) if run.configs else None
            config = flat_values(told) if isinstance(told, Mapping) else settings.of(row[text])
            taken = _taken(row[perf_ms]) if row[status] == "ok" else ()
            yield Record(run.kernel, run.sizes, config, taken, run.device, "" if taken else row[status][:100])
        except BadRecordError as error:
            skip(str(error))


class _Run(NamedTuple):
    """What the records of one run share."""

    kernel: str
    sizes: Mapping[str, Value]
    device: str
    configs: Mapping[Any, Any]


def _runs(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """What the file beside the CSV says of each run; nothing where there is none."""
    beside = path.with_suffix(".meta.jsonl") if path is not None else None
    if beside is None or not os.path.lexists(beside):
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    with open_input(beside, MAX_FILE_BYTES) as stream:
        for line in lines(Source(beside.name, stream)):
            entry = parse_line(line)
            if isinstance(entry, Mapping) and isinstance(entry.get("run_id"), str) and len(found) < _RUNS:
                found[entry["run_id"]] = entry
    return found


def _run(told: Mapping[str, Any], kernel: str) -> _Run:
    shapes = {key: told[key] for key in ("input_shapes", "shapes", "args", "dtypes") if key in told}
    name = str(told.get("kernel_name", kernel))[:100] or kernel
    device = str(told.get("device_name", told.get("hardware", "")))[:100]
    configs = told.get("configs")
    return _Run(name, flat_values(shapes), device, configs if isinstance(configs, Mapping) else {})


def _taken(text: str) -> tuple[float, ...]:
    try:
        return runtime(float(text), _MILLISECOND)
    except ValueError:
        return ()


class _Settings:
    """The settings in configurations' texts; one that differs from another in whole numbers only is filled in."""

    def __init__(self) -> None:
        # By what stands around the numbers: settings, and which of them the numbers are; None: read the whole text.
        self._known: dict[tuple[str, ...], tuple[dict[str, Value], list[str]] | None] = {}

    def of(self, text: str) -> Mapping[str, Value]:
        parts = _NUMBER.split(text)
        around = tuple(parts[::2])
        if around not in self._known:
            if len(self._known) >= _PATTERNS:
                self._known.clear()
            self._known[around] = self._pattern(around) if len(text) <= _MAX_LITERAL else None
        if (pattern := self._known[around]) is None:
            return flat_values(_literals(text))
        found = pattern[0].copy()
        found.update(zip(pattern[1], map(float, parts[1::2]), strict=True))
        return found

    def _pattern(self, around: tuple[str, ...]) -> tuple[dict[str, Value], list[str]] | None:
        """Numbers that occur nowhere else are put in and looked for; one that is not found is part of a word."""
        marks = [_MARK + place for place in range(len(around) - 1)]
        try:
            found = flat_values(_literals("".join(map("{}{}".format, around, [*marks, ""]))))
        except BadRecordError:
            return None
        name_of = {value: name for name, value in found.items()}
        if not all(mark in name_of for mark in marks):
            return None
        return dict(found), [name_of[mark] for mark in marks]


def _literals(text: str) -> dict[str, Any]:
    """The named literals of ``Config(block_sizes=[64, 32], num_warps=4)`` or of a table."""
    if len(text) > _MAX_LITERAL:
        raise BadRecordError("a configuration of more than 20,000 characters")
    quickly = _quickly(text)
    return _thoroughly(text) if quickly is None else quickly


def _quickly(text: str) -> dict[str, Any] | None:
    """A call's literals by way of JSON, a tenth of the work; None where that is not sure to read the same."""
    if not text.startswith("Config(") or not text.endswith(")") or '"' in text or "\\" in text:
        return None
    try:
        value: dict[str, Any] = json.loads("{" + _SIMPLE.sub(_json, text[7:-1]) + "}")
    except (ValueError, RecursionError):
        return None
    return value


def _json(match: re.Match[str]) -> str:
    text, constant, name = match.groups()
    if name is not None:
        return f'"{name}":'
    return _AS_JSON[constant] if constant is not None else f'"{text}"'


def _thoroughly(text: str) -> dict[str, Any]:
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call):
            return {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        value = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRecordError("a configuration that is no table of literals") from None
    if not isinstance(value, dict):
        raise BadRecordError("a configuration that is no table")
    return {str(name): item for name, item in value.items()}
