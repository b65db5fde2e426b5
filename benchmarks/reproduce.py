"""`make reproduce ROW=products`: measure the short form of one of README's rows here, with all peers installed here.

    python -m benchmarks.reproduce [ROW]

Nothing is stored: the row is printed with the ratio to each peer, below it the recorded row for comparison. A peer that
is not installed is left out and named.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from benchmarks.cases import ROWS, all_cases, counted_cases, peer_ratios
from benchmarks.harness import read_rows
from benchmarks.results_files import geometric


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in ROWS:
        lines = "\n".join(f"  {key:10s} {label} ({command})" for key, (label, command) in ROWS.items())
        sys.exit(f"Choose one of README's rows, as in `make reproduce ROW=products`:\n{lines}")
    key = sys.argv[1]
    label, command = ROWS[key]
    module, *arguments = command.split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{module}.json"
        sys.argv = [module, *arguments, "--json", str(path)]
        importlib.import_module(f"benchmarks.{module}").main()
        ratios = [peer_ratios({"seconds": row.seconds, "ratio": row.ratio}) for row in read_rows(path)]
    fastest = [min(by_peer.values()) for by_peer in ratios]
    peers = dict.fromkeys(peer for by_peer in ratios for peer in by_peer)
    print(f"\n{label} here: {geometric(fastest):.2f}× (worst {min(fastest):.2f}) against {', '.join(peers)}")
    recorded = counted_cases(case for case in all_cases() if case.line.row == key)
    missing = sorted({peer for case in recorded for peer in case.ratios} - set(peers))
    speeds = [case.ratio for case in recorded]
    print(f"recorded, all cases and CPUs: {geometric(speeds):.2f}× (worst {min(speeds):.2f})")
    print(f"peers in the recorded row that were not measured here: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
