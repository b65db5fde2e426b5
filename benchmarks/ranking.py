"""TileRanker beside EarlyJoinSAGE at the course's defaults and GBDT: errors on held-out kernels, seconds of training.

    python -m benchmarks.ranking                              # the embedded collections, five seeds
    python -m benchmarks.ranking h200-few cpu-renamed --seeds 3 --models TileRanker,GBDT

Takes collections by name or folder, and the stand-ins of `standins` by name (those called "simulated" have runtimes
from a formula). Every model trains on the same kernels with the same threads; an interval is that of Student's t over
seeds. The table is also written as JSON, after every line.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.standins import STANDINS
from tilewise._files import write_whole
from tilewise.costmodel import load_dataset, train
from tilewise.costmodel.dataset import Dataset
from tilewise.costmodel.metrics import top_k_error

MODELS = "TileRanker,GBDT,EarlyJoinSAGE"
RESULTS = Path(__file__).parent / "results" / "ranking.json"
_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def run_once(data: Dataset, model: str, seed: int) -> dict[str, float]:
    """Per cent above the best on the test split, and wall-clock and processor seconds of training."""
    wall, used = time.perf_counter(), time.process_time()
    trained = train(data, model, seed=seed, progress=False, device="cpu")
    seconds = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - used}
    scores = [(kernel.target, trained.score(kernel)) for kernel in data.test]
    return {f"top{k}": 100 * float(np.mean([top_k_error(t, s, k) for t, s in scores])) for k in (1, 5)} | seconds


def summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and, over several seeds, half the width of its 95 % interval."""
    found = {}
    for key in runs[0]:
        values = np.array([run[key] for run in runs])
        half = _T95.get(len(values), 2.0) * values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        found[key] = [round(float(values.mean()), 3), round(float(half), 3)]
    return found


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("collections", nargs="*", default=["h200", "cpu"])
    flags.add_argument("--models", default=MODELS)
    flags.add_argument("--seeds", type=int, default=5)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--out", type=Path, default=RESULTS)
    options = flags.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    table: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for name in options.collections:
        data = STANDINS[name](0) if name in STANDINS else load_dataset(name)
        sizes = {split: len(data.split(split)) for split in ("train", "valid", "test")}
        for model in options.models.split(","):
            runs = [run_once(data, model, seed) for seed in range(options.seeds)]
            row = summary(runs) | {"seeds": len(runs), "threads": options.threads, "machine": platform.machine()}
            table.setdefault(name, {"kernels": sizes})[model] = row
            errors = "  ".join(f"{key} {row[key][0]:6.2f} ± {row[key][1]:.2f} %" for key in ("top1", "top5"))
            print(f"{name:26s} {model:14s} {errors}  {row['seconds'][0]:.0f} s", flush=True)
            write_whole(options.out, (json.dumps(table, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
