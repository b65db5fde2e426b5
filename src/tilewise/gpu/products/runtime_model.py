"""Predicted runtimes of matrix products on a GPU: kernels and cuBLAS in the same unit, so that they can be compared.

Small networks predict the logarithm of the ratio between a runtime and the estimate of `roofline.py`, in three stages:
the estimate shortens the list of kernels, a screening network shortens it further, and a rerank ensemble scores the
best of those. Another ensemble predicts cuBLAS. The spread of an ensemble's members is the uncertainty of a prediction.
Prediction needs NumPy alone; some thousand configurations take a millisecond.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise._safetensors import load_arrays
from tilewise.errors import FileFormatError
from tilewise.gpu.devices import H200, Device
from tilewise.gpu.products.roofline import (
    Columns,
    Numbers,
    columns,
    cublas_features,
    estimate_seconds,
    features,
    floor_seconds,
    is_cublas,
)
from tilewise.store.problem import Config, Problem

Weights = npt.NDArray[np.float32]
FILE = "h200_products.safetensors"
# Names of the networks in a model file: the screening network, the rerank ensemble, the cuBLAS ensemble.
NETWORKS = SCREENING, RERANK, CUBLAS_NETWORK = ("kernel", "judge", "library")
_MAX_SCREENED = 512  # kernels that the screening network scores: bounds the time of a prediction
_MAX_RERANKED = 32  # kernels that the rerank ensemble scores: an ensemble of eight larger networks
_MAX_LOG_RATIO = np.float32(3)  # bound for sizes far outside the training data: e**3 times the estimate


# A kernel is chosen unmeasured if its predicted gain, a logarithm, exceeds a margin and some standard deviations of the
# predictions: (margin, deviations). Fitted to 278 products held out of training (`benchmarks/results/products_*.json`):
# where TMA applies the choices take 1.037 and 1.068 of 1.067 and 1.097 (worst 0.89); elsewhere 1.33 of 1.45 (worst
# 0.92). Predictions are less exact where rows are not whole 16-byte loads, so more deviations are required there.
_REQUIRED_WITH_TMA, _REQUIRED_WITHOUT_TMA = (0.04, 0.5), (0.06, 2.5)


def required_gain(with_tma: bool, deviation: float) -> float:
    """Return the predicted gain over cuBLAS (log of the speed-up) above which a kernel is chosen unmeasured."""
    margin, deviations = _REQUIRED_WITH_TMA if with_tma else _REQUIRED_WITHOUT_TMA
    return margin + deviations * deviation


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of each configuration, and the relative standard deviation over the ensemble's members."""

    seconds: Numbers
    deviation: Numbers


class RuntimeModel:
    """Neural networks that predict the runtimes of matrix products on one GPU."""

    def __init__(self, path: str | os.PathLike[str], device: Device = H200) -> None:
        """Read a model file; `device` is the GPU that it was trained on."""
        self.device = device
        arrays, self.metadata = load_arrays(path)
        self.digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]  # of the file
        try:
            self._screening, self._rerank, self._cublas = (_ensemble(arrays, name) for name in NETWORKS)
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} is not a model of runtimes: it lacks {error}.") from error

    def predict_kernels(
        self, problem: Problem, of: Columns, batch: int = 1, max_screened: int = _MAX_SCREENED
    ) -> Prediction:
        """Predict the runtimes of kernels, whose settings are given as columns (`roofline.columns`).

        Cheap stages screen out slow kernels first; a kernel that is dropped is predicted slower than every kernel that
        the next stage scores.
        """
        estimate = np.log(estimate_seconds(problem, of, batch, self.device))
        # Kernels that are not screened keep ten times their estimate, behind all others.
        seconds, deviation = np.exp(estimate) * 10, np.ones(len(estimate))
        screened = _smallest(estimate, max_screened)
        rows = features(problem, {name: column[screened] for name, column in of.items()}, batch, self.device)
        screening = _prediction(self._screening(rows) + rows[:, 0])
        reranked = _smallest(screening.seconds, _MAX_RERANKED)
        final = _prediction(self._rerank(rows[reranked]) + rows[reranked, 0])
        seconds[screened] = np.maximum(screening.seconds, final.seconds.max(initial=0))
        deviation[screened] = screening.deviation
        seconds[screened[reranked]], deviation[screened[reranked]] = final.seconds, final.deviation
        return Prediction(seconds, deviation)

    def predict_cublas(self, problem: Problem, batch: int = 1) -> Prediction:
        """Predict the runtime of cuBLAS for a problem."""
        floor = np.log(floor_seconds(problem, batch, self.device))
        return _prediction(self._cublas(cublas_features(problem, batch, self.device)) + floor)

    def predict(self, problem: Problem, configs: Sequence[Config], batch: int = 1) -> Prediction:
        """Predict the runtimes of configurations in their order; cuBLAS may be among them."""
        cublas = np.array([is_cublas(config) for config in configs])
        seconds, deviation = np.zeros(len(configs)), np.zeros(len(configs))
        kernels = [config for config in configs if not is_cublas(config)]
        if kernels:
            prediction = self.predict_kernels(problem, columns(kernels), batch)
            seconds[~cublas], deviation[~cublas] = prediction.seconds, prediction.deviation
        if cublas.any():
            prediction = self.predict_cublas(problem, batch)
            seconds[cublas], deviation[cublas] = prediction.seconds[0], prediction.deviation[0]
        return Prediction(seconds, deviation)


