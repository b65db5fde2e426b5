"""Blends: several trained models as one, whose rankings are fused or whose scores are added.

Rankings are fused by reciprocal rank fusion (Cormack et al. 2009) with k = 0: a configuration gets the sum of 1 / rank
over all models. So the first choices of every model come first, and the best of a few measured ones is rarely bad even
if some models are wrong. The fused order is returned as scores: the p-th configuration gets the p-th lowest weighted
sum of the models' scores. A network's and trees' scores have different units, so a model's weight is the inverse of the
standard deviation of its scores within a kernel; the sum has the units of the first model, for a network log runtime.

In a file the first model is stored as it would be alone, the arrays of the others follow with a number as prefix, and
the record lists the weight and record of each.

A blend may know its train kernels: for kernels unlike them a warning says so, and they get no confidence. A model
extrapolates badly to kinds of kernels that it has never seen, and its scores do not show it. So a kernel is described
by its operations, element types and log sizes. It is familiar if the nearest train kernel is not much farther away than
most train kernels are from each other. Columns that never vary in the train split count too, because a new kind of
kernel differs in just those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel, ranking
from tilewise.costmodel.data.schema import N_OPCODES, NODE_COLUMN, Schema
from tilewise.costmodel.features.inputs import Preparation
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.models.file_writer import FileContents, write_tensors
from tilewise.costmodel.models.files import BLEND, ModelFile, checked_file, model_path, read_tensors
from tilewise.errors import FileFormatError

_MAX_MODELS = 8  # of a file, as a check against damage

Floats = npt.NDArray[np.float32]
_MIN_DEVIATION = 0.5  # of a column: a doubled size, or an operation more, is never far away
# Distance to the nearest train kernel, relative to that of nine train kernels in ten. On eight collections this takes
# 77 of 78 kernels of families that training lacked, and 12 of 296 others, for unfamiliar (`benchmarks.unseen`).
_TOLERANCE, _TYPICAL_SHARE = 1.3, 0.9
_TYPES = slice(NODE_COLUMN["shape_element_type_is_invalid_type"], NODE_COLUMN["shape_dimensions_0"])


class BlendMember(Protocol):
    """Interface of a model that can be blended."""

    schema: Schema
    preparation: Preparation

    @property
    def name(self) -> str: ...

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]: ...

    def contents(self) -> FileContents: ...


@dataclass(eq=False)
class Blend:
    """A weighted sum of models of one collection; it implements `ranking.Model`."""

    models: Sequence[BlendMember]
    weights: Sequence[float]
    record: dict[str, Any] = field(default_factory=dict)
    familiarity: Familiarity | None = None

    @property
    def name(self) -> str:
        members = zip(self.models, self.weights, strict=True)
        return " + ".join(dict.fromkeys(model.name for model, weight in members if weight))

    @property
    def schema(self) -> Schema:
        return self.models[0].schema

    @property
    def preparation(self) -> Preparation:
        return self.models[0].preparation

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Return one score per configuration, or per configuration in `rows`; lower is faster."""
        if distance := self.unfamiliarity(kernel):
            warnings.warn(
                f"{kernel.name} is unlike the kernels of the train split (distance {distance:.1f} of 1). No "
                "measurement supports the order of its configurations, so measure some of them.",
                stacklevel=2,
            )
        members = [(model, weight) for model, weight in zip(self.models, self.weights, strict=True) if weight]
        if not self.record.get("by_rank"):
            return np.asarray(sum(weight * model.score(kernel, rows) for model, weight in members), np.float32)
        # A rank depends on all configurations, so all are scored.
        scores = [weight * model.score(kernel) for model, weight in members]
        fused = np.empty(kernel.n_configs, np.float32)
        fused[_fused_order(scores)] = np.sort(np.sum(scores, axis=0))
        return fused if rows is None else fused[rows]

    def unfamiliarity(self, kernel: Kernel) -> float:
        """Return a kernel's distance to the train kernels if it is beyond the familiar range (above 1), else 0.

        Such kernels get no confidence.
        """
        distance = self.familiarity.distance(kernel) if self.familiarity is not None else 0.0
        return distance if distance > 1 else 0.0

    def save(self, path: str | Path) -> None:
        """Write one file with the arrays and records of all models."""
        # The first model keeps its names, so that a blend of one reads like a plain file.
        contents = [model.contents() for model in self.models]
        tensors = {
            _member_prefix(i) + name: array for i, (arrays, _) in enumerate(contents) for name, array in arrays.items()
        }
        members = [
            {"weight": float(weight), "record": r} for weight, (_, r) in zip(self.weights, contents, strict=True)
        ]
        record = contents[0][1] | {"calibration": None} | self.record
        if self.familiarity is not None:
            tensors |= self.familiarity.tensors()
        write_tensors(Path(path), tensors, record | {"model": BLEND, "parts": members})


