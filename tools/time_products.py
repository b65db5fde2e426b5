"""Time drawn float32 products in every configuration, as rows for tools/data/products.csv.xz.

    python -m tools.time_products --machine spr --set paths --products 300 --threads 1 --out rows.csv
    python -m tools.time_products --add rows.csv ...            # append files of rows to the collection

`paths` times every feasible path of a product, the tiled one with and without separate last columns; `tiles` a random
draw of tiles, among them the chosen one. The instruction set is that of TILEWISE_ISA. The time of a candidate is the
least of several interleaved readings; on one thread they are processor time, which other programs disturb little.
"""

from __future__ import annotations

import argparse
import csv
import io
import lzma
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.gemm_random import LAYOUTS, Product
from tilewise._extension import native
from tilewise.backend.tiled.matmul import TileConfig
from tilewise.errors import ConfigurationError
from tools.fit_products import COLUMNS, PATHS, TILES, TIMINGS

MOST_MULTIPLY_ADDS, MOST_FLOATS = {PATHS: 1 << 27, TILES: 1 << 30}, 1 << 23
# By set: ranges of all three sides, and the share of products drawn from them; the others are narrow or small.
SIDES = {PATHS: [(1, 2048), (16, 1024), (64, 1536)], TILES: [(16, 1024), (64, 1536)]}
WIDE_SHARE = {PATHS: 0.4, TILES: 1.0}
READINGS, READING_S, CANDIDATE_S = 8, 5e-5, 0.08
Candidate = tuple[str, int, TileConfig | None]  # the path, the number of separate last columns, the tile


