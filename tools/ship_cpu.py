"""Trains the CPU's model, and says how good it is on machines that it was not taught on.

    python -m tools.ship_cpu --table                      # leave one machine out: results/machines.json
    python -m tools.ship_cpu --table --models CpuRidge TileRanker GBDT
    python -m tools.ship_cpu --ship                       # the model in the package, with the margin of the table
    python -m tools.ship_cpu --without amd-epyc --out x.safetensors   # one that has not seen a processor

A fold leaves out the kernels of one kind of CPU (a processor as one instruction set), of one processor, or of one
instruction set, and teaches on the others. On what was left out: the default, the first choice (not measured: the
model's, where it promises more than the margin, else the default) and the best of five measurements beside the default,
in the model's order and drawn at random, each as the fastest tile's time over theirs. The margin is the one that did
best over all folds of single kinds; a fold is judged with the margin of the other folds. Intervals are of the mean over
kernels, by bootstrap, paired.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import write_atomic
from tilewise.costmodel import train
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import dataset_from_kernels, find_collection
from tilewise.costmodel.models.ridge import NAME
from tilewise.costmodel.models.scorer import ridge_scorer
from tilewise.tune.search.calibration import calibration_path
from tilewise.tune.search.replay import recalibrate

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "machines.json"
FOLDER = Path(__file__).parents[1] / "src" / "tilewise" / "costmodel" / "shipped_models"
MARGINS = (0.0, 0.02, 0.045, 0.06, 0.08, 0.1, 0.13, 0.17, 0.22, 0.3)
LOSS_COUNTS = 3.0  # times as much as a gain of the same size: a first choice must not be slower than the default
_RESAMPLED, _DRAWS = 2000, 200
Score = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """A kernel that was left out: what the best, the default and the choices took, over the default."""

    family: str
    threads: int
    best: float
    first: float  # of the model's favourite, whatever it promises
    five: float
    drawn: float  # the best of five drawn at random, in the geometric mean over draws
    promise: float  # of the favourite over the default, in logarithms

    def chosen(self, margin: float) -> float:
        return self.first if self.promise >= margin else 1.0


def machine_of(measured: MeasuredKernel) -> str:
    """The machine in a merged collection's kernel name."""
    return measured.kernel.program.rpartition(".")[2]


def processor(machine: str) -> str:
    return machine.rpartition("-")[0]


def instructions(machine: str) -> str:
    return machine.rpartition("-")[2]


def folds(machines: Sequence[str]) -> dict[str, set[str]]:
    """What is left out together."""
    found = {machine: {machine} for machine in machines}
    for name, part in (("processor", processor), ("instruction set", instructions)):
        groups = sorted({part(machine) for machine in machines})
        if len(groups) > 1:
            found |= {f"{name} {group}": {m for m in machines if part(m) == group} for group in groups}
    return found


def fit(model: str, kernels: Sequence[MeasuredKernel], collection: Collection, seed: int) -> Any:
    """A model of these kernels. Networks choose their checkpoint by the shapes of the valid split."""
    every = [m.kernel for m in kernels]
    if model == NAME:
        return ridge_scorer(every, collection.schema, seed)
    later = {m.kernel.name for m in collection.splits["valid"]}
    parts = [k for k in every if k.name not in later], [k for k in every if k.name in later] or every[::6]
    return train(dataset_from_kernels(*parts, (), collection.schema), model, seed=seed, progress=False, device="cpu")


def case(score: Score, measured: MeasuredKernel, default_column: int) -> Case:
    kernel, problem = measured.kernel, measured.problem
    scores, target = np.asarray(score(kernel), dtype=np.float64), kernel.target
    default = int(np.argmax(kernel.config_feat[:, default_column]))
    order = np.argsort(scores, kind="stable")
    target = target / target[default]
    five = min(1.0, float(target[order[:5]].min()))
    promise = float(scores[default] - scores[order[0]])
    picks = np.random.default_rng(len(target)).integers(0, len(target), (_DRAWS, 5))
    drawn = float(np.exp(np.log(np.minimum(1.0, target[picks].min(axis=1))).mean()))
    family, threads = str(problem["family"]), int(problem["threads"])
    return Case(family, threads, float(target.min()), float(target[order[0]]), five, drawn, promise)


def best_margin(cases: Sequence[Case]) -> float:
    def worth(margin: float) -> float:
        gains = -np.log([one.chosen(margin) for one in cases])
        return float(np.where(gains < 0, LOSS_COUNTS * gains, gains).mean())

    return max(MARGINS, key=lambda margin: (round(worth(margin), 5), margin))


