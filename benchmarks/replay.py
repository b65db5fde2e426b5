"""Tuning replayed with the shipped models on the embedded collections: what the docs say of it, as JSON.

    python -m benchmarks.replay

Needs no hardware and comes out the same every time, so it is made again whenever a model, its prior or a collection
changed (`python -m benchmarks.tables` sees to that): the file says of which bytes it tells.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.harness import today
from tilewise._files import write_whole
from tilewise.costmodel.data.dataset import find_collection, load_dataset
from tilewise.costmodel.evaluate import evaluate
from tilewise.costmodel.models.shipped import shipped_file, shipped_names, shipped_scorer
from tilewise.tune.search.calibration import load_calibration
from tilewise.tune.search.replay import replay

RESULTS = Path(__file__).parent / "results" / "replay.json"


def sources() -> dict[str, str]:
    """The bytes that the figures follow from: collections, models and priors."""
    paths = [p for name in shipped_names() for p in (find_collection(name), shipped_file(name))]
    paths += [path.with_suffix(".tuning.json") for path in paths if path.suffix == ".safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(set(paths))}


def replayed(name: str) -> dict[str, Any]:
    """One collection: the tuner on its test kernels, and the errors of the model and of what it must beat."""
    found, calibration = replay(name, trees=False), load_calibration(shipped_file(name))
    table = evaluate({"shipped model": shipped_scorer(name)}, load_dataset(name, progress=False), "test")
    assert calibration is not None
    return {
        "kernels": found.kernels,
        "configs": found.configs,
        "regret": {strategy.name: strategy.regret for strategy in found.strategies},
        "adaptive": {"regret": found.adaptive.regret, "measurements": found.adaptive.measurements},
        "sure": found.adaptive.sure,
        "right_when_sure": found.adaptive.right_when_sure,
        "first_choice": found.first_choice,
        "default": found.default,
        "validation_kernels": calibration.kernels,
        "rule": {"least": calibration.rule.least, "budget": calibration.rule.budget},
        "errors": {row.name: {k: row.metrics[k].mean for k in ("top1", "top5", "top10")} for row in table.rows},
    }


def main() -> None:
    found = {name: replayed(name) for name in shipped_names()}
    text = json.dumps({"date": today(), "sources": sources(), "replay": found}, indent=1)
    write_whole(RESULTS, text + "\n")
    for name, row in found.items():
        own = row["adaptive"]
        print(f"{name}: {100 * own['regret']:.2f} % slower than the best after {own['measurements']:.1f} measurements")


def up_to_date() -> bool:
    return RESULTS.is_file() and json.loads(RESULTS.read_text(encoding="utf-8"))["sources"] == sources()


if __name__ == "__main__":
    main()
