"""Measures the accuracy lost by INT8: the digits CNN and the MNIST CNN for several seeds and every observer, networks
trained on MNIST, and a GPT.

    python -m benchmarks.int8_accuracy [--mnist FOLDER] [--seeds 0 1 2] [--epochs 1] [--out out/int8-accuracy]

MNIST's four IDX files are not shipped; without a folder of them (`--mnist`, $TILEWISE_MNIST) those rows are left
out. Models are trained by `tilewise fit` into the folder `--out`, and taken from there when they are there
already. Points lost are paired: both models answer the same images, and the 95 % interval is over images; the share of
equal answers is recorded as well. Perplexity is over the whole validation text. One row measures the size of vgg6: its
tensors, its file, and the growth of a process for each model it loads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tilewise
from benchmarks.harness import machine_class, results_path, today
from benchmarks.trained_networks import NETWORKS, as_pictures, trained_network
from tilewise import Tensor, data, models, no_grad
from tilewise._atomic import write_atomic
from tilewise.cli.optimize.before_after import answers, load_image_task, paired_drop
from tilewise.fit import fit, recipe_for
from tilewise.nn import Module, functional
from tilewise.quantize import calibrate, quantize, save_quantized
from tilewise.quantize.calibration import OBSERVERS

CALIBRATION_IMAGES = 256
_GROWTH = """
import gc, sys
from tilewise import load, models
from tilewise.quantize import load_quantized

def read():
    if sys.argv[1] == "int8":
        return load_quantized(sys.argv[2])
    model = models.vgg6()
    model.load_state_dict(load(sys.argv[2]))
    return model

def held():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

first = read()
before = held()
models_held = [read() for _ in range(20)]
print((held() - before) // len(models_held))
"""


def trained(folder: Path, images: str | None, seed: int, epochs: int | None) -> Path:
    """The weights of a CNN trained with this seed."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        result = fit(recipe_for("cnn", images, epochs, seed, None), folder)
        weights = Path(str(result.model_path))
    return weights


def image_rows(name: str, images: str | None, weights: Path | None, seed: int) -> Iterator[dict[str, Any]]:
    """One trained CNN against its int8 forms, one per observer."""
    task = load_image_task("cnn", images, weights)
    yield from rows_of(name, task.model, task.data, seed, OBSERVERS)


def network_rows(folder: str, out: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Networks trained on MNIST against their int8 forms."""
    images = data.mnist(folder)
    for name in NETWORKS:
        network = trained_network(name, images, out, seed)
        pictures = replace(
            images, x_train=as_pictures(images.x_train[:CALIBRATION_IMAGES]), x_test=as_pictures(images.x_test)
        )
        yield from rows_of(f"MNIST {name}", network, pictures, seed, OBSERVERS[:1])


def rows_of(
    name: str, model: Module, images: data.ImageData, seed: int, observers: Sequence[str]
) -> Iterator[dict[str, Any]]:
    predictions = answers(model, images.x_test)
    before = predictions == images.y_test
    batches = np.array_split(images.x_train[:CALIBRATION_IMAGES], 4)
    for observer in observers:
        int8 = quantize(model, calibrate(model, batches, observer))
        after = answers(int8, images.x_test)
        drop, interval = paired_drop(before, after == images.y_test, 0)
        yield {
            "model": name,
            "seed": seed,
            "observer": observer,
            "images": len(before),
            "float32 %": 100 * float(before.mean()),
            "agree %": 100 * float((after == predictions).mean()),
            "points lost": drop,
            "interval": interval,
        }


def perplexity(model: Module, ids: np.ndarray, context: int = 256) -> float:
    """exp of the mean loss over the text in windows of `context` characters."""
    windows = (len(ids) - 1) // context
    x = ids[: windows * context].reshape(windows, context)
    y = ids[1 : windows * context + 1].reshape(windows, context)
    losses = []
    with no_grad():
        for i in range(windows):
            losses.append(float(functional.cross_entropy(model(x[i : i + 1]), Tensor(y[i : i + 1])).data))
    return float(np.exp(np.mean(losses)))


def gpt_row() -> dict[str, Any]:
    model, ids = models.pretrained("gpt"), data.text().valid
    before, after = perplexity(model, ids), perplexity(quantize(model, []), ids)
    return {
        "model": "gpt 4x128, dynamic",
        "perplexity float32": before,
        "int8": after,
        "up %": 100 * (after / before - 1),
    }


def size_row() -> dict[str, Any]:
    """vgg6 in int8 over vgg6 in float32: bytes of the tensors and of the file, and what one more adds to a process."""
    model = models.vgg6().eval()
    int8: Any = quantize(model, [np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)])
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float32": Path(folder) / "float32.safetensors", "int8": Path(folder) / "int8.safetensors"}
        tilewise.save(model, paths["float32"])
        save_quantized(int8, paths["int8"])
        grown = {kind: _growth(kind, path) for kind, path in paths.items()}
        disk = {kind: path.stat().st_size for kind, path in paths.items()}
    weight_bytes = sum(tensor.data.nbytes for _, tensor in model.named_tensors())
    return {
        "model": "vgg6, size",
        "held": int8.nbytes / weight_bytes,
        "disk": disk["int8"] / disk["float32"],
        "grows float32 MB": grown["float32"] / 1e6,
        "grows int8 MB": grown["int8"] / 1e6,
    }


def _growth(kind: str, path: Path) -> int:
    command = [sys.executable, "-c", _GROWTH, kind, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, default=os.environ.get("TILEWISE_MNIST"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=1, help="of the MNIST training")
    parser.add_argument("--out", type=Path, default=Path("out/int8-accuracy"))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "int8_accuracy.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    tilewise.set_num_threads(options.threads)
    rows = [*table_rows(gpt_row()), *table_rows(size_row())]
    for row in image_rows("digits cnn as shipped", None, None, 0):
        rows += table_rows(row)
    for seed in options.seeds:
        weights = trained(options.out / f"digits-{seed}", None, seed, None)
        for row in image_rows("digits cnn", None, weights, seed):
            rows += table_rows(row)
        if options.mnist is not None:
            folder = str(options.mnist)
            weights = trained(options.out / f"mnist-{seed}", folder, seed, options.epochs)
            for row in image_rows("MNIST cnn", folder, weights, seed):
                rows += table_rows(row)
    if options.mnist is not None:
        for row in network_rows(str(options.mnist), options.out, options.seeds[0]):
            rows += table_rows(row)
    facts = {"date": today(), "machine": machine_class(), "accuracy": rows}
    write_atomic(results_path(options.json), (json.dumps(facts, indent=1) + "\n").encode())


def table_rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print("  ".join(parts), flush=True)
    yield row


if __name__ == "__main__":
    main()
