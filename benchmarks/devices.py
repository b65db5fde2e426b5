"""Evaluates choices for a GPU that was left out of training, on one kernel that was measured on several GPUs.

    python -m benchmarks.devices ../shared/data/t4/*.gz                    # Kernel Tuner's T4 files, one a device
    python -m benchmarks.devices ../shared/data/t4/*.gz --kernel-tuner     # twenty measurements against its strategies
    python -m benchmarks.devices ../shared/data/t4/*.gz --ceilings         # upper bounds by hindsight
    python -m benchmarks.devices --processors                              # the CPU collection, a processor left out
    python -m benchmarks.devices --products ../shared/data/inductor/a100_mm.zip     # the H200's model on another GPU

A figure is the fastest configuration's time divided by the choice's: 1 is perfect. The ranker is boosted trees. Five
and twenty measurements follow the ranker's order, or are chosen one by one by the expected improvement of the tuner's
Gaussian process (`tilewise.tune.search`, with its default hyperparameters). "Drawn" means that five are measured after
twenty random ones. "Hindsight" uses the times of the device that was left out: the best configuration among the first k
of any other device, or among the first k by a weighted mean of the others' log runtimes, with the best of a thousand
random weightings. Intervals are bootstrap intervals over the devices.

`--processors` does the same with the CPU collection. Each kernel is ranked by a model that was not trained on its
processor, measured in the model's order or one by one. Unmeasured choices come from that model, or from trees trained
on other kernels of the same machine alone. Half of a machine's kernels are for training, half for evaluation. Gains are
differences of logarithms, paired over kernels.

`--products` asks the shipped model of the H200, which has seen no other device, to choose among the Triton
configurations of PyTorch's own records of another GPU, and trains trees in the same way; the records lack the group,
which is 8 in PyTorch's templates.

Strategies are scored as Kernel Tuner's methodology does (autotuning_methodology 1.1, over measurements): the median
over runs of the best so far, less what random search has by then, as a share of how far the optimum is from that; the
mean over the first twenty measurements and the spaces. Random search has the time at the rank expected of it.
tilewise runs with twenty seeds as the strategies do, each time with a ranker of the other devices that has that seed;
"from nothing" has no ranker and draws its first. Intervals draw the runs of every space anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import today
from tilewise._atomic import write_atomic
from tilewise.costmodel.data.dataset import dataset_from_kernels, load_dataset
from tilewise.costmodel.data.importers import import_logs
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.costmodel.models.gbdt import train_gbdt
from tilewise.costmodel.models.ridge import ridge_scorer
from tilewise.costmodel.models.scorer import shipped_scorer
from tilewise.tune.search.calibration import make_case
from tilewise.tune.search.gaussian_process import Hyperparameters

RESULTS = Path(__file__).parent / "results" / "devices.json"
BUDGET, DRAWS, SEEDS, RUNS = 20, 3, 3, 20
FIRST, FEW = (1, 5, 20), (5, 10, 20)
_WEIGHTS, _UNKNOWN = 1000, 100.0  # draws of hindsight; a time over the fastest for what another device could not run
TRAINED_ON = (5, 20, 100)  # kernels of the new device
ALONE = "first, trained on {} kernels alone"
PAIRS = [
    *(("first", ALONE.format(count)) for count in TRAINED_ON),
    *((f"{k}, in order", f"{k}, one by one") for k in FEW),
]
TILE_WIDTH = len(TILE_FEATURES)
OURS, FROM_NOTHING = "tilewise, from the other devices", "tilewise, from nothing"
Scores = npt.NDArray[Any]


class Mean:
    """Several trained models as one, which remembers the scores of the kernel it was asked about last."""

    name = "GBDT"

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = models
        self.preparation, self.schema = models[0].preparation, models[0].schema
        self.record: dict[str, Any] = {}
        self._last: tuple[Any, Scores] | None = None

    def score(self, kernel: Kernel, rows: Any = None) -> Scores:
        if rows is not None:
            return np.asarray(np.mean([model.score(kernel, rows) for model in self.models], axis=0))
        if self._last is None or self._last[0] is not kernel.config_feat:
            scores = np.mean([model.score(kernel) for model in self.models], axis=0)
            self._last = (kernel.config_feat, scores)
        return self._last[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--kernel-tuner", action="store_true", help="score its strategies beside tilewise's search")
    parser.add_argument("--jobs", type=int, default=1, help="processes for --kernel-tuner")
    parser.add_argument("--ceilings", action="store_true", help="add what could be reached to the run recorded")
    parser.add_argument("--processors", action="store_true", help="the CPU collection instead of files")
    parser.add_argument("--products", action="store_true", help="the files are PyTorch's records of products")
    options = parser.parse_args()
    if not options.files and not options.processors:
        parser.error("give the files of one kernel, one a device, or --processors")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    kernels, schema = read_kernels(options.files) if options.files and not options.products else ([], Schema(()))
    if options.processors:
        results["processors"] = left_out_processors()
    elif options.products:
        results["products"] = from_h200(options.files)
    elif options.kernel_tuner:
        results["strategies"] = beside_strategies(kernels, schema, options.jobs)
    elif options.ceilings:
        results["ceilings"] = ceilings(kernels)
    else:
        other_parts = {name: results[name] for name in ("processors", "products", "strategies") if name in results}
        results = every_device(kernels, schema) | {"ceilings": ceilings(kernels)} | other_parts
    write_atomic(RESULTS, json.dumps(results, indent=1) + "\n")


def every_device(kernels: Sequence[Kernel], schema: Schema) -> dict[str, Any]:
    """Each device left out in turn."""
    rows, curves = {}, {}
    for number, kernel in enumerate(kernels):
        others = [k for i, k in enumerate(kernels) if i != number]
        rows[kernel.program], curves[kernel.program] = leave_out(kernel, others, schema)
        print(kernel.program, {name: round(value, 3) for name, value in rows[kernel.program].items()}, flush=True)
    names = list(next(iter(rows.values())))
    means = {name: interval([row[name] for row in rows.values()]) for name in names}
    for name, (mean, low, high) in means.items():
        print(f"{name}: {mean:.3f} ({low:.3f} to {high:.3f})", flush=True)
    near = {k.program: int((k.target < 1.1 * k.target.min()).sum()) for k in kernels}
    return {"date": today(), "left_out": rows, "means": means, "within_10": near, "curves": curves}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean, and where 95 in 100 of such means of the devices resampled lie."""
    logs = np.log(values)
    means = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return float(np.exp(logs.mean())), float(low), float(high)


