"""`make programs`: check many random programs, or those of a file.

python -m tests.programs --count 20000 --seed 7 --jobs 2
python -m tests.programs --check tests/programs/regressions/flatten_activation.json
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Before NumPy is imported: the threads of its library would compete with the other jobs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TILEWISE_TUNED", "0")

from tests.programs.campaign import Failure, check_drawn, seed_of_today
from tests.programs.oracles import failure_of
from tests.programs.program import read_programs

_PART = 250  # programs that one job checks before it reports


def check_file(path: Path) -> int:
    """Check the programs of a file; returns how many fail."""
    failed = 0
    for line, program in enumerate(read_programs(path), 1):
        mismatch = failure_of(program)
        failed += mismatch is not None
        print(f"{path}:{line}: {mismatch or 'agrees'}")
    return failed


def check_many(count: int, seed: int, jobs: int, most_failures: int) -> int:
    """Check the first programs of a seed, printing failures as they come; returns how many fail."""
    started, failed = time.perf_counter(), 0
    parts = [range(first, min(first + _PART, count)) for first in range(0, count, _PART)]
    with ProcessPoolExecutor(jobs) as pool:
        for failures in pool.map(_check_part, [seed] * len(parts), parts, [most_failures] * len(parts)):
            failed += len(failures)
            for failure in failures:
                print(failure, flush=True)
    seconds = time.perf_counter() - started
    print(f"{count:,} programs of seed {seed}: {failed} failed, {seconds:.0f} s with {jobs} job(s)")
    return failed


def _check_part(seed: int, numbers: range, most_failures: int) -> list[Failure]:
    return check_drawn(seed, numbers, most_failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="programs to draw (20000)")
    parser.add_argument("--seed", type=int, default=seed_of_today(), help="what they are drawn from (the date)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--most-failures", type=int, default=10, help=f"failures to minimise in {_PART} programs (10)")
    parser.add_argument("--check", type=Path, help="check the programs of this file instead")
    options = parser.parse_args()
    if options.check:
        return 1 if check_file(options.check) else 0
    return 1 if check_many(options.count, options.seed, options.jobs, options.most_failures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
