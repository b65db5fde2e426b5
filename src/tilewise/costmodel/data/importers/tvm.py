"""Reads TVM's two tuning logs: AutoTVM's lines and MetaSchedule's database of tuning records.

An AutoTVM line is ``{"input": [target, task, arguments, …], "config": {"entity": [[name, kind, value], …]}, "result":
[[seconds, …], error, …]}``. A MetaSchedule line is ``[workload, [[instructions, decisions], [seconds, …], target,
arguments]]``. Its decisions (tile sizes, unrolling, …) identify the schedule and become the parameters, named after
their instructions. Workloads are modules in TVM's own encoding and are never decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewise.costmodel.data.importers.record import (
    LogRecord,
    Skip,
    Value,
    cache_by_value,
    check_text,
    convert_entries,
    flat_values,
    runtimes,
)
from tilewise.costmodel.data.importers.stream import Source, lines, parse_line

_SECOND_NS = 1e9


def read_autotvm(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of an AutoTVM log."""
    entries = (parse_line(line) for line in lines(source) if line and not line.startswith("#"))
    return convert_entries(entries, _autotvm_record, skip, "a line that is not an AutoTVM record")


def _autotvm_record(entry: Any) -> LogRecord:
    """Convert one line of an AutoTVM log; old versions abbreviate the field names."""
    task_input = entry["input"] if "input" in entry else entry["i"]
    result = entry["result"] if "result" in entry else entry["r"]
    target, task, arguments = task_input[0], task_input[1], task_input[2]
    entity = entry["config"]["entity"] if "config" in entry else task_input[5]["e"]
    config = {check_text(name, 200): value for name, _, value in entity}
    config |= _split_products([value for _, kind, value in entity if kind == "sp"])
    # A failed measurement has an error number and meaningless costs.
    costs, error = result[0], int(result[1])
    times = runtimes(costs if isinstance(costs, list) else [], _SECOND_NS) if error == 0 else ()
    return LogRecord(
        kernel=check_text(task, 200),
        sizes=_argument_sizes(arguments),
        config=flat_values(config),
        runtimes_ns=times,
        device=_target(target),
        failure="" if times else f"error {error}",
    )


def read_metaschedule(source: Source, skip: Skip) -> Iterator[LogRecord]:
    """Yield the records of a MetaSchedule database; the lines of its workload file are ignored."""
    entries = (parse_line(line) for line in lines(source) if line)
    return convert_entries(entries, _metaschedule_record, skip, "a line that is not a tuning record")


def _metaschedule_record(entry: Any) -> LogRecord | None:
    """Convert one line of a MetaSchedule database; None if the line is a workload."""
    workload, body = entry
    if isinstance(workload, str):  # [hash, module]: a workload, not a record
        return None
    trace, seconds, target, arguments = body[0], body[1], body[2], body[3]
    instructions, decisions = trace
    config: dict[str, Any] = {}
    # Decisions refer to instructions by position; the name makes columns readable.
    for position, decision in decisions:
        name = instructions[int(position)][0]
        config[f"{check_text(name, 100)}_{int(position)}"] = decision
    config |= _split_products([decision for decision in config.values() if isinstance(decision, list)])
    times = runtimes(seconds if isinstance(seconds, list) else [seconds], _SECOND_NS)
    return LogRecord(
        kernel=f"workload{int(workload)}",
        sizes=_argument_sizes(arguments),
        config=flat_values(config),
        runtimes_ns=times,
        device=_target(target),
        failure="" if times else "no runtime",
    )


def _split_products(splits: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Multiply the splits of a schedule's loops, those of equal length position by position.

    Every operator names its loops differently, but these products mean the same for all: where TVM splits the loops of
    a GPU kernel in four, they are its blocks, virtual threads, threads and elements per thread. So a model can rank
    operators that it was not trained on.

    >>> _split_products([[2, 1, 16, 4], [8, 1, 8, 2], [32, 4]])
    {'splits_in_4': [16, 1, 128, 8], 'splits_in_2': [32, 4]}
    """
    products: dict[str, list[int]] = {}
    for split in splits:
        name = f"splits_in_{len(split)}"
        products[name] = [a * b for a, b in zip(products.get(name, [1] * len(split)), split, strict=True)]
    return products


@cache_by_value
def _argument_sizes(arguments: Any) -> Mapping[str, Value]:
    """Return an argument list's sizes and dtypes by numbered names, from ["TENSOR", [1, 3], "float32"]."""
    values = flat_values({"arg": arguments})
    return {name: value for name, value in values.items() if value != "TENSOR"}


@cache_by_value
def _target(target: Any) -> str:
    """Describe a TVM target, a text or a JSON object, in at most 100 characters."""
    if isinstance(target, Mapping):
        target = " ".join(str(target.get(key, "")) for key in ("kind", "mcpu", "arch", "tag", "model")).strip()
    return str(target)[:100]