def draw(kind: str, rng: np.random.Generator) -> Product:
    """Draw a product of one of the families that models have: few rows or columns, short or long sums, transformers."""

    def size(low: int, high: int) -> int:
        value = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        grain = int(rng.choice([1, 1, 8, 16, 64])) if value >= 64 else 1
        return max(value // grain * grain, low)

    narrow = [((1, 8), (8, 4096), (2, 4096)), ((8, 4096), (1, 16), (2, 4096)), ((1, 16), (1, 16), (64, 8192)),
              ((2, 2048), (2, 2048), (1, 40)), ((1, 1), (1, 4096), (1, 4096)), ((8, 4096), (1, 1), (2, 4096)),
              ((1, 64), (1, 64), (1, 64))]  # fmt: skip
    while True:
        if rng.random() < WIDE_SHARE[kind]:
            sides = [SIDES[kind][int(rng.integers(len(SIDES[kind])))]] * 3
        elif rng.random() < 0.15:
            sides = [(1, 512), (384, 3072), (384, 3072)]
        else:
            sides = narrow[int(rng.integers(len(narrow)))]
        m, n, k = (size(*side) for side in sides)
        if m * n * k <= MOST_MULTIPLY_ADDS[kind] and max(m * n, m * k, n * k) <= MOST_FLOATS:
            return Product(m, n, k, str(rng.choice(LAYOUTS, p=[0.35, 0.25, 0.3, 0.1])))


def path_candidates(product: Product, a: np.ndarray, b: np.ndarray, _: np.random.Generator) -> Iterator[Candidate]:
    """Return every path of a product; the tiled one with and without separate last columns."""
    others = set(native.matmul_paths(a, b)) - {"tiled"}
    yield from ((path, 0, None) for path in sorted(others))
    for last_columns in {0, product.n % native.gemm_register_tiles()[0][1]}:
        yield "tiled", last_columns, TileConfig(*native.matmul_plan(a, b)[1])


def tile_candidates(product: Product, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> Iterator[Candidate]:
    """Return the chosen tile and 24 drawn from those that the choice considers, or nearly does."""
    yield "tiled", 0, TileConfig(*native.matmul_plan(a, b)[1])
    registers, threads = native.gemm_register_tiles(), tilewise.get_num_threads()
    lanes, l2 = registers[0][1], native.cache_sizes()[1]
    for _ in range(24):
        vectors = int(rng.integers(1, 5))
        most = max(mr for mr, nr in registers if nr == vectors * lanes)
        mr = int(rng.choice([most, -(-product.m // -(-product.m // most))]))
        kc = min(int(rng.choice([product.k, 1024, 768, 512, 384, 256, 160])), product.k)
        half = max(l2 // 2 // (kc * 4) // mr * mr, mr)
        mc = min(int(rng.choice([half, half // 2, -(-product.m // mr) * mr])), -(-product.m // mr) * mr)
        pack_a = bool(rng.integers(2))
        grid = int(rng.choice([g for g in range(1, threads + 1) if threads % g == 0]))
        yield "tiled", 0, TileConfig(
            mr=mr, nr=vectors * lanes, mc=max(mc, mr), nc=4096 // (vectors * lanes) * vectors * lanes, kc=kc,
            pack_a=pack_a, pack_b=pack_a or product.layout[1] == "t" or bool(rng.integers(2)),
            threads_m=grid, threads_n=threads // grid,
        )  # fmt: skip


CANDIDATES = {PATHS: path_candidates, TILES: tile_candidates}


def time_candidates(candidates: list[Candidate], a: np.ndarray, b: np.ndarray) -> list[float]:
    """Return the least nanoseconds of each candidate; infinity for a tile that cannot be used."""
    clock = time.thread_time if tilewise.get_num_threads() == 1 else time.perf_counter
    configs: list[Any] = [
        path if tile is None else (native.prepared_tile(tile), last) for path, last, tile in candidates
    ]
    best, repeats = [float("inf")] * len(configs), [0] * len(configs)
    for i, config in enumerate(configs):
        try:
            native.matmul(a, b, config)
        except ConfigurationError:
            continue
        start = clock()
        native.matmul(a, b, config)
        repeats[i] = max(1, int(READING_S / (clock() - start)))
    for reading in range(READINGS):
        for i, config in enumerate(configs):
            if repeats[i] == 0 or (reading >= 4 and best[i] * reading > CANDIDATE_S * 1e9):
                continue
            native.matmul(a, b, config)
            start = clock()
            for _ in range(repeats[i]):
                native.matmul(a, b, config)
            best[i] = min(best[i], (clock() - start) / repeats[i] * 1e9)
    return best


def rows_of(kind: str, machine: str, product: Product, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Time one product and return the rows of its candidates."""
    a, b = product.operands(rng)
    candidates = list(dict.fromkeys(CANDIDATES[kind](product, a, b, rng)))
    for (path, last_columns, tile), ns in zip(candidates, time_candidates(candidates, a, b), strict=True):
        if ns == float("inf"):
            continue
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row.update(set=kind, machine=machine, isa=native.isa(), threads=tilewise.get_num_threads(), m=product.m)
        row.update(n=product.n, k=product.k, layout=product.layout, path=path, tail=last_columns, rules=0)
        if tile is not None:
            fields = tile.as_dict()
            row.update({name: fields[name] for name in COLUMNS if name in fields})
        row["ns"] = f"{ns:.4g}"
        yield row


def add_to_collection(files: list[Path]) -> None:
    """Append rows to the collection."""
    rows = []
    for text in (lzma.decompress(TIMINGS.read_bytes()).decode(), *(file.read_text() for file in files)):
        rows += list(csv.DictReader(io.StringIO(text)))
    with lzma.open(TIMINGS, "wt", preset=9, newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, restval="0", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Time products and write a file, or append files to the collection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="a name in MACHINES of tools/fit_products.py")
    parser.add_argument("--set", choices=[PATHS, TILES], default=PATHS)
    parser.add_argument("--products", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", type=Path, default=Path("products.csv"))
    parser.add_argument("--add", type=Path, nargs="+")
    options = parser.parse_args()
    if options.add:
        return add_to_collection(options.add)
    tilewise.set_num_threads(options.threads)
    rng, start = np.random.default_rng([options.seed, options.set == TILES]), time.monotonic()
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for _ in range(options.products):
            if time.monotonic() - start > options.seconds:
                break
            writer.writerows(rows_of(options.set, options.machine, draw(options.set, rng), rng))
            file.flush()


if __name__ == "__main__":
    main()
