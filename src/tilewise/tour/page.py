"""The tour's report: one HTML page with its styles and drawings inside, which loads nothing and opens from disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from tilewise.tour.stops import Bars, Stop, Table

_WIDTH, _ROW, _LABEL = 860, 30, 250


def page(stops: Sequence[Stop], when: str) -> str:
    """The whole page as text."""
    style = (files("tilewise.tour") / "page.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tilewise on this machine</title><style>{style}</style>"
    )
    links = "".join(f'<li><a href="#stop{i}">{escape(stop.title)}</a></li>' for i, stop in enumerate(stops, 1))
    hint = f'<p class="hint">Measured here, {escape(when)}.</p>'
    intro = f"<h1>tilewise on this machine</h1>{hint}<nav><ol>{links}</ol></nav>"
    body = "\n".join(_section(number, stop) for number, stop in enumerate(stops, 1))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{intro}\n{body}\n</main></body></html>\n'


def _section(number: int, stop: Stop) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in stop.lines)
    charts = "".join(f"<figure><figcaption>{escape(c.title)}</figcaption>{bars_svg(c)}</figure>" for c in stop.charts)
    tables = "".join(_table(table) for table in stop.tables)
    return f'<section id="stop{number}"><h2>{number}. {escape(stop.title)}</h2>{lines}{charts}{tables}</section>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def bars_svg(chart: Bars) -> str:
    """Horizontal bars with their values written at the end."""
    largest = max(chart.values.values(), default=0.0)
    height = _ROW * len(chart.values) + 24
    bars = []
    for place, (name, value) in enumerate(chart.values.items()):
        length = (_WIDTH - _LABEL - 90) * _share(value, largest, chart.log)
        top = place * _ROW
        bars.append(
            f'<text x="{_LABEL - 10}" y="{top + 19}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LABEL}" y="{top + 5}" width="{max(length, 1):.1f}" height="{_ROW - 10}" rx="3"/>'
            f'<text x="{_LABEL + length + 8:.1f}" y="{top + 19}">{_number(value)}</text>'
        )
    scale = " (logarithmic)" if chart.log else ""
    unit = f'<text class="soft" x="{_LABEL}" y="{height - 6}">{escape(chart.unit)}{scale}</text>'
    label = escape(f"{chart.title}: " + ", ".join(f"{name} {_number(value)}" for name, value in chart.values.items()))
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(bars)}{unit}</svg>'


def _share(value: float, largest: float, log: bool) -> float:
    if not (value > 0 and largest > 0):
        return 0.0
    return math.log1p(value) / math.log1p(largest) if log else value / largest


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
