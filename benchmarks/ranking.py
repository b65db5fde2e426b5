"""Compares TileRanker, GBDT and EarlyJoinSAGE (at the course's defaults): errors on held-out kernels, training time.

    python -m benchmarks.ranking                              # the embedded collections, five seeds
    python -m benchmarks.ranking h200-few cpu-renamed --seeds 3 --models TileRanker,GBDT

Takes collections by name or folder, and the stand-ins of `standins` by name (those called "simulated" have runtimes
from a formula). Every model trains on the same kernels with the same threads; an interval is that of Student's t over
seeds. Every run is written as JSON when it ends, and one that is there already is not repeated (`--again` repeats it),
so the table can be made in pieces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.standins import STANDINS
from tilewise._atomic import write_atomic
from tilewise.costmodel import load_dataset, train
from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.metrics import top_k_error

MODELS = "TileRanker,GBDT,EarlyJoinSAGE"
RESULTS = Path(__file__).parent / "results" / "ranking.json"
_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def run_once(data: Dataset, model: str, seed: int) -> dict[str, float]:
    """Return errors on the test split in per cent, and wall-clock and processor seconds of training."""
    wall, used = time.perf_counter(), time.process_time()
    trained = train(data, model, seed=seed, progress=False, device="cpu")
    seconds = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - used}
    scores = [(kernel.target, trained.score(kernel)) for kernel in data.test]
    return {f"top{k}": 100 * float(np.mean([top_k_error(t, s, k) for t, s in scores])) for k in (1, 5)} | seconds


def summary(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean and, over several seeds, half the width of its 95 % interval."""
    figures = {}
    for key in ("top1", "top5", "seconds", "processor_seconds"):
        values = np.array([run[key] for run in runs])
        half = _T95.get(len(values), 2.0) * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        figures[key] = [round(float(values.mean()), 3), round(float(half), 3)]
    return figures


def fingerprint(data: Dataset) -> str:
    """A collection that was measured again counts as another collection."""
    digest = hashlib.sha256()
    for split in (data.train, data.valid, data.test):
        digest.update(np.ascontiguousarray(split.column("runtime")).tobytes())
    return digest.hexdigest()[:12]


def read_results(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return results


def recorded(path: Path, name: str, model: str, seed: int, key: dict[str, Any]) -> dict[str, Any] | None:
    run = read_results(path).get(name, {}).get(model, {}).get("runs", {}).get(str(seed))
    return run if run is not None and all(run[k] == v for k, v in key.items()) else None


def record(path: Path, name: str, data: Dataset, model: str, seed: int, run: dict[str, Any]) -> None:
    """Add one run to the file, with the summary of all runs of its model on the same data."""
    table = read_results(path)
    sizes = {split: len(data.split(split)) for split in ("train", "valid", "test")}
    entry = table.setdefault(name, {})
    entry["kernels"] = sizes
    runs = entry.get(model, {}).get("runs", {}) | {str(seed): run}
    like = {s: r for s, r in runs.items() if all(r[k] == run[k] for k in ("threads", "fingerprint"))}
    entry[model] = summary(list(like.values())) | {"seeds": len(like), "threads": run["threads"], "runs": like}
    write_atomic(path, (json.dumps(table, indent=1) + "\n").encode())


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("collections", nargs="*", default=["h200", "cpu"])
    flags.add_argument("--models", default=MODELS)
    flags.add_argument("--seeds", type=int, default=5)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--out", type=Path, default=RESULTS)
    flags.add_argument("--again", action="store_true", help="repeat runs that the file holds already")
    options = flags.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    for name in options.collections:
        data = STANDINS[name](0) if name in STANDINS else load_dataset(name)
        for model in options.models.split(","):
            for seed in range(options.seeds):
                key = {"threads": options.threads, "fingerprint": fingerprint(data)}
                if options.again or recorded(options.out, name, model, seed, key) is None:
                    record(options.out, name, data, model, seed, run_once(data, model, seed) | key)
            row = read_results(options.out)[name][model]
            errors = "  ".join(f"{key} {row[key][0]:6.2f} ± {row[key][1]:.2f} %" for key in ("top1", "top5"))
            print(f"{name:26s} {model:14s} {errors}  {row['seconds'][0]:.0f} s", flush=True)


if __name__ == "__main__":
    main()
