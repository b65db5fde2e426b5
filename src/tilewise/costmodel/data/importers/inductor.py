"""PyTorch's records: AutoHeuristic's text, and JSON lines from a feedback saver.

AutoHeuristic writes a line of JSON (the device and which columns are numbers), then CSV: the problem's columns,
``choice`` and ``feedback`` in milliseconds. A choice is a name such as ``type=triton_BLOCK-M=64_…_numwarps=4``, or
``extern_mm``, the library, which counts as the default. A feedback line is ``{"name": "mm", "sizes": {…}, "device": …,
"choices": [[{…configuration…}, milliseconds], …]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from tilewise.costmodel.data.importers.record import (
    BadRecordError,
    Record,
    Value,
    flat_values,
    plain,
    remembered,
    runtime,
    word,
)
from tilewise.costmodel.data.importers.stream import Source, csv_rows, lines, parse_line

_MILLISECOND = 1e6
_OUR_NAMES = {"numwarps": "warps", "numstages": "stages"}  # as in collections of our own


def read(source: Source, skip: Callable[[str], None]) -> Iterator[Record]:
    """The records of either kind of file; the first line tells which."""
    text = lines(source)
    head = parse_line(next(text, ""))
    if isinstance(head, Mapping) and "choices" in head:
        yield from _feedback(head, skip)
        for line in text:
            yield from _feedback(parse_line(line), skip)
        return
    if not isinstance(head, Mapping):
        return skip("no line of JSON at the start")
    columns = next(csv_rows([next(text, "")], skip), [])
    if not {"choice", "feedback"} <= set(columns):
        return skip("no columns called choice and feedback")
    device = _device(head)
    name = str(head.get("name", "kernel"))[:100] or "kernel"
    details = {key: head[key] for key in ("shared_memory", "device_capa") if key in head}
    choice, feedback = columns.index("choice"), columns.index("feedback")
    sizes = [place for place in range(len(columns)) if place not in (choice, feedback)]
    named = tuple(columns[place] for place in sizes)
    sized: Callable[[list[str]], Any] = itemgetter(*sizes) if len(sizes) > 1 else lambda row: [row[i] for i in sizes]
    for row in csv_rows(text, skip):
        try:
            config = _choice(row[choice])
            taken = runtime(float(row[feedback]), _MILLISECOND)
            default = config.get("type") == "extern"
            values = _sizes((named, sized(row)))
            yield Record(name, values, config, taken, device, "" if taken else "no runtime", default, details)
        except BadRecordError as error:
            skip(str(error))
        except (IndexError, ValueError):
            skip("a row that lacks columns")


@remembered
def _sizes(row: tuple[Sequence[str], Sequence[str]]) -> Mapping[str, Value]:
    return {word(column, 100): plain(value) for column, value in zip(*row, strict=False)}


@remembered
def _choice(text: str) -> Mapping[str, Value]:
    """A choice's settings by name; the library has none but its own."""
    parts = dict(part.split("=", 1) for part in text.split("_") if "=" in part)
    parts = {_OUR_NAMES.get(name, name): value for name, value in parts.items()}
    if not parts:
        return flat_values({"type": "extern", "library": text})
    return flat_values(parts)


def _device(head: Mapping[str, Any]) -> str:
    capability = head.get("device_capa")
    if isinstance(capability, list) and len(capability) == 2:
        return f"sm{capability[0]}{capability[1]}"[:20]
    return str(head.get("device", ""))[:100]


def _feedback(entry: Any, skip: Callable[[str], None]) -> Iterator[Record]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("choices"), list):
        return skip("a line that is no feedback record")
    try:
        name, sizes = word(entry.get("name"), 100), flat_values(entry.get("sizes", {}))
    except BadRecordError as error:
        return skip(str(error))
    device = str(entry.get("device", ""))[:100]
    for choice in entry["choices"]:
        try:
            config, milliseconds = choice
            taken = runtime(milliseconds, _MILLISECOND)
            settings = flat_values(config if type(config) is dict else {"choice": config})
            yield Record(name, sizes, settings, taken, device, "" if taken else "no runtime")
        except BadRecordError as error:
            skip(str(error))
        except (TypeError, ValueError):
            skip("a choice that is no pair of a configuration and a time")
