"""The tables of docs/gpu.md: unseen products beside the library and a peer, and inside `torch.compile`."""

from __future__ import annotations

import json

from benchmarks.results_files import RESULTS, geometric, table
from tilewise.tune.choose.recorded import NAMES, read_recorded
from tilewise.tune.choose.recorded import table as compared
from tilewise.tune.families.triton.runtimes import shipped_runtimes

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
    """Microseconds a run and seconds of the first call: ATen, max-autotune and tilewise inside `torch.compile`."""
    path = RESULTS / "inductor_h200.json"
    if not path.is_file():
        return ""
    rows = json.loads(path.read_bytes())["problems"]
    ways = ("aten", "max-autotune", "tilewise")
    cells = [[row["name"], *(_spent(row["us"][way], row["seconds"].get(way)) for way in ways)] for row in rows]
    mean = [geometric([row["us"][way] / row["us"]["tilewise"] for row in rows]) for way in ways]
    cells.append(["runs as long as tilewise's, geometric mean", *(f"{ratio:.2f}" for ratio in mean)])
    return table(("problem", "ATen", "max-autotune", "tilewise"), cells)


def _spent(microseconds: float, seconds: float | None) -> str:
    return f"{microseconds:.1f} µs" + (f", {seconds:.1f} s" if seconds else "")
