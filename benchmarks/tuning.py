"""The tuner on this CPU: choices for shapes drawn at random against measuring every tile, and what a choice costs.

    python -m benchmarks.tuning [--shapes 24] [--convolutions 12] [--seed 1]
    python -m benchmarks.tuning --choosing                # what a choice costs, alone
    python -m benchmarks.tuning --left-out                # as on a processor that no model has seen

The shapes are matrix products and convolutions in no collection. `--left-out` takes this processor's kernels out of
what the model and its margin are fitted on. A tile is chosen without measuring, after five measurements, by the
analytical default, and by measuring all; they then run in turns (`tilewise tune --check` does the same for shapes of
your own).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import machine_class, provenance, results_path, today
from tilewise._atomic import write_atomic
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.gpu.families.family import get_family
from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import shipped_scores
from tilewise.tune.choose.tuner import check
from tilewise.tune.measure.cpu.device import CpuDevice
from tilewise.tune.measure.export import slug
from tools.ship_cpu import processor, ship

RESULTS = Path(__file__).parent / "results" / "tuning.json"
UNSEEN = RESULTS.with_name("tuning_unseen.json")
CONFIGURATIONS = 500
_CHOICES = 100


def shapes(count: int, seed: int) -> list[Mapping[str, Value]]:
    """Products of 0.25 to 100 million multiplications, sizes spread evenly in doublings, half of them of row-major
    operands and half with transposed views."""
    rng = np.random.default_rng(seed)
    problems: list[Mapping[str, Value]] = []
    while len(problems) < count:
        m, n, k = (int(size) for size in np.exp2(rng.uniform(4, 11, 3)))
        if 2.5e5 <= m * n * k <= 1e8:
            layout = str(rng.choice(["nn", "nt", "tn", "tt"], p=[0.5, 0.25, 0.15, 0.1]))
            problems.append({"family": "matmul", "m": m, "n": n, "k": k, "layout": layout})
    return problems


def convolutions(count: int, seed: int) -> list[Mapping[str, Value]]:
    """Convolutions of one to sixty million multiplications: kernels of 1, 3 and 5, strides of 1 and 2."""
    rng = np.random.default_rng([seed, 2])
    problems: list[Mapping[str, Value]] = []
    while len(problems) < count:
        channels, filters = (int(size) for size in np.exp2(rng.uniform(3, 8, 2)))
        size, kernel, stride = int(np.exp2(rng.uniform(2.5, 6))), int(rng.choice([1, 3, 5])), int(rng.choice([1, 1, 2]))
        if 1e6 <= channels * filters * (size // stride) ** 2 * kernel**2 <= 6e7:
            place = {"height": size, "width": size, "kernel": kernel, "stride": stride, "padding": kernel // 2}
            problems.append({"family": "conv2d", "batch": 1, "channels": channels, "filters": filters, **place})
    return problems


def choosing(seed: int) -> dict[str, float]:
    """Seconds of one choice without measuring among five hundred configurations of a Triton product, median over shapes
    that were never asked about before. "cold" is a process's first: the model is read, and what holds for all shapes is
    worked out."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(int(size) for size in np.exp2(rng.uniform(5, 9, 3))) for _ in range(_CHOICES)]
    family = get_family("matmul")
    spec: dict[str, Value] = {"dtype": "bf16", "epilogue": "none", "layout": "nt"}
    problems = [Problem.of("matmul", m=8 * m, n=8 * n, k=8 * k, **spec) for m, n, k in shapes]
    configs = family.configs(problems[0])
    more = [Config({**config, "group": 4}) for config in configs if config["group"] == 1]
    configs = (*configs, *more)[:CONFIGURATIONS]

    def on_gpu() -> Callable[[Any], Any]:
        model, _ = shipped_scores("h200", "H200", "triton", 0.0)
        assert model is not None
        return lambda problem: decide(problem, configs, model.rank(problem, configs))

    return _seconds("h200", on_gpu, problems)


def _seconds(name: str, make: Callable[[], Callable[[Any], Any]], inputs: Sequence[Any]) -> dict[str, float]:
    """Return the seconds of the first, cold choice and the median of later ones."""
    start = time.perf_counter()
    run = make()
    seconds = []
    for one in inputs:
        run(one)
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    return {name: statistics.median(seconds[_CHOICES // 10 :]), f"{name} cold": seconds[0]}


def unseen_model(folder: str) -> Path:
    """A CPU model whose weights, margin and calibration know nothing of this processor."""
    path, here = Path(folder) / "unseen.safetensors", processor(slug(CpuDevice().machine.identity))
    ship(read_collection(find_collection("cpu")), 1, path, here)
    return path


def by_family(results: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means and the worst of each choice, over a family's problems; the worst over the default too."""
    rows: dict[str, Any] = {}
    for family in sorted({one["problem"]["family"] for one in results["problems"]}):
        some = [one for one in results["problems"] if one["problem"]["family"] == family]
        ways = ("default", "first", "five")
        ratios = {way: np.array([one[way] for one in some]) for way in ways}
        rows[family] = {"problems": len(some)} | {
            way: {"mean": float(np.exp(np.log(own).mean())), "worst": float(own.min())} for way, own in ratios.items()
        }
        for way in ways[1:]:
            rows[family][way]["worst_over_default"] = float((ratios[way] / ratios["default"]).min())
    return rows


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--shapes", type=int, default=24)
    flags.add_argument("--convolutions", type=int, default=12)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--choosing", action="store_true", help="only say what a choice costs")
    flags.add_argument("--left-out", action="store_true", help="with a model that has not seen this processor")
    options = flags.parse_args()
    tilewise.set_num_threads(1)
    if options.choosing:
        print(json.dumps({name: f"{1e3 * seconds:.3f} ms" for name, seconds in choosing(options.seed).items()}))
        return
    problems = [*shapes(options.shapes, options.seed), *convolutions(options.convolutions, options.seed)]
    with tempfile.TemporaryDirectory(prefix="tilewise-tuning-") as folder:
        model = unseen_model(folder) if options.left_out else None
        results = check(problems, model=model and str(model), say=lambda line: print(line, flush=True))
    del results["machine"]
    results |= {"date": today(), "machine": machine_class(), "seed": options.seed, **provenance("tuning")}
    results |= {"families": by_family(results)}
    if not options.left_out:
        results |= {"choosing": choosing(options.seed)}
    write_atomic(results_path(UNSEEN if options.left_out else RESULTS), json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["families"], indent=1))
    print(results.get("choosing"))


if __name__ == "__main__":
    main()