def read_kernels(files: Sequence[Path]) -> tuple[list[Kernel], Schema]:
    """Read the files as one collection with a kernel for each device."""
    with tempfile.TemporaryDirectory() as folder:
        import_logs("kernel-tuner", files, Path(folder) / "all", split="train")
        data = load_dataset(Path(folder) / "all", cache_dir=Path(folder) / "cache", progress=False)
        return [dataclasses.replace(k, config_feat=np.array(k.config_feat)) for k in data.train], data.schema


def leave_out(kernel: Kernel, others: Sequence[Kernel], schema: Schema) -> tuple[dict[str, float], list[float]]:
    """Return the speed that each method reaches on `kernel`, and the curve of measuring one by one."""
    model = trained(others, schema)
    order = np.argsort(model.score(kernel), kind="stable")
    curve = one_by_one(model, kernel, schema, BUDGET)[1]
    speeds = {
        "first": reached(kernel, order[:1]),
        "five, in order": reached(kernel, order[:5]),
        "five, one by one": curve[4],
        "20, in order": reached(kernel, order[:20]),
        "20, one by one": curve[19],
        "five after 20 drawn": after_drawn(model, kernel),
    }
    return speeds, curve


def trained(kernels: Sequence[Kernel], schema: Schema, seeds: Iterable[int] = range(SEEDS)) -> Any:
    width = kernels[0].config_feat.shape[1]
    data = dataset_from_kernels(kernels, [], [], Schema(schema.config_features[:width]))
    return Mean([train_gbdt(data, seed, threads=1) for seed in seeds])


