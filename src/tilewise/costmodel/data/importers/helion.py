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
from tilewise.costmodel.data.importers.record import BadRecordError, Record, Value, flat_values, runtimes
from tilewise.costmodel.data.importers.stream import MAX_FILE_BYTES, Source, csv_rows, lines, parse_line

_MILLISECOND = 1e6
_MAX_LITERAL = 20_000
_RUNS = 100_000

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
    kernel = source.name.rpartition("/")[2].partition(".")[0][:100] or "kernel"
    known: dict[str, _Run] = {}
    for row in rows:
        values = dict(zip(columns, row, strict=False))
        if values.get("status") == "started":
            continue
        try:
            if (run := known.get(name := values.get("run_id", ""))) is None:
                if len(known) >= _RUNS:
                    known.clear()
                run = known[name] = _run(runs.get(name, {}), kernel)
            yield _record(values, run)
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


def _record(row: Mapping[str, str], run: _Run) -> Record:
    config = run.configs.get(row.get("config_id"))
    try:
        taken = runtimes([float(row["perf_ms"])], _MILLISECOND) if row.get("status") == "ok" else ()
    except (KeyError, ValueError):
        taken = ()
    settings = config if isinstance(config, Mapping) else _literals(row.get("config", ""))
    failure = "" if taken else str(row.get("status"))[:100]
    return Record(run.kernel, run.sizes, flat_values(settings), taken, run.device, failure)


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
