"""Figures of the charts on the pages; `templates/charts.html` draws them as inline SVG."""

from __future__ import annotations

import math
from typing import Any

from tilewise.profile.units import bytes_, seconds

_MAX_BAR = 590  # user units of a bar; text takes the rest of the chart's 720


def step_rows(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chart bar for each step of a recipe: the cumulative speed-up on a log scale."""
    speedups = [float(step["speedup"]) for step in steps]
    largest = math.log1p(max([1.0001, *speedups]))
    return [
        {
            "label": str(step["label"]),
            "length": _MAX_BAR * max(math.log1p(speedup) / largest, 0.012),
            "text": f"{speedup:.2f}×",
            "kind": "after" if at else "before",
        }
        for at, (step, speedup) in enumerate(zip(steps, speedups, strict=True))
    ]


def history(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of a chart of an event's records over time: points, entries and axis levels."""
    scores = [float(record["score"] or 0) for record in records]
    low, high = 0.8 * min(scores, default=0.0), max(scores, default=0.0) * 1.08 or 1.0

    def y(score: float) -> float:
        return 12 + 154 * (1 - (score - low) / (high - low))

    points = [
        {"x": 56 + 644 * at / len(records), "y": y(score), "end": 56 + 644 * (at + 1) / len(records)}
        | {"entry": int(record["entry"]), "day": str(record["at"])[5:10]}
        | {"label": f"{record['team']}: {score:.2f} on {str(record['at'])[:10]}"}
        for at, (record, score) in enumerate(zip(records, scores, strict=True))
    ]
    return {"points": points, "levels": [(level, y(level)) for level in (low, (low + high) / 2, high)]}


def before_and_after(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare baseline and entry in time, memory and file size: texts and widths of two bars each."""
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
        longer = max(before, after) / 100
        widths = (before / longer, max(after / longer, 0.6))
        pairs.append({"title": title, "gain": before / after, "texts": texts, "widths": widths})
    return pairs
