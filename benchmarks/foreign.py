"""Collections of other people's shapes: `--model auto` compared with its parts, LightGBM and five random picks.

    python -m benchmarks.foreign                                          # those below, three seeds
    python -m benchmarks.foreign no-graph ties --seeds 1
    python -m benchmarks.foreign imported/a100                            # or a folder, such as `tiles import` writes

Every collection is trained on as a user would, with every default. "LightGBM" is given the configuration's columns and
the kernel's sizes and no more; GBDT is LightGBM on tilewise's own features. Errors are means over the test kernels,
plain and geometric, and over seeds; five random picks are the expected best of five drawn. A collection that is in the
results already is not trained on again (`--again`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import today
from benchmarks.standins import GPUS, OPENCL_NAMES, STANDINS, embedded, opencl_gemm, split_up
from tilewise._atomic import write_atomic
from tilewise.costmodel import load_dataset, load_model
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.importers.description import plain_graph
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.metrics import random_top_k_error, top_k_error
from tilewise.costmodel.training.auto import KINDS, train_auto

RESULTS = Path(__file__).parent / "results" / "foreign.json"
PLAIN, PICKS = "LightGBM", "five random picks"


def no_graph(seed: int) -> Dataset:
    """Simulated products of which only three sizes are known, as a log without a description gives them."""
    data = STANDINS["simulated-opencl-gemm"](seed)
    return _changed(data, lambda kernel: dataclasses.replace(kernel, **_plain(kernel)))


def _plain(kernel: Kernel) -> dict[str, Any]:
    sizes = [float(size) for size in kernel_sizes(kernel)[6:9] if size]
    feat, opcode, edges = plain_graph({str(i): size for i, size in enumerate(sizes)})
    return {"node_feat": feat, "node_opcode": opcode, "edge_index": edges}


def ties(seed: int) -> Dataset:
    """Simulated convolutions timed by a coarse clock, one in fifty disturbed, a fifth of the configurations failed."""
    rng = np.random.default_rng(seed)

    def spoiled(kernel: Kernel) -> Kernel:
        rows = np.flatnonzero(rng.random(kernel.n_configs) < 0.8)
        step = max(1, int(kernel.runtime.min()) // 20)
        disturbed = np.where(rng.random(len(rows)) < 0.02, rng.uniform(5, 60, len(rows)), 1.0)
        runtime = np.maximum(1, np.rint(kernel.runtime[rows] * disturbed / step)).astype(np.int64) * step
        cut = {"config_feat": kernel.config_feat[rows], "normalizer": kernel.normalizer[rows]}
        return dataclasses.replace(kernel, runtime=runtime, **cut)

    data = STANDINS["simulated-implicit-conv"](seed)
    # Training sees what the clock saw; what was chosen is judged by undisturbed times.
    return dataclasses.replace(_changed(data, spoiled), test=data.test)


def one_kernel(seed: int) -> Dataset:
    """One simulated product: two thirds of its configurations to learn from, no valid split."""
    rng = np.random.default_rng(seed)
    whole = opencl_gemm(rng, "only_0", GPUS[2], 3000)
    order = rng.permutation(whole.n_configs)
    parts = [
        make_kernel(f"only_{number}", whole.node_feat, whole.node_opcode, whole.edge_index, whole.config_feat[rows],
                    whole.runtime[rows], whole.normalizer[rows])
        for number, rows in enumerate(np.array_split(order, 3))
    ]  # fmt: skip
    return dataset_from_kernels(parts[:2], [], parts[2:], Schema(OPENCL_NAMES))


def forty(seed: int) -> Dataset:
    """Forty kernels of the GPU's own collection with shuffled columns of other names."""
    return embedded("h200", (), 40, seed, rename=True)


def _changed(data: Dataset, change: Callable[[Kernel], Kernel]) -> Dataset:
    parts = [[change(kernel) for kernel in split] for split in (data.train, data.valid, data.test)]
    return dataset_from_kernels(*parts, data.schema)


COLLECTIONS: dict[str, Callable[[int], Dataset]] = {
    "no-graph": no_graph,
    "ties": ties,
    "one-kernel": one_kernel,
    "forty": forty,
    "h200-dots-renamed": STANDINS["h200-dots-renamed"],
    "cpu-renamed": STANDINS["cpu-renamed"],
    "simulated-template-conv": STANDINS["simulated-template-conv"],
}


