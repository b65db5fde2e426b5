"""`make fuzz`: many damaged files for every reader, each target in a process of its own.

    python -m fuzz --count 1000 --seed 1 [--only quantized]

Nothing may escape but a TilewiseError of one line, nothing may crash, take ten seconds or grow by 512 MiB. What does is
written to the folder `build/fuzz` beside a line saying where; with --keep, to the corpus that the tests replay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zlib
from pathlib import Path

from fuzz.runner import CORPUS, Outcome, run_target
from fuzz.targets import TARGETS


def child(name: str, count: int, seed: int) -> int:
    outcome = run_target(name, count, seed, progress=Path("build/fuzz") / f"{name}.last")
    print(json.dumps(outcome.as_dict()))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="damaged files per reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--keep", action="store_true", help="put what failed into the tests' corpus")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.count, options.seed)
    Path("build/fuzz").mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.only:
        failed += not report(name, options.count, options.seed, options.keep)
    return 1 if failed else 0


def report(name: str, count: int, seed: int, keep: bool) -> bool:
    """Run one target apart and say how it went."""
    started = time.perf_counter()
    numbers = ["--count", str(count), "--seed", str(seed)]
    command = [sys.executable, "-W", "ignore", "-m", "fuzz", "--child", name, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = Path("build/fuzz") / f"{name}.last"
        print(f"{name}: CRASHED with {done.returncode} at {last}: {done.stderr.strip().splitlines()[-1:]}")
        return False
    outcome = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    seconds = time.perf_counter() - started
    print(
        f"{name}: {count} files, {outcome.read} read, {outcome.refused} refused, {len(outcome.failures)} kinds of "
        f"failure, slowest {outcome.slowest_s:.2f} s, grew by {outcome.grown_mib:.0f} MiB, {seconds:.0f} s",
        flush=True,
    )
    for where, (times, content) in outcome.failures.items():
        place = (CORPUS if keep else Path("build/fuzz")) / name / f"{zlib.crc32(where.encode()):08x}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes.fromhex(content))
        print(f"    {times} x {where} ({place})")
    return not outcome.failures


if __name__ == "__main__":
    sys.exit(main())
