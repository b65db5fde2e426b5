"""Runs kept as Keras models: saving one, and taking one up again by the steps of the course's grader.

The grader does not use the saved computation. It builds the class anew from ``models.py`` and the run's arguments,
calls ``forward`` once so that the variables exist, and copies the saved trainable variables into it one by one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn
from flags import TrainArgs, read_run, run_file_of
from keras_graphs import graph_of, merged_graph
from keras_losses import CombinedLoss

from tilewise.costmodel.data import tpu_tiles
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.scaling import MinMax
from tilewise.errors import ConfigurationError, FileFormatError

SCALING_FILE = "tilewise_scaling.npz"


def load_models(path: Path | None = None) -> ModuleType:
    """The module of model classes: ``models.py`` beside this file, or the one handed in."""
    path = path or Path(__file__).with_name("models.py")
    spec = importlib.util.spec_from_file_location(f"models_{abs(hash(path))}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"There is no {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if getattr(module, "tpu_tiles", True) is None:  # a hand-in has its own copy
        module.tpu_tiles = tpu_tiles  # type: ignore[attr-defined]
    return module


def build(models: ModuleType, name: str, configs: int, kwargs: dict[str, Any], num_ops: int = 121) -> tf.keras.Model:
    """The class `name` of `models` with the grader's constructor call."""
    model_class = getattr(models, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, tf.keras.Model)):
        raise ConfigurationError(f"models.py has no Keras class {name}.")
    try:
        return model_class(num_configs=configs, num_ops=num_ops, **kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{name} does not take these arguments: {error}.") from error


def save_model(model: tf.keras.Model, folder: Path, scaling: MinMax, sample: tfgnn.GraphTensor) -> None:
    """Save as a folder that appears whole; the scaling lies beside the Keras files for tilewise's own commands."""
    model(sample)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.redirect_stdout(None):
            model.save(unfinished, include_optimizer=False)
        np.savez(unfinished / SCALING_FILE, **scaling.tensors())
        replaced = folder.with_name(f".{folder.name}.{os.getpid()}.replaced")
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_scaling(folder: Path) -> MinMax:
    """The feature ranges saved with a model."""
    try:
        with np.load(folder / SCALING_FILE, allow_pickle=False) as arrays:
            return MinMax.restore({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise FileFormatError(f"{folder} lacks a readable {SCALING_FILE}.") from error


def load_for_ranking(folder: Path, sample: tfgnn.GraphTensor, models: ModuleType | None = None) -> tf.keras.Model:
    """The model in `folder`, by the grader's steps."""
    args = read_run(run_file_of(folder))["args"]
    try:
        with tf.keras.utils.custom_object_scope({"CombinedLoss": CombinedLoss}):
            saved = tf.keras.models.load_model(folder)
    except (OSError, ValueError, KeyError, AttributeError, tf.errors.OpError) as error:
        raise FileFormatError(f"{folder} is not a readable Keras model ({type(error).__name__}).") from error
    model = build(models or load_models(), args["model"], args["configs"], TrainArgs_kwargs(args))
    model.forward(sample, int(sample.node_sets["config"].sizes[0]))
    ours, theirs = model.trainable_variables, saved.trainable_variables
    if [v.shape for v in ours] != [v.shape for v in theirs]:
        raise FileFormatError(f"{folder} holds other variables than the class {args['model']} of models.py.")
    for variable, value in zip(ours, theirs, strict=True):
        variable.assign(value)
    return model


def TrainArgs_kwargs(args: dict[str, Any]) -> dict[str, Any]:
    return TrainArgs(**{name: args.get(name) for name in TrainArgs.__dataclass_fields__}).model_kwargs


class KerasRanker:
    """A loaded run that scores kernels."""

    def __init__(self, folder: Path, first: Kernel) -> None:
        self.scaling = load_scaling(folder)
        self.model = load_for_ranking(folder, graph_of(first, self.scaling))

    def scores(self, kernel: Kernel) -> np.ndarray:
        """One score per configuration, lower = faster."""
        return self.model.forward(graph_of(kernel, self.scaling), kernel.n_configs).numpy()[0]


__all__ = ["KerasRanker", "build", "load_for_ranking", "load_models", "load_scaling", "merged_graph", "save_model"]
