"""Train the CPU's cost model, and evaluate it on machines that it was not trained on.

    python -m tools.ship_cpu --table                      # leave one machine out: results/machines.json
    python -m tools.ship_cpu --table --models CpuRidge TileRanker GBDT
    python -m tools.ship_cpu --ship                       # the model in the package, with the margin of the table
    python -m tools.ship_cpu --without amd-epyc --out x.safetensors   # one that has not seen a processor

A fold leaves out the kernels of one kind of CPU (a processor with one instruction set), of one processor, or of one
instruction set, and trains on the others. Four choices are evaluated on what was left out, each as the fastest tile's
time divided by the choice's: the default; the first choice (unmeasured: the model's if its predicted gain exceeds the
margin, else the default); and the best of the default and five measurements, in the model's order and in random order.
The margin is the best one over all folds of single kinds; a fold is evaluated with the margin of the other folds.
Intervals are paired bootstrap intervals of the mean over kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise.costmodel import train
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import dataset_from_kernels, find_collection
from tilewise.costmodel.models.ridge import ridge_scorer
from tilewise.costmodel.models.scorer import RIDGE
from tilewise.tune.search.confidence import calibration_path
from tilewise.tune.search.replay import recalibrate

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "machines.json"
FOLDER = Path(__file__).parents[1] / "src" / "tilewise" / "costmodel" / "shipped_models"
# Margins to choose from, in logarithms of runtime.
MARGINS = (0.0, 0.02, 0.045, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3)
LOSS_WEIGHT = (
    3.0  # arbitrary: a loss counts three times a gain, since a first choice must not be slower than the default
)
_BOOTSTRAP_SAMPLES, _RANDOM_ORDERS = 2000, 200  # enough that the tables' digits do not change
Score = Callable[[Any], Any]


@dataclass(frozen=True)
class HeldOutKernel:
    """The runtimes of the best and of the chosen tiles of a kernel that was left out, relative to the default's."""

    family: str
    threads: int
    best: float
    first: float  # the model's first tile, whatever its predicted gain
    five: float
    random_five: float  # the best of five random tiles, geometric mean over many draws
    predicted_gain: float  # of the first tile over the default, in logarithms

    def unmeasured_choice(self, margin: float) -> float:
        """Return the runtime of the first tile if its predicted gain reaches the margin, else the default's."""
        return self.first if self.predicted_gain >= margin else 1.0


def machine_of(kernel: MeasuredKernel) -> str:
    """Return the machine in a merged collection's kernel name."""
    return kernel.kernel.program.rpartition(".")[2]


def processor(machine: str) -> str:
    return machine.rpartition("-")[0]


def instructions(machine: str) -> str:
    return machine.rpartition("-")[2]


def folds(machines: Sequence[str]) -> dict[str, set[str]]:
    """Name the sets of machines that are left out together."""
    result = {machine: {machine} for machine in machines}
    for name, group_of in (("processor", processor), ("instruction set", instructions)):
        groups = sorted({group_of(machine) for machine in machines})
        if len(groups) > 1:
            result |= {f"{name} {group}": {m for m in machines if group_of(m) == group} for group in groups}
    return result


def fit(model: str, kernels: Sequence[MeasuredKernel], collection: Collection, seed: int) -> Any:
    """Train a model on these kernels. Networks choose their checkpoint by the shapes of the valid split."""
    every = [m.kernel for m in kernels]
    if model == RIDGE:
        return ridge_scorer(every, collection.schema, seed)
    valid_names = {m.kernel.name for m in collection.splits["valid"]}
    training = [k for k in every if k.name not in valid_names]
    validation = [k for k in every if k.name in valid_names] or every[::6]
    return train(
        dataset_from_kernels(training, validation, (), collection.schema),
        model,
        seed=seed,
        progress=False,
        device="cpu",
    )


def evaluate_kernel(score: Score, measurement: MeasuredKernel, default_column: int) -> HeldOutKernel:
    """Look up the runtimes of the tiles that a model would choose for a kernel it was not trained on."""
    kernel, problem = measurement.kernel, measurement.problem
    scores, target = np.asarray(score(kernel), dtype=np.float64), kernel.target
    default = int(np.argmax(kernel.config_feat[:, default_column]))
    order = np.argsort(scores, kind="stable")
    target = target / target[default]
    five = min(1.0, float(target[order[:5]].min()))
    predicted_gain = float(scores[default] - scores[order[0]])
    picks = np.random.default_rng(len(target)).integers(0, len(target), (_RANDOM_ORDERS, 5))
    return HeldOutKernel(
        family=str(problem["family"]),
        threads=int(problem["threads"]),
        best=float(target.min()),
        first=float(target[order[0]]),
        five=five,
        random_five=float(np.exp(np.log(np.minimum(1.0, target[picks].min(axis=1))).mean())),
        predicted_gain=predicted_gain,
    )