def few(folder: str, seed: int, kernels: int = 300) -> Dataset:
    """Read at most `kernels` kernels of a folder and split them again."""
    data = load_dataset(folder, progress=False)
    every = [k for split in (data.train, data.valid, data.test) for k in split if k.labelled and k.n_configs > 1]
    order = np.random.default_rng(seed).permutation(len(every))[:kernels]
    return split_up([every[i] for i in order], data.schema, seed)


def run_once(data: Dataset, seed: int) -> dict[str, dict[str, float]]:
    """Errors of every candidate, of the one that auto kept, of plain LightGBM and of five random picks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        auto = train_auto(data, out_dir=folder, seed=seed, device="cpu", progress=False)
        names = [name for name in KINDS if (Path(folder) / name).is_dir()]
        models: dict[str, Any] = {"auto": auto} | {name: load_model(Path(folder) / name) for name in names}
    booster = plain_trees(data, seed)
    scores = {name: [model.score(k) for k in data.test] for name, model in models.items()}
    scores[PLAIN] = [booster.predict(plain_rows(k)) for k in data.test]
    results = {name: errors(data.test, model_scores) for name, model_scores in scores.items()}
    results["auto"]["chosen"] = auto.name
    results[PICKS] = _complete(_means([[math.nan, random_top_k_error(k.target, 5)] for k in data.test]))
    return results


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value == value}


def plain_rows(kernel: Kernel) -> npt.NDArray[np.float64]:
    sizes = np.broadcast_to(kernel_sizes(kernel), (kernel.n_configs, len(kernel_sizes(kernel))))
    return np.hstack([kernel.config_feat.astype(np.float64), sizes])


def plain_trees(data: Dataset, seed: int) -> Any:
    import lightgbm

    table = np.concatenate([plain_rows(k) for k in data.train])
    goal = np.concatenate([np.log(k.target / k.target.min()) for k in data.train])
    settings = {"objective": "regression", "seed": seed, "verbose": -1, "learning_rate": 0.05}
    return lightgbm.train(settings, lightgbm.Dataset(table, goal), 500)


def errors(kernels: Any, scores: Sequence[Any]) -> dict[str, Any]:
    return _means([[top_k_error(k.target, s, at) for at in (1, 5)] for k, s in zip(kernels, scores, strict=True)])


def _means(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return errors in per cent: arithmetic means, and geometric means of runtime / best."""
    values = np.array(rows)
    plain, geometric = 100 * values.mean(axis=0), 100 * np.expm1(np.log1p(values).mean(axis=0))
    return {"top1": plain[0], "top5": plain[1], "geometric1": geometric[0], "geometric5": geometric[1]}


def summary(runs: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    keys = ("top1", "top5", "geometric1", "geometric5")
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {
        name: {
            key: float(np.mean([run[name][key] for run in runs]))
            for key in keys
            if all(key in run[name] for run in runs)
        }
        for name in names
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("collections", nargs="*", default=list(COLLECTIONS))
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--first", type=int, default=60, help="the first of the seeds: 0 to 51 were looked at before")
    flags.add_argument("--again", action="store_true")
    options = flags.parse_args()

    import torch

    torch.set_num_threads(1)
    for collection in options.collections:
        name = collection if collection in COLLECTIONS else Path(collection).name
        table = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        entry = {} if options.again else table.get(name, {})
        runs = entry.get("runs", []) if entry.get("first") == options.first else []
        while len(runs) < options.seeds:
            seed = options.first + len(runs)
            data = COLLECTIONS[collection](seed) if collection in COLLECTIONS else few(collection, seed)
            runs.append(run_once(data, seed))
            kernels = [len(data.train), len(data.valid), len(data.test)]
            table[name] = {
                "date": today(),
                "first": options.first,
                "kernels": kernels,
                "mean": summary(runs),
                "runs": runs,
            }
            write_atomic(RESULTS, json.dumps(table, indent=1) + "\n")
        for model, row in table[name]["mean"].items():
            line = "  ".join(f"{key} {value:7.2f} %" for key, value in row.items())
            print(f"{name:24s} {model:18s} {line}", flush=True)


if __name__ == "__main__":
    main()
