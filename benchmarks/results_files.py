"""Reads the JSON files of `make bench` for the tables and figures, and looks up their rows by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HOME_KIND = "Zen 4, AVX-512"  # the kind of CPU whose results lie in RESULTS itself; every other kind has a folder there


def folder_of(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def kinds() -> list[str]:
    """Every kind of CPU that something was measured on, home first."""
    files = sorted(RESULTS.glob("*/*.json"))
    return [HOME_KIND, *dict.fromkeys(_parse(f, f.stat().st_mtime_ns)["machine"]["kind"] for f in files)]


@cache
def _parse(path: Path, _mtime_ns: int) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _file(name: str, kind: str) -> Path:
    return (RESULTS if kind == HOME_KIND else RESULTS / folder_of(kind)) / f"{name}.json"


def read_any(name: str, kind: str = HOME_KIND) -> Any:
    """One results file as it is, or None where it was not written yet."""
    path = _file(name, kind)
    return _parse(path, path.stat().st_mtime_ns) if path.is_file() else None


def read(name: str, kind: str = HOME_KIND) -> dict[str, Any]:
    """One file of timings (`harness.write_results`), or an empty one where it was not written yet."""
    content = read_any(name, kind)
    return content if isinstance(content, dict) and "rows" in content else {"rows": []}


def rows(name: str, names: str = "", without: str = "$^", kind: str = HOME_KIND) -> list[dict[str, Any]]:
    """The rows of a file of timings whose names match."""
    content = read(name, kind)
    dated = [{"date": content.get("date", ""), **row} for row in content["rows"]]
    return [r for r in dated if re.search(names, r["name"]) and not re.search(without, r["name"])]


def dates(rows: Iterable[dict[str, Any]]) -> str:
    """Return the date on which these rows were measured, or the first and the last date."""
    days = sorted({row.get("date", "") for row in rows} - {""})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "undated"


def geometric(ratios: Iterable[float]) -> float:
    values = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(sum(values) / len(values))


def table(headings: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
