"""The table of what the cost model makes of other people's collections: `benchmarks.foreign`."""

from __future__ import annotations

import math

from benchmarks.results_files import read_any, table

NOT_MEASURED = "not measured yet"
_KEYS = ("top1", "top5", "geometric1", "geometric5")


def foreign() -> str:
    """`--model auto` beside its peers on collections of other shapes; the best of each column is not marked."""
    found = read_any("foreign")
    if not found:
        return f"{NOT_MEASURED}: `python -m benchmarks.foreign` writes it."
    cells = []
    for name, entry in found.items():
        chosen = ", ".join(dict.fromkeys(run["auto"]["chosen"] for run in entry["runs"]))
        for model, row in entry["mean"].items():
            label = f"auto ({chosen})" if model == "auto" else model
            errors = (f"{row[key]:.2f} %" if not math.isnan(row.get(key, math.nan)) else "" for key in _KEYS)
            cells.append((f"`{name}`", label, *errors, str(len(entry["runs"]))))
    headings = ("collection", "model", "top-1 error", "top-5", "top-1, geometric", "top-5, geometric", "seeds")
    return table(headings, cells)