def elsewhere(kernel: Kernel, other: Kernel) -> Scores:
    """The other device's runtimes of the configurations of `kernel`; infinite where it has none."""
    times = {row.tobytes(): t for row, t in zip(other.config_feat, other.target, strict=True)}
    return np.array([times.get(row.tobytes(), math.inf) for row in kernel.config_feat])


def ceilings(kernels: Sequence[Kernel]) -> dict[str, dict[str, float]]:
    """Return, by hindsight rule and device, the speed that the other devices' times allow at best."""
    bounds: dict[str, dict[str, float]] = {}
    for number, kernel in enumerate(kernels):
        times = np.array([elsewhere(kernel, other) for i, other in enumerate(kernels) if i != number])
        orders = np.argsort(times, axis=1, kind="stable")
        weighted = [np.argsort(w @ np.log(np.minimum(times, _UNKNOWN)), kind="stable") for w in _weights(len(times))]
        for k in FIRST:
            union = bounds.setdefault(f"all that are in another device's first {k}", {})
            union[kernel.program] = reached(kernel, orders[:, :k].reshape(-1))
            mean = bounds.setdefault(f"the first {k} by the best weighting of the others", {})
            mean[kernel.program] = max(reached(kernel, order[:k]) for order in weighted)
    for name, row in bounds.items():
        print(f"hindsight, {name}: {_geometric(list(row.values())):.3f}", flush=True)
    return bounds


def _weights(devices: int) -> Scores:
    """Each device alone, then draws; some of a third of them are negative."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(devices, 0.4), _WEIGHTS)
    signs = np.where((np.arange(_WEIGHTS)[:, None] % 3 == 0) & (rng.random(weights.shape) < 0.25), -1.0, 1.0)
    return np.vstack([np.eye(devices), weights * signs])


def one_by_one(
    model: Any, kernel: Kernel, schema: Schema, budget: int, first_rows: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Measure as the tuner does, by expected improvement, after the rows in `begun`.

    Returns the measured rows, and what the best so far reaches after each.
    """
    process = make_case(model, kernel, schema.config_features).process(Hyperparameters())
    rows: list[int] = []
    while len(rows) < budget:
        row = first_rows[len(rows)] if len(rows) < len(first_rows) else process.next()
        if row is None:
            break
        rows.append(row)
        process.observe(row, math.log(kernel.target[row]))
    return rows, [reached(kernel, rows[: k + 1]) for k in range(len(rows))]


def after_drawn(model: Any, kernel: Kernel) -> float:
    """Best of five more after twenty measurements at random: geometric mean over draws."""
    speeds = []
    for seed in range(DRAWS):
        drawn = np.random.default_rng(seed).choice(kernel.n_configs, BUDGET, replace=False)
        rows, _ = one_by_one(model, kernel, model.schema, BUDGET + 5, first_rows=[int(row) for row in drawn])
        speeds.append(reached(kernel, rows))
    return _geometric(speeds)


