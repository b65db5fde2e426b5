"""The tile chooser compared with no chooser: `tilewise.tune.enable()` must cost nothing where it cannot help.

    python -m benchmarks.chooser [--threads 1 2] [--only products batches networks drawn odd] [--random 24] [--seed 11]

The products and networks of the other benchmarks, batches of products, products drawn at random (few rows or columns,
short and long sums, tiny ones), and odd ones (sizes of 16 to 400, a quarter million multiplications or more), both of
all layouts; all through `dispatch`, with the chooser on and off in turns.
The chooser has met each shape before. A ratio above 1 means that it is faster on. A case whose ratio is more than 3 %
from 1, either way, is measured twice more, and the middle one counts. Of `--only` some, or other threads,
the rows that are not measured anew stay in the file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import tilewise
from benchmarks.gemm import LARGE, SMALL
from benchmarks.gemm_random import LAYOUT_SHARES, LAYOUTS, Product, draw
from benchmarks.harness import Row, Run, compare, read_rows, write_results
from benchmarks.results_files import geometric
from tilewise import Tensor, models, no_grad
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.tune.choose.chooser import ModelChooser, make_chooser

RESULTS = Path("benchmarks/results/chooser.json")
THREADS = [1, 2]
DOUBTFUL = 0.03
PARTS = ["products", "batches", "networks", "drawn", "odd"]
# (batch, m, n, k): heads of attention, and a few larger
BATCHES = [(12, 64, 64, 32), (48, 128, 128, 64), (6, 256, 64, 256), (4, 300, 300, 100), (2, 512, 512, 512)]
NETWORKS = [("vgg6", 32), ("resnet8", 1), ("resnet8", 32), ("gpt", 1), ("mlp", 32)]
Pair = tuple[np.ndarray, np.ndarray]


class Patient:
    """A backend with the chooser and one without, and how often a call must run until the chooser has decided."""

    def __init__(self) -> None:
        self.chooser: ModelChooser = make_chooser()
        self.off, self.on = OptimizedBackend(), OptimizedBackend(tile_chooser=self.chooser)

    def compare(self, name: str, threads: int, call: Callable[[OptimizedBackend], object], work: int, s: float) -> Row:
        for _ in range(2 + self.chooser.warm_up // max(work, self.chooser.min_work)):
            call(self.on)
        runs: dict[str, Run] = {"tilewise": lambda: call(self.on), "chooser off": lambda: call(self.off)}
        rows = [compare(name, threads, runs, s)]
        while abs(math.log(rows[0].ratio)) > DOUBTFUL and len(rows) < 3:
            rows.append(compare(name, threads, runs, s))
        return sorted(rows, key=lambda row: row.ratio)[len(rows) // 2]


def product(both: Patient, name: str, pair: Pair, threads: int, budget_s: float) -> Row:
    a, b = pair
    work = a.size * b.shape[-1]
    return both.compare(name, threads, lambda backend: backend.dispatch("matmul", a, b), work, budget_s)


def dense(rng: np.random.Generator, *batch_m_n_k: int) -> Pair:
    *batch, m, n, k = batch_m_n_k
    return rng.standard_normal((*batch, m, k), dtype=np.float32), rng.standard_normal((*batch, k, n), dtype=np.float32)


def network(both: Patient, name: str, batch: int, threads: int, budget_s: float) -> Row:
    rng = np.random.default_rng(0)
    model = models.gpt("4x128") if name == "gpt" else getattr(models, name)()
    model.eval()
    if name == "gpt":
        x = rng.integers(0, 65, (batch, 128))
    else:
        x = Tensor(rng.standard_normal((batch, 64) if name == "mlp" else (batch, 3, 32, 32), dtype=np.float32))

    def call(backend: OptimizedBackend) -> None:
        with use_backend(backend), no_grad():
            model(x)

    return both.compare(f"{name} forward, batch {batch}", threads, call, both.chooser.warm_up // 40, budget_s)


def rows_of(part: str, threads: int, options: argparse.Namespace) -> Iterator[Row]:
    tilewise.set_num_threads(threads)
    both, rng = Patient(), np.random.default_rng(options.seed)
    if part == "products":
        for shape in LARGE[:1] + SMALL:
            yield product(both, "×".join(map(str, shape)), dense(rng, *shape), threads, options.budget)
    elif part == "batches":
        for shape in BATCHES:
            name = f"{shape[0]} of {'×'.join(map(str, shape[1:]))}"
            yield product(both, name, dense(rng, *shape), threads, options.budget)
    elif part == "networks":
        for name, batch in NETWORKS:
            yield network(both, name, batch, threads, 4 * options.budget)
    else:
        for _ in range(options.random):
            shapes = draw(rng) if part == "drawn" else odd(rng)
            yield product(both, f"{part} {shapes}", shapes.operands(rng), threads, options.budget)


def odd(rng: np.random.Generator) -> Product:
    while True:
        m, n, k = (int(size) for size in rng.integers(16, 401, 3))
        if m * n * k >= 250_000:
            return Product(m, n, k, str(rng.choice(LAYOUTS, p=LAYOUT_SHARES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--random", type=int, default=24, metavar="N", help="products drawn at random")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--budget", type=float, default=0.4, help="seconds per case")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    new_rows = [row for t in options.threads for part in options.only for row in rows_of(part, t, options)]
    print(f"{len(new_rows)} cases: geometric mean {geometric(r.ratio for r in new_rows):.3f}×")
    for row in sorted(new_rows, key=lambda row: row.ratio)[:5]:
        print(f"  {row.ratio:.3f}× {row.name}, threads {row.threads}")
    new = {(row.name, row.threads) for row in new_rows}
    whole = options.only == PARTS and options.threads == THREADS
    old_rows = [] if whole else [row for row in read_rows(options.json) if (row.name, row.threads) not in new]
    write_results(options.json, [*old_rows, *new_rows])


if __name__ == "__main__":
    main()
