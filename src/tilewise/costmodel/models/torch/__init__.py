"""Models by name: the five baselines, TileRanker, or a user's own class.

A model class is a torch module built as ``Class(node_width, config_width, **kwargs)`` whose ``forward(batch)`` returns
one score per configuration slot; lower is faster. Its attribute ``preparation`` names the features that it reads, by
default "minmax". Importing this module needs torch; the package imports it only when a model is built.

Models score configurations independently of each other, so `score_inputs` scores a chunk at a time to bound memory.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.models.torch.baselines import MLP, EarlyJoinResGCN, EarlyJoinSAGE, LateJoinResGCN, LateJoinSAGE
from tilewise.costmodel.models.torch.fused import kernel_threads
from tilewise.costmodel.models.torch.ragged import collate
from tilewise.costmodel.models.torch.ranker import TileRanker
from tilewise.costmodel.training.config import parse_kwargs
from tilewise.errors import ConfigurationError

MODELS: dict[str, type[nn.Module]] = {
    "MLP": MLP,
    "LateJoinSAGE": LateJoinSAGE,
    "EarlyJoinSAGE": EarlyJoinSAGE,
    "LateJoinResGCN": LateJoinResGCN,
    "EarlyJoinResGCN": EarlyJoinResGCN,
    "TileRanker": TileRanker,
}

CHUNK_PAIRS = 1 << 13  # (node, configuration) pairs of an early join that stay in a CPU's cache
GPU_CHUNK_FACTOR = 64  # a GPU needs larger chunks to be busy
MAX_CHUNK = 4096  # configurations
MIN_CHUNK = 16
SINGLE_THREAD_CONFIGS = 1024  # one thread of torch scores this many configurations as fast as several threads


def model_class(name: str) -> type[nn.Module]:
    """Return the model class called `name`.

    ``package.module:Class`` imports a user's own, also from the working folder.

    Such a name must come from the user, never from a file; `trained.load_model` ensures that.
    """
    if name in MODELS:
        return MODELS[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        similar = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {similar[0]}? There are" if similar else "use"
        raise ConfigurationError(
            f"There is no model {name!r}; {hint} GBDT, {', '.join(MODELS)}, your own as package.module:Class, or, "
            "in the course's tiles_train.py, a Keras class of models.py (--framework=keras)."
        )
    # A console script does not have the working folder on its path.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"The model class {name} cannot be imported: {error}.") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigurationError(f"{name} is not a torch.nn.Module class.")
    return cls


def build_model(
    name: str, node_width: int, config_width: int, kwargs: Mapping[str, Any] | str | None = None
) -> nn.Module:
    """Build an untrained model by name, for inputs of these widths; `kwargs` is a mapping or JSON text."""
    settings = parse_kwargs(kwargs)
    cls = model_class(name)
    try:
        return cls(node_width, config_width, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{name} cannot be built with {json.dumps(settings)}: {reason}.") from error


def constructor_defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the keyword arguments of a model class that have plain defaults, with those defaults."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}


def score_inputs(model: nn.Module, inputs: ModelInputs, device: str = "cpu") -> npt.NDArray[np.float32]:
    """Run a model on one kernel's inputs; return a score per configuration, lower is faster."""
    pairs = CHUNK_PAIRS if device == "cpu" else CHUNK_PAIRS * GPU_CHUNK_FACTOR
    early = getattr(model, "early", False)
    # The compiled kernels never hold all (node, configuration) pairs, so they need no small chunks.
    materializes_pairs = early and not (device == "cpu" and getattr(model, "compiled", False))
    chunk = min(MAX_CHUNK, max(MIN_CHUNK, pairs // max(1, len(inputs.node)))) if materializes_pairs else MAX_CHUNK
    scores = np.empty(len(inputs.config), np.float32)
    # Waking torch's threads costs more than it saves on small lists.
    single_thread = early or len(scores) <= SINGLE_THREAD_CONFIGS
    with torch.inference_mode(), kernel_threads(model, device) if single_thread else nullcontext():
        for start in range(0, len(scores), chunk):
            chunk_inputs = inputs.with_config(inputs.config[start : start + chunk])
            scores[start : start + chunk] = model(collate([chunk_inputs], device=device))[0].float().cpu().numpy()
    return scores
