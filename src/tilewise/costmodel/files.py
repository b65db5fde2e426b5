"""Tensors and a JSON record in one safetensors file that appears whole or not at all.

Both model files and checkpoints are such files: arrays by name, and one JSON document in the header's metadata. Reading
checks the size against the header before anything is believed, and a damaged file is one sentence.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import write_whole
from tilewise.errors import FileFormatError

_MAX_HEADER_BYTES = 64 << 20


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], record: Mapping[str, Any]) -> None:
    from safetensors.numpy import save

    metadata = {"tilewise": json.dumps(without_nans(record), sort_keys=True, allow_nan=False)}
    write_whole(path, save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata))


def without_nans(value: Any) -> Any:
    """The same document with null where a number means nothing, since JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nans(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nans(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def read_tensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The arrays and the JSON record of a file written by `write_tensors`."""
    try:
        content = path.read_bytes()
        record = _record(content)
        tensors = _tensors(content, path)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path} does not exist.") from error
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged or not a file of tilewise; train or export it again.") from error
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise FileFormatError(f"{path}: {name} holds values that are not finite.")
    return tensors, record


def _tensors(content: bytes, path: Path) -> dict[str, npt.NDArray[Any]]:
    """ValueError where they cannot be read. A GPU machine may lack safetensors; then tilewise's own reader does."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError:
        from tilewise.io import load_arrays

        return load_arrays(path)[0]
    try:
        return load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _record(content: bytes) -> dict[str, Any]:
    length = struct.unpack("<Q", content[:8])[0]
    if length > min(_MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError("header longer than the file")
    record = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["tilewise"])
    if not isinstance(record, dict):
        raise ValueError("no record")
    return record
