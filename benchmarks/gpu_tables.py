"""The table of docs/gpu.md: unseen products beside the library and a peer."""

from __future__ import annotations

from benchmarks.results_files import RESULTS, table
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
