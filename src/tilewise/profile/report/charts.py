"""The two SVG drawings of the HTML page: the timeline of nested events, and the roofline plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tilewise.profile.events import ProfileEvent
from tilewise.profile.flops import cost_of
from tilewise.profile.report.results import ProfileResults
from tilewise.profile.units import bytes_, count, seconds

KINDS = {
    "layer": "layer",
    "python": "operation outside its kernel",
    "compute": "product (matmul, convolution, attention)",
    "memory": "other operation",
    "backward": "backward pass",
}
_WIDTH, _ROW = 1080, 22  # of the drawing and of one row of bars, in SVG units
_MAX_BARS = 3000  # keeps the page below about 1 MB


def timeline_svg(events: Sequence[ProfileEvent]) -> tuple[str, int]:
    """Draw one lane of nested bars per thread; return the SVG and the number of bars too short to draw."""
    if not events:
        return f'<svg viewBox="0 0 {_WIDTH} {_ROW}"></svg>', 0
    start = min(event.start_ns for event in events)
    span = max(max(event.end_ns for event in events) - start, 1)
    visible = sorted(events, key=lambda e: e.start_ns - e.end_ns)[:_MAX_BARS]
    visible = [e for e in visible if e.duration_ns * _WIDTH > 0.05 * span]
    tops, height = _lanes(visible)
    bars = "".join(
        _bar(e, (e.start_ns - start) / span, e.duration_ns / span, tops[e.thread] + _depth(e)) for e in visible
    )
    axis = _time_axis(span, height)
    drawing = f'<svg viewBox="0 0 {_WIDTH} {height + 20}" role="img" aria-label="timeline">{axis}{bars}</svg>'
    return drawing, len(events) - len(visible)


def _depth(event: ProfileEvent) -> int:
    """Return the nesting depth of an event, its number of ancestors."""
    depth, ancestor = 0, event.parent
    while ancestor is not None:
        depth, ancestor = depth + 1, ancestor.parent
    return depth


def _lanes(events: Sequence[ProfileEvent]) -> tuple[dict[int, int], int]:
    """Return the first row of each thread's lane, and the height of all lanes."""
    rows: dict[int, int] = {}
    for event in sorted(events, key=lambda e: e.start_ns):
        rows[event.thread] = max(rows.get(event.thread, 0), _depth(event) + 1)
    tops, top = {}, 0
    for thread, row_count in rows.items():
        tops[thread] = top
        top += row_count + 1
    return tops, max(top, 1) * _ROW


def _bar(event: ProfileEvent, start: float, duration: float, row: int) -> str:
    """Format an event as an SVG bar.

    `start` and `duration` are fractions of the timeline, `row` counts from the top.
    """
    x, width, y = start * _WIDTH, max(duration * _WIDTH, 0.3), row * _ROW
    name = (event.layer.rsplit(".", 1)[-1] or event.name) if event.kind == "module" else event.name
    text = ""
    if width > 14:
        text = (
            f'<text class="inside" data-w="{width:.1f}" data-x="{x:.2f}" transform="translate({x:.2f} 0)" x="4" '
            f'y="{y + 15}">{escape(name)}</text>'
        )
    colour = _colour_class(event)
    return (
        f'<rect x="{x:.3f}" y="{y + 1}" width="{width:.3f}" height="{_ROW - 3}" style="fill:var(--{colour})">'
        f"<title>{escape(_tip(event))}</title></rect>{text}"
    )


def _colour_class(event: ProfileEvent) -> str:
    """Return the CSS class of an event's colour: layer, Python, backward, compute or memory bound."""
    if event.kind == "module":
        return "layer"
    if event.has_kernels:
        return "python"
    if event.phase == "backward":
        return "backward"
    cost = cost_of(event)
    return "compute" if cost is not None and cost.flops else "memory"


