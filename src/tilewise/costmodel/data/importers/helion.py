"""Helion's autotuning log: a CSV with a row a candidate, and beside it what each run was about.

``<run>.csv`` has the columns run_id, config_id, status, perf_ms, …, config; ``<run>.meta.jsonl`` has the kernel, the
device, the shapes and the configurations of each run. Every candidate has a row when it starts and one when it ends;
only the latter counts. Without the second file the text in the column ``config`` is read, as literals, never evaluated.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewise._files import open_input
from tilewise.costmodel.data.importers.record import BadRecordError, Record, flat_values, runtimes
from tilewise.costmodel.data.importers.stream import MAX_FILE_BYTES, Source, csv_rows, lines, parse_line

_MILLISECOND = 1e6
_MAX_LITERAL = 20_000
_RUNS = 100_000


def read(source: Source, skip: Callable[[str], None], path: Path | None = None) -> Iterator[Record]:
    """The records of one CSV file; `path` is where it lies, so that the file beside it is found."""
    runs = _runs(path)
    rows = csv_rows(lines(source), skip)
    columns = next(rows, [])
    if not {"status", "perf_ms", "config"} <= set(columns):
        return skip("no columns called status, perf_ms and config")
    kernel = source.name.rpartition("/")[2].partition(".")[0][:100] or "kernel"
    for row in rows:
        values = dict(zip(columns, row, strict=False))
        if values.get("status") == "started":
            continue
        try:
            yield _record(values, runs.get(values.get("run_id", ""), {}), kernel)
        except BadRecordError as error:
            skip(str(error))


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


def _record(row: Mapping[str, str], run: Mapping[str, Any], kernel: str) -> Record:
    configs = run.get("configs")
    config = configs.get(row.get("config_id")) if isinstance(configs, Mapping) else None
    try:
        taken = runtimes([float(row["perf_ms"])], _MILLISECOND) if row.get("status") == "ok" else ()
    except (KeyError, ValueError):
        taken = ()
    shapes = {key: run[key] for key in ("input_shapes", "shapes", "args", "dtypes") if key in run}
    return Record(
        kernel=str(run.get("kernel_name", kernel))[:100] or kernel,
        sizes=flat_values(shapes),
        config=flat_values(config if isinstance(config, Mapping) else _literals(row.get("config", ""))),
        runtimes_ns=taken,
        device=str(run.get("device_name", run.get("hardware", "")))[:100],
        failure="" if taken else str(row.get("status"))[:100],
    )


def _literals(text: str) -> dict[str, Any]:
    """The named literals of ``Config(block_sizes=[64, 32], num_warps=4)`` or of a table."""
    if len(text) > _MAX_LITERAL:
        raise BadRecordError("a configuration of more than 20,000 characters")
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
