"""The tour's report: one self-contained HTML page that opens from disk and loads nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from tilewise.tour.stops import Bars, Headline, Stop, Table


def page(stops: Sequence[Stop], about: str, headlines: Sequence[Headline] = ()) -> str:
    """Format the whole page; `about` is the line under its title, `headlines` are the numbers at the top."""
    style = (files("tilewise.tour") / "page.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tilewise on this machine</title><style>{style}</style>"
    )
    links = "".join(f'<li><a href="#stop{i}">{escape(stop.title)}</a></li>' for i, stop in enumerate(stops, 1))
    hint = f'<p class="hint">{escape(about)}</p>'
    numbers = "".join(f"<div><b>{escape(h.number)}</b><p>{escape(h.sentence)}</p></div>" for h in headlines)
    hero = f'<div class="headlines">{numbers}</div>' if numbers else ""
    intro = f"<h1>tilewise on this machine</h1>{hint}{hero}<nav><ol>{links}</ol></nav>"
    body = "\n".join(_format_section(number, stop) for number, stop in enumerate(stops, 1))
    steps = "".join(f"<li>{_format_code(line)}</li>" for line in NEXT)
    body += f'\n<section id="next"><h2>What next</h2><ul>{steps}</ul></section>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{intro}\n{body}\n</main></body></html>\n'


NEXT = (
    "`tilewise check` lists seven lessons with exercises: how each of these steps works inside.",
    "`tilewise profile cnn` shows where a model's time goes; `--html` draws it. It also profiles your own scripts.",
    "`tilewise calibrate` takes a minute and tunes a few dozen kernels on this machine, or your own shapes.",
    "`tilewise tune matmul 512x512x512` finds the best tile for one shape and stores it.",
    "`tilewise compete run --event MLP_SPRINT --entry reference` scores an entry of the competition.",
    "`tilewise --help` lists the rest.",
)


def _format_code(line: str) -> str:
    """Escape a line for HTML; text between backticks becomes code."""
    pieces = escape(line).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(pieces))


def _format_section(number: int, stop: Stop) -> str:
    """Format one stop of the tour as an HTML section."""
    lead = f'<p class="meaning">{escape(stop.meaning)}</p>' if stop.meaning else ""
    lines = lead + "".join(f"<p>{_format_code(line)}</p>" for line in stop.lines)
    charts = "".join(f"<figure><figcaption>{escape(c.title)}</figcaption>{bars(c)}</figure>" for c in stop.charts)
    tables = "".join(
        _table(table) for table in stop.tables if not any(_repeats_chart(table, chart) for chart in stop.charts)
    )
    return f'<section id="stop{number}"><h2>{number}. {escape(stop.title)}</h2>{lines}{charts}{tables}</section>'


def _repeats_chart(table: Table, chart: Bars) -> bool:
    """Tell whether a table has only the values that a chart shows already."""
    return len(table.headings) == 2 and [row[0] for row in table.rows] == list(chart.values)


def _table(table: Table) -> str:
    """Format a table as HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def bars(chart: Bars) -> str:
    """Format a bar chart as HTML, values at the bars' ends; on a narrow screen the names are above the bars."""
    largest = max(chart.values.values(), default=0.0) if chart.largest is None else chart.largest
    rows = "".join(
        f'<div><span>{escape(name)}</span><p><i style="--share:{_share(value, largest, chart.log):.4f}"></i>'
        f"{_number(value)}</p></div>"
        for name, value in chart.values.items()
    )
    scale = " (logarithmic)" if chart.log else ""
    label = escape(f"{chart.title}: " + ", ".join(f"{name} {_number(value)}" for name, value in chart.values.items()))
    return f'<div class="bars" role="img" aria-label="{label}">{rows}<small>{escape(chart.unit)}{scale}</small></div>'


def _share(value: float, largest: float, log: bool) -> float:
    """Return a bar's length in [0, 1] for a value, on a linear or logarithmic scale up to `largest`."""
    if not (value > 0 and largest > 0):
        return 0.0
    return math.log1p(value) / math.log1p(largest) if log else value / largest


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
