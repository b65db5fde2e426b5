"""Train the GPU model of the package and fit the tuner's prior to it, for example after new measurements.

    python -m tools.ship_models h200
    python -m tools.ship_models h200 --device cuda --processes 6 --out FOLDER

A shipped model has to rank 500 configurations within a millisecond, so it is a narrow TileRanker of one member, trained
by distillation (Hinton et al. 2015). Several wide teachers are trained on the measured kernels, their mean ranks the
configurations of kernels that were never measured, and the narrow student is trained on both. Of several seeds the one
with the smallest loss on the valid split is kept: the sum over its first choice, the best of five, and the choice of
the tuner. Nothing is chosen by the test split.

The H200 model in the package was made this way, with four teachers of two widths, fewer epochs and six students
(results/training_h200.json): `--teachers 4 --students 6 --unmeasured 1600` makes a similar one, not the same weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise.costmodel import Dataset, load_dataset, train
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.data.writing import write_collection
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.gpu.families.family import get_family
from tilewise.tune.choose.scores import as_kernel
from tilewise.tune.measure.collector import pick_configs
from tilewise.tune.search.confidence import calibration_path
from tilewise.tune.search.replay import OURS, recalibrate, replay
from tools.workloads.gpu import other_problems

FOLDER = Path(__file__).parents[1] / "src" / "tilewise" / "costmodel" / "shipped_models"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TEACHER: dict[str, Any] = {"epochs": 60, "model_kwargs": {"hidden_dim": 96, "members": 4}}
STUDENT: dict[str, Any] = {"epochs": 60, "model_kwargs": {"members": 1, "dropout": 0.0}, "weight_decay": 0.005}
WIDTHS = {"h200": 96}  # of the student, as large as the millisecond allows
TEACHERS, STUDENTS, UNMEASURED = 5, 4, 1200
_MAX_CONFIGS = 400  # of a kernel that was not measured
_SHORTEST_NS = 1e6  # made-up runtime of the best tile: large, because runtimes are stored as integers
Scores = Callable[[Kernel], Any]


def unmeasured(collection: str, count: int, seed: int = 1000) -> list[Kernel]:
    """Create kernels like those of the collection that are in none of its splits."""
    own = load_dataset(collection).schema.config_features[len(TILE_FEATURES) :]
    problems = other_problems(seed, count)
    families = {problem.family: get_family(problem.family) for problem in problems}
    chance = random.Random(seed)
    configs_of = {
        p: pick_configs(families[p.family].configs(p), _MAX_CONFIGS, chance.randrange(1 << 30)) for p in problems
    }
    return [as_kernel(families[p.family], p, configs, own) for p, configs in configs_of.items()]


def labelled(kernel: Kernel, score: Scores) -> Kernel:
    """Give a kernel the runtimes that a model predicts."""
    expected = np.asarray(score(kernel), dtype=np.float64)
    runtime = np.rint(_SHORTEST_NS * np.exp(np.minimum(expected - expected.min(), 7.0))).astype(np.int64)
    graph = (kernel.node_feat, kernel.node_opcode, kernel.edge_index)
    return make_kernel(kernel.name, *graph, kernel.config_feat, runtime, np.full(len(runtime), int(_SHORTEST_NS)))


def mean_of(models: Sequence[Any]) -> Scores:
    return lambda kernel: np.mean([model.score(kernel) for model in models], axis=0)


def errors(score: Scores, data: Dataset, split: str) -> dict[str, float]:
    """Compute the mean top-1 and top-5 error over a split."""
    scored = [(kernel.target, score(kernel)) for kernel in data.split(split)]
    return {f"top{k}": float(np.mean([top_k_error(t, s, k) for t, s in scored])) for k in (1, 5)}


def _train_one(collection: str, device: str, out: str, settings: dict[str, Any], seed: int) -> str:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    path = Path(out) / f"seed{seed}.safetensors"
    train(load_dataset(collection), "TileRanker", device=device, seed=seed, progress=False, **settings).save(path)
    return str(path)


def train_many(
    collection: str, seeds: Sequence[int], settings: dict[str, Any], options: argparse.Namespace, out: Path
) -> list[Any]:
    """Train one model per seed, in parallel processes."""
    out.mkdir(parents=True, exist_ok=True)
    one = functools.partial(_train_one, collection, options.device, str(out), settings)
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        return [load_scorer(path) for path in pool.map(one, seeds)]


def ship(collection: str, options: argparse.Namespace) -> None:
    """Train teachers and students, and write the best student with its calibration."""
    data = load_dataset(collection)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        teachers = train_many(collection, range(1, options.teachers + 1), TEACHER, options, scratch / "teachers")
        ensemble = mean_of(teachers)
        report = {"teachers": [_errors(t.score, data) for t in teachers], "together": _errors(ensemble, data)}
        print(json.dumps(report), flush=True)
        kernels = _read(options.kernels) if options.kernels else unmeasured(collection, options.unmeasured)
        both = _with(read_collection(find_collection(collection)), [labelled(k, ensemble) for k in kernels])
        write_collection(scratch / "both.npz", both)
        student_kwargs = STUDENT["model_kwargs"] | {"hidden_dim": WIDTHS.get(collection, 64)}
        settings, seeds = STUDENT | {"model_kwargs": student_kwargs}, range(1, options.students + 1)
        students = train_many(str(scratch / "both.npz"), seeds, settings, options, scratch / "students")
        report["students"] = [_errors(s.score, data) for s in students]
        regrets = [_tuning_regret(student, data) for student in students]
        losses = [regret + sum(e["valid"].values()) for regret, e in zip(regrets, report["students"], strict=True)]
        best = min(range(len(students)), key=losses.__getitem__)
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{collection}.safetensors"
        path.write_bytes((scratch / "students" / f"seed{best + 1}.safetensors").read_bytes())
    print(json.dumps(report["students"]), flush=True)
    write_atomic(RESULTS / f"training_{collection}.json", json.dumps(report, indent=1) + "\n")
    recalibrate(collection, path, calibration_path(path))


def _tuning_regret(student: Any, data: Dataset) -> float:
    """Compute the regret on the validation kernels after three measurements."""
    return replay(data, split="valid", model=student, most=3, trees=False).strategy(OURS).regret[2]


def _errors(score: Scores, data: Dataset) -> dict[str, dict[str, float]]:
    return {split: errors(score, data, split) for split in ("valid", "test")}


def _with(collection: Collection, kernels: Sequence[Kernel]) -> Collection:
    """Add kernels to the train split of a collection."""
    more = [MeasuredKernel(k, np.zeros(k.n_configs, np.float32), np.ones(k.n_configs, np.uint16), {}) for k in kernels]
    splits = collection.splits | {"train": [*collection.splits["train"], *more]}
    return Collection(collection.schema, splits)


def _read(path: Path) -> list[Kernel]:
    return [measurement.kernel for measurement in read_collection(path).splits["train"]]


def main() -> None:
    """Run the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description="Train the models that come with the package.")
    parser.add_argument("collections", nargs="*", default=["h200"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="parallel trainings")
    parser.add_argument("--teachers", type=int, default=TEACHERS)
    parser.add_argument("--students", type=int, default=STUDENTS)
    parser.add_argument("--unmeasured", type=int, default=UNMEASURED, help="kernels that the teachers rank")
    parser.add_argument("--kernels", type=Path, help="a collection file with those kernels, instead of making them")
    parser.add_argument("--write-kernels", type=Path, help="only make those kernels, and write them to this file")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    for name in options.collections:
        if options.write_kernels:
            empty = Collection(load_dataset(name).schema, {"train": []})
            write_collection(options.write_kernels, _with(empty, unmeasured(name, options.unmeasured)))
        else:
            ship(name, options)


if __name__ == "__main__":
    main()
