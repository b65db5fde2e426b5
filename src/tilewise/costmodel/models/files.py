"""Model files: arrays by name and a JSON record in one safetensors file, which `file_writer` writes atomically.

A model's file holds its weights (``weight.*``), its fitted preparation (``prepare.*``) and a record with its name,
settings and columns; checkpoints have the same format. Reading goes through `_safetensors`, which checks everything, so
that a damaged file raises an error of one sentence. `scorer` builds a NumPy model from a file, `trained` a torch model.
Trained models for the embedded collections are shipped with the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._files import parse_json
from tilewise._safetensors import load_arrays
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.inputs import Preparation, preparation_class
from tilewise.errors import FileFormatError, TilewiseError, UnavailableError

FORMAT = "tilewise-cost-model-1"
MODEL_FILE = "model.safetensors"
BLEND = "Blend"  # model name in the file of several models; see `blend`

_FOLDER = Path(str(files("tilewise.costmodel") / "shipped_models"))


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


@contextlib.contextmanager
def report_misfit(name: str) -> Iterator[None]:
    """Convert shape errors in the block, from weights that do not match the features, to `FileFormatError`."""
    try:
        yield
    except TilewiseError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise FileFormatError(f"The weights of this {name[:80]} do not fit its features; export it again.") from error


@dataclass(frozen=True, eq=False)
class ModelFile:
    """Contents of a model file after validation."""

    weights: dict[str, npt.NDArray[Any]]
    preparation: Preparation
    schema: Schema
    record: dict[str, Any]


def model_path(path: str | Path) -> Path:
    """Resolve a path to a model file: the path itself, or the model file in that folder."""
    resolved = Path(path).expanduser()
    return resolved / MODEL_FILE if resolved.is_dir() else resolved


def read_model_file(path: str | Path) -> ModelFile:
    """Read and validate a model file, or the one in a folder."""
    file = model_path(path)
    return checked_file(*read_tensors(file), file)


def checked_file(tensors: Mapping[str, npt.NDArray[Any]], record: dict[str, Any], path: Path) -> ModelFile:
    """Validate a model file's arrays and record, and separate weights from feature preparation."""
    # A model file of another version or of another program.
    if record.get("format") != FORMAT or not isinstance(record.get("model"), str):
        raise FileFormatError(f"{path} is not a cost model of this version of tilewise; train or export it again.")
    # The preparation decides how every kernel is read, so it must be one of those known here.
    preparation, names = preparation_class(record.get("preparation")), record.get("config_features")
    if preparation is None or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise FileFormatError(f"{path} does not record the features that it reads; train or export it again.")
    # Split the arrays by prefix.
    tables = {k.removeprefix("prepare."): v for k, v in tensors.items() if k.startswith("prepare.")}
    weights = {k.removeprefix("weight."): v for k, v in tensors.items() if k.startswith("weight.")}
    return ModelFile(weights, preparation.restore(tables), Schema(tuple(names)), record)


def shipped_names() -> list[str]:
    """List the collections that have a shipped model."""
    return sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


def shipped_file(collection: str) -> Path:
    """Return the file of a collection's model; the error for an unknown name lists the existing ones."""
    path = _FOLDER / f"{collection}.safetensors"
    if not path.is_file():
        names = ", ".join(shipped_names()) or "none yet"
        raise UnavailableError(f"no trained model is shipped for {collection!r}; there are: {names}")
    return path
