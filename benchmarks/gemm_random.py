"""Drawn shapes against NumPy: is there a product, of the kinds that models have, for which the default is slow?

Each draw takes a family (few rows, few columns, short or long sums, small, or anything), sizes that are often odd, and
a layout: nn, nt (B a transposed view), tn (A one) or tt. All are checked and timed briefly; those that look slow are
timed again at length, and only what is slow then counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Row, compare
from tilewise.backend import matmul_native
from tilewise.profile.timing.clock import time_interleaved

LAYOUTS = ["nn", "nt", "tn", "tt"]
LAYOUT_SHARES = [0.4, 0.3, 0.2, 0.1]
MOST_FLOATS, MOST_MULTIPLICATIONS = 1 << 23, 1 << 26
SUSPECT, SLOW = 0.95, 0.9
ROUNDS, ROUND_S = 7, 6e-4


@dataclass(frozen=True)
class Product:
    m: int
    n: int
    k: int
    layout: str

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k} {self.layout}"

    def operands(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((self.m, self.k), (self.k, self.n)))
        a = np.ascontiguousarray(a.T).T if self.layout[0] == "t" else a
        return a, np.ascontiguousarray(b.T).T if self.layout[1] == "t" else b


def draw(rng: np.random.Generator) -> Product:
    """One product, of a random family."""

    def size(low: int, high: int) -> int:
        value = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        if value >= 32 and rng.random() < 0.5:  # half of the large sizes are what people choose
            grain = int(rng.choice([8, 16, 32, 64]))
            value = max(grain, value // grain * grain)
        return min(max(value, low), high)

    families: list[Callable[[], tuple[int, int, int]]] = [
        lambda: (size(1, 8), size(8, 8192), size(2, 4096)),  # few rows
        lambda: (size(8, 8192), size(1, 16), size(2, 4096)),  # few columns
        lambda: (size(2, 2048), size(2, 2048), size(1, 64)),  # short sums
        lambda: (size(1, 64), size(1, 64), size(64, 8192)),  # long sums
        lambda: (size(4, 300), size(4, 300), size(4, 300)),  # small
        lambda: (size(1, 4096), size(1, 4096), size(1, 4096)),  # anything
    ]
    while True:
        m, n, k = families[int(rng.integers(len(families)))]()
        if m * n * k <= MOST_MULTIPLICATIONS and max(m * n, m * k, n * k) <= MOST_FLOATS:
            return Product(m, n, k, str(rng.choice(LAYOUTS, p=LAYOUT_SHARES)))


def quick_ratio(a: np.ndarray, b: np.ndarray) -> float:
    """NumPy's best time over ours, in a few milliseconds."""
    start = time.perf_counter()
    np.matmul(a, b)
    matmul_native(a, b)
    repeats = max(1, int(ROUND_S * 2 / (time.perf_counter() - start)))
    runs = [functools.partial(run, a, b) for run in (matmul_native, np.matmul)]
    ours, theirs = (min(times) for times in time_interleaved(runs, ROUNDS, calls=repeats, warmup=0))
    return theirs / ours


def check(product: Product, a: np.ndarray, b: np.ndarray) -> None:
    exact, size = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
    if not (np.abs(matmul_native(a, b) - exact) <= 2e-6 * size + 1e-6).all():
        raise SystemExit(f"{product}: the product is wrong")


def careful(product: Product, seed: int, threads: int, budget_s: float = 0.5) -> Row:
    a, b = product.operands(np.random.default_rng(seed))
    runs = {"tilewise": lambda: matmul_native(a, b), "numpy": lambda: np.matmul(a, b)}
    return compare(str(product), threads, runs, budget_s)


def sweep(count: int, seed: int, threads: int) -> list[Row]:
    """`count` shapes; the rows of those that had to be timed at length."""
    rng = np.random.default_rng(seed)
    ratios: dict[Product, float] = {}
    for _ in range(count):
        product = draw(rng)
        a, b = product.operands(rng)
        check(product, a, b)
        ratios[product] = quick_ratio(a, b)
    rows = []
    for product in [product for product, ratio in ratios.items() if ratio < SUSPECT]:
        rows.append(careful(product, seed, threads))
        ratios[product] = rows[-1].ratio
    values = np.array(list(ratios.values()))
    print(
        f"{len(values)} shapes against NumPy: geometric mean {np.exp(np.log(values).mean()):.2f}×, "
        f"{(values < SLOW).sum()} below {SLOW}×, worst {values.min():.2f}× at {min(ratios, key=ratios.__getitem__)}"
    )
    return rows
