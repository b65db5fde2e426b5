"""Checkpoints: one safetensors file with weights, optimizer state, best weights so far, and counters as JSON metadata.

The file is written atomically, so a killed process never leaves a partial state. Nothing is unpickled.
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

Array = npt.NDArray[Any]
Groups = dict[str, dict[str, Array]]


def write_checkpoint(path: Path, groups: Mapping[str, Mapping[str, Any]], counters: Mapping[str, Any]) -> None:
    """Store groups of named arrays ("model", "optimizer", ...) and JSON counters as one file."""
    flat = {f"{group}/{name}": np.asarray(value) for group, arrays in groups.items() for name, value in arrays.items()}
    save(flat, path, {"tilewise": json.dumps(counters)})


def read_checkpoint(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Read the groups of arrays and the counters of a checkpoint."""
    arrays, metadata = load_arrays(path)
    counters = parse_json(metadata.get("tilewise", "null"), f"The record in {path}")
    if not isinstance(counters, dict):
        raise FileFormatError(f"{path} is not a checkpoint of tilewise fit")
    groups: Groups = {}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        groups.setdefault(group, {})[key] = array
    return groups, counters
