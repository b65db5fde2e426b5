"""`make bench` runs every benchmark against its peers, in turn; `python -m benchmarks gemm rows` runs two."""

from __future__ import annotations

import importlib
import sys
import time

ALL = (
    "gemm", "rows", "conv", "networks", "train_step", "int8", "sparse", "decode", "profiling", "tuning",
    "replay", "int8_accuracy", "prune_accuracy", "modules", "plan_speed",
)  # fmt: skip


def main() -> None:
    names, sys.argv = sys.argv[1:] or list(ALL), sys.argv[:1]
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise SystemExit(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(ALL)}")
    for name in names:
        start = time.perf_counter()
        print(f"\n== {name} ==", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
