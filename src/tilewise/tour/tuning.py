"""Third stop: three matrix products tuned here, with five measurements each, beside measuring every tile there is."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.store.problem import Value
from tilewise.tour.stops import Bars, Stop, Table, Visit
from tilewise.tune.choose.check import check

_SHAPES = ((48, 96, 80), (64, 192, 128), (197, 256, 64))


_SEEN = 0.02  # bars that differ by less look the same


def tuning_stop(visit: Visit) -> Stop:
    shapes = _SHAPES[:1] if visit.quick else _SHAPES
    problems: list[Mapping[str, Value]] = [{"family": "matmul", "m": m, "n": n, "k": k} for m, n, k in shapes]
    found = check(problems, say=visit.say)
    rows = [
        (
            " × ".join(str(row["problem"][name]) for name in ("m", "n", "k")),
            f"{row['configs']:,}",
            f"{row['default']:.3f}",
            f"{row['first']:.3f}",
            f"{row['five']:.3f}",
            f"{row['exhaustive_seconds'] / row['five_seconds']:,.0f}×",
        )
        for row in found["problems"]
    ]
    headings = ("m × n × k", "tiles", "analytical default", "model, unmeasured", "after five", "less time than all")
    means = {"analytical default": found["default"], "model, unmeasured": found["first"], "after five": found["five"]}
    alike = min(means.values()) > 0.97 or max(means.values()) - min(means.values()) < _SEEN
    notes = [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in found["notes"]]
    lines = [verdict(found["default"], found["first"], found["five"]), *notes]
    charts = [] if alike else [Bars("Share of the fastest tile's speed", "1 is the fastest", means)]
    meaning = (
        "The same question for this machine's own matrix product: how near to the fastest tile does one get by rule "
        "(the default), by the model alone, and with five measurements? All tiles were measured to know."
    )
    title = "Products tuned here, five measurements against all"
    return Stop(title, found, lines, [Table(headings, rows)], charts, meaning)


def verdict(default: float, first: float, five: float) -> str:
    """What the three shares of the fastest speed mean, said as they are."""
    if min(default, first, five) > 0.97:
        return f"Nothing to gain here: the default already reaches {default:.0%} of the fastest tile's speed."
    if five < default + _SEEN / 2:
        return f"Tuning gained nothing here: {five:.0%} of the fastest tile's speed, the default {default:.0%}."
    said = f"Five measurements reach {five:.0%} of the fastest tile's speed, the default {default:.0%}."
    return said + (f" The model alone chose a slower tile than the default ({first:.0%})." if first < default else "")
