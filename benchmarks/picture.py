"""Dot plots of the cost model's choices and of the speed compared with the fastest peer, as SVG.

Labels stand above their lanes, so that a picture can still be read on a phone. A dot is the typical value, a bar goes
from the worst case to the best, and the vertical line at 1 separates slower from faster. A hollow dot has measurements
that are older than the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLUMN, _LEFT, _RIGHT, _LANE = 460, 12, 16, 13  # pixels: a column, its margins, the distance of two lanes
COLOURS = (  # ink, muted text, grid and series on a light page, then on a dark one
    ("#24292f", "#57606a", "#d0d7de", ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#6e7781")),
    ("#e6edf3", "#9da7b3", "#3d444d", ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#ff7bc0", "#afb8c1")),
)


@dataclass(frozen=True)
class Lane:
    """One bar with its dot; `series` is the place of its colour and legend."""

    series: int
    worst: float
    typical: float
    best: float
    is_stale: bool = False


@dataclass(frozen=True)
class Group:
    """Lanes that share a label and, in smaller letters, the peers they are compared with."""

    label: str
    peers: str
    lanes: Sequence[Lane]


class Picture:
    """Collects SVG elements from top to bottom, in columns from left to right, in one of the two colour schemes."""

    def __init__(self, dark: bool) -> None:
        self.ink, self.muted, self.grid, self.colours = COLOURS[dark]
        self.parts: list[str] = []
        self.left, self.y, self.height = 0, 0, 0

    def next_column(self) -> None:
        """Continue at the top, to the right of what is drawn already."""
        self.left, self.y, self.height = self.left + COLUMN, 0, max(self.height, self.y)

    def text(
        self, x: float, text: str, size: int = 13, colour: str = "", anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{self.left + x:.0f}" y="{self.y}" font-size="{size}" fill="{colour or self.ink}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def note(self, text: str) -> None:
        self.text(_LEFT, text, 12, self.muted)

    def legend(self, names: Sequence[str]) -> None:
        """Names with their colours, as many in a line as fit."""
        x = _LEFT
        self.y += 20
        for name, colour in zip(names, self.colours, strict=False):
            width = 22 + 7 * len(name)
            if x + width > COLUMN - _RIGHT:
                x, self.y = _LEFT, self.y + 18
            self.parts.append(f'<circle cx="{self.left + x + 5}" cy="{self.y - 4}" r="4.5" fill="{colour}"/>')
            self.text(x + 14, name, 12, self.muted)
            x += width

    def panel(self, title: str, subtitle: str, groups: Sequence[Group], ticks: Sequence[float], log: bool) -> None:
        """One axis with its groups. On a logarithmic axis 1 is marked as the border between slower and faster."""
        scale = math.log2 if log else float
        low, high = scale(ticks[0]), scale(ticks[-1])

        def x(value: float) -> float:
            return _LEFT + (scale(value) - low) / (high - low) * (COLUMN - _LEFT - _RIGHT)

        self.y += 30
        self.text(_LEFT, title, 16, bold=True)
        self.y += 18
        self.text(_LEFT, subtitle, 12, self.muted)
        if log:
            self.y += 26
            self.text(x(1) - 10, "◀ slower", 13, anchor="end", bold=True)
            self.text(x(1) + 10, "faster ▶", 13, bold=True)
        for group in groups:
            self.y += 24
            self.text(_LEFT, group.label, 13, bold=True)
            self.y += 15
            self.text(_LEFT, group.peers, 12, self.muted)
            for tick in ticks:
                strong = log and tick == 1
                self.parts.append(
                    f'<line x1="{self.left + x(tick):.1f}" x2="{self.left + x(tick):.1f}" y1="{self.y + 5}" '
                    f'y2="{self.y + 4 + _LANE * len(group.lanes)}" '
                    f'stroke="{self.muted if strong else self.grid}" stroke-width="{1.5 if strong else 1}"/>'
                )
            for lane in group.lanes:
                self.y += _LANE
                self.lane(lane, x)
        self.y += 22
        for tick in ticks:
            anchor = "start" if tick == ticks[0] else "end" if tick == ticks[-1] else "middle"
            self.text(x(tick), _tick_label(tick) if log else f"{tick:g}", 12, self.muted, anchor)

    def lane(self, lane: Lane, x: Callable[[float], float]) -> None:
        """Draw one bar with its dot; `x` gives the place of a value in the column."""
        colour, y, start = self.colours[lane.series], self.y - 2, x(lane.worst)
        dot = f'r="4" fill="none" stroke="{colour}" stroke-width="2"' if lane.is_stale else 'r="4.5"'
        self.parts.append(
            f'<g fill="{colour}"><title>{lane.typical:.2f} ({lane.worst:.2f} to {lane.best:.2f})</title>'
            f'<rect x="{self.left + start:.1f}" y="{y - 1.5}" width="{x(lane.best) - start:.1f}" height="3" '
            f'rx="1.5" opacity="0.4"/><circle cx="{self.left + x(lane.typical):.1f}" cy="{y}" {dot}/></g>'
        )

    def svg(self, description: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.left + COLUMN} '
            f'{max(self.height, self.y) + 10}" role="img" '
            f'aria-label="{escape(description)}" font-family="system-ui, -apple-system, sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def _tick_label(ratio: float) -> str:
    return f"{ratio:g}×" if ratio >= 1 else f"1/{1 / ratio:g}"


def ratio_ticks(groups: Sequence[Group]) -> list[float]:
    """Powers of two that no bar reaches beyond."""
    low = min(lane.worst for group in groups for lane in group.lanes)
    high = max(lane.best for group in groups for lane in group.lanes)
    exponents = range(min(math.floor(math.log2(low)), -1), max(math.ceil(math.log2(high)), 1) + 1)
    return [2.0**exponent for exponent in exponents]
