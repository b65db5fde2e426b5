"""The tuner on this CPU: choices for shapes drawn at random against measuring every tile, and what a choice costs.

    python -m benchmarks.tuning [--shapes 24] [--seed 1]

The shapes are matrix products in no collection. A tile is chosen without measuring, after five measurements, by the
analytical default, and by measuring all; the four then run in turns (`tilewise tune --check` does the same for shapes
of your own). "met before" is a product through `dispatch` with the chooser on beside one with it off, in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import interleaved, machine_class, placed, today
from tilewise._files import write_whole
from tilewise.backend import OptimizedBackend
from tilewise.tune.choose.check import check
from tilewise.tune.choose.chooser import make_chooser
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import shipped_scores
from tilewise.tune.families.triton.family import get_family
from tilewise.tune.problem import Config, Problem, Value

RESULTS = Path(__file__).parent / "results" / "tuning.json"
CONFIGURATIONS = 500
_CHOICES = 100


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


def choosing(seed: int) -> dict[str, float]:
    """Seconds of one choice without measuring, median over shapes that were never asked about before: the tuner's among
    five hundred configurations of a Triton product, and the framework's chooser's for a product on this CPU."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(int(size) for size in np.exp2(rng.uniform(5, 9, 3))) for _ in range(_CHOICES)]
    (gpu, _), chooser = shipped_scores("h200", "H200", "triton", 0.0), make_chooser()
    family = get_family("matmul")
    spec: dict[str, Value] = {"dtype": "bf16", "epilogue": "none", "layout": "nt"}
    problems = [Problem.of("matmul", m=8 * m, n=8 * n, k=8 * k, **spec) for m, n, k in drawn]
    listed = family.configs(problems[0])
    more = [Config({**config, "group": 4}) for config in listed if config["group"] == 1]
    configs = (*listed, *more)[:CONFIGURATIONS]

    def on_gpu(problem: Problem) -> None:
        decide(problem, configs, gpu)

    ways: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {
        "h200": (on_gpu, problems),
        "cpu": (lambda shape: chooser("matmul", shape, "float32", "nn"), drawn),
    }
    return {name: _median_seconds(choose, asked) for name, (choose, asked) in ways.items()}


def _median_seconds(run: Callable[[Any], Any], asked: Sequence[Any]) -> float:
    """After a few that warm up."""
    seconds = []
    for one in asked:
        start = time.perf_counter()
        run(one)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[_CHOICES // 10 :])


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
    found |= {"met_before": met_before(), "choosing": choosing(options.seed)}
    write_whole(placed(RESULTS), json.dumps(found, indent=1) + "\n")
    print({key: found[key] for key in ("first", "five", "default", "time_ratio", "met_before", "choosing")})


if __name__ == "__main__":
    main()
