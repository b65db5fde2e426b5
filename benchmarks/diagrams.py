"""The pictures of docs/how-it-works.md, in two colour schemes: tile, waves, ranking and uncertainty.

The first two explain with made-up sizes; the last two draw what `results/replay.json` recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.picture import COLOURS, COLUMN
from benchmarks.results_files import read_any

_MEASUREMENTS = range(1, 11)
_STRATEGIES = {
    "random": "at random",
    "exhaustive": "in the order of the list",
    "analytical": "by a formula (roofline and waves)",
    "the model's order, first k": "in the model's order",
    "ours, by expected improvement": "model and Gaussian process",
}


class Diagram:
    """SVG elements in one colour scheme, with a few shorthands."""

    def __init__(self, dark: bool) -> None:
        self.ink, self.muted, self.grid, self.colours = COLOURS[dark]
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "", size: int = 13) -> None:
        style = f'font-size="{size}" fill="{colour or self.ink}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>')

    def box(
        self, corner: tuple[float, float], size: tuple[float, float], fill: str = "none", opacity: float = 1
    ) -> None:
        (x, y), (width, height) = corner, size
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" fill="{fill}" '
            f'fill-opacity="{opacity}" stroke="{self.muted}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> None:
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )

    def svg(self, height: int, description: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMN} {height}" role="img" '
            f'aria-label="{escape(description)}" font-family="system-ui, -apple-system, sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def tile(dark: bool) -> str:
    """One tile of C = A B needs a band of rows of A and a band of columns of B."""
    d = Diagram(dark)
    side, top, block = 112, 40, 28
    for place, (name, shape) in enumerate((("A", "m × k"), ("B", "k × n"), ("C", "m × n"))):
        left = 14 + place * 150
        d.box((left, top), (side, side))
        d.text(left + side / 2, top - 10, f"{name}  ({shape})")
        d.text(left + side + 19, top + side / 2 + 5, ("×", "=", "")[place], size=18)
    blue, orange, green = d.colours[:3]
    d.box((14, top + block), (side, block), blue, 0.2)
    d.box((14 + block, top + block), (block, block), blue, 0.7)
    d.box((164 + 2 * block, top), (block, side), orange, 0.2)
    d.box((164 + 2 * block, top + block), (block, block), orange, 0.7)
    d.box((314 + 2 * block, top + block), (block, block), green, 0.7)
    d.text(COLUMN / 2, top + side + 26, "A tile of C sums blocks of A and B that stay in fast memory.")
    d.text(COLUMN / 2, top + side + 46, "Larger tiles move fewer bytes, until they no longer fit.", colour=d.muted)
    return d.svg(top + side + 60, "A tile of a matrix product")


def waves(dark: bool) -> str:
    """Thread blocks run in waves; an almost empty last wave costs as much as a full one."""
    d = Diagram(dark)
    cores, cell = 8, 40
    for row, (label, blocks) in enumerate((("16 tiles on 8 cores: 2 waves", 16), ("17 tiles on 8 cores: 3 waves", 17))):
        top = 30 + row * 150
        d.text(14, top - 8, label, anchor="start")
        for wave in range(math.ceil(blocks / cores)):
            for core in range(cores):
                is_busy = wave * cores + core < blocks
                fill = d.colours[0] if is_busy else "none"
                d.box((14 + core * (cell + 6), top + wave * 34), (cell, 26), fill, 0.7)
            d.text(14 + cores * (cell + 6) + 4, top + wave * 34 + 18, f"wave {wave + 1}", anchor="start", size=12)
    d.text(
        14, 304, "One tile more, half as much time again: the last wave is nearly idle.", anchor="start", colour=d.muted
    )
    return d.svg(320, "Waves of thread blocks")


def _axes(d: Diagram, xs: Mapping[float, str], ys: Mapping[float, str], title: str) -> None:
    """Grid lines with labels; the keys are positions in pixels."""
    left, right, bottom = min(xs), max(xs), max(ys)
    d.text(12, 20, title, anchor="start")
    for y, label in ys.items():
        d.line([(left, y), (right, y)], d.grid)
        d.text(left - 8, y + 4, label, anchor="end", colour=d.muted, size=12)
    for x, label in xs.items():
        d.text(x, bottom + 20, label, colour=d.muted, size=12)


def ranking(dark: bool) -> str:
    """Draw the slowdown of the choice against the number of measurements, on the H200's test kernels."""
    d, regret = Diagram(dark), read_any("replay")["replay"]["h200"]["regret"]
    low, high = -2.0, math.log10(300)  # per cent slower, 0.01 to 300

    def x(count: float) -> float:
        return 70 + (count - 1) * 40

    def y(fraction: float) -> float:
        return 40 + (high - max(math.log10(max(100 * fraction, 1e-9)), low)) / (high - low) * 220

    ticks = {y(percent / 100): f"{percent:g} %" for percent in (100, 10, 1, 0.1, 0.01)}
    _axes(d, {x(count): str(count) for count in _MEASUREMENTS}, ticks, "slower than the best, mean of 140 kernels")
    d.text(250, 298, "configurations measured", colour=d.muted, size=12)
    for place, (strategy, values) in enumerate(regret.items()):
        d.line([(x(count), y(values[count - 1])) for count in _MEASUREMENTS], d.colours[place])
        d.parts.append(f'<circle cx="20" cy="{320 + 20 * place}" r="5" fill="{d.colours[place]}"/>')
        d.text(32, 324 + 20 * place, _STRATEGIES.get(strategy, strategy), anchor="start", size=12)
    return d.svg(330 + 20 * len(regret), "Slowdown after one to ten measurements")


def uncertainty(dark: bool) -> str:
    """Draw how often the claim "within 5 %" is made, and how often it is right."""
    d, replay = Diagram(dark), read_any("replay")["replay"]
    counts = sorted(int(count) for count in replay["h200"]["sure"])
    xs = {70 + 340 * count / counts[-1]: str(count) for count in counts}

    def y(share: float) -> float:
        return 40 + (1 - share) * 200

    _axes(d, xs, {y(share): f"{share:.0%}" for share in (0, 0.25, 0.5, 0.75, 1)}, "claims “within 5 %”")
    d.text(240, 278, "configurations measured", colour=d.muted, size=12)
    for place, (name, color) in enumerate((("h200", d.colours[0]), ("cpu", d.colours[1]))):
        rows: dict[str, Any] = replay[name]["sure"]
        for key, dashes, label in (("said", "", "claimed for"), ("right", "5 4", "right when claimed")):
            points = [(x, y(rows[count][key])) for x, count in xs.items() if key in rows[count]]
            d.line(points, color, dashes)
            row = 300 + 20 * (2 * place + (key == "right"))
            d.line([(12, row), (40, row)], color, dashes)
            d.text(48, row + 4, f"{name}: {label}", anchor="start", size=12)
    return d.svg(376, "Claims of being within five per cent, and how often they are right")


DIAGRAMS: Mapping[str, Callable[[bool], str]] = {
    "tile": tile, "waves": waves, "ranking": ranking, "uncertainty": uncertainty,
}  # fmt: skip
