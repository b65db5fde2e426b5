"""Calibrated confidence: when to claim that a choice is within 5 % of the fastest configuration.

After each measurement, and before the first, the Gaussian process estimates the probability of that
(`GaussianProcess.chance_within`). The estimates are not calibrated, but their order is informative: the claim is made
above a bound that was fitted by replaying the tuning of held-out kernels. A claim about one configuration also holds
for every faster one, so it stays valid until a measurement contradicts it by being more than 5 % faster.

On a device that the model was not trained on, the model's errors are larger and the bounds do not hold, so no claim is
made there.

The bounds and the hyperparameters of the process are the calibration of a cost model (`calibration.py` fits it). It is
stored in a file next to the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tilewise
from tilewise._files import read_input, read_json_input
from tilewise._system import cache_folder
from tilewise.errors import TilewiseError
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters

WITHIN = 0.05  # the claimed distance to the fastest
_MAX_MODEL_BYTES = 1 << 30  # arbitrary, far above any shipped model
_PACKAGE = Path(tilewise.__file__).resolve().parent
_MAX_VALUE = 1e9  # larger numbers in a file are rejected
# Names of the hyperparameters in files. Those of other tasks are not stored: with a model, tasks are independent.
_IN_FILES = {
    "slope": "coefficient", "slope_error": "coefficient_deviation", "spread": "signal", "length": "length_scale",
    "own": "nugget", "noise": "noise",
}  # fmt: skip
START = Hyperparameters(
    coefficient=1.0,
    coefficient_deviation=0.3,
    signal=0.15,
    length_scale=2.0,
    nugget=0.05,
    noise=0.01,
    far=0.0,
    near=0.0,
)


class Claim:
    """Whether the choice for one problem is claimed to be within 5 % of the fastest; updated by measurements."""

    def __init__(self, process: GaussianProcess) -> None:
        self._process = process
        self._index: int | None = None  # the configuration the claim was made for

    def after(self, measurements: int) -> bool | None:
        """Tell whether, after this many measurements, the choice counts as within 5 %; None without fitted bounds."""
        process, bounds = self._process, self._process.hyper.confidence_bounds
        stages = [count for count in bounds if count <= measurements]
        if not stages:
            return None
        # A measurement that is more than 5 % faster contradicts an earlier claim.
        if self._index is not None and process.best is not None and self._index != process.best:
            slowest_valid = process.log_runtimes[process.best] + math.log1p(WITHIN)
            if process.log_runtimes.get(self._index, math.inf) > slowest_valid:  # or it could not be measured
                self._index = None
        if self._index is None and process.chance_within(WITHIN) >= bounds[max(stages)]:
            self._index = process.first() if process.best is None else process.best
        return self._index is not None


def digest_of(path: Path) -> str:
    """Return the first sixteen hexadecimal digits of a model file's SHA-256."""
    return hashlib.sha256(read_input(path, _MAX_MODEL_BYTES)).hexdigest()[:16]


def calibration_path(model_file: Path) -> Path:
    """Return the path of the calibration that is shipped with a model file."""
    return model_file.with_suffix(".tuning.json")


def own_calibration_path(model_file: Path) -> Path:
    """Return the path of a user's calibration: next to a user's model, in the cache for a shipped one."""
    if model_file.resolve().is_relative_to(_PACKAGE):
        return cache_folder() / "tune" / calibration_path(model_file).name
    return calibration_path(model_file)


def save_calibration(model_file: Path, hyper: Hyperparameters, path: Path | None = None) -> Path:
    """Write the calibration of a model to `path` (default: `own_calibration_path`)."""
    numbers = {name: getattr(hyper, field) for name, field in _IN_FILES.items()}
    content: dict[str, Any] = {"prior": {**numbers, "weights": dict(hyper.ard)}, "model": digest_of(model_file)}
    if hyper.confidence_bounds:
        content["sure"] = {str(count): bound for count, bound in hyper.confidence_bounds.items()}
    if hyper.by_score:
        content["by_score"] = True
    path = own_calibration_path(model_file) if path is None else path
    from tilewise._atomic import write_atomic  # late: most programs only read calibrations

    write_atomic(path, json.dumps(content, indent=1) + "\n")
    return path


def load_calibration(model_file: Path) -> Hyperparameters | None:
    """Load a model's calibration, preferably the user's own; None if there is none for this model."""
    # The user's own calibration replaces the shipped one.
    own, shipped = (path(model_file) for path in (own_calibration_path, calibration_path))
    return _calibration_in(own, model_file) or _calibration_in(shipped, model_file)


def _calibration_in(path: Path, model_file: Path) -> Hyperparameters | None:
    """Read a calibration file; None if it is missing, damaged or of another model."""
    try:
        content = read_json_input(path)
        hyper = _hyperparameters(content["prior"])
        bounds = {int(count): float(bound) for count, bound in dict(content.get("sure", {})).items()}
        by_score = content.get("by_score") is True
        hyper = dataclasses.replace(hyper, confidence_bounds=bounds, by_score=by_score)
        model = str(content["model"])
    except (TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return hyper if model == digest_of(model_file) else None


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    """Read hyperparameters from a file's values; unknown names are ignored, bad numbers raise."""
    numbers: dict[str, Any] = {field: float(values[name]) for name, field in _IN_FILES.items() if name in values}
    weights = {str(name): float(value) for name, value in dict(values.get("weights", {})).items()}
    if not all(0 <= value <= _MAX_VALUE for value in (*numbers.values(), *weights.values())):
        raise ValueError("hyperparameters must be finite and not negative")
    if numbers.get("length_scale", 1.0) <= 1 / _MAX_VALUE:
        raise ValueError("a length scale must be positive")
    return dataclasses.replace(START, **numbers, ard=weights)
