"""Checks that an entry's weights were derived from the shipped ones, matrix by matrix.

What an entry brings may be retrained, pruned or rounded, but it starts from the shipped model. A model of another
origin can be hidden among small weights that have the shipped signs, so that the matrix as a whole looks alike; a
pruning step then takes exactly these away. So zeros do not count: the weights that are left must point where the
shipped ones at the same places do, and they must be places where the shipped model has its own weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.bench.errors import Rejected

Array = npt.NDArray[Any]
LEAST_COSINE = 0.8  # of the weights that are left
LEAST_ENERGY = 0.5  # of the shipped squares that as many weights could keep


def check_likeness(weights: Mapping[str, Array], shipped: Mapping[str, Array]) -> None:
    """Reject weights that are not the shipped ones, changed."""
    for name, own in shipped.items():
        if own.ndim > 1 and own.dtype.kind == "f":
            cosine, energy = likeness(weights[name], own)
            if cosine < LEAST_COSINE:
                raise Rejected(
                    "another model",
                    f"these weights are of another model: what is left of {name} has a cosine of {cosine:.2f} to the "
                    f"shipped weights at the same places, and retraining leaves at least {LEAST_COSINE}",
                )
            if energy < LEAST_ENERGY:
                raise Rejected(
                    "another model",
                    f"these weights are of another model: what is left of {name} lies where the shipped model has "
                    f"little ({energy:.2f} of what as many of its largest weights hold; {LEAST_ENERGY} is asked for)",
                )


def likeness(weights: Array, shipped: Array) -> tuple[float, float]:
    """(cosine to the shipped weights where `weights` are not zero, share of the shipped squares kept there)."""
    remaining = weights != 0
    if not remaining.any():
        return 1.0, 1.0
    x, y = weights[remaining].astype(np.float64), shipped[remaining].astype(np.float64)
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    squares = np.sort(shipped.astype(np.float64).ravel() ** 2)[::-1]
    return float(x @ y) / scale if scale else 0.0, float(y @ y / squares[: remaining.sum()].sum())
