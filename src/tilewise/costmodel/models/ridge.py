"""CpuRidge: the CPU cost model, a ridge regression on random features that is fitted in about a second.

Log runtime is linear in the features of `features.cpu` and in ReLUs of fixed random projections of them (random
features as in Rahimi and Recht 2008), with separate weights for products, integer products and convolutions. The mean
of each kernel is removed, and its fast configurations weigh more: `exp(-SHARPNESS * (log runtime above the best))`.
`python -m tools.ship_cpu --table` evaluates it on machines that were left out of the fit; the three constants were
chosen with that table. Networks were not tried on the same folds, because that takes hours instead of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.data.dataset import from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.cpu import N_GROUPS, CpuFeatures, kernel_group
from tilewise.costmodel.models.scorer import RIDGE, Scorer
from tilewise.errors import ConfigurationError

Floats = npt.NDArray[Any]
HIDDEN, SHARPNESS, PENALTY = 400, 4.0, 60.0  # chosen with `tools.ship_cpu --table`
_MAX_KERNEL_WEIGHT = 60  # a kernel weighs as much as its number of configurations, up to this


def fit_ridge(
    kernels: Sequence[Kernel], schema: Schema, seed: int = 0
) -> tuple[dict[str, npt.NDArray[np.float32]], CpuFeatures]:
    """Fit the ridge regression to kernels with runtimes; return its weights and its feature preparation."""
    labelled = [kernel for kernel in kernels if kernel.labelled]
    if not labelled:
        raise ConfigurationError("Fitting needs kernels with runtimes; there are none.")
    features = CpuFeatures.fit(from_kernels(labelled, schema))
    rng = np.random.default_rng(seed)
    width = features.config_width
    weights = {
        # Random projections, scaled so that their outputs have about unit variance.
        "hidden": (rng.standard_normal((width, HIDDEN)) / np.sqrt(width)).astype(np.float32),
        "hidden_bias": rng.uniform(-1, 1, HIDDEN).astype(np.float32),
    }
    # Normal equations of the weighted regression, one per group, summed over kernels.
    gram = np.zeros((N_GROUPS, width + HIDDEN, width + HIDDEN))
    moment = np.zeros((N_GROUPS, width + HIDDEN))
    for kernel in labelled:
        config = features.apply(kernel).config
        z, y = (
            np.hstack([config, _relu_layer(config, weights["hidden"], weights["hidden_bias"])]),
            np.log(kernel.target),
        )
        # Fast configurations matter most; a kernel's total weight is bounded.
        weight = np.exp(-SHARPNESS * (y - y.min()))
        weight *= min(len(y), _MAX_KERNEL_WEIGHT) / weight.sum()
        # Only differences within a kernel matter, so remove its weighted mean from both sides.
        z = z - weight @ z / weight.sum()
        group, weighted = kernel_group(config), z * weight[:, None]
        gram[group] += weighted.T @ z
        moment[group] += weighted.T @ (y - weight @ y / weight.sum())
    ridge = PENALTY * np.eye(width + HIDDEN)
    out = np.stack([np.linalg.solve(g + ridge, b) for g, b in zip(gram, moment, strict=True)])
    return weights | {"out": out.astype(np.float32)}, features


def score_ridge(w: Mapping[str, Floats], config: Floats) -> Floats:
    """Return one score per configuration, log runtime up to a constant per kernel; `w` are the weights.

    Features that are equal in all configurations, which most of the kernel's and machine's are, are multiplied once.
    """
    out, width, first = w["out"][kernel_group(config)], config.shape[1], config[0]
    # Split the features into constant ones, which become a bias, and varying ones.
    varies = (config != first).any(axis=0)
    constant, linear, hidden = first * ~varies, out[:width], w["hidden"]
    activations = _relu_layer(config.T[varies].T, hidden[varies], w["hidden_bias"] + constant @ hidden)
    scores: Floats = config @ linear + activations @ out[width:]
    return scores


def _relu_layer(x: Floats, kernel: Floats, bias: Floats) -> Floats:
    """Compute relu(x @ kernel + bias), in float32 by the compiled product, which fuses and threads it."""
    if native is not None and x.dtype == np.float32 and x.size:
        fused: Floats = native.matmul(x, kernel, bias=bias, activation="relu")
        return fused
    hidden: Floats = x @ kernel
    hidden += bias
    np.maximum(hidden, hidden.dtype.type(0), out=hidden)
    return hidden


def ridge_scorer(kernels: Sequence[Kernel], schema: Schema, seed: int = 0) -> Scorer:
    """Fit the CPU model to kernels with runtimes and return it as a scorer."""
    weights, features = fit_ridge(kernels, schema, seed)
    return Scorer(RIDGE, weights, {}, features, schema, {"model": RIDGE, "seed": seed})
