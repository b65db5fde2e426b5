"""Recorded runs of `torch.compile`, with tilewise and with other ways of choosing, as one table.

`python3 -m tilewise.tune.triton.check --compiled FILE` prints it without a GPU; `python3 -m benchmarks.inductor` writes
such files, and `python3 -m benchmarks.compiled FILE... --out FILE` merges several with different problems. A row is a
problem; for each way it has the microseconds of a run and the seconds of the first call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.errors import FileFormatError

OURS = "tilewise"
WAYS = ("aten", "default", "max-autotune", "as-it-comes", "exhaustive", "autoheuristic", "nvmatmul", "steps")


@dataclass(frozen=True)
class CompiledProblem:
    """One problem: microseconds of a run and seconds of the first call, by way."""

    name: str
    kind: str
    us: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class WayComparison:
    """One way compared with tilewise over the problems that both ran, as geometric means of time ratios."""

    way: str
    problems: int
    runs: float  # runtime, as a multiple of tilewise's
    least: float  # the smallest of these ratios
    first_call: float | None  # seconds of the first call, as a multiple; None for ATen, which compiles nothing
    all_calls: float | None  # the sum of all first calls, as a multiple


def read_compiled(path: str | os.PathLike[str]) -> list[CompiledProblem]:
    """Read the problems of a file that `benchmarks.inductor` wrote."""
    content = read_json_input(Path(path))
    try:
        return [CompiledProblem(str(row["name"]), str(row["kind"]), _times(row["us"]), _times(row["seconds"]))
                for row in content["problems"]]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileFormatError(f"{path} holds no compiled problems ({type(error).__name__}: {error}).") from error


def _times(values: Mapping[str, Any]) -> dict[str, float]:
    times = {str(way): float(value) for way, value in values.items()}
    if not all(0 < value < math.inf for value in times.values()):
        raise ValueError("a time must be positive and finite")
    return times


def compare_ways(rows: Sequence[CompiledProblem]) -> list[WayComparison]:
    """Compare every way that ran any problem with tilewise."""
    comparisons = []
    for way in WAYS:
        both = [row for row in rows if way in row.us and OURS in row.us]
        if not both:
            continue
        ratios = [row.us[way] / row.us[OURS] for row in both]
        pairs = [(row.seconds[way], row.seconds[OURS]) for row in both if {way, OURS} <= row.seconds.keys()]
        first = _geometric([theirs / ours for theirs, ours in pairs]) if pairs else None
        total = sum(theirs for theirs, _ in pairs) / sum(ours for _, ours in pairs) if pairs else None
        comparisons.append(WayComparison(way, len(both), _geometric(ratios), min(ratios), first, total))
    return comparisons


def lines(rows: Sequence[CompiledProblem]) -> list[str]:
    """Format the table as text."""
    text = []
    for row in rows:
        calls = {way: f" {seconds:.1f} s" for way, seconds in row.seconds.items()}
        text.append(f"{row.name:42} " + "  ".join(f"{w} {us:.1f} us{calls.get(w, '')}" for w, us in row.us.items()))
    for other in compare_ways(rows):
        first = f", its first call {other.first_call:.2f} times" if other.first_call is not None else ""
        first += f", all of them {other.all_calls:.2f}" if other.all_calls is not None else ""
        text.append(f"{other.way}: {other.problems} problems, runs {other.runs:.3f} times as long as tilewise's "
                    f"(least {other.least:.3f}){first}")  # fmt: skip
    return text


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def merge_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Merge the problems of several files of one machine; the last file wins."""
    contents = [read_json_input(path) for path in paths if read_compiled(path)]
    rows = {row["name"]: row for content in contents for row in content["problems"]}
    return {**contents[0], "problems": list(rows.values())}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(json.dumps(merge_files(options.files), indent=1) + "\n")
    print("\n".join(lines(read_compiled(options.out))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
