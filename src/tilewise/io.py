"""Save and load tensors in the safetensors format (see `_safetensors.py` for the reader).

The writer stores the SHA-256 of the data in the header's metadata, which other readers ignore.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._atomic import atomic_writer
from tilewise._safetensors import CHECKSUM, DTYPES, byte_view, digest_of, is_huge_but_empty, load_arrays
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, type_name

if TYPE_CHECKING:
    from tilewise.nn import Module
    from tilewise.tensor import Tensor

__all__ = ["load", "load_arrays", "save"]

Array = npt.NDArray[Any]

_NAMES = {np.dtype(code): name for name, code in DTYPES.items() if name != "BF16"}


def save(
    tensors: Mapping[str, Any] | Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors (or a module's state) to a safetensors file, atomically.

    >>> from tilewise import Tensor
    >>> save({"weight": Tensor([1.0, 2.0])}, "/tmp/weights.safetensors")
    >>> load("/tmp/weights.safetensors")["weight"]
    Tensor([1., 2.])
    """
    if not isinstance(tensors, Mapping) and not hasattr(tensors, "state_dict"):
        raise ConfigurationError(f"save(model, path) takes a module or named tensors, not {type_name(tensors)}")
    source = tensors if isinstance(tensors, Mapping) else tensors.state_dict()
    # The format stores little-endian data in C order.
    arrays = {name: np.asarray(value, order="C") for name, value in source.items()}
    arrays = {name: a.astype(a.dtype.newbyteorder("<"), copy=False) for name, a in arrays.items()}
    header = _header(arrays, {**(metadata or {}), CHECKSUM: digest_of(arrays.values())})
    with atomic_writer(Path(path)) as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            stream.write(byte_view(array))


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Encode the JSON header, padded so that the data is aligned to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES or name == "__metadata__":
            raise DtypeError(f"{name} of {array.dtype} cannot be saved in the safetensors format")
        if is_huge_but_empty(array.shape):
            raise ShapeError(f"{name} of shape {array.shape} has no elements and its other dimensions are too large")
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read every tensor of a safetensors file, by name."""
    from tilewise.tensor import Tensor  # late: the cost model reads arrays, and needs no tensors

    return {name: Tensor(array) for name, array in load_arrays(path)[0].items()}
