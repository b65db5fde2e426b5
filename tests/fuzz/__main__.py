"""`make fuzz`: many damaged files for every reader, each target in a process of its own.

    python -m fuzz --count 1000 --seed 1 [--jobs 16] [--only quantized] [--strangers]

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzz.runner import CORPUS, Outcome, run_target
from fuzz.strangers import mutated
from fuzz.targets import TARGETS


def child(name: str, count: int, seed: int, strangers: bool) -> int:
    mutate = mutated if strangers else None
    outcome = run_target(name, count, seed, progress=Path("build/fuzz") / f"{name}.last", mutate=mutate)
    print(json.dumps(outcome.as_dict()))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="damaged files per reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--jobs", type=int, default=1, help="readers at once")
    parser.add_argument("--limit", type=float, default=None, help="seconds that one reader's files may take in all")
    parser.add_argument("--keep", action="store_true", help="put what failed into the tests' corpus")
    parser.add_argument("--strangers", action="store_true", help="the mutator that knows no format of this project")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.count, options.seed, options.strangers)
    Path("build/fuzz").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda name: report(name, options), options.only))
    ended = [outcome for outcome in outcomes if outcome is not None]
    kinds = sum(len(outcome.failures) for outcome in ended)
    print(
        f"{len(ended) * options.count:,} damaged files over {len(ended)} readers, seed {options.seed}: "
        f"{kinds} kinds of failure, {len(outcomes) - len(ended)} readers crashed or did not end, slowest file "
        f"{max((outcome.slowest_s for outcome in ended), default=0):.2f} s, most memory "
        f"{max((outcome.grown_mib for outcome in ended), default=0):.0f} MiB"
    )
    return 1 if kinds or len(ended) < len(outcomes) else 0


def report(name: str, options: argparse.Namespace) -> Outcome | None:
    """Run one reader's files in a process of its own and say how it went; None where the process did not end well."""
    started = time.perf_counter()
    numbers = ["--count", str(options.count), "--seed", str(options.seed), *["--strangers"] * options.strangers]
    command = [sys.executable, "-W", "ignore", "-m", "fuzz", "--child", name, *numbers]
    last = Path("build/fuzz") / f"{name}.last"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=options.limit)
    except subprocess.TimeoutExpired:
        print(f"{name}: STILL AT IT after {options.limit:.0f} s at {last}", flush=True)
        return None
    if done.returncode:
        print(f"{name}: CRASHED with {done.returncode} at {last}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    outcome = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    lines = [
        f"{name}: {options.count} files, {outcome.accepted} read, {outcome.rejected_count} refused, "
        f"{len(outcome.failures)} kinds of failure, slowest {outcome.slowest_s:.2f} s, "
        f"grew by {outcome.grown_mib:.0f} MiB, {time.perf_counter() - started:.0f} s"
    ]
    for where, (times, content) in outcome.failures.items():
        place = (CORPUS if options.keep else Path("build/fuzz")) / name / f"{zlib.crc32(where.encode()):08x}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes.fromhex(content))
        lines.append(f"    {times} x {where} ({place})")
    print("\n".join(lines), flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
