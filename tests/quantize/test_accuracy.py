"""What int8 costs in accuracy on real data. `python -m benchmarks.int8_accuracy` measures the same for more seeds."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tilewise import Tensor, data, models, no_grad
from tilewise.cli.optimize.before_after import answers, load_image_task, paired_drop
from tilewise.fit import fit, recipe_for
from tilewise.nn import Module, functional
from tilewise.quantize import calibrate, quantize
from tilewise.quantize.calibration import OBSERVERS


def points_lost(task, observer: str, images: int = 256, start: int = 0) -> float:
    calibration = calibrate(task.model, np.array_split(task.data.x_train[start : start + images], 4), observer)
    after = answers(quantize(task.model, calibration), task.data.x_test) == task.data.y_test
    drop, (low, high) = paired_drop(answers(task.model, task.data.x_test) == task.data.y_test, after, 0)
    assert low <= drop <= high
    return drop


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_the_digits_models_lose_at_most_one_image_in_three_hundred(model: str, observer: str) -> None:
    task = load_image_task(model, None, None)
    for images, start in ((256, 0), (64, 512)):
        assert points_lost(task, observer, images, start) <= 0.3


def test_a_gpt_with_int8_layers_is_at_most_a_hundredth_more_perplexed() -> None:
    model, ids = models.pretrained("gpt"), data.text().valid
    x, y = ids[: 16 * 256].reshape(16, 256), ids[1 : 16 * 256 + 1].reshape(16, 256)

    def perplexity(candidate: Module) -> float:
        with no_grad():
            return float(np.exp(functional.cross_entropy(candidate(x), Tensor(y)).data))

    assert perplexity(quantize(model, [])) <= 1.01 * perplexity(model)


@pytest.mark.slow
def test_an_mnist_model_loses_at_most_three_images_in_a_thousand(tmp_path: Path) -> None:
    folder = os.environ.get("TILEWISE_MNIST")
    if folder is None:
        pytest.skip("set TILEWISE_MNIST to a folder with MNIST's four IDX files")
    result = fit(recipe_for("cnn", folder, 1, 0, None), tmp_path)
    task = load_image_task("cnn", folder, Path(str(result.model_path)))
    assert len(task.data.x_test) == 10_000
    for observer in OBSERVERS:
        assert points_lost(task, observer) <= 0.3
