"""Honest entries pass: of two hundred drawn at random, moderate ones that a student might try, none is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import save
from tilewise.bench import Settings, TinyMLPerf, parse_recipe
from tilewise.bench.scoring import validate_recipe

pytestmark = pytest.mark.slow
COUNT = 200
# What an entry may prune without falling below the floor by its own fault; harder pruning needs more retraining.
GENTLE = {"MLP_SPRINT": (0.3, 0.6), "CNN_MARATHON": (0.3, 0.5)}


def drawn_recipe(rng: np.random.Generator, folder: Path) -> dict[str, Any]:
    """A recipe of a few steps, each with parameters that do no harm."""
    event = str(rng.choice(list(GENTLE)))
    own = bool(rng.random() < 0.3)
    low, high = GENTLE[event]
    steps: list[dict[str, Any]] = [_own_weights(rng, event, folder)] if own else []
    steps.append({"step": "backend", "name": str(rng.choice(["native", "numpy"]))})
    if rng.random() < 0.6:
        epochs = 0 if own else int(rng.integers(4, 9))
        sparsity = float(rng.uniform(0.05, low if not epochs else high))
        steps.append({"step": "prune", "sparsity": sparsity, "epochs": epochs, "seed": int(rng.integers(1000))})
    if rng.random() < 0.7:
        observer = str(rng.choice(["minmax", "percentile", "mse"]))
        steps.append({"step": "quantize", "observer": observer, "samples": int(rng.integers(256, 1437))})
    return {"tilewise": 1, "event": event, "steps": steps}


def _own_weights(rng: np.random.Generator, event: str, folder: Path) -> dict[str, Any]:
    """The shipped weights, slightly moved, as a little training of one's own would leave them."""
    weights = {name: tensor.data for name, tensor in TinyMLPerf.event(event).model().named_tensors()}
    moved = {n: w + _noise(rng, w) if w.ndim > 1 else w for n, w in weights.items()}
    dtype = str(rng.choice(["float32", "float16"]))
    save({n: w.astype(dtype) if w.ndim > 1 else w for n, w in moved.items()}, folder / "w.safetensors")
    return {"step": "weights", "file": "w.safetensors", "dtype": dtype}


def _noise(rng: np.random.Generator, weights: Any) -> Any:
    return (0.05 * weights.std() * rng.standard_normal(weights.shape)).astype(weights.dtype)


def test_no_honest_entry_is_refused(tmp_path: Path, quick: Settings) -> None:
    rng = np.random.default_rng(7)
    settings = replace(quick, seed=None, drawn_inputs=512)
    refused = []
    for _ in range(COUNT):
        recipe = drawn_recipe(rng, tmp_path)
        try:
            validate_recipe(parse_recipe(recipe, tmp_path), settings)
        except ValueError as error:
            refused.append((recipe, str(error)))
    assert refused == []
