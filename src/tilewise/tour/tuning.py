"""Third stop: three matrix products tuned here, with five measurements each, beside measuring every tile there is."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.tour.stops import Bars, Stop, Table, Visit
from tilewise.tune.checking import check
from tilewise.tune.problem import Value

_SHAPES = ((48, 96, 80), (64, 192, 128), (197, 256, 64))


def tuning_stop(visit: Visit) -> Stop:
    shapes = _SHAPES[:1] if visit.quick else _SHAPES
    problems: list[Mapping[str, Value]] = [{"family": "matmul", "m": m, "n": n, "k": k} for m, n, k in shapes]
    found = check(problems, say=visit.say)
    rows = [
        (
            " × ".join(str(row.problem[name]) for name in ("m", "n", "k")),
            f"{row.configs:,}",
            f"{row.default:.3f}",
            f"{row.first:.3f}",
            f"{row.five:.3f}",
            f"{row.exhaustive_seconds / row.five_seconds:,.0f}×",
        )
        for row in found.problems
    ]
    headings = ("m × n × k", "tiles", "analytical default", "model, unmeasured", "after five", "less time than all")
    means = {"analytical default": found.default, "model, unmeasured": found.first, "after five": found.five}
    lines = ["Speed as a share of the fastest tile, found by measuring all of them.", *found.notes]
    charts = [Bars("Share of the fastest tile's speed", "1 is the fastest", means)]
    return Stop(
        "Products tuned here, five measurements against all", found.as_dict(), lines, [Table(headings, rows)], charts
    )
