"""Accuracy claims of the teaching plan on all 1,797 digits by cross-validation, or on MNIST's 10,000 test images.

    python -m benchmarks.modules [--mnist FOLDER] [--models mlp cnn resnet8] [--folds 5]

Each fold trains a model from scratch, quantizes it to INT8 and prunes 70 % of its weights as `tilewise prune` does.
Points lost are paired over all test images of all folds, with a 95 % bootstrap interval. `make mnist` fetches the
MNIST files.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise import data, models
from tilewise._atomic import write_atomic
from tilewise.cli.optimize.before_after import Task, paired_drop
from tilewise.cli.optimize.prune import _prune_weights, _remove_filters, fine_tune
from tilewise.cli.optimize.pruning_tasks import ImagePruning
from tilewise.quantize import quantize

SPARSITY = 0.7
EPOCHS = {"mlp": 100, "cnn": 30, "resnet8": 40}  # of the training on digits; MNIST has 40 times as many images


def evaluate_fold(name: str, images: data.ImageData, seed: int) -> dict[str, Any]:
    """Train, quantize and prune one model; return which test images each form classifies correctly."""
    size = images.x_train.shape[-1]
    model = models.image_model(name, size, seed)
    task = ImagePruning(Task(name, model, images.for_model(name)), 64, seed)
    epochs = max(2, EPOCHS[name] * 1437 // len(images.x_train))
    fine_tune(model, task.loss, epochs * task.steps_per_epoch, 1e-3 if name == "resnet8" else 3e-3)
    model.eval()
    forms = {"dense": model, "int8": quantize(model, np.array_split(task.images.x_train[:256], 4))}
    forms["zeros"] = _prune_weights(task, SPARSITY, "auto", "unstructured", task.epochs)
    if task.can_shrink:
        forms["filters"] = _remove_filters(task, SPARSITY, True, task.epochs)
    return {form: task.correct(version) for form, version in forms.items()}


def claims(name: str, folds: Iterable[data.ImageData]) -> list[dict[str, Any]]:
    """Pool the test images of all folds and compare each form with the dense model."""
    results = []
    for fold, images in enumerate(folds):
        start = time.perf_counter()
        results.append(evaluate_fold(name, images, fold))
        print(f"{name}, fold {fold}: {time.perf_counter() - start:.0f} s", flush=True)
    correct = {form: np.concatenate([result[form] for result in results]) for form in results[0]}
    rows = []
    for form in list(correct)[1:]:
        drop, interval = paired_drop(correct["dense"], correct[form], 0)
        row = {"model": name, "form": form, "images": len(correct["dense"])}
        rows.append(row | {"dense %": 100 * float(correct["dense"].mean()), "points lost": drop, "interval": interval})
        print(row["model"], form, f"{drop:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, default=os.environ.get("TILEWISE_MNIST"))
    parser.add_argument("--models", nargs="+", default=list(EPOCHS))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/modules.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    rows = json.loads(options.json.read_text()) if options.json.is_file() else []
    source = "digits" if options.mnist is None else "mnist"
    for name in options.models:
        folds = data.digits_folds(options.folds) if options.mnist is None else [data.mnist(options.mnist)]
        fresh = [{"data": source} | row for row in claims(name, folds)]
        rows = [row for row in rows if (row["data"], row["model"]) != (source, name)] + fresh
        write_atomic(options.json, json.dumps(rows, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
