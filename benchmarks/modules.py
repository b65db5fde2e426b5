"""Accuracy claims of the teaching plan on all 1,797 digits, or on MNIST's 10,000 test images, and on held-out text.

    python -m benchmarks.modules [--mnist FOLDER] [--models mlp cnn resnet8 gpt] [--folds 5]
    python -m benchmarks.modules --epochs 10 20 40 --models cnn  # on a validation part of the training digits

Each fold of a cross-validation trains a model from scratch, quantizes it to INT8 and prunes 70 % of its weights as
`tilewise prune` does. The gpt is the shipped one, judged by the characters that it predicts in text it has not seen.
Points lost are paired over all test images of all folds, with a 95 % bootstrap interval. `make mnist` fetches the
MNIST files. `--epochs` shows how the loss depends on the epochs of fine-tuning, without the test images: the models are
trained on three quarters of the training digits and judged on the fourth.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from tilewise import data, models
from tilewise._atomic import write_atomic
from tilewise.cli.optimize.before_after import Task, paired_drop
from tilewise.cli.optimize.prune import _prune_weights, _remove_filters, fine_tune
from tilewise.cli.optimize.pruning_tasks import ImagePruning, TextPruning
from tilewise.quantize import quantize

SPARSITY = 0.7
EPOCHS = {"mlp": 100, "cnn": 30, "resnet8": 40}  # of the training on digits; MNIST has 40 times as many images


def validation_folds(count: int) -> Iterator[data.ImageData]:
    """Split the training digits into a training and a validation part, in `count` of four ways."""
    digits = data.digits()
    x, y = digits.x_train, digits.y_train
    for fold in range(count):
        held_out = np.arange(len(x)) % 4 == fold
        yield data.ImageData(x[~held_out], y[~held_out], x[held_out], y[held_out])


def trained_task(name: str, images: data.ImageData, seed: int) -> ImagePruning:
    """Train one model from scratch; return its pruning task."""
    model = models.image_model(name, images.x_train.shape[-1], seed)
    task = ImagePruning(Task(name, model, images.for_model(name)), 64, seed)
    epochs = max(2, EPOCHS[name] * 1437 // len(images.x_train))
    fine_tune(model, task.loss, epochs * task.steps_per_epoch, 1e-3 if name == "resnet8" else 3e-3)
    model.eval()
    return task


def evaluate(task: ImagePruning | TextPruning, epochs: Sequence[int]) -> dict[str, Any]:
    """Quantize and prune a model; return what each form answers correctly.

    With `epochs`, prune it once for each of these lengths of the fine-tuning instead.
    """
    forms = {"dense": task.model}
    if not epochs:
        forms["int8"] = quantize(task.model, task.calibration())
    for count in epochs or [task.epochs]:
        suffix = f", {count} epochs" if epochs else ""
        forms[f"zeros{suffix}"] = _prune_weights(task, SPARSITY, "auto", "unstructured", count)
        if task.can_shrink:
            forms[f"filters{suffix}"] = _remove_filters(task, SPARSITY, True, count)
    return {form: task.correct(version) for form, version in forms.items()}


def image_answers(name: str, folds: Iterable[data.ImageData], epochs: Sequence[int]) -> dict[str, Any]:
    """Pool the test images of all folds: which of them each form classifies correctly."""
    results = []
    for fold, images in enumerate(folds):
        start = time.perf_counter()
        results.append(evaluate(trained_task(name, images, fold), epochs))
        print(f"{name}, fold {fold}: {time.perf_counter() - start:.0f} s", flush=True)
    return {form: np.concatenate([result[form] for result in results]) for form in results[0]}


def text_answers(seeds: int, epochs: Sequence[int]) -> dict[str, Any]:
    """Average the shares of characters of each test window that the shipped gpt predicts, over seeds of fine-tuning."""
    results = []
    for seed in range(seeds):
        task = TextPruning(seed)
        task.test = task.validation if epochs else task.test
        results.append(evaluate(task, epochs))
    return {form: np.mean([result[form] for result in results], 0) for form in results[0]}


def claims(name: str, correct: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Compare each form with the dense model; an answer stands for `size` images or characters."""
    rows = []
    for form in list(correct)[1:]:
        drop, interval = paired_drop(correct["dense"], correct[form], 0)
        row = {"model": name, "form": form, "images": size * len(correct["dense"])}
        rows.append(row | {"dense %": 100 * float(correct["dense"].mean()), "points lost": drop, "interval": interval})
        print(row["model"], form, f"{drop:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f})", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, default=os.environ.get("TILEWISE_MNIST"))
    parser.add_argument("--models", nargs="+", default=[*EPOCHS, "gpt"])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="of the fine-tuning of the gpt")
    parser.add_argument("--epochs", type=int, nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/modules.json"))
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    rows = json.loads(options.json.read_text()) if options.json.is_file() else []
    images_source = "digits" if options.mnist is None else "mnist"
    for name in options.models:
        folds: Iterable[data.ImageData] = data.digits_folds(options.folds)
        if options.mnist is not None:
            folds = [data.mnist(options.mnist)]
        if options.epochs:
            folds = validation_folds(min(options.folds, 4))
        if name == "gpt":
            answers, size = text_answers(options.seeds, options.epochs), models.pretrained("gpt").context
        else:
            answers, size = image_answers(name, folds, options.epochs), 1
        source = "validation" if options.epochs else "text" if name == "gpt" else images_source
        fresh = [{"data": source} | row for row in claims(name, answers, size)]
        rows = [row for row in rows if (row["data"], row["model"]) != (source, name)] + fresh
        write_atomic(options.json, json.dumps(rows, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