def _smallest(values: Numbers, count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` smallest values, unordered."""
    return np.argpartition(values, count)[:count] if len(values) > count else np.arange(len(values))


def _prediction(logarithms: Numbers) -> Prediction:
    """Average the log runtimes of the ensemble's members, (members, rows); their spread is the deviation."""
    return Prediction(np.exp(logarithms.mean(axis=0)), logarithms.std(axis=0))


def _ensemble(arrays: dict[str, npt.NDArray[np.generic]], name: str) -> Callable[[Numbers], Weights]:
    """Build a function that maps feature rows to the log runtime by each ensemble member: (members, rows).

    The first layer is one matrix for all members, with the normalisation of the features folded in; the weights of
    later layers have the member as their first dimension.
    """
    count = sum(key.startswith(f"{name}.weight") for key in arrays)
    layers = tuple(
        (arrays[f"{name}.weight{i}"].astype(np.float32), arrays[f"{name}.bias{i}"].astype(np.float32))
        for i in range(max(count, 1))
    )
    for (left, bias), (right, _) in zip(layers, (*layers[1:], layers[-1]), strict=True):
        if left.ndim != 3 or bias.ndim != 3 or (right is not left and left.shape[2] != right.shape[1]):
            raise ValueError(f"layers of {name} that fit each other")
    weight, bias = layers[0]
    mean, scale = (arrays[f"{name}.{statistic}"].astype(np.float64) for statistic in ("mean", "scale"))
    if len(layers) < 2 or mean.shape != scale.shape or mean.shape != weight.shape[1:2]:
        raise ValueError(f"layers of {name} that fit its features")
    # Fold (x - mean) / scale into the first layer: weights / scale, and a bias reduced by mean @ weights / scale.
    all_members = weight.astype(np.float64).transpose(1, 0, 2).reshape(len(mean), -1) / scale[:, None]
    first = all_members.astype(np.float32)  # (features, members * width)
    first_bias = (bias.reshape(-1) - mean @ all_members).astype(np.float32)  # (members * width,)

    def run(rows: Numbers) -> Weights:
        """Evaluate all members on feature rows: (members, rows)."""
        x = rows.astype(np.float32) @ first  # (rows, members * width)
        x += first_bias
        x = x.reshape(len(rows), len(layers[1][0]), -1).transpose(1, 0, 2)  # (members, rows, width)
        for weight, bias in layers[1:]:  # (members, in, out), (members, 1, out)
            x = np.maximum(x, 0) @ weight  # (members, rows, out)
            x += bias
        log_ratio: Weights = np.clip(x[..., 0], -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return log_ratio

    return run


def shipped_folder() -> Path:
    """Return the folder of the models that are installed with tilewise."""
    return Path(str(files("tilewise.gpu.products")))


@lru_cache(maxsize=4)
def shipped_runtime_model(name: str = FILE) -> RuntimeModel | None:
    """Load the model that is installed with tilewise; None if the file is missing."""
    path = shipped_folder() / name
    return RuntimeModel(path) if path.is_file() else None
