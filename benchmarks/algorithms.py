"""The algorithms of a 3x3 convolution side by side: direct, Winograd's F(4x4, 3x3) and F(2x2, 3x3), and the
default's choice among them.

    python -m benchmarks.algorithms [--threads 1] [--batch 1 8] [--budget 0.4]

Layers are chained in one plan, each with filters of its own, until all of them together exceed the caches: in a network
filters come from memory. "tilewise" is the default; a ratio of 1 means that it chose the fastest, 0.9 that another one
takes nine tenths of its time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import Row, Run, compare, write_results
from tilewise._extension import native
from tilewise.backend.tiled.conv2d import ALGORITHMS

# channels and image side: of networks people run at several sizes, and some of none
LAYERS = (
    (16, 32), (24, 56), (32, 112), (32, 40), (48, 28), (64, 56), (64, 97), (64, 8), (96, 20), (128, 28), (128, 40),
    (128, 13), (160, 14), (192, 25), (256, 14), (256, 20), (256, 7), (320, 10), (384, 12), (512, 7), (512, 10),
    (512, 14),
)  # fmt: skip
_FILTER_BYTES = 48 << 20
_MOST_LAYERS = 12


def chain(channels: int, side: int, batch: int, algorithm: str, filters: list[np.ndarray]) -> Run:
    """Layers of 3x3 filters one after the other; their results stay of one size."""
    kernels: Any = native
    x = np.random.default_rng(0).standard_normal((batch, channels, side, side), dtype=np.float32)
    plan = kernels.Graph()
    value = plan.input(*x.shape)
    for weight in filters:
        layer = kernels.FloatConvLayer(weight, None, (1, 1), (1, 1, 1, 1), (1, 1), 1, "relu")
        value = plan.conv(layer, value, algorithm=algorithm)
        layer.release()
    plan.output(value)
    plan.finish()
    return lambda: plan.run([x])[0]


def case(channels: int, side: int, batch: int, threads: int, budget_s: float) -> Row:
    rng = np.random.default_rng(1)
    count = max(1, min(_MOST_LAYERS, _FILTER_BYTES // (36 * channels**2)))
    scale = np.float32((2 / (9 * channels)) ** 0.5)
    filters = [rng.standard_normal((channels, channels, 3, 3), dtype=np.float32) * scale for _ in range(count)]
    runs = {name: chain(channels, side, batch, name, filters) for name in ALGORITHMS}
    want = runs["direct"]()
    for name, run in runs.items():
        if np.abs(run() - want).max() > 1e-4 * np.abs(want).max():
            raise SystemExit(f"{name} differs from the direct algorithm at {channels} channels, {side} pixels")
    runs["tilewise"] = chain(channels, side, batch, "", filters)
    return compare(f"3x3 {channels}-{channels} at {side}, batch {batch}", threads, runs, budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=float, default=0.4, help="seconds a row")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "algorithms.json")
    options = parser.parse_args()
    for threads in options.threads:
        tilewise.set_num_threads(threads)
        for batch in options.batch:
            rows = [case(*layer, batch, threads, options.budget) for layer in LAYERS]
            write_results(options.json, rows, keep=True)


if __name__ == "__main__":
    main()
