"""Render the profile as text: a summary line, two tables, and a sentence with advice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from tilewise.profile.events import ProfileEvent
from tilewise.profile.flops import cost_of
from tilewise.profile.machine import MachineFigures, active_isa
from tilewise.profile.report.charts import KINDS, roofline_svg, timeline_svg
from tilewise.profile.report.results import ProfileResults, ProfileRow
from tilewise.profile.units import bytes_, count, seconds, share

HEADINGS = ("time", "share", "calls", "FLOPs", "FLOP/s", "of roofline", "moved", "allocated", "backend")


def text_report(results: ProfileResults, rows: int = 15) -> str:
    """Format tables by layer and by operation with their share of the roofline, and the bottleneck."""
    sections = [_format_totals(results), ceilings(results.machine, results.threads)]
    if results.by_layer:
        sections += [_table("layer", list(results.by_layer.values()), results, rows)]
        sections += [_table("operation", list(results.by_op.values()), results, rows)]
    sections.append(verdict(results))
    if results.failed:
        sections.append(f"{results.failed} operations raised an error; their work is not counted.")
    return "\n\n".join(sections)


def verdict(results: ProfileResults) -> str:
    """Format the bottleneck and the other causes, one line each."""
    if not results.findings:
        return "Nothing was recorded: no operation of tilewise ran inside the context."
    first, *others = results.findings
    return "\n".join([f"Bottleneck: {first.sentence}", *(f"Also: {finding.sentence}" for finding in others)])


def _format_totals(results: ProfileResults) -> str:
    """Format total time, floating-point work and bytes moved in one line."""
    return (
        f"{seconds(results.seconds)} in total, {seconds(results.outside_seconds)} of it outside layers and operations; "
        f"{count(results.flops)}FLOP in products at {count(results.flops_per_second)}FLOP/s, "
        f"{bytes_(results.bytes_moved)} moved (recording overhead of {seconds(results.recording_seconds)} excluded)"
    )


def ceilings(machine: MachineFigures, threads: int) -> str:
    """Format the machine's peak rates for this number of threads in one line."""
    cache, memory = machine.bandwidth(0.0, threads), machine.memory_bandwidth(threads)
    plural = "thread" if threads == 1 else "threads"
    doubtful = f" (doubtful: {machine.doubts[0]})" if machine.doubts else ""
    return (
        f"Ceilings ({machine.cpu}, {active_isa()}, {threads} {plural}, {machine.method}): "
        f"{count(machine.peak(threads))}FLOP/s; {count(cache)}B/s in cache, {count(memory)}B/s in memory{doubtful}"
    )


def _table(first: str, rows: list[ProfileRow], results: ProfileResults, max_rows: int) -> str:
    """Format the rows as a text table; the first column is called `first`, rows after `max_rows` are summed up."""
    lines = [[row.title, *row_cells(row, results.seconds)] for row in rows[:max_rows] if row.seconds > 0]
    if len(rows) > max_rows:
        remaining = sum(row.seconds for row in rows[max_rows:])
        lines.append(
            [f"({len(rows) - max_rows} more)", seconds(remaining), share(remaining / results.seconds), *[""] * 7]
        )
    return aligned([first, *HEADINGS], lines)


def row_cells(row: ProfileRow, total: float) -> list[str]:
    """Format a row's cells in the order of `HEADINGS`; `total` is the profile's time in seconds."""
    allocated = row.allocated + row.own_allocated
    return [
        seconds(row.seconds),
        share(row.seconds / total if total else 0.0),
        str(row.calls),
        count(row.flops).strip() if row.flops else "",
        count(row.flops_per_second).strip() if row.flops else "",
        roofline_text(row.roofline_share) if row.roofline_seconds else "",
        bytes_(row.bytes_moved) if row.bytes_moved else "",
        bytes_(allocated) if allocated else "",
        ", ".join(row.backends),
    ]


def roofline_text(fraction: float) -> str:
    """Format a share of the roofline; above 1 (Winograd multiplies less than is counted) it says so."""
    return share(fraction) if fraction <= 1.0 else "> 100 %"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with padded columns: the first and the last aligned left, numbers aligned right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    last = len(headings) - 1

    def line(cells: Sequence[str]) -> str:
        """Format one line with padded cells."""
        padded = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *(line(row) for row in rows)])


# --- Chrome trace ---


def chrome_trace(events: Sequence[ProfileEvent], start_ns: int) -> dict[str, Any]:
    """Convert events to the trace, as plain data for JSON."""
    process = os.getpid()
    threads: dict[int, int] = {}
    ordered = sorted(events, key=lambda e: (e.start_ns, -e.end_ns))
    entries: list[dict[str, Any]] = [_name_event("process_name", process, 0, "tilewise")]
    for event in ordered:
        number = threads.setdefault(event.thread, len(threads) + 1)
        entries.append(_entry(event, process, number, start_ns))
    entries += [_name_event("thread_name", process, number, f"thread {number}") for number in threads.values()]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _entry(event: ProfileEvent, process: int, thread: int, start_ns: int) -> dict[str, Any]:
    """Convert an event to a trace entry; `start_ns` is the trace's time 0."""
    return {
        "name": event.layer or event.name if event.kind == "module" else event.name,
        "cat": f"{event.kind},{event.phase}",
        "ph": "X",
        "ts": max(event.start_ns - start_ns, 0) / 1000,
        "dur": event.duration_ns / 1000,
        "pid": process,
        "tid": thread,
        "args": _details(event),
    }