def _tip(event: ProfileEvent) -> str:
    """Return the text of a bar's tooltip."""
    lines = [f"{event.name}, {seconds(event.duration_ns * 1e-9)}, {event.phase}", f"layer {event.layer or '(model)'}"]
    if event.inputs:
        lines.append("inputs " + ", ".join("×".join(map(str, shape)) or "scalar" for shape in event.inputs))
    cost = cost_of(event)
    if cost is not None and cost.flops and event.duration_ns:
        lines.append(f"{count(cost.flops)}FLOP at {count(cost.flops / (event.duration_ns * 1e-9))}FLOP/s")
    if cost is not None and cost.bytes_moved:
        lines.append(f"moves {bytes_(cost.bytes_moved)}")
    if event.allocated:
        lines.append(f"allocates {bytes_(event.allocated)}")
    if event.backend:
        lines.append(f"backend {event.backend}" + (f", tile {event.tile}" if event.tile is not None else ""))
    return "\n".join(lines)


def _time_axis(span_ns: int, height: int) -> str:
    """Draw about eight vertical grid lines with time labels over `height` pixels."""
    step = _round_step(span_ns * 1e-9 / 8)
    marks = []
    for i in range(1, int(span_ns * 1e-9 / step) + 1):
        x = i * step / (span_ns * 1e-9) * _WIDTH
        marks.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        marks.append(
            f'<text class="soft" x="{x - 3:.1f}" y="{height + 14}" text-anchor="end">{seconds(i * step)}</text>'
        )
    return "".join(marks)


def _round_step(rough: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)


# --- roofline ---

_H, _LEFT_MARGIN, _BOTTOM_MARGIN = 420, 92, 44  # SVG units