def left_out_processors() -> dict[str, Any]:
    """The CPU collection's kernels under models that have not seen their processor: means, and paired gains."""
    data = load_dataset("cpu", progress=False)
    every = [k for split in (data.train, data.valid, data.test) for k in split if k.n_configs > BUDGET]
    rows = []
    for machine in sorted({machine_of(k) for k in every}):
        processor = machine.rpartition("-")[0]
        base = ridge_scorer([k for k in every if not machine_of(k).startswith(processor)], data.schema, 0)
        mine = [k for k in every if machine_of(k) == machine]
        mine = [mine[i] for i in np.random.default_rng(0).permutation(len(mine))]
        half = len(mine) // 2
        others = trained_there(base, mine[:half])
        rows += [on_processor(base, others, kernel) for kernel in mine[half:]]
        print(machine, len(mine), flush=True)
    results: dict[str, Any] = {"date": today(), "kernels": len(rows)}
    for plain, other in PAIRS:
        logs = np.log([[row[plain], row[other]] for row in rows if other in row])
        if not len(logs):
            continue
        gain = logs[:, 1] - logs[:, 0]
        resampled = np.random.default_rng(0).choice(gain, (4000, len(gain))).mean(axis=1)
        low, high = np.expm1(np.percentile(resampled, [2.5, 97.5])).tolist()
        means = np.exp(logs.mean(axis=0)).tolist()
        results[other] = {"plain": means[0], "reached": means[1], "gain": [float(np.expm1(gain.mean())), low, high]}
        results[other]["kernels"] = len(logs)
        print(f"{plain} {means[0]:.4f}, {other} {means[1]:.4f}: {low:+.2%} to {high:+.2%}", flush=True)
    return results


def from_h200(files: Sequence[Path]) -> dict[str, Any]:
    """Evaluate the H200's model on another GPU's products, unmeasured and with five measurements."""
    model = shipped_scorer("h200")
    with tempfile.TemporaryDirectory() as folder:
        import_logs("inductor", files, Path(folder) / "all", split="train")
        data = load_dataset(Path(folder) / "all", cache_dir=Path(folder) / "cache", progress=False)
        have = {name: number for number, name in enumerate(data.schema.config_features)}
        columns = [have.get(name, -1) for name in model.schema.config_features]
        kernels = [kernel for kernel in (as_on_h200(k, columns) for k in data.train) if kernel.n_configs > 5]
    rows: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    shuffled = [kernels[i] for i in rng.permutation(len(kernels))]
    others = trained_there(model, shuffled[: max(TRAINED_ON)])
    for kernel in shuffled[max(TRAINED_ON) :]:
        scored = Mean([model])
        order = np.argsort(scored.score(kernel), kind="stable")
        random_order = rng.permutation(kernel.n_configs)
        picks = {
            "first": order[:1],
            "five, in order": order[:5],
            "five, one by one": one_by_one(scored, kernel, model.schema, 5)[0],
        }
        picks |= {"first, drawn": random_order[:1], "five, drawn": random_order[:5]}
        picks |= {name: [int(np.argmin(other.score(kernel)))] for name, other in others.items()}
        for name, picked_rows in picks.items():
            rows.setdefault(name, []).append(reached(kernel, picked_rows))
    for name in others:
        rows[f"{name}, over the first"] = np.divide(rows[name], rows["first"]).tolist()
    means = {name: interval(values) for name, values in rows.items()}
    for name, (mean, low, high) in means.items():
        print(f"{name}: {mean:.4f} ({low:.4f} to {high:.4f})", flush=True)
    return {"date": today(), "kernels": len(rows["first"]), "means": means}


def as_on_h200(kernel: Kernel, columns: Sequence[int]) -> Kernel:
    """The Triton configurations of a kernel in the columns of the H200's collection."""
    triton = some(kernel, np.flatnonzero(kernel.config_feat[:, :TILE_WIDTH].any(axis=1)))
    grouped = np.hstack([triton.config_feat, np.full((triton.n_configs, 1), 8, np.float32)])
    return dataclasses.replace(triton, config_feat=np.ascontiguousarray(grouped[:, columns]))


