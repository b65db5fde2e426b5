"""Fitting the process to a trained model, and keeping its hyperparameters beside the model's file.

They are the likeliest ones given how the model's leading configurations really ran on the validation programs, which
the model was not trained on: the marginal likelihood of `gaussian_process.py`, climbed one number at a time.
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

_MOST_MODEL_BYTES = 1 << 30
_PACKAGE = Path(tilewise.__file__).resolve().parent
_FITTED_ON = 40  # leaders of a kernel that are fitted: those that matter, and few enough to be quick
_DERIVED = ("_sum", "_product")
_LEAST_WEIGHT = 0.05  # of a setting that hardly matters; its inverse is the most
_MOST = 1e9  # of any number in a file
# What a file calls them. Nothing is carried over from problem to problem where there is a model.
_IN_FILES = {
    "slope": "coefficient", "slope_error": "coefficient_deviation", "spread": "signal", "length": "length_scale",
    "own": "nugget", "noise": "noise",
}  # fmt: skip
_START = Hyperparameters(1.0, 0.3, 0.15, 2.0, 0.05, 0.01, far=0.0, near=0.0)


def config_logs(config_feat: npt.NDArray[Any], names: Sequence[str]) -> tuple[Numbers, tuple[str, ...]]:
    """The configurations as the belief compares them, each setting once, in doublings; and the settings' names.

    A block size is a bound of several tensors, and kept as one of them; the hardware's settings come last.
    """
    kept: dict[bytes, int] = {}
    for column in reversed(range(len(names))):
        values = np.ascontiguousarray(config_feat[:, column])
        if len(values) and not names[column].endswith(_DERIVED) and np.ptp(values) > 0:
            kept.setdefault(values.tobytes(), column)
    columns = list(kept.values())
    logs = np.log2(1.0 + np.abs(config_feat[:, columns].astype(np.float64)))
    return logs, tuple(names[column] for column in columns)


@dataclass(frozen=True, eq=False)
class Case:
    """A measured kernel as the tuner would meet it."""

    name: str
    scores: Numbers
    features: Numbers
    runtime: Numbers  # nanoseconds, over the default's in the same batches
    names: tuple[str, ...] = ()  # of the features
    default: int | None = None  # the configuration that a CPU's trial times beside the first, where it is known

    @property
    def best(self) -> float:
        return float(self.runtime.min())

    def process(self, hyper: Hyperparameters) -> GaussianProcess:
        weights = np.array([hyper.ard.get(name, 1.0) for name in self.names])
        return GaussianProcess(self.scores, self.features * weights if len(weights) else self.features, hyper)


def make_case(model: Model, kernel: Kernel, names: Sequence[str]) -> Case:
    """A kernel with its scores and what it really took."""
    scores = np.asarray(model.score(kernel), dtype=np.float64)
    features, settings = config_logs(kernel.config_feat, names)
    marked = kernel.config_feat[:, list(names).index("default")] if "default" in names else np.zeros(1)
    default = int(np.argmax(marked)) if marked.any() else None
    return Case(kernel.name, scores, features, kernel.target, settings, default)


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
    """The likeliest hyperparameters."""
    settings = tuple(sorted({name for case in cases for name in case.names} - set(TILE_FEATURES)))
    by_count: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_count[min(len(case.scores), _FITTED_ON)].append(case)
    prepared = [_Leading.of(alike, settings) for alike in by_count.values()]
    best = dataclasses.replace(_START, noise=noise, ard=dict.fromkeys(settings, 1.0))
    names = ("coefficient", "coefficient_deviation", "signal", "length_scale", "nugget", *settings)
    return climb(best, names, _changed, lambda hyper: _negative_log_likelihood(prepared, hyper), 0.15)[1]


def _changed(hyper: Hyperparameters, name: str, factor: float) -> Hyperparameters:
    if name in hyper.ard:
        weight = min(max(hyper.ard[name] * factor, _LEAST_WEIGHT), 1 / _LEAST_WEIGHT)
        return dataclasses.replace(hyper, ard={**hyper.ard, name: weight})
    return dataclasses.replace(hyper, **{name: max(1e-3, getattr(hyper, name) * factor)})


@dataclass(frozen=True, eq=False)
class _Leading:
    """The first so many configurations of several cases: scores above the first, log runtimes, and how far apart they
    are, squared: in each of the hardware's settings, and last in all else."""

    guess: Numbers  # (cases, so many)
    logs: Numbers
    squares: Numbers  # (settings + 1, cases, so many, so many)
    settings: tuple[str, ...]

    @classmethod
    def of(cls, cases: Sequence[Case], settings: tuple[str, ...]) -> _Leading:
        orders = [np.argsort(case.scores, kind="stable")[:_FITTED_ON] for case in cases]
        count = len(orders[0])
        squares = np.zeros((len(settings) + 1, len(cases), count, count))
        for number, (case, order) in enumerate(zip(cases, orders, strict=True)):
            names = case.names or ("",) * case.features.shape[1]
            for name, column in zip(names, case.features[order].T, strict=True):
                place = settings.index(name) if name in settings else -1
                squares[place, number] += (column[:, None] - column[None, :]) ** 2
        scores, runtimes = ([getattr(case, name) for case in cases] for name in ("scores", "runtime"))
        guess = np.stack([score[order] - score[order[0]] for score, order in zip(scores, orders, strict=True)])
        logs = np.log([runtime[order] for runtime, order in zip(runtimes, orders, strict=True)])
        return cls(guess, logs, squares, settings)

    def negative_log_likelihood(self, hyper: Hyperparameters) -> float:
        """With the level of each kernel free."""
        weights = np.array([hyper.ard[name] for name in self.settings] + [1.0])
        squared = np.tensordot(weights**2, self.squares, axes=1)
        covariance = hyper.signal**2 * np.exp(-0.5 * squared / hyper.length_scale**2)
        covariance += hyper.coefficient_deviation**2 * self.guess[:, :, None] * self.guess[:, None, :] + 25.0
        places = np.arange(self.guess.shape[1])
        covariance[:, places, places] += hyper.nugget**2 + hyper.noise**2
        root = np.linalg.cholesky(covariance)
        z = np.linalg.solve(root, (self.logs - hyper.coefficient * self.guess)[:, :, None])
        return float(0.5 * np.square(z).sum() + np.log(root[:, places, places]).sum())


