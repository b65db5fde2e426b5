"""docs/assets/results.svg: how fast tilewise is beside its peers, a line for each kind of work and CPU.

A dot is the typical ratio, the bar around it goes from the worst case to the best. The text's grey can be read on light
and on dark pages, since a picture in a page does not know which of the two it stands on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tilewise._wording import with_interval

_COLOURS = ("#3b7dd8", "#d9772b", "#2a9d8f", "#9a62c4", "#b0413e", "#8a8a1f")
_TEXT = "#808080"
_LEFT, _RIGHT, _WIDTH, _STEP, _TOP = 330, 20, 860, 13, 52


@dataclass(frozen=True)
class Range:
    """One line of the picture."""

    label: str
    kind: str
    worst: float
    typical: float
    best: float


@dataclass(frozen=True)
class Scale:
    """From ratio to place; the ends are powers of two that no line reaches beyond."""

    low: int  # exponents of two
    high: int

    @classmethod
    def of(cls, ranges: Sequence[Range]) -> Scale:
        worst, best = min(line.worst for line in ranges), max(line.best for line in ranges)
        return cls(min(math.floor(math.log2(worst)), -1), max(math.ceil(math.log2(best)), 1))

    def x(self, ratio: float) -> float:
        return _LEFT + (math.log2(ratio) - self.low) / (self.high - self.low) * (_WIDTH - _LEFT - _RIGHT)

    def ticks(self) -> list[float]:
        return [2.0**exponent for exponent in range(self.low, self.high + 1)]


def picture(ranges: Sequence[Range], kinds: Sequence[str]) -> str:
    """The picture as SVG; lines of one label stand together under it."""
    colours = dict(zip(kinds, _COLOURS, strict=False))
    parts, y, above, scale = [], _TOP, "", Scale.of(ranges)
    for line in ranges:
        if line.label != above:
            y += _STEP // 2
            parts.append(_text(_LEFT - 12, y + 4, line.label, "end"))
            above = line.label
        parts.append(_line(line, y, colours.get(line.kind, _TEXT), scale))
        y += _STEP
    height = y + 30
    title = "Speed compared with the fastest peer: above 1, tilewise is faster"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        _text(_LEFT, 16, "fastest peer's time / tilewise's (logarithmic): dot typical, bar worst to best", "start"),
        *_legends(kinds, colours),
        *(_tick(value, y, scale) for value in scale.ticks()),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}" fill="{_TEXT}">{escape(text)}</text>'


def _line(line: Range, y: int, colour: str, scale: Scale) -> str:
    ratio = with_interval(f"{line.typical:.2f}×", f"{line.worst:.2f}", f"{line.best:.2f}")
    said = f"{line.label}, {line.kind}: {ratio}"
    return (
        f'<g stroke="{colour}" fill="{colour}"><title>{escape(said)}</title>'
        f'<line x1="{scale.x(line.worst):.1f}" x2="{scale.x(line.best):.1f}" y1="{y}" y2="{y}" '
        'stroke-width="3" opacity="0.45"/>'
        f'<circle cx="{scale.x(line.typical):.1f}" cy="{y}" r="4" stroke="none"/></g>'
    )


def _legends(kinds: Sequence[str], colours: Mapping[str, str]) -> list[str]:
    """One after the other, with room by the number of letters."""
    room = [30 + 7 * len(kind) for kind in kinds]
    return [_legend(16 + sum(room[:i]), kind, colours[kind]) for i, kind in enumerate(kinds)]


def _legend(x: int, kind: str, colour: str) -> str:
    return f'<circle cx="{x}" cy="34" r="4" fill="{colour}"/>{_text(x + 10, 38, kind, "start")}'


def _tick(value: float, bottom: int, scale: Scale) -> str:
    x, weight = scale.x(value), 1.5 if value == 1 else 0.5
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="{_TEXT}" stroke-width="{weight}"/>'
        f"{_text(x, bottom + 16, f'{value:g}×', 'middle')}"
    )