def summary(cases: Sequence[Case], margin: float, seed: int = 0) -> dict[str, Any]:
    """Geometric means of fastest / chosen, and by how much the first choice and five measurements beat the default."""
    best = np.log([one.best for one in cases])
    ways = {"default": np.zeros(len(cases)), "first": np.log([one.chosen(margin) for one in cases])}
    ways |= {"five": np.log([one.five for one in cases]), "five_drawn": np.log([one.drawn for one in cases])}
    drawn = np.random.default_rng(seed).integers(0, len(cases), (_RESAMPLED, len(cases)))
    gains = {f"{way}_over_default": -ways[way][drawn].mean(axis=1) for way in ("first", "five")}
    gains["five_over_drawn"] = (ways["five_drawn"] - ways["five"])[drawn].mean(axis=1)
    return {
        "kernels": len(cases),
        **{way: float(np.exp((best - logs).mean())) for way, logs in ways.items()},
        "worst_first": float(np.exp((best - ways["first"]).min())),
        "slower_than_default": float(np.exp(-ways["first"]).min()),
        "taken": int(sum(one.promise >= margin and one.first != 1.0 for one in cases)),
        **{name: [float(x) for x in np.quantile(gain, (0.025, 0.975))] for name, gain in gains.items()},
    }


def table(collection: Collection, models: Sequence[str], seed: int) -> dict[str, Any]:
    every = [m for split in ("train", "valid", "test") for m in collection.splits[split]]
    column = collection.schema.config_features.index("default")
    machines = sorted({machine_of(m) for m in every})
    found: dict[str, Any] = {"machines": machines, "models": {}}
    for model in models:
        judged: dict[str, list[Case]] = {}
        for name, left_out in folds(machines).items():
            taught = fit(model, [m for m in every if machine_of(m) not in left_out], collection, seed)
            judged[name] = [case(taught.score, m, column) for m in every if machine_of(m) in left_out]
            print(model, name, json.dumps(summary(judged[name], 0.045)), flush=True)
        found["models"][model] = _judge(judged, machines)
    return found


def _judge(judged: dict[str, list[Case]], machines: Sequence[str]) -> dict[str, Any]:
    single = [one for machine in machines for one in judged[machine]]
    errors = [one.promise + np.log(one.first) for one in single]
    rows = {}
    for name, cases in judged.items():
        others = [one for machine in machines if machine != name for one in judged[machine]]
        margin = best_margin(others if name in machines and others else single)
        rows[name] = {"margin": margin, **summary(cases, margin)}
        for family in sorted({one.family for one in cases}):
            rows[name].setdefault("families", {})[family] = summary([c for c in cases if c.family == family], margin)
    return {"margin": best_margin(single), "error": float(np.sqrt(np.mean(np.square(errors)))), "folds": rows}


def ship(collection: Collection, seed: int, path: Path = FOLDER / "cpu.safetensors", without: str = "") -> None:
    """A model with its margin and calibration; `without` leaves a processor out of all three."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["models"][NAME]
    margin = kept["folds"][f"processor {without}"]["margin"] if without else kept["margin"]
    seen = [m for split in ("train", "valid") for m in collection.splits[split] if processor(machine_of(m)) != without]
    model = fit(NAME, seen, collection, seed)
    model.record |= {"margin": margin, "error": kept["error"]}
    model.save(path)
    names = {m.kernel.name for m in seen}
    recalibrate("cpu", path, calibration_path(path), kept=lambda kernel: kernel.name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="leave one machine out")
    parser.add_argument("--ship", action="store_true", help="train the model of the package")
    parser.add_argument(
        "--without", metavar="PROCESSOR", help="train a model that has not seen this processor, into --out"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=[NAME])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--collection", default="cpu")
    given = parser.parse_args()
    collection = read_collection(find_collection(given.collection))
    if given.table:
        found = table(collection, given.models, given.seed)
        write_atomic(RESULTS, json.dumps(found, indent=1) + "\n")
    if given.ship:
        ship(collection, given.seed)
    if given.without:
        known = sorted({processor(machine_of(m)) for kernels in collection.splits.values() for m in kernels})
        if given.without not in known or given.out is None:
            parser.error(f"--without needs --out and one of these processors: {', '.join(known)}.")
        ship(collection, given.seed, given.out, given.without)


if __name__ == "__main__":
    main()