def _negative_log_likelihood(prepared: Sequence[_Leading], hyper: Hyperparameters) -> float:
    """In the mean over the kernels."""
    total = sum(leading.negative_log_likelihood(hyper) for leading in prepared)
    return total / sum(len(leading.guess) for leading in prepared)


def digest_of(path: Path) -> str:
    """Sixteen digits that stand for a model file."""
    return hashlib.sha256(read_input(path, _MOST_MODEL_BYTES)).hexdigest()[:16]


def calibration_path(model_file: Path) -> Path:
    return model_file.with_suffix(".tuning.json")


def own_calibration_path(model_file: Path) -> Path:
    """Where a calibration goes that was made here: beside a model of one's own; in the cache folder for one that came
    with the package, in which nothing is ever written."""
    if model_file.resolve().is_relative_to(_PACKAGE):
        return cache_folder() / "tune" / calibration_path(model_file).name
    return calibration_path(model_file)


def save_calibration(model_file: Path, hyper: Hyperparameters, path: Path | None = None) -> Path:
    """Write a calibration of a model where it belongs, or to `path`."""
    numbers = {name: getattr(hyper, field) for name, field in _IN_FILES.items()}
    kept: dict[str, Any] = {"prior": {**numbers, "weights": dict(hyper.ard)}, "model": digest_of(model_file)}
    if hyper.sure:
        kept["sure"] = {str(count): least for count, least in hyper.sure.items()}
    if hyper.by_score:
        kept["by_score"] = True
    path = own_calibration_path(model_file) if path is None else path
    write_atomic(path, json.dumps(kept, indent=1) + "\n")
    return path


def load_calibration(model_file: Path) -> Hyperparameters | None:
    """The calibration of a model file, one's own first; None where there is none, it cannot be read, or it is another
    model's."""
    paths = dict.fromkeys((own_calibration_path(model_file), calibration_path(model_file)))
    return next((found for path in paths if (found := _calibration_in(path, model_file)) is not None), None)


def _calibration_in(path: Path, model_file: Path) -> Hyperparameters | None:
    try:
        content = read_json_input(path)
        hyper = _hyperparameters(content["prior"])
        sure = {int(count): float(least) for count, least in dict(content.get("sure", {})).items()}
        hyper = dataclasses.replace(hyper, sure=sure, by_score=content.get("by_score") is True)
        model = str(content["model"])
    except (TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return hyper if model == digest_of(model_file) else None


def _hyperparameters(values: Mapping[str, Any]) -> Hyperparameters:
    """A name that is not known is left out, a bad number refused."""
    known: dict[str, Any] = {field: float(values[name]) for name, field in _IN_FILES.items() if name in values}
    weights = {str(name): float(value) for name, value in dict(values.get("weights", {})).items()}
    if not all(0 <= value <= _MOST for value in (*known.values(), *weights.values())):
        raise ValueError("hyperparameters must be finite and not negative")
    if known.get("length_scale", 1.0) <= 1 / _MOST:
        raise ValueError("a length scale must be positive")
    return dataclasses.replace(_START, **known, ard=weights)