def _fused_order(scores: Sequence[Floats]) -> npt.NDArray[np.int64]:
    """Fuse rankings by the sum of reciprocal ranks, largest first; equal scores share their mean rank."""
    total = np.zeros(len(scores[0]))
    for member in scores:
        _, group, counts = np.unique(member, return_inverse=True, return_counts=True)
        total += 1 / (np.cumsum(counts) - (counts - 1) / 2)[group.reshape(-1)]
    return ranking(-total)


def blend(models: Sequence[BlendMember], kernels: Sequence[Kernel]) -> Blend:
    """Fuse the rankings of models, whose scores are scaled by their deviation within these kernels.

    In the sum of scores all models of one kind together count as much as those of another kind.
    """
    # Median over kernels: one kernel with extreme scores must not decide a weight.
    deviations = [float(np.median([np.std(model.score(kernel)) for kernel in kernels])) or 1.0 for model in models]
    kinds = [model.name for model in models]
    shares = [1.0 / kinds.count(kind) / len(set(kinds)) for kind in kinds]
    weights = [share * deviations[0] / deviation for share, deviation in zip(shares, deviations, strict=True)]
    return Blend(models, weights, {"model": BLEND, "by_rank": True})


def restore_blend(path: str | Path, restore: Callable[[ModelFile], Any]) -> Blend:
    """Load a blend; `restore` builds each of its models."""
    file = model_path(path)
    tensors, record = read_tensors(file)
    members = record.get("parts")
    if not isinstance(members, list) or not 1 <= len(members) <= _MAX_MODELS or not all(map(_is_member, members)):
        raise FileFormatError(f"{file} does not list the models of its blend; train it again.")
    files = [checked_file(_member_arrays(tensors, i), member["record"], file) for i, member in enumerate(members)]
    # All members must read the same configurations.
    if any(part.schema.config_features != files[0].schema.config_features for part in files):
        raise FileFormatError(f"The models of {file} read different columns; train it again.")
    weights = [float(member["weight"]) for member in members]
    return Blend([restore(part) for part in files], weights, record, _restored_familiarity(tensors, file))


def _restored_familiarity(tensors: dict[str, npt.NDArray[Any]], file: Path) -> Familiarity | None:
    """Read the descriptions of train kernels from a blend's file; None in files without them."""
    names = "familiar.kernels", "familiar.scale", "familiar.limit"
    if names[0] not in tensors:
        return None
    kernels, scale, limit = (tensors.get(name, np.zeros(0)) for name in names)
    if kernels.ndim != 2 or scale.shape != kernels.shape[1:] or limit.shape != (1,) or not limit[0] > 0:
        raise FileFormatError(f"The train kernels that {file} describes are damaged; train it again.")
    return Familiarity(kernels, scale, float(limit[0]))


def _is_member(member: Any) -> bool:
    """Tell whether an entry of a blend's record is valid: a positive weight and a single model's record."""
    weight = member.get("weight") if isinstance(member, dict) else None
    weighted = isinstance(weight, int | float) and 0 <= weight < 1e9
    return weighted and isinstance(member.get("record"), dict) and member["record"].get("model") != BLEND


def _member_arrays(tensors: dict[str, npt.NDArray[Any]], number: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of blended model `number`, without the prefix of their names."""
    prefix = _member_prefix(number)
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def _member_prefix(number: int) -> str:
    return f"{number}." if number else ""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Descriptions of train kernels, and the distance up to which a kernel counts as familiar."""

    kernels: Floats  # (K, D), scaled
    scale: Floats  # (D,)
    limit: float

    @classmethod
    def fit(cls, kernels: Sequence[Kernel]) -> Familiarity:
        """Describe the train kernels and derive the limit from their distances to each other."""
        table = np.stack([_familiarity_features(kernel) for kernel in kernels])
        scale = (1 / np.maximum(table.std(axis=0), _MIN_DEVIATION)).astype(np.float32)
        table = table * scale
        # Distances to the nearest other kernel; equal descriptions count as one kernel.
        unique = np.unique(table, axis=0)
        nearest = (
            [np.partition(np.linalg.norm(unique - row, axis=1), 1)[1] for row in unique] if len(unique) > 1 else []
        )
        typical = float(np.quantile(nearest, _TYPICAL_SHARE)) if len(nearest) else 0.0
        return cls(unique, scale, _TOLERANCE * max(1.0, typical))

    def distance(self, kernel: Kernel) -> float:
        """Return the distance to the nearest train kernel, in units of the familiar limit."""
        gaps = np.linalg.norm(self.kernels - _familiarity_features(kernel) * self.scale, axis=1)
        return float(gaps.min()) / self.limit

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"familiar.kernels": self.kernels, "familiar.scale": self.scale,
                "familiar.limit": np.array([self.limit], np.float32)}  # fmt: skip


def _familiarity_features(kernel: Kernel) -> Floats:
    """Return a kernel's feature vector: flags of its operations and dtypes, and logs of its sizes."""
    present = np.zeros(N_OPCODES)
    present[kernel.node_opcode] = 1
    sizes = np.log2(np.maximum(kernel_sizes(kernel), 0) + 1)
    return np.concatenate([present, kernel.node_feat[:, _TYPES].max(axis=0), sizes]).astype(np.float32)
