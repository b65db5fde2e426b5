"""Pictures for the pages: inline SVG made of plain shapes, coloured by the style sheet, with the figures as text."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup, escape

from tilewise.profile.units import bytes_, seconds

_WIDTH = 720
_ROW = 58


def bars(rows: list[dict[str, Any]], title: str) -> Markup:
    """Draw horizontal bars on a logarithmic scale: [{"label", "value", "text", "kind"}], one per row."""
    if not rows:
        return Markup()
    largest = max(max(row["value"] for row in rows), 1.0001)
    max_length = _WIDTH - 130
    shapes = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_ROW * len(rows) + 4}" role="img" aria-label="{escape(title)}">'
    ]
    for at, row in enumerate(rows):
        top = at * _ROW + 4
        long = max_length * max(math.log1p(row["value"]) / math.log1p(largest), 0.012)
        shapes.append(
            f'<text class="chart-label" x="0" y="{top + 16}">{escape(_cut(row["label"]))}</text>'
            f'<rect class="bar {escape(row.get("kind", ""))}" x="0" y="{top + 24}" '
            f'rx="4" width="{long:.1f}" height="22"/>'
            f'<text class="chart-value" x="{long + 8:.1f}" y="{top + 41}">{escape(row["text"])}</text>'
        )
    return Markup("".join(shapes) + "</svg>")


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def history(records: list[dict[str, Any]]) -> Markup:
    """Draw the records over time as steps, each with a link to its entry."""
    if not records:
        return Markup()
    width, height, axis_x, bottom = 720, 210, 56, 44
    scores = [float(r["score"] or 0) for r in records]
    low, top = 0.8 * min(scores), max(scores) * 1.08 or 1.0
    count = len(records)

    def x(at: float) -> float:
        return axis_x + (width - axis_x - 20) * (at / max(count, 1))

    def y(score: float) -> float:
        return 12 + (height - bottom - 12) * (1 - (score - low) / (top - low))

    shapes = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="Records over time">']
    for share in (0, 0.5, 1):
        level = low + (top - low) * share
        shapes.append(f'<line class="grid" x1="{axis_x}" x2="{width - 10}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>')
        shapes.append(f'<text class="chart-axis" x="{axis_x - 8}" y="{y(level) + 4:.1f}">{level:.1f}</text>')
    path = f"M {x(0):.1f} {y(scores[0]):.1f}"
    for at, score in enumerate(scores):
        path += f" V {y(score):.1f} H {x(at + 1):.1f}"
    shapes.append(f'<path class="line" d="{path}"/>')
    for at, record in enumerate(records):
        where = f'cx="{x(at):.1f}" cy="{y(scores[at]):.1f}"'
        label = f"{record['team']}: {scores[at]:.2f} on {str(record['at'])[:10]}"
        shapes.append(
            f'<a href="/entry/{int(record["entry"])}"><circle class="dot" {where} r="6"><title>{escape(label)}</title>'
            f'</circle></a><text class="chart-axis day" x="{x(at):.1f}" y="{height - 6}">'
            f"{escape(str(record['at'])[5:10])}</text>"
        )
    return Markup("".join(shapes) + "</svg>")


def before_and_after(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Draw pairs of bars: plain tilewise and the entry, in time, memory and file."""
    figures = result.get("figures", {})
    base, entry = figures.get("baseline", {}), figures.get("entry", {})
    pairs = []
    for title, key, show in (
        ("Latency (p50)", "latency_s", seconds),
        ("Memory", "memory_bytes", bytes_),
        ("File", "file_bytes", bytes_),
    ):
        try:
            before, after = (float(side[key]["p50"] if key == "latency_s" else side[key]) for side in (base, entry))
        except (KeyError, TypeError):
            continue
        if before <= 0 or after <= 0:
            continue
        relative = title != "Latency (p50)" and after <= 1.0  # the open division knows ratios, not bytes
        texts = ("1", f"1/{before / after:.2f}") if relative else (show(before), show(after))
        pairs.append(
            {"title": title, "gain": before / after, "before": texts[0], "after": texts[1], "share": after / before}
        )
    return pairs


def pair_bars(pair: dict[str, Any]) -> Markup:
    """Draw two bars on one scale, before above after."""
    share = float(pair["share"])
    before, after = (100.0, 100 * share) if share <= 1 else (100 / share, 100.0)
    return Markup(
        '<svg class="pair" viewBox="0 0 100 22" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar before" x="0" y="0" width="{before:.2f}" height="9" rx="1.2"/>'
        f'<rect class="bar after" x="0" y="12" width="{max(after, 0.6):.2f}" height="9" rx="1.2"/></svg>'
    )


def step_rows(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cumulative speed-up after each step of a recipe."""
    return [
        {
            "label": str(step["label"]),
            "value": float(step["speedup"]),
            "text": f"{float(step['speedup']):.2f}×",
            "kind": "before" if at == 0 else "after",
        }
        for at, step in enumerate(steps)
    ]
