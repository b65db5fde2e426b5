"""Builds an entry: applies the steps of a recipe to the shipped model, one after the other.

`build_stages` keeps the state after every step, so that a score can say where the gain came from. Nothing here reads
the held-out images: calibration and retraining use the training part. An entry's own weights are
compared with the shipped ones when they are loaded, and again after every step that removes some (see likeness.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import optim
from tilewise._safetensors import load_arrays
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.backend.tiled import check_tile
from tilewise.backend.tiled.matmul import TileConfig
from tilewise.bench.events import Event
from tilewise.bench.recipe import Recipe, Step
from tilewise.bench.runner import Runner, baseline
from tilewise.bench.validation import check_likeness
from tilewise.errors import Rejected, TilewiseError
from tilewise.nn import Module
from tilewise.nn import functional as F
from tilewise.prune import prune, shrink, sparsify
from tilewise.quantize import quantize
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
_BATCH = 32
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Stage:
    """The model, ready to run, after one step of a recipe."""

    label: str
    runner: Runner


def build(recipe: Recipe) -> Runner:
    """Apply all steps of a recipe to the event's shipped model; return the result, ready to run."""
    return build_stages(recipe)[-1].runner


def build_stages(recipe: Recipe) -> list[Stage]:
    """Return the baseline, and the entry after each step of a recipe."""
    runner = baseline(recipe.event)
    stages = [Stage("plain tilewise", runner)]
    shipped = {name: tensor.data for name, tensor in runner.model.named_tensors()}
    brings_weights = any(step.name == "weights" for step in recipe.steps)
    quantized_later = any(step.name == "quantize" for step in recipe.steps)
    for step in recipe.steps:
        try:
            runner = _APPLY[step.name](runner, step, recipe)
        except Rejected:
            raise
        except TilewiseError as error:
            raise Rejected("cannot build", f"the step {step.name} failed: {error}") from error
        stages.append(Stage(str(step), runner))
        if brings_weights and step.name in ("weights", "prune"):
            check_likeness({name: tensor.data for name, tensor in runner.model.named_tensors()}, shipped)
        if step.name == "prune" and step.options["sparse"] and not quantized_later:
            runner = replace(runner, model=sparsify(runner.model))
            stages[-1] = Stage(str(step), runner)
    return stages


# --- steps ---


def _load_weights(runner: Runner, step: Step, recipe: Recipe) -> Runner:
    """Replace the model's weights by those of a file that the recipe names."""
    path = recipe.read_file(step.options["file"])
    arrays, _ = load_arrays(path)
    arrays = check_weights(arrays, runner.model, step.options["dtype"])
    model = copy.deepcopy(runner.model)
    model.load_state_dict(arrays)
    return replace(runner, model=model)


def check_weights(arrays: dict[str, Array], shipped: Module, dtype: str) -> dict[str, Array]:
    """Return the weights in float32; reject a file with another dtype, other names or other shapes than the event's.

    In a file of int8 every matrix NAME comes with NAME.scale, one float32 per row.
    """
    own = {name: tensor.data for name, tensor in shipped.named_tensors()}
    scales = {name: arrays[name] for name in arrays if name.endswith(".scale") and name not in own}
    arrays = {name: array for name, array in arrays.items() if name not in scales}
    if arrays.keys() != own.keys() or any(arrays[n].shape != own[n].shape for n in own):
        raise Rejected(
            "another model", "these weights belong to another model: their names or shapes differ from the event's"
        )
    return {name: _checked_weight(name, array, own[name], dtype, scales) for name, array in arrays.items()}


def _checked_weight(name: str, array: Array, shipped: Array, dtype: str, scales: dict[str, Array]) -> Array:
    """Return a submitted weight in float32 (counters keep their dtype); reject a wrong dtype or value."""
    if shipped.dtype.kind != "f":  # a counter, such as how many batches a norm has seen
        if array.dtype != shipped.dtype:
            raise Rejected("false dtype", f"{name} holds {shipped.dtype} in the shipped model, and {array.dtype} here")
        return array
    if array.ndim > 1 and array.dtype.name != dtype:
        raise Rejected("false dtype", f"{name} is declared {dtype} but stored as {array.dtype}")
    values = array.astype(np.float32)
    if array.dtype == np.int8:
        scale = scales.get(f"{name}.scale", np.empty(0))
        if scale.shape != (len(array),):
            raise Rejected("another model", f"{name} is int8 but has no {name}.scale with one number per row")
        values *= scale.astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))
    if not np.isfinite(values).all():
        raise Rejected("another model", f"{name} holds NaN or infinity")
    return values