def _details(event: ProfileEvent) -> dict[str, Any]:
    """Return an event's shapes, work, backend, tile and memory for the viewer's details pane."""
    details: dict[str, Any] = {"layer": event.layer, "kind": event.name}
    if event.inputs:
        details["inputs"] = [list(shape) for shape in event.inputs]
        details["outputs"] = [list(shape) for shape in event.outputs]
    cost = cost_of(event)
    if cost is not None:
        details |= {"flops": cost.flops, "elementwise": cost.elementwise, "bytes": cost.bytes_moved}
    if event.backend:
        details["backend"] = event.backend
    if event.tile is not None:
        details["tile"] = str(event.tile)
    if event.allocated:
        details["allocated"] = event.allocated
    if event.failed:
        details["failed"] = True
    return details


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the metadata event that names a process or thread (`kind`) in Chrome's trace format."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


# --- HTML page ---


_TIMELINE_HINT = (
    "Layers on top, operations and kernels below them. Drag to move, use the wheel to zoom, double-click to reset; "
    "point at a bar for details."
)
_ROOFLINE_HINT = (
    "Each dot is an operation; its size shows its share of the time. The lines are the peak rates of this machine: a "
    "dot under the slanted part is limited by memory, under the flat part by arithmetic. Winograd convolutions can "
    "pass the lines, because they multiply less than is counted."
)


def _asset(name: str) -> str:
    return (files("tilewise.profile.report") / name).read_text(encoding="utf-8")


def html_page(results: ProfileResults, events: Sequence[ProfileEvent], title: str = "tilewise profile") -> str:
    """Render the report as one HTML page: summary, tables, timeline and roofline."""
    drawing, omitted = timeline_svg(events)
    legend = "".join(f'<span><i style="background:var(--{name})"></i>{label}</span>' for name, label in KINDS.items())
    sections = [
        f"<h1>{escape(title)}</h1>",
        _verdict(results),
        _tiles(results),
        f'<h2>Timeline</h2><p class="hint">{_TIMELINE_HINT}</p>',
        f'<p class="legend">{legend}</p>',
        f'<div class="chart" id="timeline">{drawing}</div>',
        f'<p class="hint">{omitted} bars too short to see are omitted.</p>' if omitted else "",
        f'<h2>Roofline</h2><p class="hint">{_ROOFLINE_HINT}</p>',
        f'<div class="chart">{roofline_svg(results)}</div>',
        f'<p class="hint">{escape(ceilings(results.machine, results.threads))}</p>',
        "<h2>By layer</h2>" + _html_table("layer", list(results.by_layer.values()), results.seconds),
        "<h2>By operation</h2>" + _html_table("operation", list(results.by_op.values()), results.seconds),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_asset("page.css")}</style></head>\n'
        f"<body><main>\n{body}\n</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _verdict(results: ProfileResults) -> str:
    """Format the findings as HTML, the first one as the verdict and the others as a list."""
    if not results.findings:
        return '<p class="verdict">Nothing was recorded.</p>'
    first, *others = results.findings
    more = "".join(f"<li>{escape(finding.sentence)}</li>" for finding in others)
    return f'<p class="verdict">{escape(first.sentence)}</p>' + (f'<ul class="hint">{more}</ul>' if more else "")


def _tiles(results: ProfileResults) -> str:
    """Render the row of summary numbers above the charts."""
    figures = [
        (seconds(results.seconds), "measured time"),
        (f"{count(results.flops)}FLOP", "in products"),
        (f"{count(results.flops_per_second)}FLOP/s", "overall"),
        (roofline_text(results.roofline_share), "of the roofline"),
        (bytes_(results.bytes_moved), "moved at least"),
        (seconds(results.recording_seconds), "recording overhead (excluded)"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in figures)
    return f'<div class="tiles">{cells}</div>'


def _html_table(first: str, rows: list[ProfileRow], total: float) -> str:
    """Format up to 200 rows as an HTML table; `total` is the whole runtime in seconds."""
    head = "".join(f"<th>{heading}</th>" for heading in (first, *HEADINGS))
    body = "".join(_row(row, total) for row in rows[:200] if row.seconds > 1e-4 * total)  # at least 0.01 %
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: ProfileRow, total: float) -> str:
    """Format one row of the HTML table, with a bar for its share of the runtime."""
    cells = [escape(cell) for cell in row_cells(row, total)]
    bar = f'<span class="share"><i style="width:{60 * min(row.seconds / total, 1):.1f}px"></i></span>'
    cells[1] = f'{bar}<span class="number">{cells[1]}</span>'
    tile = f"<small>{escape(next(iter(row.tiles)))}</small>" if row.tiles else ""
    return f"<tr><td>{escape(row.title)}{tile}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
