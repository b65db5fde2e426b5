"""Tensors and a JSON record in one safetensors file, written atomically.

Model files and checkpoints have this format: arrays by name, and one JSON document in the header's metadata. Reading
goes through `tilewise.io`, which checks everything, so that a damaged file raises an error of one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import parse_json
from tilewise.errors import FileFormatError
from tilewise.io import load_arrays, save


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], record: Mapping[str, Any]) -> None:
    """Write arrays and a JSON record, with null for numbers that are not finite."""
    save(tensors, path, {"tilewise": json.dumps(without_nans(record), sort_keys=True, allow_nan=False)})


def without_nans(value: Any) -> Any:
    """Return the document with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nans(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nans(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def read_tensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read the arrays and the JSON record of a file from `write_tensors`."""
    tensors, metadata = load_arrays(path)
    record = parse_json(metadata.get("tilewise", ""), f"The record in {path}")
    if not isinstance(record, dict):
        raise FileFormatError(f"{path} is damaged or not a tilewise file; train or export it again.")
    # A NaN or infinity would spread to every score without an error.
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise FileFormatError(f"{path}: {name} holds values that are not finite; train or export it again.")
    return tensors, record
