"""The tuner on this CPU: choices for shapes drawn at random against measuring every tile, and what a choice costs.

    python -m benchmarks.tuning [--shapes 24] [--seed 1]

The shapes are matrix products in no collection. A tile is chosen without measuring, after five measurements, by the
analytical default, and by measuring all; the four then run in turns (`tilewise tune --check` does the same for shapes
of your own). "met before" is a product through `dispatch` with the chooser on beside one with it off, in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import interleaved, machine_class, today
from tilewise._files import write_whole
from tilewise.backend import OptimizedBackend
from tilewise.costmodel.dataset import load_dataset
from tilewise.costmodel.shipped import shipped_names, shipped_scorer
from tilewise.tune.checking import check
from tilewise.tune.chooser import make_chooser
from tilewise.tune.problem import Value

RESULTS = Path(__file__).parent / "results" / "tuning.json"
CONFIGURATIONS = 500


def shapes(count: int, seed: int) -> list[Mapping[str, Value]]:
    """Products of a quarter of a million to sixteen million multiplications, sizes spread evenly in doublings, half of
    them of row-major operands and half with transposed views."""
    rng = np.random.default_rng(seed)
    found: list[Mapping[str, Value]] = []
    while len(found) < count:
        m, n, k = (int(size) for size in np.exp2(rng.uniform(4, 10, 3)))
        if 2.5e5 <= m * n * k <= 1.6e7:
            layout = str(rng.choice(["nn", "nt", "tn", "tt"], p=[0.5, 0.25, 0.15, 0.1]))
            found.append({"family": "matmul", "m": m, "n": n, "k": k, "layout": layout})
    return found


def met_before() -> dict[str, float]:
    """Seconds of one product by `dispatch`: with the chooser, which knows the shape by then, and without."""
    a = np.ones((64, 64), np.float32)
    plain, asking = OptimizedBackend(), OptimizedBackend(tile_chooser=make_chooser())
    runs = {"off": lambda: plain.dispatch("matmul", a, a), "on": lambda: asking.dispatch("matmul", a, a)}
    for _ in range(2000):  # until it has decided
        runs["on"]()
    return interleaved(runs, 1, 2.0)


def scoring() -> dict[str, float]:
    """Seconds to score some five hundred configurations of one kernel, for each shipped model."""
    found = {}
    for name in shipped_names():
        scorer, kernels = shipped_scorer(name), load_dataset(name, progress=False).test
        kernel = min(kernels, key=lambda k: abs(k.n_configs - CONFIGURATIONS))
        each = interleaved({name: lambda s=scorer, k=kernel: s.score(k)}, 1, 1.0)[name]  # type: ignore[misc]
        found[name] = each * CONFIGURATIONS / kernel.n_configs
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--shapes", type=int, default=24)
    flags.add_argument("--seed", type=int, default=1)
    options = flags.parse_args()
    tilewise.set_num_threads(1)
    checked = check(shapes(options.shapes, options.seed), say=lambda line: print(line, flush=True))
    found: dict[str, Any] = checked.as_dict()
    del found["machine"]
    found |= {"date": today(), "machine": machine_class(), "seed": options.seed}
    found |= {"met_before": met_before(), "scoring": scoring()}
    write_whole(RESULTS, json.dumps(found, indent=1) + "\n")
    print({key: found[key] for key in ("first", "five", "default", "time_ratio", "met_before", "scoring")})


if __name__ == "__main__":
    main()