def best_margin(cases: Sequence[HeldOutKernel]) -> float:
    """Return the margin with the largest mean gain, the wider one of equals."""

    def value(margin: float) -> float:
        gains = -np.log([one.unmeasured_choice(margin) for one in cases])
        return float(np.where(gains < 0, LOSS_WEIGHT * gains, gains).mean())

    return max(MARGINS, key=lambda margin: (round(value(margin), 5), margin))


def summary(cases: Sequence[HeldOutKernel], margin: float, seed: int = 0) -> dict[str, Any]:
    """Compute geometric means of fastest / chosen, and the gains of the first choice and of five measurements."""
    best = np.log([one.best for one in cases])
    ways = {"default": np.zeros(len(cases)), "first": np.log([one.unmeasured_choice(margin) for one in cases])}
    ways |= {"five": np.log([one.five for one in cases]), "five_drawn": np.log([one.random_five for one in cases])}
    resampled = np.random.default_rng(seed).integers(0, len(cases), (_BOOTSTRAP_SAMPLES, len(cases)))
    gains = {f"{way}_over_default": -ways[way][resampled].mean(axis=1) for way in ("first", "five")}
    gains["five_over_drawn"] = (ways["five_drawn"] - ways["five"])[resampled].mean(axis=1)
    return {
        "kernels": len(cases),
        **{way: float(np.exp((best - logs).mean())) for way, logs in ways.items()},
        "worst_first": float(np.exp((best - ways["first"]).min())),
        "slower_than_default": float(np.exp(-ways["first"]).min()),
        "taken": int(sum(one.predicted_gain >= margin and one.first != 1.0 for one in cases)),
        **{name: [float(x) for x in np.quantile(gain, (0.025, 0.975))] for name, gain in gains.items()},
    }


def table(collection: Collection, models: Sequence[str], seed: int) -> dict[str, Any]:
    """Evaluate the models on every fold; the result is what results/machines.json contains."""
    every = [m for split in ("train", "valid", "test") for m in collection.splits[split]]
    column = collection.schema.config_features.index("default")
    machines = sorted({machine_of(m) for m in every})
    results: dict[str, Any] = {"machines": machines, "models": {}}
    for model in models:
        cases: dict[str, list[HeldOutKernel]] = {}
        for name, left_out in folds(machines).items():
            trained = fit(model, [m for m in every if machine_of(m) not in left_out], collection, seed)
            cases[name] = [evaluate_kernel(trained.score, m, column) for m in every if machine_of(m) in left_out]
            print(model, name, json.dumps(summary(cases[name], 0.045)), flush=True)
        results["models"][model] = _summaries(cases, machines)
    return results


def _summaries(cases_by_fold: dict[str, list[HeldOutKernel]], machines: Sequence[str]) -> dict[str, Any]:
    """Summarize every fold with the margin that the other folds choose."""
    single = [one for machine in machines for one in cases_by_fold[machine]]
    errors = [one.predicted_gain + np.log(one.first) for one in single]
    rows = {}
    for name, cases in cases_by_fold.items():
        others = [one for machine in machines if machine != name for one in cases_by_fold[machine]]
        margin = best_margin(others if name in machines and others else single)
        rows[name] = {"margin": margin, **summary(cases, margin)}
        for family in sorted({one.family for one in cases}):
            rows[name].setdefault("families", {})[family] = summary([c for c in cases if c.family == family], margin)
    return {"margin": best_margin(single), "error": float(np.sqrt(np.mean(np.square(errors)))), "folds": rows}


def ship(collection: Collection, seed: int, path: Path = FOLDER / "cpu.safetensors", without: str = "") -> None:
    """Write a model with its margin and calibration; `without` leaves a processor out of all three."""
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))["models"][RIDGE]
    margin = figures["folds"][f"processor {without}"]["margin"] if without else figures["margin"]
    training = [
        m for split in ("train", "valid") for m in collection.splits[split] if processor(machine_of(m)) != without
    ]
    model = fit(RIDGE, training, collection, seed)
    model.record |= {"margin": margin, "error": figures["error"]}
    model.save(path)
    names = {m.kernel.name for m in training}
    recalibrate("cpu", path, calibration_path(path), keep=lambda kernel: kernel.name in names)


def main() -> None:
    """Run the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="leave one machine out")
    parser.add_argument("--ship", action="store_true", help="train the model of the package")
    parser.add_argument(
        "--without", metavar="PROCESSOR", help="train a model that has not seen this processor, into --out"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=[RIDGE])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--collection", default="cpu")
    options = parser.parse_args()
    collection = read_collection(find_collection(options.collection))
    if options.table:
        results = table(collection, options.models, options.seed)
        write_atomic(RESULTS, json.dumps(results, indent=1) + "\n")
    if options.ship:
        ship(collection, options.seed)
    if options.without:
        processors = sorted({processor(machine_of(m)) for kernels in collection.splits.values() for m in kernels})
        if options.without not in processors or options.out is None:
            parser.error(f"--without needs --out and one of these processors: {', '.join(processors)}.")
        ship(collection, options.seed, options.out, options.without)


if __name__ == "__main__":
    main()
