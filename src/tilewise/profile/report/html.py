"""Render the profile as one HTML page: the bottleneck, a timeline, a roofline plot and the tables.

The file is self-contained: styles (page.css), two SVG drawings (charts.py) and a short script that zooms the timeline
(page.js). Without the script everything except zooming works.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from tilewise.profile.events import ProfileEvent
from tilewise.profile.report.charts import KINDS, roofline_svg, timeline_svg
from tilewise.profile.report.results import ProfileResults, ProfileRow
from tilewise.profile.report.text import HEADINGS, ceilings, roofline_text, row_cells
from tilewise.profile.units import bytes_, count, seconds

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
    """Render the page."""
    drawing, omitted = timeline_svg(events)
    sections = [
        f"<h1>{escape(title)}</h1>",
        _verdict(results),
        _tiles(results),
        f'<h2>Timeline</h2><p class="hint">{_TIMELINE_HINT}</p>',
        _legend(),
        f'<div class="chart" id="timeline">{drawing}</div>',
        f'<p class="hint">{omitted} bars too short to see are omitted.</p>' if omitted else "",
        f'<h2>Roofline</h2><p class="hint">{_ROOFLINE_HINT}</p>',
        f'<div class="chart">{roofline_svg(results)}</div>',
        f'<p class="hint">{escape(ceilings(results.machine, results.threads))}</p>',
        "<h2>By layer</h2>" + _table("layer", list(results.by_layer.values()), results.seconds),
        "<h2>By operation</h2>" + _table("operation", list(results.by_op.values()), results.seconds),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(section for section in sections if section)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_asset("page.css")}</style></head>\n'
        f"<body><main>\n{body}\n</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _verdict(results: ProfileResults) -> str:
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


def _legend() -> str:
    items = "".join(f'<span><i style="background:var(--{name})"></i>{label}</span>' for name, label in KINDS.items())
    return f'<p class="legend">{items}</p>'


def _table(first: str, rows: list[ProfileRow], total: float) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in (first, *HEADINGS))
    body = "".join(_row(row, total) for row in rows[:200] if row.seconds > 1e-4 * total)  # at least 0.01 %
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: ProfileRow, total: float) -> str:
    cells = [escape(cell) for cell in row_cells(row, total)]
    bar = f'<span class="share"><i style="width:{60 * min(row.seconds / total, 1):.1f}px"></i></span>'
    cells[1] = f'{bar}<span class="number">{cells[1]}</span>'
    tile = f"<small>{escape(next(iter(row.tiles)))}</small>" if row.tiles else ""
    return f"<tr><td>{escape(row.title)}{tile}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
