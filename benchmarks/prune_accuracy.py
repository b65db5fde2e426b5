"""Measures the accuracy lost by pruning alone, with two epochs of fine-tuning, and with INT8; also times `shrink`.

    python -m benchmarks.prune_accuracy [--mnist FOLDER] [--seeds 0 1 2] [--out out/prune-accuracy]

MNIST's four IDX files are not shipped; without a folder of them (`--mnist`, $TILEWISE_MNIST) those rows are left
out. Models are trained by `tilewise fit` into the folder `--out`, and taken from there when they are there
already. Points lost are paired: both
models answer the same images of the whole test set, and the 95 % interval is over images.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import interleaved
from benchmarks.int8_accuracy import table_rows, trained
from tilewise import Tensor, models, no_grad
from tilewise._atomic import write_atomic
from tilewise.cli.optimize.before_after import answers, load_image_task, paired_drop
from tilewise.cli.optimize.prune import fine_tune
from tilewise.cli.optimize.pruning_tasks import ImagePruning
from tilewise.io import save
from tilewise.prune import prune, save_pruned, shrink
from tilewise.quantize import quantize

EPOCHS = 2


def image_rows(name: str, images: str | None, weights: Path | None, seed: int, out: Path) -> Iterator[dict[str, Any]]:
    """One trained model, pruned globally by magnitude to two sparsities, before and after fine-tuning and INT8."""
    task = load_image_task("cnn", images, weights)
    right = answers(task.model, task.data.x_test) == task.data.y_test
    save(task.model, out / "dense.safetensors")
    for sparsity in (0.7, 0.9):
        pruned: Any = prune(task.model, sparsity)
        tuned: Any = prune(task.model, sparsity)
        pruning = ImagePruning(task, 64, seed)
        fine_tune(tuned, pruning.loss, EPOCHS * pruning.steps_per_epoch, pruning.lr)
        tuned.eval()
        int8 = quantize(tuned, np.array_split(task.data.x_train[:256], 4))
        save_pruned(int8, out / "small.safetensors")
        size = (out / "small.safetensors").stat().st_size / (out / "dense.safetensors").stat().st_size
        for what, model in (("no tuning", pruned), (f"{EPOCHS} epochs", tuned), (f"{EPOCHS} epochs, int8", int8)):
            drop, interval = paired_drop(right, answers(model, task.data.x_test) == task.data.y_test, 0)
            row = {"model": name, "seed": seed, "sparsity": sparsity, "images": len(right), "then": what}
            row |= {"dense %": 100 * float(right.mean()), "points lost": drop, "interval": interval}
            yield row | ({"file": size} if model is int8 else {})


def shrink_row(threads: int) -> dict[str, Any]:
    """vgg6 with half its filters: parameters, latency of 8 images, and how far from the masked model it is."""
    model = models.vgg6().eval()
    small = shrink(model, 0.5).eval()
    x = Tensor(np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32))

    @no_grad()
    def run(which: Any) -> Any:
        return which(x)

    seconds = interleaved({"vgg6": lambda: run(model), "shrunk": lambda: run(small)}, threads, 3.0)
    sizes = [sum(p.size for p in m.parameters()) for m in (small, model)]
    return {
        "model": "vgg6, half the filters",
        "parameters": sizes[0] / sizes[1],
        "times faster": seconds["vgg6"] / seconds["shrunk"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, default=os.environ.get("TILEWISE_MNIST"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=1, help="of the MNIST training")
    parser.add_argument("--out", type=Path, default=Path("out/prune-accuracy"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/prune_accuracy.json"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = list(table_rows(shrink_row(options.threads)))
    for row in image_rows("digits cnn as shipped", None, None, 0, options.out):
        rows += table_rows(row)
    for seed in options.seeds:
        weights = trained(options.out / f"digits-{seed}", None, seed, None)
        for row in image_rows("digits cnn", None, weights, seed, options.out):
            rows += table_rows(row)
        if options.mnist is not None:
            folder = str(options.mnist)
            weights = trained(options.out / f"mnist-{seed}", folder, seed, options.epochs)
            for row in image_rows("MNIST cnn", folder, weights, seed, options.out):
                rows += table_rows(row)
    write_atomic(options.json, (json.dumps(rows, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
