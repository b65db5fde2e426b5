"""Matrix multiplication compared with NumPy (OpenBLAS) and PyTorch: large, small, skinny and odd shapes.

    python -m benchmarks.gemm [--threads 1] [--only large transformer small transposed routing threads] [--json FILE]
    python -m benchmarks.gemm --random 500 --seed 7

Every result is compared with float64 before it is timed. A ratio above 1 means tilewise is faster than the faster peer;
each group ends with its geometric mean and its worst. `large` are cubes and their odd neighbours, `transformer` rows of
tokens through the layers of a transformer in every layout, `small` the shapes of small models, `transposed` products
with a transposed A that is read in place, as in gradients of narrow layers. `routing` times the implementation that
the router chooses against the others that could be fastest: the ratio is the best one's time divided by the chosen
one's. `threads` are large products at `--threads` (or two), compared with the peers and with one thread.

`TILEWISE_ISA=avx2` holds all three to AVX2 (benchmarks/__init__.py).

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

PARTS = ["large", "transformer", "small", "transposed", "routing", "threads"]
LARGE = [(512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)]
NEIGHBOURS = [(n, n, n) for n in (511, 513, 640, 768, 1000, 1023, 1025, 1280, 1537, 2047)]
THREADED = [(n, n, n) for n in (1024, 1536, 2048, 4096)]
# Columns and sums of attention and feed-forward layers, by rows of tokens; layouts change from one to the next.
TOKENS = (1, 4, 8, 16, 32, 64, 128, 197, 256, 512)
LAYERS = [(768, 768), (2304, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096)]
# (m, n, k) as models have them: squares, heads, batches of one, embeddings, im2col of convolutions, classifiers
SMALL = [
    *((n, n, n) for n in (16, 32, 48, 64, 96, 100, 128, 192, 200, 256, 300)),
    *((7, 129, 33), (13, 37, 61), (50, 70, 90), (127, 131, 137), (5, 1000, 300), (1000, 10, 64), (64, 10, 576)),
    *((1, 4096, 4096), (1, 1024, 1024), (1, 768, 3072), (4096, 1, 1024), (2, 2048, 2048), (8, 1024, 1024)),
    *((32, 1024, 1024), (16, 4096, 1024), (64, 512, 2048), (128, 128, 1024), (197, 768, 768), (197, 3072, 768)),
    *((256, 256, 64), (256, 64, 256), (512, 384, 384), (384, 1536, 384), (3136, 64, 576), (784, 128, 1152)),
    *((196, 256, 2304), (49, 512, 4608), (1000, 1000, 3), (3, 1000, 1000)),
]
TRANSPOSED = [
    *((659, 33, 256, "tn"), (510, 41, 907, "tn"), (37, 179, 316, "tn"), (21, 287, 962, "tn"), (49, 22, 1306, "tn")),
    *((864, 313, 178, "tn"), (156, 300, 205, "tn"), (128, 64, 512, "tn"), (784, 100, 600, "tn"), (990, 16, 1847, "tn")),
    *((901, 107, 464, "tt"), (522, 173, 493, "tt"), (1274, 57, 720, "tt"), (159, 475, 136, "tt")),
]


def product(m: int, n: int, k: int, threads: int, seed: int, budget_s: float, layout: str = "nn") -> Row:
    a, b = gemm_random.Product(m, n, k, layout).operands(np.random.default_rng(seed))
    left, right = torch.from_numpy(a), torch.from_numpy(b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if np.abs(matmul_native(a, b) - exact).max() > 1e-5 * max(1.0, np.abs(exact).max()):
        raise SystemExit(f"{m}×{n}×{k} {layout}: the product is wrong")
    runs = {"tilewise": lambda: matmul_native(a, b), "numpy": lambda: a @ b, "pytorch": lambda: left @ right}
    return compare(f"{m}×{n}×{k}" + (f" {layout}" if layout != "nn" else ""), threads, runs, budget_s)


def transformer_shapes() -> list[tuple[int, int, int, str]]:
    """Every layer at every number of rows, as the weights of a framework lie (nt) or in another layout in turn."""
    cases = [(m, n, k) for n, k in LAYERS for m in TOKENS]
    return [(*case, ("nt", "nn", "nt", "tn", "nn")[i % 5]) for i, case in enumerate(cases)]


def routed(m: int, n: int, k: int, threads: int, seed: int, budget_s: float) -> Row:
    """The chosen implementation against the others, each called directly, so that only the choice is judged."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    backend = OptimizedBackend()
    implementation = backend.select("matmul", a, b).name
    runs: dict[str, Run] = {}
    for entry in backend.implementations("matmul"):
        if entry.name in ("blocked", "naive"):  # rungs without vectors, tens of times slower everywhere
            continue
        runs["tilewise" if entry.name == implementation else entry.name] = partial(entry.run, a, b)
    return compare(f"routing {m}×{n}×{k} ({implementation})", threads, runs, budget_s)