def _backend(runner: Runner, step: Step, _: Recipe) -> Runner:
    backend = OptimizedBackend(only="numpy") if step.options["name"] == "numpy" else OptimizedBackend()
    return replace(runner, backend=backend)


def _tile(runner: Runner, step: Step, _: Recipe) -> Runner:
    """Use the step's tiles for the shapes that it names."""
    table = {}
    for entry in step.options["matmul"]:
        tile = TileConfig(**entry["tile"])
        check_tile("matmul", tuple(entry["shape"]), tile, entry["layout"])
        table[tuple(entry["shape"]), entry["layout"]] = tile

    def choose(op: str, shape: tuple[int, ...], dtype: str, layout: str) -> Any:
        return table.get((shape, layout)) if op == "matmul" and dtype == "float32" else None

    return replace(runner, backend=OptimizedBackend(only=runner.backend.only, tile_chooser=choose))


def _shrink(runner: Runner, step: Step, _: Recipe) -> Runner:
    """Remove filters of convolutions, or hidden units of the mlp, and retrain the model, as the step says."""
    model = shrink(runner.model, step.options["sparsity"])
    if step.options["sparsity"] and _size(model) == _size(runner.model):
        raise Rejected("cannot build", "shrink removes nothing at this sparsity; raise it or leave the step out")
    retrain(model, runner.event, step.options["epochs"], step.options["seed"])
    return replace(runner, model=model.eval())


def _size(model: Module) -> int:
    return sum(int(tensor.data.size) for _, tensor in model.named_tensors())


def _prune(runner: Runner, step: Step, _: Recipe) -> Runner:
    """Set the smallest weights to zero and retrain the model with them held at zero, as the step says."""
    pruned: Any = prune(runner.model, step.options["sparsity"], step.options["scope"])
    retrain(pruned, runner.event, step.options["epochs"], step.options["seed"], pruned.pruning.apply)
    return replace(runner, model=pruned.eval())


def _quantize(runner: Runner, step: Step, _: Recipe) -> Runner:
    """Quantize the model to int8, calibrated on training images; a text model decodes with int8 weights."""
    if runner.event.kind == "text":
        return replace(runner, decoder_weights="int8")
    x = runner.event.training_images()[0][: step.options["samples"]]
    batches = [x[i : i + 64] for i in range(0, len(x), 64)]
    options = {name: step.options[name] for name in ("observer", "keep_float")}
    model = quantize(runner.model, batches, max_error=None, **options)  # int8 only, as the recipe asks for
    return replace(runner, model=model)


def _kv_cache(runner: Runner, step: Step, _: Recipe) -> Runner:
    return replace(runner, use_cache=True, cache_dtype=step.options["dtype"])


_APPLY: dict[str, Callable[[Runner, Step, Recipe], Runner]] = {
    "weights": _load_weights,
    "backend": _backend,
    "tile": _tile,
    "shrink": _shrink,
    "prune": _prune,
    "quantize": _quantize,
    "kv_cache": _kv_cache,
}


def retrain(model: Module, event: Event, epochs: int, seed: int, after_step: Callable[[], None] = lambda: None) -> None:
    """Train on the event's training images for `epochs`, with the default backend; `after_step` follows each step."""
    if not epochs:
        return
    from tilewise.fit.tasks import random_shift

    x, y = event.training_images()
    images = x.reshape(len(x), 1, 8, 8)
    optimizer = optim.AdamW(list(model.parameters()), lr=_LEARNING_RATE, weight_decay=0.01)
    steps, steps_done = epochs * -(-len(x) // _BATCH), 0
    model.train()
    with use_backend(OptimizedBackend()):
        for epoch in range(epochs):
            rng = np.random.default_rng([seed, epoch])
            for batch in np.array_split(rng.permutation(len(x)), -(-len(x) // _BATCH)):
                shifted = random_shift(images[batch], 1, rng).reshape(len(batch), *x.shape[1:])
                optimizer.lr = _LEARNING_RATE * (1 - steps_done / steps)
                optimizer.zero_grad()
                F.cross_entropy(model(Tensor(shifted)), y[batch]).backward()
                optimizer.step()
                after_step()
                steps_done += 1
    model.eval()
