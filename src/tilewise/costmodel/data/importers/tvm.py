"""TVM's two tuning logs: AutoTVM's lines and MetaSchedule's database of tuning records.

An AutoTVM line is ``{"input": [target, task, arguments, …], "config": {"entity": [[name, kind, value], …]}, "result":
[[seconds, …], error, …]}``. A MetaSchedule line is ``[workload, [[instructions, decisions], [seconds, …], target,
arguments]]``; its decisions (tile factors, unrolling, …) are what tells two schedules apart, by the instruction they
belong to. Workloads are modules in an encoding of TVM's own; they are never decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilewise.costmodel.data.importers.record import (
    BadRecordError,
    Record,
    Value,
    flat_values,
    remembered,
    runtimes,
    word,
)
from tilewise.costmodel.data.importers.stream import Source, lines, parse_line

_SECOND = 1e9

# What a line that is JSON and no record gives: a word where a number should be, an infinity as a whole number.
_UNFIT = (BadRecordError, KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError)


def read_autotvm(source: Source, skip: Callable[[str], None]) -> Iterator[Record]:
    """The records of an AutoTVM log."""
    for line in lines(source):
        if not line or line.startswith("#"):
            continue
        try:
            yield _autotvm(parse_line(line))
        except _UNFIT as error:
            skip(str(error) if isinstance(error, BadRecordError) else "a line that is no AutoTVM record")


def _autotvm(entry: Any) -> Record:
    given = entry["input"] if "input" in entry else entry["i"]
    result = entry["result"] if "result" in entry else entry["r"]
    target, task, arguments = given[0], given[1], given[2]
    entity = entry["config"]["entity"] if "config" in entry else given[5]["e"]
    config = {word(name, 200): value for name, _, value in entity}
    costs, error = result[0], int(result[1])
    taken = runtimes(costs if isinstance(costs, list) else [], _SECOND) if error == 0 else ()
    return Record(
        kernel=word(task, 200),
        sizes=_numbers(arguments),
        config=flat_values(config),
        runtimes_ns=taken,
        device=_target(target),
        failure="" if taken else f"error {error}",
    )


def read_metaschedule(source: Source, skip: Callable[[str], None]) -> Iterator[Record]:
    """The records of a MetaSchedule database; its file of workloads holds none and is passed over."""
    for line in lines(source):
        if not line:
            continue
        try:
            record = _metaschedule(parse_line(line))
        except _UNFIT as error:
            skip(str(error) if isinstance(error, BadRecordError) else "a line that is no tuning record")
            continue
        if record is not None:
            yield record


def _metaschedule(entry: Any) -> Record | None:
    workload, body = entry
    if isinstance(workload, str):  # [hash, module]: a workload, not a record
        return None
    trace, seconds, target, arguments = body[0], body[1], body[2], body[3]
    instructions, decisions = trace
    config: dict[str, Any] = {}
    for position, decision in decisions:
        name = instructions[int(position)][0]
        config[f"{word(name, 100)}_{int(position)}"] = decision
    taken = runtimes(seconds if isinstance(seconds, list) else [seconds], _SECOND)
    return Record(
        kernel=f"workload{int(workload)}",
        sizes=_numbers(arguments),
        config=flat_values(config),
        runtimes_ns=taken,
        device=_target(target),
        failure="" if taken else "no runtime",
    )


@remembered
def _numbers(arguments: Any) -> Mapping[str, Value]:
    """Sizes of tensors by place: ["TENSOR", [1, 3, 224, 224], "float32"] in either order of type and shape."""
    found = flat_values({"arg": arguments})
    return {name: value for name, value in found.items() if value != "TENSOR"}


@remembered
def _target(target: Any) -> str:
    if isinstance(target, Mapping):
        target = " ".join(str(target.get(key, "")) for key in ("kind", "mcpu", "arch", "tag", "model")).strip()
    return str(target)[:100]
