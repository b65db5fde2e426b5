"""Third stop: three matrix products tuned with five measurements each, compared with exhaustive search."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise._extension import native
from tilewise.errors import UnavailableError
from tilewise.store.problem import Value
from tilewise.tour.stops import Bars, Stop, Table, Visit
from tilewise.tune.choose.tuner import check

_SHAPES = ((48, 96, 80), (64, 192, 128), (197, 256, 64))


_VISIBLE_DIFFERENCE = 0.02  # share of the fastest speed; bars that differ by less look the same


def tuning_stop(visit: Visit) -> Stop:
    """Compare the default tile, the model's first choice and five measurements with the fastest tile."""
    if native is None:
        raise UnavailableError("tiles belong to the compiled kernels, which are not installed")
    shapes = _SHAPES[:1] if visit.quick else _SHAPES
    problems: list[Mapping[str, Value]] = [{"family": "matmul", "m": m, "n": n, "k": k} for m, n, k in shapes]
    result = check(problems, say=visit.say)
    rows = [
        (
            " × ".join(str(row["problem"][name]) for name in ("m", "n", "k")),
            f"{row['configs']:,}",
            f"{row['default']:.3f}",
            f"{row['first']:.3f}",
            f"{row['five']:.3f}",
            f"{row['exhaustive_seconds'] / row['five_seconds']:,.0f}×",
        )
        for row in result["problems"]
    ]
    headings = ("m × n × k", "tiles", "analytical default", "model, unmeasured", "after five", "less time than all")
    means = {
        "analytical default": result["default"],
        "model, unmeasured": result["first"],
        "after five": result["five"],
    }
    notes = [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in result["notes"]]
    lines = [verdict(result["default"], result["first"], result["five"]), *notes]
    charts = [Bars("Share of the fastest tile's speed", "1 is the fastest", means, largest=1.0)]
    meaning = (
        "The same question for this machine's own matrix product: how near to the fastest tile does one get by rule "
        "(the default), by the model alone, and with five measurements? All tiles were measured to know."
    )
    title = "Products tuned here, five measurements against all"
    return Stop(title, result, lines, [Table(headings, rows)], charts, meaning)


def verdict(default: float, first: float, five: float) -> str:
    """Summarize in a sentence the speeds of default, model's choice and tuned tile, as shares of the fastest one's."""
    if min(default, first, five) > 0.97:
        return f"Nothing to gain here: the default already reaches {default:.0%} of the fastest tile's speed."
    if five < default + _VISIBLE_DIFFERENCE / 2:
        return f"Tuning gained nothing here: {five:.0%} of the fastest tile's speed, the default {default:.0%}."
    sentence = f"Five measurements reach {five:.0%} of the fastest tile's speed, the default {default:.0%}."
    return sentence + (
        f" The model alone chose a slower tile than the default ({first:.0%})." if first < default else ""
    )
