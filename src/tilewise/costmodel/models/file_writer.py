"""Write model files; `files` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.inputs import Preparation
from tilewise.costmodel.models.files import FORMAT
from tilewise.io import save

FileContents = tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]  # arrays and record


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], record: Mapping[str, Any]) -> None:
    """Write arrays and a JSON record, with null for numbers that are not finite."""
    save(tensors, path, {"tilewise": json.dumps(without_nans(record), sort_keys=True, allow_nan=False)})


def without_nans(value: Any) -> Any:
    """Return a copy of a JSON document with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: without_nans(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nans(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def file_contents(
    weights: Mapping[str, npt.NDArray[Any]], preparation: Preparation, schema: Schema, record: Mapping[str, Any]
) -> FileContents:
    """Collect what a model file stores: weights and preparation as arrays, schema and training record as JSON data."""
    tensors = {f"weight.{k}": v for k, v in weights.items()}
    return tensors | {f"prepare.{k}": v for k, v in preparation.tensors().items()}, {
        **record,
        "format": FORMAT,
        "preparation": preparation.kind,
        "config_features": list(schema.config_features),
        "collection": schema.extra.get("name") or schema.extra.get("hardware"),
    }