class _Axes:
    """Logarithmic axes of the roofline plot: arithmetic intensity to the right, FLOP/s upwards."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self.x_low, self.x_high = math.floor(math.log10(x_low)), math.ceil(math.log10(x_high))
        self.y_low, self.y_high = math.floor(math.log10(y_low)), math.ceil(math.log10(y_high))

    def x(self, value: float) -> float:
        """Return the horizontal pixel position of an intensity, on a log scale."""
        return _LEFT_MARGIN + (math.log10(value) - self.x_low) / (self.x_high - self.x_low) * (
            _WIDTH - _LEFT_MARGIN - 20
        )

    def y(self, value: float) -> float:
        """Return the vertical pixel position of a rate, on a log scale."""
        return (
            _H
            - _BOTTOM_MARGIN
            - (math.log10(value) - self.y_low) / (self.y_high - self.y_low) * (_H - _BOTTOM_MARGIN - 16)
        )

    def draw(self) -> str:
        """Draw the grid lines and their labels."""
        svg = []
        for power in range(self.x_low, self.x_high + 1):
            x = self.x(10.0**power)
            svg.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{_H - _BOTTOM_MARGIN}"/>')
            label_y = _H - _BOTTOM_MARGIN + 15
            svg.append(f'<text class="soft" x="{x:.1f}" y="{label_y}" text-anchor="middle">{10.0**power:g}</text>')
        for power in range(self.y_low, self.y_high + 1):
            y = self.y(10.0**power)
            svg.append(f'<line class="grid" x1="{_LEFT_MARGIN}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label = f"{count(10.0**power)}FLOP/s"
            svg.append(f'<text class="soft" x="{_LEFT_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        middle = (_LEFT_MARGIN + _WIDTH) / 2
        svg.append(f'<text x="{middle}" y="{_H - 8}" text-anchor="middle">operations per byte moved</text>')
        return "".join(svg)


def roofline_svg(results: ProfileResults) -> str:
    """Draw each operation by its intensity and rate, below the rooflines of the L1 cache and of main memory."""
    machine, threads = results.machine, results.threads
    peak = machine.peak(threads)
    rates = {"in cache": machine.bandwidth(0.0, threads), "in memory": machine.memory_bandwidth(threads)}
    points = []
    for name, row in results.by_op.items():
        work = row.flops + row.elementwise
        if work and row.bytes_moved and row.seconds > 0.002 * results.seconds:
            points.append((name, row.intensity, work / row.seconds, row.seconds / results.seconds))
    intensities = [0.05, 100.0, *(dot[1] for dot in points)]
    heights = [peak / 1000, peak * 1.5, *(dot[2] for dot in points)]
    axes = _Axes(min(intensities), max(intensities), min(heights), max(heights))
    svg = [axes.draw(), *(_roof(axes, label, rate, peak) for label, rate in rates.items())]
    labels: list[tuple[float, float]] = []
    svg += [_dot(axes, results, labels, *dot) for dot in sorted(points, key=lambda d: -d[3])]
    return f'<svg viewBox="0 0 {_WIDTH} {_H}" role="img" aria-label="roofline plot">{"".join(svg)}</svg>'


def _roof(axes: _Axes, label: str, bandwidth: float, peak: float) -> str:
    """Draw a roofline: rising with the bandwidth up to the ridge point, then flat at the peak."""
    low, high, ridge = 10.0**axes.x_low, 10.0**axes.x_high, peak / bandwidth
    bottom = max(low, 10.0**axes.y_low / bandwidth)
    points = [(bottom, bottom * bandwidth), (ridge, peak), (high, peak)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)
    (x0, y0), (x1, y1) = ((axes.x(x), axes.y(y)) for x, y in points[:2])
    slope = math.degrees(math.atan2(y1 - y0, x1 - x0))  # the label is drawn parallel to the line, just above it
    along = f"translate({x0:.1f} {y0:.1f}) rotate({slope:.2f}) translate(10 -6)"
    dash = ' stroke-dasharray="5 4"' if label == "in cache" else ""
    return (
        f'<polyline points="{path}" fill="none" style="stroke:var(--roof)" stroke-width="1.5"{dash}/>'
        f'<text class="soft" transform="{along}">{label}, {count(bandwidth)}B/s</text>'
        f'<text class="soft" x="{_WIDTH - 24}" y="{axes.y(peak) - 6:.1f}" text-anchor="end">{count(peak)}FLOP/s</text>'
    )


def _dot(
    axes: _Axes,
    results: ProfileResults,
    labels: list[tuple[float, float]],
    name: str,
    intensity: float,
    rate: float,
    time_share: float,
) -> str:
    """Draw an operation as a dot whose area is its share of the time; from 2 % on it gets a label."""
    row = results.by_op[name]
    kind = "compute" if row.flops else "memory"
    kind = "backward" if name.endswith(("_grad", "_grad_input", "_grad_weight")) else kind
    radius = 4 + 16 * math.sqrt(min(time_share, 1.0))
    x, y = axes.x(intensity), axes.y(rate)
    tip = f"{name}: {count(rate).strip()} operations/s at {intensity:.3g} per byte, {seconds(row.seconds)}"
    label = _label(name, x, radius, _free_height(labels, x, y + 4)) if time_share > 0.02 else ""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" style="fill:var(--{kind})" fill-opacity="0.75">'
        f"<title>{escape(tip)}</title></circle>{label}"
    )


def _label(name: str, x: float, radius: float, y: float) -> str:
    """Draw the label of a dot of this radius, on its right or, if that leaves the drawing, its left."""
    fits = x + radius + 3 + 6.5 * len(name) < _WIDTH
    at, anchor = (x + radius + 3, "start") if fits else (x - radius - 3, "end")
    return f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(name)}</text>'


def _free_height(labels: list[tuple[float, float]], x: float, y: float) -> float:
    """Return a vertical position from `y` on where a label overlaps none of `labels`, and add it to them."""
    while any(abs(x - other_x) < 150 and abs(y - other_y) < 13 for other_x, other_y in labels):
        y += 13
    labels.append((x, y))
    return y