def trained_there(base: Any, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Trees that know nothing but so many kernels of a device."""
    return {
        ALONE.format(count): train_gbdt(dataset_from_kernels(kernels[:count], [], [], base.schema), threads=1)
        for count in TRAINED_ON
        if count <= len(kernels)
    }


def on_processor(base: Any, others: dict[str, Any], kernel: Kernel) -> dict[str, float]:
    once = Mean([base])
    order = np.argsort(once.score(kernel), kind="stable")
    curve = one_by_one(once, kernel, base.schema, BUDGET)[1]
    speeds = {"first": reached(kernel, order[:1])}
    speeds |= {name: reached(kernel, [int(np.argmin(other.score(kernel)))]) for name, other in others.items()}
    for k in FEW:
        speeds |= {f"{k}, in order": reached(kernel, order[:k]), f"{k}, one by one": curve[k - 1]}
    return speeds


def machine_of(kernel: Kernel) -> str:
    return kernel.program.rpartition(".")[2]


def beside_strategies(kernels: Sequence[Kernel], schema: Schema, jobs: int) -> dict[str, dict[str, Any]]:
    """Kernel Tuner's strategies and tilewise's search, all with the same number of runs on every space."""
    from benchmarks.kernel_tuner_peer import STRATEGIES

    scores = {}
    with ProcessPoolExecutor(jobs) as pool:
        pending = {
            name: [pool.submit(runs_on, name, number, kernels, schema) for number in range(len(kernels))]
            for name in (OURS, FROM_NOTHING, *STRATEGIES)
        }
        for name, spaces in pending.items():
            try:
                curves = [space.result() for space in spaces]
            except Exception as error:  # a strategy that needs what is not installed is left out of the table
                print(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            scores[name] = row = scored(curves, kernels)
            print(f"{name}: score {row['score']:.3f} {row['interval']}, reached {row['reached']:.3f}", flush=True)
    return scores


def runs_on(name: str, number: int, kernels: Sequence[Kernel], schema: Schema) -> list[list[float]]:
    """Return, for each run on one space, the fastest time divided by the best so far."""
    kernel = kernels[number]
    if name == OURS:
        others = [k for i, k in enumerate(kernels) if i != number]
        return [one_by_one(trained(others, schema, [seed]), kernel, schema, BUDGET)[1] for seed in range(RUNS)]
    if name == FROM_NOTHING:
        first = [int(np.random.default_rng(seed).integers(kernel.n_configs)) for seed in range(RUNS)]
        return [one_by_one(Nothing(), kernel, schema, BUDGET, first_rows=[row])[1] for row in first]
    from benchmarks.kernel_tuner_peer import run

    return [run(name, kernel, schema, BUDGET, seed) for seed in range(RUNS)]


class Nothing:
    """A model that thinks all configurations alike."""

    def score(self, kernel: Kernel) -> Scores:
        return np.zeros(kernel.n_configs)


def some(kernel: Kernel, rows: Any) -> Kernel:
    cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **cut)


def reached(kernel: Kernel, rows: Any) -> float:
    return float(kernel.target.min() / kernel.target[rows].min())


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def scored(curves: Sequence[Sequence[Sequence[float]]], kernels: Sequence[Kernel]) -> dict[str, Any]:
    """A strategy's curves (space, run, measurement) of the fastest time over the best so far."""
    rng = np.random.default_rng(0)
    means = []
    for draw in range(1001):
        scores = []
        for runs, kernel in zip(curves, kernels, strict=True):
            rows = np.arange(len(runs)) if draw == 0 else rng.integers(len(runs), size=len(runs))
            scores.append(score(np.asarray(runs)[rows], kernel.target))
        means.append(float(np.mean(scores)))
    low, high = np.percentile(means[1:], [2.5, 97.5])
    last = _geometric([run[-1] for runs in curves for run in runs])
    interval = [round(float(low), 4), round(float(high), 4)]
    return {"score": means[0], "interval": interval, "reached": last, "runs": len(curves[0])}


def score(runs: Scores, target: Scores) -> float:
    """The methodology's score on one space, of the fastest time over the best so far by run and measurement."""
    best = float(target.min())
    by_chance = expected_by_chance(target, runs.shape[1])
    return float(np.mean((by_chance - np.median(best / runs, axis=0)) / (by_chance - best)))


def expected_by_chance(target: Scores, budget: int) -> Scores:
    """Return the expected time of random search after 1 to `budget` measurements."""
    slowest_first, n = np.sort(target)[::-1], len(target)
    return slowest_first[[min(n - 1, round(k * (n + 1) / (k + 1))) for k in range(1, budget + 1)]]


if __name__ == "__main__":
    main()
