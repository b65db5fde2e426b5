"""What the tables and figures read: the JSON files of `make bench`, and how their rows are found by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read_any(name: str) -> Any:
    """One results file as it is, or None where it was not written yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read(name: str) -> dict[str, Any]:
    """One file of timings (`harness.write_results`), or an empty one where it was not written yet."""
    found = read_any(name)
    return found if isinstance(found, dict) and "rows" in found else {"rows": []}


def rows(name: str, names: str = "", without: str = "$^") -> list[dict[str, Any]]:
    """The rows of a file of timings whose names match."""
    return [r for r in read(name)["rows"] if re.search(names, r["name"]) and not re.search(without, r["name"])]


def geometric(ratios: Iterable[float]) -> float:
    values = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(sum(values) / len(values))


def table(headings: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
