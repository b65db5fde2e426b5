"""Trained models and their files: weights, feature preparation and training record in one safetensors file.

A file holds the weights (``weight.*``), the fitted preparation (``prepare.*``) and a JSON record. This module loads it
into torch; `scorer` loads the same file into NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.inputs import Preparation
from tilewise.costmodel.models.file_writer import FileContents, file_contents, write_tensors
from tilewise.costmodel.models.files import BLEND, ModelFile, read_model_file, report_misfit
from tilewise.costmodel.models.scorer import RIDGE, Scorer, restore_scorer
from tilewise.errors import FileFormatError

if TYPE_CHECKING:
    from torch import nn

    from tilewise.costmodel.models.blend import Blend
    from tilewise.costmodel.models.gbdt import GBDT


Module = TypeVar("Module", bound="nn.Module")


@dataclass(eq=False)
class TrainedModel:
    """A trained torch model; `record` holds settings, learning curve, metrics and calibration."""

    module: nn.Module
    preparation: Preparation
    schema: Schema
    record: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def name(self) -> str:
        return str(self.record.get("model", type(self.module).__name__))

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Return one score per configuration, or per configuration in `rows`; lower is faster."""
        from tilewise.costmodel.models.torch import score_inputs

        with report_misfit(self.name):
            return score_inputs(self.module, self.preparation.apply(kernel, rows), self.device)

    def exact(self, kernel: Kernel, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
        """Score configurations `rows` in float64 with the NumPy scorer; None for a user's own model class."""
        # Names with a colon are user classes, which have no NumPy scorer.
        if ":" in self.name:
            return None
        weights = {k: v.detach().cpu().numpy() for k, v in self.module.state_dict().items()}
        kwargs = self.record.get("model_kwargs") or {}
        return Scorer(self.name, weights, kwargs, self.preparation, self.schema, self.record).exact(kernel, rows)

    def contents(self) -> FileContents:
        weights = {k: v.detach().cpu().numpy() for k, v in self.module.state_dict().items()}
        return file_contents(weights, self.preparation, self.schema, self.record)

    def save(self, path: str | Path) -> None:
        write_tensors(Path(path), *self.contents())


def load_model(
    path: str | Path, device: str = "cpu", model_class: str | None = None
) -> TrainedModel | GBDT | Scorer | Blend:
    """Load the torch model from a file or folder; `scorer.load_scorer` does the same without torch.

    A file never decides which code runs: a model of your own class is loaded with `model_class` as
    ``package.module:Class``.
    """
    # Reading checks everything that does not depend on the kind of model.
    file = read_model_file(path)
    if file.record["model"] == BLEND:
        from tilewise.costmodel.models.blend import restore_blend

        return restore_blend(path, lambda member: _restored(member, path, device, None))
    return _restored(file, path, device, model_class)


def _restored(file: ModelFile, path: str | Path, device: str, model_class: str | None) -> TrainedModel | GBDT | Scorer:
    """Build a model from a validated file, after checking that the weights have the model's shapes."""
    # Trees and the ridge model need no torch.
    if file.record["model"] in ("GBDT", RIDGE):
        return restore_scorer(file, path)
    from tilewise.costmodel.models.torch import build_model

    name = _trusted_name(file.record["model"], model_class, path)
    kwargs = file.record.get("model_kwargs") or {}
    with report_misfit(name):
        # Damaged tables can make the widths fail.
        widths = file.preparation.node_width, file.preparation.config_width
    misfit = FileFormatError(f"The weights in {path} do not fit the model {name}.")
    meta = ":" not in name  # a user's own class need not work without memory, and may allocate anything
    module = restored_module(file.weights, kwargs, lambda: build_model(name, *widths, kwargs), misfit, meta=meta)
    return TrainedModel(module.eval().to(device), file.preparation, file.schema, file.record, device)


def _trusted_name(name: str, model_class: str | None, path: str | Path) -> str:
    """Return the model to build: a file may name a built-in one, only the user (`model_class`) any other."""
    from tilewise.costmodel.models.torch import MODELS

    if name in MODELS:
        return name
    if model_class is None:
        raise FileFormatError(
            f"{path} was trained with {name[:80]!r}, which is not a tilewise model; if the class is yours, name it "
            "with --model-class package.module:Class (in Python, load_model's model_class)."
        )
    return model_class


def restored_module(
    weights: Mapping[str, npt.NDArray[Any]],
    kwargs: Any,
    build: Callable[[], Module],
    error: FileFormatError,
    *,
    meta: bool = True,
) -> Module:
    """Build a module with `build` and load a file's weights; raise `error` if their names or shapes differ.

    The module is built on the meta device, where tensors have no memory, so that a file cannot make us allocate more
    than its own size.
    """
    import torch

    tensors = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    if meta:
        sizes = [size for array in weights.values() for size in array.shape]
        limit = max([len(weights), *sizes])  # no argument of a model can exceed every dimension of its weights
        if not isinstance(kwargs, dict) or any(isinstance(v, int | float) and v > limit for v in kwargs.values()):
            raise error
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    with torch.device("meta" if meta else "cpu"):
        module = build()
    try:
        module.load_state_dict(tensors, assign=meta)
    except RuntimeError as mismatch:
        raise error from mismatch
    return module
