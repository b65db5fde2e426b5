"""CpuRidge: the CPU's cost model, fitted in closed form in about a second.

Log runtime is linear in the features of `features.cpu` and in fixed random rectified mixtures of them, with weights of
their own for products, integer products and convolutions. Each kernel's level is taken out, and its fast configurations
count for more: `exp(-sharpness * (log runtime above the best))`. A ridge keeps the weights small. How well it does on
machines left out of the fitting is what `python -m tools.ship_cpu --table` says; its three constants were chosen
while looking at that table. Networks were not tried on the same folds: that takes hours where this takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.data.shards import from_kernels
from tilewise.costmodel.features.cpu import GROUPS, CpuFeatures, group_of
from tilewise.errors import ConfigurationError

Floats = npt.NDArray[Any]
NAME = "CpuRidge"
HIDDEN, SHARPNESS, RIDGE = 400, 4.0, 60.0
_MOST = 60  # a kernel counts for as many configurations as it has, up to so many


def fit_ridge(
    kernels: Sequence[Kernel], schema: Schema, seed: int = 0
) -> tuple[dict[str, npt.NDArray[np.float32]], CpuFeatures]:
    """Weights and features from kernels with runtimes."""
    labelled = [kernel for kernel in kernels if kernel.labelled]
    if not labelled:
        raise ConfigurationError("Fitting needs kernels with runtimes; there are none.")
    features = CpuFeatures.fit(from_kernels(labelled, schema))
    rng = np.random.default_rng(seed)
    width = features.config_width
    weights = {
        "hidden": (rng.standard_normal((width, HIDDEN)) / np.sqrt(width)).astype(np.float32),
        "hidden_bias": rng.uniform(-1, 1, HIDDEN).astype(np.float32),
    }
    gram = np.zeros((GROUPS, width + HIDDEN, width + HIDDEN))
    moment = np.zeros((GROUPS, width + HIDDEN))
    for kernel in labelled:
        config = features.apply(kernel).config
        z, y = np.hstack([config, mixtures(weights, config)]), np.log(kernel.target)
        weight = np.exp(-SHARPNESS * (y - y.min()))
        weight *= min(len(y), _MOST) / weight.sum()
        z = z - weight @ z / weight.sum()
        group, weighted = group_of(config), z * weight[:, None]
        gram[group] += weighted.T @ z
        moment[group] += weighted.T @ (y - weight @ y / weight.sum())
    ridge = RIDGE * np.eye(width + HIDDEN)
    out = np.stack([np.linalg.solve(part + ridge, goal) for part, goal in zip(gram, moment, strict=True)])
    return weights | {"out": out.astype(np.float32)}, features


def mixtures(w: Mapping[str, Floats], config: Floats) -> Floats:
    """(C, hidden): the random mixtures."""
    return _rectified(config, w["hidden"], w["hidden_bias"])


def score_ridge(w: Mapping[str, Floats], config: Floats) -> Floats:
    """One score per configuration: log runtime, up to the kernel's own level. What is the same for all of them, which
    is most of what they say of kernel and machine, is multiplied once."""
    out, width, first = w["out"][group_of(config)], config.shape[1], config[0]
    varies = (config != first).any(axis=0)
    same, straight, hidden = first * ~varies, out[:width], w["hidden"]
    mixed = _rectified(config.T[varies].T, hidden[varies], w["hidden_bias"] + same @ hidden)
    scores: Floats = config @ straight + mixed @ out[width:]
    return scores


def _rectified(x: Floats, kernel: Floats, bias: Floats) -> Floats:
    """relu(x @ kernel + bias), by the compiled product where it takes them: one pass, and on the threads in force."""
    if native is not None and x.dtype == np.float32 and x.size:
        found: Floats = native.matmul(x, kernel, bias=bias, activation="relu")
        return found
    hidden: Floats = x @ kernel
    hidden += bias
    np.maximum(hidden, hidden.dtype.type(0), out=hidden)
    return hidden
