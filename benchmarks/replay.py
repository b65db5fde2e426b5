"""Tuning replayed with the shipped models on the embedded collections: what the docs say of it, as JSON.

    python -m benchmarks.replay

Needs no hardware and comes out the same every time, so it is made again whenever a model, its calibration or a
collection changed (`python -m benchmarks.tables` sees to that): the file says of which bytes it tells.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import today
from tilewise._atomic import write_atomic
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import find_collection, load_dataset
from tilewise.costmodel.evaluation import evaluate
from tilewise.costmodel.models.files import shipped_file, shipped_names
from tilewise.costmodel.models.scorer import shipped_scorer
from tilewise.tune.search.confidence import WITHIN
from tilewise.tune.search.replay import replay, replay_without_model

RESULTS = Path(__file__).parent / "results" / "replay.json"


def sources() -> dict[str, str]:
    """The bytes that the figures follow from: collections, models and their calibrations."""
    paths = [p for name in shipped_names() for p in (find_collection(name), shipped_file(name))]
    paths += [path.with_suffix(".tuning.json") for path in paths if path.suffix == ".safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(set(paths))}


def replayed(name: str) -> dict[str, Any]:
    """One collection: the tuner on its test kernels, and the errors of the model and of what it must beat."""
    result, without = replay(name, trees=False), replay_without_model(name)
    table = evaluate({"shipped model": shipped_scorer(name)}, load_dataset(name, progress=False), "test")
    return {
        "kernels": result.kernels,
        "configs": result.configs,
        "regret": {strategy.name: strategy.regret for strategy in result.strategies},
        "comparisons": [asdict(comparison) for comparison in result.comparisons],
        "first_choice": result.first_choice,
        "default": result.default,
        "without_model": without,
        "errors": {row.name: {k: row.metrics[k].mean for k in ("top1", "top5", "top10")} for row in table.rows},
        "sure": result.sure,
        "read_again": read_again(name),
    }


def read_again(name: str, draws: int = 100) -> float:
    """Return how often the recorded fastest configuration stays within 5 % of the fastest after measuring again.

    The second measurement is simulated with errors as large as the recorded ones. It bounds the confidence of
    any claim.
    """
    rng, within = np.random.default_rng(0), []
    for kernel in read_collection(find_collection(name)).splits["test"]:
        target = kernel.kernel.target
        error = np.nan_to_num(kernel.deviation.astype(np.float64)) / np.sqrt(np.maximum(kernel.repeats, 1))
        again = target[:, None] * np.exp(error[:, None] * rng.standard_normal((len(target), draws)))
        within.append(float((again[np.argmin(target)] <= (1 + WITHIN) * again.min(axis=0)).mean()))
    return float(np.mean(within))


def main() -> None:
    results = {name: replayed(name) for name in shipped_names()}
    text = json.dumps({"date": today(), "sources": sources(), "replay": results}, indent=1, default=asdict)
    write_atomic(RESULTS, text + "\n")
    for name, row in results.items():
        for who, regret in row["regret"].items():
            print(f"{name}: {who}: {100 * regret[4]:.2f} % slower than the best after five measurements")


def up_to_date() -> bool:
    return RESULTS.is_file() and json.loads(RESULTS.read_text(encoding="utf-8"))["sources"] == sources()


if __name__ == "__main__":
    main()
