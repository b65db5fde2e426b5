"""Fit the Gaussian process to a trained cost model and store its hyperparameters in a file next to the model.

The hyperparameters maximize the marginal likelihood (`gaussian_process.py`) of the measured runtimes of each kernel's
leading configurations, on validation programs that the model was not trained on. Each parameter is optimized in turn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tilewise
from tilewise._files import read_input, read_json_input, write_atomic
from tilewise._system import cache_folder
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.rank import Model
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters, Numbers, climb

_MAX_MODEL_BYTES = 1 << 30  # arbitrary, far above any shipped model
_PACKAGE = Path(tilewise.__file__).resolve().parent
_FIT_CONFIGS = 40  # best-ranked configurations per kernel in the fit; the cost grows with the cube
_DERIVED = ("_sum", "_product")
_MIN_WEIGHT = 0.05  # lower limit of an ARD weight; the upper limit is its inverse
_MAX_VALUE = 1e9  # larger numbers in a file are rejected
# Names of the hyperparameters in files. Those of other tasks are not stored: with a model, tasks are independent.
_IN_FILES = {
    "slope": "coefficient", "slope_error": "coefficient_deviation", "spread": "signal", "length": "length_scale",
    "own": "nugget", "noise": "noise",
}  # fmt: skip
_START = Hyperparameters(
    coefficient=1.0,
    coefficient_deviation=0.3,
    signal=0.15,
    length_scale=2.0,
    nugget=0.05,
    noise=0.01,
    far=0.0,
    near=0.0,
)


def config_logs(config_feat: npt.NDArray[Any], names: Sequence[str]) -> tuple[Numbers, tuple[str, ...]]:
    """Return the distinct, varying settings of configurations in doublings, and their names.

    A block size occurs as a bound of several tensors; only one of these equal columns remains. Hardware settings come
    last.
    """
    columns_by_values: dict[bytes, int] = {}
    # Equal columns have equal bytes: the last of them remains.
    for column in reversed(range(len(names))):
        values = np.ascontiguousarray(config_feat[:, column])
        if len(values) and not names[column].endswith(_DERIVED) and np.ptp(values) > 0:
            columns_by_values.setdefault(values.tobytes(), column)
    columns = list(columns_by_values.values())
    logs = np.log2(1.0 + np.abs(config_feat[:, columns].astype(np.float64)))
    return logs, tuple(names[column] for column in columns)


@dataclass(frozen=True, eq=False)
class Case:
    """A measured kernel in the form in which the tuner would search it."""

    name: str
    scores: Numbers
    features: Numbers
    runtime: Numbers  # relative to the default's in the same batches
    names: tuple[str, ...] = ()  # names of the features
    default: int | None = None  # index of the default, which a CPU trial times together with the first configuration

    @property
    def best(self) -> float:
        """Runtime of the fastest configuration."""
        return float(self.runtime.min())

    def process(self, hyper: Hyperparameters) -> GaussianProcess:
        """Make the process over the configurations, before any measurement."""
        weights = np.array([hyper.ard.get(name, 1.0) for name in self.names])
        return GaussianProcess(self.scores, self.features * weights if len(weights) else self.features, hyper)


def make_case(model: Model, kernel: Kernel, names: Sequence[str]) -> Case:
    """Combine a kernel's scores with its measured runtimes."""
    scores = np.asarray(model.score(kernel), dtype=np.float64)
    features, settings = config_logs(kernel.config_feat, names)
    # Collections of CPUs mark the default configuration in a column.
    default_flags = kernel.config_feat[:, list(names).index("default")] if "default" in names else np.zeros(1)
    default = int(np.argmax(default_flags)) if default_flags.any() else None
    return Case(
        name=kernel.name,
        scores=scores,
        features=features,
        runtime=kernel.target,
        names=settings,
        default=default,
    )


