"""Recompute the cost model's figures and all tables from recorded data, and say whether they agree (see README.md)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-4  # of the mean time lost; scores differ in the last bits between instruction sets
SHOWN = (1, 3, 5, 10)  # numbers of measurements


def replay(collection: str) -> bool:
    """Rank the test kernels of a collection and compare the time lost with the recorded one."""
    command = [sys.executable, "-m", "tilewise.cli.app", "tiles", "replay", collection, "--no-trees", "--json"]
    output = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    results = json.loads((ROOT / "benchmarks" / "results" / "replay.json").read_text(encoding="utf-8"))
    recorded = results["replay"][collection]["regret"]
    agree = True
    print(
        f"{collection}: mean time lost on {output['kernels']} test kernels "
        f"after {', '.join(map(str, SHOWN))} measurements"
    )
    for strategy in output["strategies"]:
        lost, expected = strategy["regret"], recorded.get(strategy["name"])
        if expected is None:
            continue
        same = all(abs(a - b) <= TOLERANCE * (1 + b) for a, b in zip(lost, expected, strict=True))
        agree &= same
        values = "  ".join(f"{100 * lost[count - 1]:7.2f} %" for count in SHOWN)
        print(f"  {strategy['name']:32s} {values}  {'as recorded' if same else 'NOT as recorded'}")
    return agree


def main() -> None:
    agree = [replay(collection) for collection in ("h200", "cpu")]
    tables = subprocess.run([sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT).returncode == 0
    print("tables and pictures: as recorded" if tables else "tables and pictures: NOT as recorded")
    sys.exit(not (all(agree) and tables))


if __name__ == "__main__":
    main()
