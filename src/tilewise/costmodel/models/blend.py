"""Several trained models as one: the sum of their scores, each by a weight of its own.

A network's scores and a forest's have different units, so a weight is the inverse of how far a model's scores spread
within a kernel, and the sum keeps the units of the first. In a file the first model lies as it would alone; the others'
arrays follow under a number, and what is known of each model is in the record's list of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.scaling import Preparation
from tilewise.costmodel.models.files import read_tensors, write_tensors
from tilewise.costmodel.models.trained import BLEND, Contents, ModelFile, checked_file, model_path
from tilewise.errors import FileFormatError

_MOST_PARTS = 8


class Part(Protocol):
    """What a trained model of any kind has."""

    schema: Schema
    preparation: Preparation

    @property
    def name(self) -> str: ...

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]: ...

    def contents(self) -> Contents: ...


@dataclass(eq=False)
class Blend:
    """Models of one collection; `score` and `calibration` are what `rank` asks for."""

    parts: Sequence[Part]
    weights: Sequence[float]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " + ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def schema(self) -> Schema:
        return self.parts[0].schema

    @property
    def preparation(self) -> Preparation:
        return self.parts[0].preparation

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """One score per configuration, lower is faster."""
        scores = [weight * part.score(kernel, rows) for part, weight in zip(self.parts, self.weights, strict=True)]
        return np.asarray(np.sum(scores, axis=0), dtype=np.float32)

    def save(self, path: str | Path) -> None:
        contents = [part.contents() for part in self.parts]
        tensors = {_mark(i) + name: array for i, (arrays, _) in enumerate(contents) for name, array in arrays.items()}
        parts = [{"weight": float(weight), "record": r} for weight, (_, r) in zip(self.weights, contents, strict=True)]
        shown = contents[0][1] | {"calibration": None} | self.record
        write_tensors(Path(path), tensors, shown | {"model": BLEND, "parts": parts})


def blended(parts: Sequence[Part], kernels: Sequence[Kernel]) -> Blend:
    """The parts, weighted by how far the scores of each spread within these kernels; those of one kind count together
    for as much as another kind."""
    spreads = [float(np.median([np.std(part.score(kernel)) for kernel in kernels])) or 1.0 for part in parts]
    kinds = [part.name for part in parts]
    shares = [1.0 / kinds.count(kind) / len(set(kinds)) for kind in kinds]
    weights = [share * spreads[0] / spread for share, spread in zip(shares, spreads, strict=True)]
    return Blend(parts, weights, {"model": BLEND})


def restore_blend(path: str | Path, restored: Callable[[ModelFile], Any]) -> Blend:
    """The blend in a file; `restored` makes a model of each of its parts."""
    found = model_path(path)
    tensors, record = read_tensors(found)
    said = record.get("parts")
    if not isinstance(said, list) or not 1 <= len(said) <= _MOST_PARTS or not all(_is_part(part) for part in said):
        raise FileFormatError(f"{found} does not say what it is blended of; train it again.")
    files = [checked_file(_own(tensors, number), part["record"], found) for number, part in enumerate(said)]
    if any(file.schema.config_features != files[0].schema.config_features for file in files):
        raise FileFormatError(f"The parts of {found} read different columns; train it again.")
    return Blend([restored(file) for file in files], [float(part["weight"]) for part in said], record)


def _is_part(part: Any) -> bool:
    weight = part.get("weight") if isinstance(part, dict) else None
    known = isinstance(weight, int | float) and 0 < weight < 1e9
    return known and isinstance(part.get("record"), dict) and part["record"].get("model") != BLEND


def _own(tensors: dict[str, npt.NDArray[Any]], number: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one part under the names that they have alone."""
    mark = _mark(number)
    return {name.removeprefix(mark): array for name, array in tensors.items() if name.startswith(mark)}


def _mark(number: int) -> str:
    return f"{number}." if number else ""
