"""Trains the models that come with the package and fits the tuner's prior to each, as after a new measurement.

    python -m benchmarks.ship_models h200 cpu

A shipped model is a TileRanker with one member and narrow layers, so that 500 configurations are scored in a
millisecond, trained for longer than a model is by default. Of several seeds the one best on the valid split is kept;
nothing is chosen by the test split. (The H200 model that ships now is wider, and takes three milliseconds.)
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilewise.costmodel import Dataset, TrainedModel, evaluate, load_dataset, train
from tilewise.tune.replay import recalibrate

SETTINGS = {"epochs": 80, "model_kwargs": {"hidden_dim": 64, "members": 1}}
FOLDER = Path(__file__).parents[1] / "src" / "tilewise" / "costmodel" / "shipped_models"


SEEDS = (1, 2, 3, 4)


def _validation_error(model: TrainedModel, data: Dataset) -> float:
    """Mostly what five measurements lose, and a little what the first choice does."""
    metrics = evaluate(model, data, "valid", baselines=False).row("model").metrics
    return metrics["top5"].mean + metrics["top1"].mean / 10


def ship(collection: str, folder: Path = FOLDER) -> None:
    data = load_dataset(collection)
    trained = [train(data, "TileRanker", device="cpu", seed=seed, **SETTINGS) for seed in SEEDS]
    model = min(trained, key=lambda candidate: _validation_error(candidate, data))
    path = folder / f"{collection}.safetensors"
    model.save(path)
    found = evaluate(model, data, "test", baselines=False).row("model").metrics
    errors = ", ".join(f"top-{k} {100 * found[f'top{k}'].mean:.2f} %" for k in (1, 5, 10))
    print(
        f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {model.record['seconds']:.0f} s; test {errors}", flush=True
    )
    recalibrate(collection, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["h200", "cpu"]:
        ship(name)
