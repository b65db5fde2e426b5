"""Tensors and a JSON record in one safetensors file that appears whole or not at all.

Both model files and checkpoints are such files: arrays by name, and one JSON document in the header's metadata. Reading
goes through `tilewise.io`, which believes nothing before it is checked, and a damaged file is one sentence.
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
    save(tensors, path, {"tilewise": json.dumps(without_nans(record), sort_keys=True, allow_nan=False)})


def without_nans(value: Any) -> Any:
    """The same document with null where a number means nothing, since JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nans(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nans(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def read_tensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The arrays and the JSON record of a file written by `write_tensors`."""
    tensors, metadata = load_arrays(path)
    record = parse_json(metadata.get("tilewise", ""), f"The record in {path}")
    if not isinstance(record, dict):
        raise FileFormatError(f"{path} is damaged or not a file of tilewise; train or export it again.")
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise FileFormatError(f"{path}: {name} holds values that are not finite.")
    return tensors, record
