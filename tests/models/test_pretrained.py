"""The shipped weights do what is said of them."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise as tw
from tilewise import data, models
from tilewise.errors import ConfigurationError
from tilewise.io import load_arrays
from tilewise.models import reference
from tilewise.nn import functional as F


@pytest.mark.parametrize(("name", "bar"), [("mlp", 0.97), ("cnn", 0.985)])
def test_the_image_models_recognise_the_held_out_digits(name, bar):
    digits = data.digits().flat() if name == "mlp" else data.digits()
    with tw.no_grad():
        predicted = models.pretrained(name)(tw.Tensor(digits.x_test)).data.argmax(axis=1)
    assert (predicted == digits.y_test).mean() >= bar


def test_the_language_model_predicts_held_out_text():
    valid = data.text().valid
    starts = np.linspace(0, len(valid) - 257, 8).astype(int)
    windows = valid[starts[:, None] + np.arange(257)]
    with tw.no_grad():
        loss = F.cross_entropy(models.pretrained("gpt")(windows[:, :-1]), windows[:, 1:]).item()
    assert loss < 1.3


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_weight_files_say_how_they_were_made(name):
    from pathlib import Path

    _, facts = load_arrays(Path(reference.__file__).parent / "weights" / f"{name}.safetensors")
    assert facts["model"] == name
    assert facts["seed"] == "0"
    assert facts["data"] in ("digits", "topics")


def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigurationError):
        models.pretrained("vgg6")