def scaling(size: int, threads: int, seed: int, budget_s: float) -> Row:
    """Several threads compared with one, interleaved."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))

    def run(count: int) -> None:
        tilewise.set_num_threads(count)
        matmul_native(a, b)

    runs: dict[str, Run] = {"tilewise": partial(run, threads), "one thread": partial(run, 1)}
    row = compare(f"{threads} threads beside one, {size}×{size}×{size}", threads, runs, budget_s)
    tilewise.set_num_threads(threads)
    return row


def threaded(threads: int, seed: int) -> list[Row]:
    set_threads(threads)
    with threadpool_limits(threads, "blas"):
        rows = summary(f"{threads} threads", [product(*shape, threads, seed, 1.5) for shape in THREADED])
    return rows + [scaling(n, threads, seed, 2.0) for n in (1024, 4096)]


def set_threads(count: int) -> None:
    tilewise.set_num_threads(count)
    torch.set_num_threads(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N drawn shapes against NumPy instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    set_threads(options.threads)
    rows: list[Row] = []
    with threadpool_limits(options.threads, "blas"):
        if options.random:
            rows = gemm_random.sweep(options.random, options.seed, options.threads)
            return write_results(options.json, rows) if options.json else None
        run = partial(product, threads=options.threads, seed=options.seed)
        if "large" in options.only:
            rows += summary("large", [run(*shape, budget_s=1.0) for shape in LARGE + NEIGHBOURS])
        if "transformer" in options.only:
            cases = transformer_shapes()
            rows += summary("transformer", [run(*case[:3], layout=case[3], budget_s=0.4) for case in cases])
        if "small" in options.only:
            rows += summary("small", [run(*shape, budget_s=0.4) for shape in SMALL])
        if "transposed" in options.only:
            rows += summary("transposed", [run(*case[:3], layout=case[3], budget_s=0.4) for case in TRANSPOSED])
        if "routing" in options.only:
            choices = [routed(*shape, options.threads, options.seed, 0.4) for shape in LARGE + SMALL]
            worst = min(choices, key=lambda r: r.ratio)
            print(f"the router's choice is never slower than {1 / min(worst.ratio, 1):.2f}× the best ({worst.name})")
            rows += choices
    if "threads" in options.only:
        rows += threaded(max(options.threads, 2), options.seed)
    write_results(options.json or Path("benchmarks/results/gemm.json"), rows, keep=options.only != PARTS)


def summary(group: str, rows: list[Row]) -> list[Row]:
    """Prints what a group comes to, and gives it back."""
    worst, mean = min(rows, key=lambda r: r.ratio), np.exp(np.mean([np.log(r.ratio) for r in rows]))
    print(f"{group}, {len(rows)} products: geometric mean {mean:.3f}×, worst {worst.ratio:.2f}× at {worst.name}")
    return rows


if __name__ == "__main__":
    main()
