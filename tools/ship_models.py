"""Trains the GPU model that comes with the package and fits the tuner's prior to it, as after a new measurement.

    python -m tools.ship_models h200
    python -m tools.ship_models h200 --device cuda --processes 6 --out FOLDER

A shipped model has to rank 500 configurations within a millisecond, so it is a narrow TileRanker of one member. It
learns from wide ones: several teachers are trained on the measured kernels, their mean ranks the configurations of
kernels that nobody has measured, and the narrow model learns from both. Of several seeds the one is kept that loses
least on the valid split: with its first choice, with the best of five, and where the tuner stops, added up. Nothing is
chosen by the test split.

The H200 model in the package was made this way, by four teachers of two widths within fewer passes and six students
(results/training_h200.json): `--teachers 4 --students 6 --unmeasured 1600` makes one like it, not the same weights.
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

from tilewise._files import write_atomic
from tilewise.costmodel import Dataset, load_dataset, train
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection, write_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.gpu.families.family import get_family
from tilewise.tune.choose.scores import as_kernel
from tilewise.tune.measure.schedule import pick_configs
from tilewise.tune.search.calibration import calibration_path
from tilewise.tune.search.replay import OURS, recalibrate, replay
from tools.workloads.gpu import other_problems

FOLDER = Path(__file__).parents[1] / "src" / "tilewise" / "costmodel" / "shipped_models"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TEACHER: dict[str, Any] = {"epochs": 60, "model_kwargs": {"hidden_dim": 96, "members": 4}}
STUDENT: dict[str, Any] = {"epochs": 60, "model_kwargs": {"members": 1, "dropout": 0.0}, "weight_decay": 0.005}
WIDTHS = {"h200": 96}  # of the student, as the millisecond allows
TEACHERS, STUDENTS, UNMEASURED = 5, 4, 1200
_MOST_CONFIGS = 400  # of a kernel that was not measured
_SHORTEST_NS = 1e6  # of a kernel that was not measured: runtimes are kept as whole numbers
Scores = Callable[[Kernel], Any]


def unmeasured(collection: str, count: int, seed: int = 1000) -> list[Kernel]:
    """Kernels like those of the collection that are in none of its splits, with all their configurations."""
    own = load_dataset(collection).schema.config_features[len(TILE_FEATURES) :]
    problems = other_problems(seed, count)
    families = {problem.family: get_family(problem.family) for problem in problems}
    chance = random.Random(seed)
    chosen = {
        p: pick_configs(families[p.family].configs(p), _MOST_CONFIGS, chance.randrange(1 << 30)) for p in problems
    }
    return [as_kernel(families[p.family], p, configs, own) for p, configs in chosen.items()]


def labelled(kernel: Kernel, score: Scores) -> Kernel:
    """The kernel with the runtimes that a model expects."""
    expected = np.asarray(score(kernel), dtype=np.float64)
    runtime = np.rint(_SHORTEST_NS * np.exp(np.minimum(expected - expected.min(), 7.0))).astype(np.int64)
    parts = (kernel.node_feat, kernel.node_opcode, kernel.edge_index, kernel.config_feat)
    return make_kernel(kernel.name, *parts, runtime, np.full(len(runtime), int(_SHORTEST_NS)))


def mean_of(models: Sequence[Any]) -> Scores:
    return lambda kernel: np.mean([model.score(kernel) for model in models], axis=0)


def errors(score: Scores, data: Dataset, split: str) -> dict[str, float]:
    """Mean top-1 and top-5 error over a split."""
    scored = [(kernel.target, score(kernel)) for kernel in data.split(split)]
    return {f"top{k}": float(np.mean([top_k_error(t, s, k) for t, s in scored])) for k in (1, 5)}


def _train_one(collection: str, device: str, out: str, settings: dict[str, Any], seed: int) -> str:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    path = Path(out) / f"seed{seed}.safetensors"
    train(load_dataset(collection), "TileRanker", device=device, seed=seed, progress=False, **settings).save(path)
    return str(path)


def train_many(
    collection: str, seeds: Sequence[int], settings: dict[str, Any], given: argparse.Namespace, out: Path
) -> list[Any]:
    """One model a seed, side by side in processes of their own."""
    out.mkdir(parents=True, exist_ok=True)
    one = functools.partial(_train_one, collection, given.device, str(out), settings)
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        return [load_scorer(path) for path in pool.map(one, seeds)]


def ship(collection: str, given: argparse.Namespace) -> None:
    data = load_dataset(collection)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        teachers = train_many(collection, range(1, given.teachers + 1), TEACHER, given, scratch / "teachers")
        together = mean_of(teachers)
        report = {"teachers": [_errors(t.score, data) for t in teachers], "together": _errors(together, data)}
        print(json.dumps(report), flush=True)
        kernels = _read(given.kernels) if given.kernels else unmeasured(collection, given.unmeasured)
        both = _with(read_collection(find_collection(collection)), [labelled(k, together) for k in kernels])
        write_collection(scratch / "both.npz", both)
        own = STUDENT["model_kwargs"] | {"hidden_dim": WIDTHS.get(collection, 64)}
        settings, seeds = STUDENT | {"model_kwargs": own}, range(1, given.students + 1)
        students = train_many(str(scratch / "both.npz"), seeds, settings, given, scratch / "students")
        report["students"] = [_errors(s.score, data) for s in students]
        tuned = [_tuned(student, data) for student in students]
        worth = [regret + sum(e["valid"].values()) for regret, e in zip(tuned, report["students"], strict=True)]
        chosen = min(range(len(students)), key=worth.__getitem__)
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{collection}.safetensors"
        path.write_bytes((scratch / "students" / f"seed{chosen + 1}.safetensors").read_bytes())
    print(json.dumps(report["students"]), flush=True)
    write_atomic(RESULTS / f"training_{collection}.json", json.dumps(report, indent=1) + "\n")
    recalibrate(collection, path, calibration_path(path))


def _tuned(student: Any, data: Dataset) -> float:
    """Regret on the validation kernels after three measurements."""
    return replay(data, split="valid", model=student, most=3, trees=False).strategy(OURS).regret[2]


def _errors(score: Scores, data: Dataset) -> dict[str, dict[str, float]]:
    return {split: errors(score, data, split) for split in ("valid", "test")}


def _with(collection: Collection, kernels: Sequence[Kernel]) -> Collection:
    """The collection with more kernels to train on."""
    more = [MeasuredKernel(k, np.zeros(k.n_configs, np.float32), np.ones(k.n_configs, np.uint16), {}) for k in kernels]
    splits = collection.splits | {"train": [*collection.splits["train"], *more]}
    return Collection(collection.schema, splits)


def _read(path: Path) -> list[Kernel]:
    return [measured.kernel for measured in read_collection(path).splits["train"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the models that come with the package.")
    parser.add_argument("collections", nargs="*", default=["h200"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="trainings side by side")
    parser.add_argument("--teachers", type=int, default=TEACHERS)
    parser.add_argument("--students", type=int, default=STUDENTS)
    parser.add_argument("--unmeasured", type=int, default=UNMEASURED, help="kernels that the teachers rank")
    parser.add_argument("--kernels", type=Path, help="a collection file with those kernels, instead of making them")
    parser.add_argument("--write-kernels", type=Path, help="only make those kernels, and write them to this file")
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    for name in given.collections:
        if given.write_kernels:
            empty = Collection(load_dataset(name).schema, {"train": []})
            write_collection(given.write_kernels, _with(empty, unmeasured(name, given.unmeasured)))
        else:
            ship(name, given)


if __name__ == "__main__":
    main()
