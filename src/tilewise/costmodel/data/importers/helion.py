"""Reads Helion's autotuning log: a CSV with a row per candidate, and a second file that describes each run.

``<run>.csv`` has the columns run_id, config_id, status, perf_ms, …, config. ``<run>.meta.jsonl`` has the kernel, the
device, the shapes and the configurations of each run. Every candidate has one row when it starts and one when it ends;
only the second is read. Without the second file the text in the column ``config`` is parsed as literals; it is never
evaluated.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tilewise._files import open_input
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
from tilewise.costmodel.data.importers.stream import MAX_FILE_BYTES, Source, csv_rows, lines, parse_line

_MAX_LITERAL_CHARS = 20_000
_MAX_RUNS = 100_000


def read_records(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of a run's CSV file; the run's own log is read from the same folder, if it exists."""
    run_entries = _read_run_entries(source.path)
    rows = csv_rows(lines(source), skip)
    columns = next(rows, [])
    if not {"status", "perf_ms", "config"} <= set(columns):
        return skip("no columns called status, perf_ms and config")
    default_kernel = source.name.rpartition("/")[2].partition(".")[0][:100] or "kernel"

    # Entries are parsed once per run, not once per row.
    @functools.lru_cache(_MAX_RUNS)
    def run_of(run_id: str) -> _HelionRun:
        return _parse_run_entry(run_entries.get(run_id, {}), default_kernel)

    def convert(row: list[str]) -> LogRecord | None:
        """Convert a CSV row to a record; None for a row that only marks the start of a candidate."""
        fields = dict.fromkeys(columns, "") | dict(zip(columns, row, strict=False))
        if fields["status"] == "started":
            return None
        run = run_of(fields.get("run_id", ""))
        # The second file has the configuration as JSON; the CSV has its text only.
        entry = run.configs.get(fields.get("config_id"))
        parameters = flat_values(entry) if isinstance(entry, Mapping) else _parse_config(fields["config"])
        times = _parse_runtime(fields["perf_ms"]) if fields["status"] == "ok" else ()
        failure = "" if times else fields["status"][:100]
        return LogRecord(run.kernel, run.sizes, parameters, times, device=run.device, failure=failure)

    yield from convert_entries(rows, convert, skip, "a row that is not a record")


class _HelionRun(NamedTuple):
    """Properties that all records of one run share."""

    kernel: str
    sizes: Mapping[str, Value]
    device: str
    configs: Mapping[Any, Any]


def _read_run_entries(path: Path | None) -> dict[str, Mapping[str, Any]]:
    """Read the entry of each run, by its name, from ``<run>.meta.jsonl``; empty without such a file."""
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
    """Parse a runtime in milliseconds; return it in nanoseconds, or () if it cannot be parsed."""
    try:
        return runtimes([float(text)], MILLISECOND_NS)
    except ValueError:
        return ()


@functools.lru_cache(1000)
def _parse_config(text: str) -> Mapping[str, Value]:
    """Parse ``Config(block_sizes=[64, 32], num_warps=4)`` into parameters."""
    # Python's parser is slow and may exhaust the stack on long nested texts.
    if len(text) > _MAX_LITERAL_CHARS:
        raise BadRecordError("a configuration of more than 20,000 characters")
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call):
            return flat_values({str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
        value = ast.literal_eval(node)
    except BadRecordError:
        raise
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRecordError("a configuration that is not a table of literals") from None
    if not isinstance(value, dict):
        raise BadRecordError("a configuration that is not a table")
    return flat_values({str(name): item for name, item in value.items()})
