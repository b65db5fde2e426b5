"""Format numbers for people: seconds, bytes, FLOPs, rates."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Format a duration: 12.3 µs, 4.56 ms, 1.23 s."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value / scale < 999.5 else f"{value / scale:.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def bytes_(value: float) -> str:
    """Format a size: 512 B, 16 KiB, 3.2 MiB, 1.5 GiB."""
    sign, value = ("-", -value) if value < 0 else ("", value)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{sign}{value:.4g} {unit}"
        value /= 1024
    return f"{sign}{value:.4g} GiB"


def count(value: float) -> str:
    """Format a count with an SI prefix, to which a unit can be appended: "1.23 G", "45.6 M", "0 "."""
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}" if value / scale < 999.5 else f"{value / scale:.0f}{unit}"
    return f"{value:.3g} "


def share(value: float) -> str:
    """Format a fraction as a percentage: 12 %, 0.4 %."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"
