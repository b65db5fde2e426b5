"""The tables of docs/gpu.md: unseen products beside the library and a peer, and `torch.compile` beside its own ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results_files import RESULTS, read_any, table
from tilewise.tune.choose.recorded import NAMES, read_recorded
from tilewise.tune.choose.recorded import table as compared
from tilewise.tune.choose.runtimes import shipped_runtimes

_HEADINGS = ("products", "number", "best kernel measured", "first choice", "five measurements",
             "nvMatmulHeuristics, first", "the same, five")  # fmt: skip


def products() -> str:
    """Speed beside the library's, by kind: geometric mean, and the least in brackets."""
    path, model = RESULTS / "products_h200.json", shipped_runtimes()
    if not path.is_file() or model is None:
        return ""
    rows = compared(model, read_recorded(path))
    cells = [[f"{row[name]:.3f} ({row[name + '_least']:.2f})" for name in NAMES] for row in rows]
    return table(
        _HEADINGS, [[row["kind"], str(row["products"]), *found] for row, found in zip(rows, cells, strict=True)]
    )


def compiled() -> str:
    """`torch.compile`, case by case: microseconds of each way, seconds of the first call."""
    found = read_any("inductor_h200")
    if not found:
        return ""
    ways = list(found["rows"][0]["us"])
    cells = [[row["name"], *(_cell(row, way) for way in ways)] for row in found["rows"]]
    return table(["case", *ways], [*cells, ["geometric mean, tilewise's speed beside", *_means(found["rows"], ways)]])


def _cell(row: Mapping[str, Any], way: str) -> str:
    seconds = row["seconds"].get(way)
    return f"{row['us'][way]:.1f} µs" + (f", {seconds:.1f} s" if seconds else "")


def _means(rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> list[str]:
    found = []
    for way in ways:
        ratios = [row["us"][way] / row["us"]["tilewise"] for row in rows]
        found.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} (least {min(ratios):.2f})")
    return found