def calibrate(model: Model, kernels: Sequence[Kernel], names: Sequence[str], noise: float = 0.01) -> Hyperparameters:
    """Fit the hyperparameters to the validation kernels."""
    cases = [make_case(model, kernel, names) for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    if len(cases) < 5:
        raise ConfigurationError(
            f"A calibration is fitted on at least 5 labelled validation kernels; there are {len(cases)}."
        )
    return dataclasses.replace(fit(cases, noise), by_score=is_gpu_space(names))


def is_gpu_space(names: Sequence[str]) -> bool:
    """Tell whether configurations with these columns are a GPU's.

    There the model's order beats expected improvement (replay of the H200 collection: 0.22 % loss against 0.41 % after
    5 measurements, 0.03 % against 0.22 % after 10), so that measurements follow it.
    """
    return {"warps", "stages"} <= set(names)


def fit(cases: Sequence[Case], noise: float) -> Hyperparameters:
    """Maximize the marginal likelihood of the cases."""
    settings = tuple(sorted({name for case in cases for name in case.names} - set(TILE_FEATURES)))
    # Cases with equally many leading configurations are stacked into one array.
    by_count: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_count[min(len(case.scores), _FIT_CONFIGS)].append(case)
    prepared = [_LeadingConfigs.of(same_size, settings) for same_size in by_count.values()]
    best = dataclasses.replace(_START, noise=noise, ard=dict.fromkeys(settings, 1.0))
    names = ("coefficient", "coefficient_deviation", "signal", "length_scale", "nugget", *settings)
    return climb(best, names, _scale_parameter, lambda hyper: _negative_log_likelihood(prepared, hyper), 0.15)[1]


def _scale_parameter(hyper: Hyperparameters, name: str, factor: float) -> Hyperparameters:
    """Multiply one hyperparameter or ARD weight by a factor, within its limits."""
    if name in hyper.ard:
        weight = min(max(hyper.ard[name] * factor, _MIN_WEIGHT), 1 / _MIN_WEIGHT)
        return dataclasses.replace(hyper, ard={**hyper.ard, name: weight})
    return dataclasses.replace(hyper, **{name: max(1e-3, getattr(hyper, name) * factor)})


@dataclass(frozen=True, eq=False)
class _LeadingConfigs:
    """The n best-ranked configurations of several cases, stacked for batched linear algebra.

    `squares` are squared distances: one matrix per hardware setting, and a last one for all tile settings together.
    """

    guess: Numbers  # (cases, n) scores relative to the best-ranked one
    logs: Numbers  # (cases, n) log runtimes
    squares: Numbers  # (settings + 1, cases, n, n)
    settings: tuple[str, ...]

    @classmethod
    def of(cls, cases: Sequence[Case], settings: tuple[str, ...]) -> _LeadingConfigs:
        """Stack cases that have the same number of leading configurations."""
        orders = [np.argsort(case.scores, kind="stable")[:_FIT_CONFIGS] for case in cases]
        count = len(orders[0])
        squares = np.zeros((len(settings) + 1, len(cases), count, count))
        # Settings of the hardware have weights of their own; the others share the last matrix.
        for number, (case, order) in enumerate(zip(cases, orders, strict=True)):
            names = case.names or ("",) * case.features.shape[1]
            for name, column in zip(names, case.features[order].T, strict=True):
                position = settings.index(name) if name in settings else -1
                squares[position, number] += (column[:, None] - column[None, :]) ** 2
        scores, runtimes = ([getattr(case, name) for case in cases] for name in ("scores", "runtime"))
        guess = np.stack([score[order] - score[order[0]] for score, order in zip(scores, orders, strict=True)])
        logs = np.log([runtime[order] for runtime, order in zip(runtimes, orders, strict=True)])
        return cls(guess, logs, squares, settings)

    def negative_log_likelihood(self, hyper: Hyperparameters) -> float:
        """Sum over the cases, with an unknown level (mean log runtime) per kernel."""
        weights = np.array([hyper.ard[name] for name in self.settings] + [1.0])
        squared = np.tensordot(weights**2, self.squares, axes=1)
        # Squared exponential kernel with ARD weights, plus an uncertain slope of the scores.
        covariance = hyper.signal**2 * np.exp(-0.5 * squared / hyper.length_scale**2)
        # The constant is the prior variance of the level: large, so that the level is free.
        covariance += hyper.coefficient_deviation**2 * self.guess[:, :, None] * self.guess[:, None, :] + 25.0
        diagonal = np.arange(self.guess.shape[1])
        covariance[:, diagonal, diagonal] += hyper.nugget**2 + hyper.noise**2
        # -log N(logs | mean, covariance) up to a constant, from the Cholesky factor.
        root = np.linalg.cholesky(covariance)
        z = np.linalg.solve(root, (self.logs - hyper.coefficient * self.guess)[:, :, None])
        return float(0.5 * np.square(z).sum() + np.log(root[:, diagonal, diagonal]).sum())


def _negative_log_likelihood(prepared: Sequence[_LeadingConfigs], hyper: Hyperparameters) -> float:
    """Mean negative log likelihood per kernel."""
    total = sum(leading.negative_log_likelihood(hyper) for leading in prepared)
    return total / sum(len(leading.guess) for leading in prepared)


def digest_of(path: Path) -> str:
    """First sixteen hexadecimal digits of the SHA-256 of a model file."""
    return hashlib.sha256(read_input(path, _MAX_MODEL_BYTES)).hexdigest()[:16]


def calibration_path(model_file: Path) -> Path:
    """Path of the calibration next to a model file."""
    return model_file.with_suffix(".tuning.json")


def own_calibration_path(model_file: Path) -> Path:
    """Path of a calibration made by the user: next to a user's model; in the cache folder for a shipped model, because
    nothing is written into the package."""
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
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    return path


def load_calibration(model_file: Path) -> Hyperparameters | None:
    """Load the calibration of a model file, the user's own first; None if there is none, it cannot be read, or it
    belongs to another model."""
    paths = dict.fromkeys((own_calibration_path(model_file), calibration_path(model_file)))
    calibrations = (_calibration_in(path, model_file) for path in paths)
    return next((calibration for calibration in calibrations if calibration is not None), None)


def _calibration_in(path: Path, model_file: Path) -> Hyperparameters | None:
    """Read one calibration file; None if it is missing, damaged or of another model."""
    try:
        content = read_json_input(path)
        hyper = _hyperparameters(content["prior"])
        bounds = {int(count): float(bound) for count, bound in dict(content.get("sure", {})).items()}
        hyper = dataclasses.replace(hyper, confidence_bounds=bounds, by_score=content.get("by_score") is True)
        model = str(content["model"])
    except (TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return hyper if model == digest_of(model_file) else None


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    """Read hyperparameters from a file's values; ignore unknown names, reject bad numbers."""
    numbers: dict[str, Any] = {field: float(values[name]) for name, field in _IN_FILES.items() if name in values}
    weights = {str(name): float(value) for name, value in dict(values.get("weights", {})).items()}
    if not all(0 <= value <= _MAX_VALUE for value in (*numbers.values(), *weights.values())):
        raise ValueError("hyperparameters must be finite and not negative")
    if numbers.get("length_scale", 1.0) <= 1 / _MAX_VALUE:
        raise ValueError("a length scale must be positive")
    return dataclasses.replace(_START, **numbers, ard=weights)
