"""Matrix multiplication beside NumPy (OpenBLAS) and PyTorch: large, small, skinny and odd shapes.

    python -m benchmarks.gemm [--threads 1] [--only products routing scaling] [--json benchmarks/results/gemm.json]
    python -m benchmarks.gemm --random 500 --seed 7

Every result is compared with float64 before it is timed. A ratio above 1 means tilewise is faster than the faster peer;
the geometric mean against NumPy alone is printed at the end. `routing` times, on the same shapes, the implementation
that the router chooses beside the others that could be fastest: the ratio is the best one's time over the chosen's.
`scaling` is tilewise beside itself: one thread's time over that of two.

`--random N` times N drawn shapes instead (benchmarks/gemm_random.py), and writes no file unless `--json` is given.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

import tilewise
from benchmarks import gemm_random
from benchmarks.harness import Row, Run, compare, write_results
from tilewise.backend import OptimizedBackend, matmul_native

PARTS = ["products", "routing", "scaling"]
LARGE = [(512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)]
# (m, n, k) as models have them: squares, heads, batches of one, embeddings, im2col of convolutions, classifiers
SMALL = [
    *((n, n, n) for n in (16, 32, 48, 64, 96, 100, 128, 192, 200, 256, 300)),
    *((7, 129, 33), (13, 37, 61), (50, 70, 90), (127, 131, 137), (5, 1000, 300), (1000, 10, 64), (64, 10, 576)),
    *((1, 4096, 4096), (1, 1024, 1024), (1, 768, 3072), (4096, 1, 1024), (2, 2048, 2048), (8, 1024, 1024)),
    *((32, 1024, 1024), (16, 4096, 1024), (64, 512, 2048), (128, 128, 1024), (197, 768, 768), (197, 3072, 768)),
    *((256, 256, 64), (256, 64, 256), (512, 384, 384), (384, 1536, 384), (3136, 64, 576), (784, 128, 1152)),
    *((196, 256, 2304), (49, 512, 4608), (1000, 1000, 3), (3, 1000, 1000)),
]


def product(m: int, n: int, k: int, threads: int, seed: int, budget_s: float) -> Row:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    left, right = torch.from_numpy(a), torch.from_numpy(b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if np.abs(matmul_native(a, b) - exact).max() > 1e-5 * max(1.0, np.abs(exact).max()):
        raise SystemExit(f"{m}×{n}×{k}: the product is wrong")
    runs = {"tilewise": lambda: matmul_native(a, b), "numpy": lambda: a @ b, "pytorch": lambda: left @ right}
    return compare(f"{m}×{n}×{k}", threads, runs, budget_s)


def routed(m: int, n: int, k: int, threads: int, seed: int, budget_s: float) -> Row:
    """The chosen implementation against the others, each called directly, so that only the choice is judged."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    backend = OptimizedBackend()
    chosen = backend.select("matmul", a, b).name
    runs: dict[str, Run] = {}
    for entry in backend.implementations("matmul"):
        if entry.name in ("blocked", "naive"):  # rungs without vectors, tens of times slower everywhere
            continue
        runs["tilewise" if entry.name == chosen else entry.name] = partial(entry.run, a, b)
    return compare(f"routing {m}×{n}×{k} ({chosen})", threads, runs, budget_s)


def scaling(size: int, seed: int, budget_s: float) -> Row:
    """Two threads beside one, taking turns."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))

    def run(threads: int) -> None:
        tilewise.set_num_threads(threads)
        matmul_native(a, b)

    runs: dict[str, Run] = {"tilewise": partial(run, 2), "one thread": partial(run, 1)}
    return compare(f"two threads beside one, {size}×{size}×{size}", 2, runs, budget_s)


def geometric_mean(rows: list[Row], peer: str) -> float:
    return float(np.exp(np.mean([np.log(r.seconds[peer] / r.seconds["tilewise"]) for r in rows])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS[:2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N drawn shapes against NumPy instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    with threadpool_limits(options.threads, "blas"):
        if options.random:
            rows = gemm_random.sweep(options.random, options.seed, options.threads)
            return write_results(options.json, rows) if options.json else None
        if "products" in options.only:
            rows += [product(*shape, options.threads, options.seed, 1.0) for shape in LARGE]
            small = [product(*shape, options.threads, options.seed, 0.4) for shape in SMALL]
            summary(small)
            rows += small
        if "routing" in options.only:
            choices = [routed(*shape, options.threads, options.seed, 0.4) for shape in LARGE + SMALL]
            worst = min(choices, key=lambda r: r.ratio)
            print(f"the router's choice is never slower than {1 / min(worst.ratio, 1):.2f}× the best ({worst.name})")
            rows += choices
        if "scaling" in options.only:
            rows.append(scaling(1024, options.seed, 2.0))
    write_results(options.json or Path("benchmarks/results/gemm.json"), rows)


def summary(small: list[Row]) -> None:
    worst = min(small, key=lambda r: r.seconds["numpy"] / r.seconds["tilewise"])
    print(
        f"{len(small)} small shapes against NumPy: geometric mean {geometric_mean(small, 'numpy'):.2f}×, worst "
        f"{worst.seconds['numpy'] / worst.seconds['tilewise']:.2f}× at {worst.name}"
    )


if __name__ == "__main__":
    main()
