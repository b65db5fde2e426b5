"""How `torch.compile` did with tilewise inside and in other ways, measured on a GPU and kept as a file, as one table.

`python3 -m tilewise.tune.triton.check --compiled FILE` prints it without a GPU; `python3 -m benchmarks.inductor` makes
such files, and `python3 -m benchmarks.compiled FILE... --out FILE` makes one of several that have different problems. A
row is a problem; for each way it holds microseconds a run and seconds of the first call.
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
class Compiled:
    """One problem: microseconds a run by way, and seconds of the first call."""

    name: str
    kind: str
    us: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Beside:
    """One way beside tilewise's over the problems that both ran: how long it runs and how long its first call takes as
    multiples of tilewise's, geometric means; and where it does best."""

    way: str
    problems: int
    runs: float
    least: float
    first_call: float | None  # None for ATen, which compiles nothing
    all_calls: float | None  # all first calls together, in multiples of tilewise's


def read_compiled(path: str | os.PathLike[str]) -> list[Compiled]:
    content = read_json_input(Path(path))
    try:
        return [Compiled(str(row["name"]), str(row["kind"]), _times(row["us"]), _times(row["seconds"]))
                for row in content["problems"]]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path} holds no compiled problems ({type(error).__name__}: {error}).") from error


def _times(found: Mapping[str, Any]) -> dict[str, float]:
    times = {str(way): float(value) for way, value in found.items()}
    if not all(0 < value < math.inf for value in times.values()):
        raise ValueError("a time that is none")
    return times


def beside(rows: Sequence[Compiled]) -> list[Beside]:
    """Every way that ran some problem, as against tilewise."""
    found = []
    for way in WAYS:
        both = [row for row in rows if way in row.us and OURS in row.us]
        if not both:
            continue
        ratios = [row.us[way] / row.us[OURS] for row in both]
        pairs = [(row.seconds[way], row.seconds[OURS]) for row in both if {way, OURS} <= row.seconds.keys()]
        first = _geometric([theirs / ours for theirs, ours in pairs]) if pairs else None
        together = sum(theirs for theirs, _ in pairs) / sum(ours for _, ours in pairs) if pairs else None
        found.append(Beside(way, len(both), _geometric(ratios), min(ratios), first, together))
    return found


def lines(rows: Sequence[Compiled]) -> list[str]:
    """The table as text."""
    found = []
    for row in rows:
        calls = {way: f" {seconds:.1f} s" for way, seconds in row.seconds.items()}
        found.append(f"{row.name:42} " + "  ".join(f"{w} {us:.1f} us{calls.get(w, '')}" for w, us in row.us.items()))
    for one in beside(rows):
        first = f", its first call {one.first_call:.2f} times" if one.first_call is not None else ""
        first += f", all of them {one.all_calls:.2f}" if one.all_calls is not None else ""
        found.append(f"{one.way}: {one.problems} problems, runs {one.runs:.3f} times as long as tilewise's "
                     f"(least {one.least:.3f}){first}")  # fmt: skip
    return found


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The problems of several files of one machine; of a problem that several have, the last file's."""
    read = [read_json_input(path) for path in paths if read_compiled(path)]
    rows = {row["name"]: row for content in read for row in content["problems"]}
    return {**read[0], "problems": list(rows.values())}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.write_text(json.dumps(merged(given.files), indent=1) + "\n")
    print("\n".join(lines(read_compiled(given.out))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
