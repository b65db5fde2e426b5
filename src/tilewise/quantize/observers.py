"""What range of activations to cover with 256 steps.

An observer watches batches go by and keeps only a histogram. "minmax" covers everything seen; "percentile" lets the
outermost 0.01 % saturate; "mse" takes the range with the least squared error; "entropy" the one whose coarse histogram
tells least apart from the fine one (Kullback-Leibler), letting at most 0.1 % saturate: the divergence counts values,
and would sacrifice the few large ones that decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError
from tilewise.quantize.parameters import AffineParameters, affine_from_range

Array = npt.NDArray[Any]
OBSERVERS = ("minmax", "percentile", "mse", "entropy")
_BINS = 2048
_OUTLIERS = 1e-4
_MOST_LOST = 1e-3


class Observer:
    """The values of one activation, as a histogram that widens when larger values come."""

    def __init__(self, histogram: bool = True) -> None:
        self.low, self.high, self.count, self._counts = np.inf, -np.inf, 0, histogram
        self.histogram: Array = np.zeros(_BINS, np.float64)

    def observe(self, x: Array) -> None:
        if x.size == 0:
            return
        low, high = float(x.min()), float(x.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ConfigurationError("the calibration data gives NaN or infinite activations")
        if self.count == 0:
            self.low, self.high = low, high
        elif low < self.low or high > self.high:
            self._widen(min(low, self.low), max(high, self.high))
        self.count += x.size
        if not self._counts:  # the smallest and largest are enough
            return
        # In float64: in float32 there may be no 2048 numbers between the lowest and the highest.
        self.histogram += np.histogram(x.astype(np.float64, copy=False), _BINS, self._span())[0]

    def parameters(self, method: str) -> AffineParameters:
        if self.count == 0:
            raise ConfigurationError("there is no calibration data")
        low, high = self.range(method)
        return affine_from_range(low, high)

    def range(self, method: str) -> tuple[float, float]:
        if method not in OBSERVERS:
            raise ConfigurationError(f"there is no observer {method!r}; choose one of {', '.join(OBSERVERS)}")
        if method == "minmax" or self.low == self.high:
            return self.low, self.high
        if method == "percentile":
            return self._percentile()
        ranges = [(self.low * part, self.high * part) for part in np.linspace(1.0, 0.2, 81)]
        if method == "mse":
            return min(ranges, key=lambda r: self._squared_error(*r))
        share = self.histogram / self.histogram.sum()
        return min((r for r in ranges if self._lost(share, *r) <= _MOST_LOST), key=lambda r: self._divergence(*r))

    # --- inside ---

    def _span(self) -> tuple[float, float]:
        return (self.low, self.high) if self.high > self.low else (self.low - 0.5, self.high + 0.5)

    def _centres(self) -> Array:
        low, high = self._span()
        return low + (np.arange(_BINS) + 0.5) * ((high - low) / _BINS)

    def _widen(self, low: float, high: float) -> None:
        centres, weights = self._centres(), self.histogram
        self.low, self.high = low, high
        self.histogram = np.histogram(centres, _BINS, self._span(), weights=weights)[0].astype(np.float64)

    def _percentile(self) -> tuple[float, float]:
        share = np.cumsum(self.histogram) / self.histogram.sum()
        centres = self._centres()
        low = int(np.searchsorted(share, _OUTLIERS / 2))
        high = min(int(np.searchsorted(share, 1 - _OUTLIERS / 2)), _BINS - 1)
        return float(centres[low]), float(centres[high])

    def _squared_error(self, low: float, high: float) -> float:
        parameters, centres = affine_from_range(low, high), self._centres()
        error = centres - parameters.dequantize(parameters.quantize(centres))
        return float((self.histogram * error**2).sum())

    def _divergence(self, low: float, high: float) -> float:
        parameters, centres = affine_from_range(low, high), self._centres()
        step = parameters.quantize(centres).astype(np.int64)
        p = self.histogram / self.histogram.sum()
        filled = p > 0
        mass, cells = np.bincount(step, p, 256), np.bincount(step, filled, 256)
        q = np.where(filled, mass[step] / np.maximum(cells[step], 1), 0.0)
        # What saturates is spread over the outermost step, whose cells it then misrepresents.
        return float((p[filled] * np.log(p[filled] / np.maximum(q[filled], 1e-300))).sum() + self._lost(p, low, high))

    def _lost(self, p: Array, low: float, high: float) -> float:
        centres = self._centres()
        return float(p[(centres < min(low, 0.0)) | (centres > max(high, 0.0))].sum())
