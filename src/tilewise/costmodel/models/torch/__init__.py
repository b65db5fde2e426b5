"""The models by name: five baselines, gradient-boosted trees, ours, or a user's own class.

A model class is a torch module built as ``Class(node_width, config_width, **kwargs)`` whose ``forward(batch)`` gives
one score per configuration slot, lower is faster. Its attribute ``preparation`` names the features it reads ("minmax"
unless it says otherwise). Importing this module needs torch; the package imports it only when a model is built.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tilewise.costmodel.models.torch.baselines import MLP, EarlyJoinResGCN, EarlyJoinSAGE, LateJoinResGCN, LateJoinSAGE
from tilewise.costmodel.models.torch.ranker import TileRanker
from tilewise.costmodel.train.config import parse_kwargs
from tilewise.errors import ConfigurationError

MODELS: dict[str, type[nn.Module]] = {
    "MLP": MLP,
    "LateJoinSAGE": LateJoinSAGE,
    "EarlyJoinSAGE": EarlyJoinSAGE,
    "LateJoinResGCN": LateJoinResGCN,
    "EarlyJoinResGCN": EarlyJoinResGCN,
    "TileRanker": TileRanker,
}


def model_class(name: str) -> type[nn.Module]:
    """The class of that name; ``package.module:Class`` imports a user's own, the working folder included. Such a name
    comes from the user, never from a file: `trained.load_model` builds nothing else on a file's word."""
    if name in MODELS:
        return MODELS[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, MODELS, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "use"
        raise ConfigurationError(
            f"There is no model {name!r}; {meant} GBDT, {', '.join(MODELS)}, your own as package.module:Class, or, "
            "in the course's tiles_train.py, a Keras class of models.py (--framework=keras)."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"The model class {name} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigurationError(f"{name} is not a torch.nn.Module class.")
    return found


def build_model(
    name: str, node_width: int, config_width: int, kwargs: Mapping[str, Any] | str | None = None
) -> nn.Module:
    """An untrained model; `kwargs` is a mapping or JSON text."""
    settings = parse_kwargs(kwargs)
    cls = model_class(name)
    try:
        return cls(node_width, config_width, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{name} cannot be built with {json.dumps(settings)}: {why}.") from error


def constructor_defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """The keyword arguments of a model class that have plain defaults, with those defaults."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, bool | int | float | str)}
