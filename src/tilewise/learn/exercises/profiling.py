"""Checks of the profiling lesson: percentiles, FLOPs of a convolution, and the roofline."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, differential

Shape = tuple[int, ...]


def percentile(samples: list[float], q: float) -> float:
    return float(np.percentile(samples, q))


def _percentile_cases() -> list[Example]:
    """Return test inputs for `percentile`, with a remark on what is special about each."""
    rng = np.random.default_rng(0)
    about = {2: "for two samples", 1: "for one sample"}
    cases = [
        Example((rng.exponential(size=count).tolist(), q), about.get(count, f"for q = {q}"))
        for count in (5, 100, 2, 1)
        for q in (50, 95, 0, 100, 12.5)
    ]
    return [*cases, Example(([3.0, 1.0, 2.0, 1.0, 1.0], 60), "where times are equal")]


def _sorted_place(samples: list[float], position: float) -> float:
    """Interpolate between sorted samples at a fractional position."""
    ordered = sorted(samples)
    low = min(max(int(position), 0), len(ordered) - 1)
    return ordered[low] + (position - int(position)) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _unsorted(samples: list[float], q: float) -> float:
    position = q / 100 * (len(samples) - 1)
    low = int(position)
    return samples[low] + (position - low) * (samples[min(low + 1, len(samples) - 1)] - samples[low])


def _other_method(method: Any) -> Any:
    return lambda samples, q: np.percentile(samples, q, method=method)


_NEIGHBOURS = "interpolate between the two neighbours of the place q/100 * (n - 1), each weighed by how near it is"


def conv_flops(x_shape: Shape, w_shape: Shape, stride: int = 1, padding: int = 0) -> int:
    (n, channels, height, width), (filters, _, kh, kw) = x_shape, w_shape
    rows, columns = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    return 2 * n * filters * rows * columns * channels * kh * kw


def _conv_mistake(rows_of: Any = None, factor: Any = None) -> Any:
    """Return a `conv_flops` function with a mistaken number of outputs per axis, or factor."""

    def outputs(size: int, kernel: int, stride: int, padding: int) -> int:
        return (size + 2 * padding - kernel) // stride + 1

    def mistaken(x: Shape, w: Shape, stride: int = 1, padding: int = 0) -> float:
        """Count a convolution's FLOPs as `conv_flops` does, but with the mistake."""
        axis = rows_of or outputs
        work = 2 * x[0] * w[0] * x[1] * w[2] * w[3]
        count = axis(x[2], w[2], stride, padding) * axis(x[3], w[3], stride, padding)
        return float(work * count * (factor(x, w) if factor else 1))

    return mistaken


def least_seconds(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    return max(flops / peak_flops, bytes_moved / bandwidth)


_SLOWER = "flops / peak and bytes / bandwidth overlap at best, so the slower of the two decides"

EXERCISES = (
    Exercise(
        "percentile",
        "the p-th percentile of timings, without NumPy",
        differential(
            percentile,
            _percentile_cases,
            "sort, go to place q/100 * (n - 1), and interpolate between its two neighbours",
        ),
    ),
    Exercise(
        "conv_flops",
        "the FLOPs of a convolution from its shapes",
        differential(
            conv_flops,
            lambda: [
                Example((x, w), about, {"stride": stride, "padding": padding})
                for x, w, stride, padding, about in (
                    ((1, 1, 8, 8), (1, 1, 1, 1), 1, 0, "for one filter of one element"),
                    ((2, 3, 32, 32), (16, 3, 3, 3), 1, 1, "with padding"),
                    ((4, 8, 17, 9), (5, 8, 5, 3), 2, 1, "with stride and padding"),
                    ((1, 2, 10, 8), (3, 2, 3, 3), 2, 0, "with stride 2"),
                    ((3, 4, 9, 14), (6, 4, 1, 4), 3, 2, "with stride 3 and padding 2"),
                )
            ],
            "for each image and filter there are (size + 2 * padding - kernel) // stride + 1 outputs along each axis; "
            "each is a sum over channels and kernel, and a multiply-add counts as 2",
        ),
    ),
    Exercise(
        "least_seconds",
        "the least time the roofline allows",
        differential(
            least_seconds,
            lambda: [
                Example((3e9, 7e6, 1.3e11, 2e10), "where the arithmetic decides"),
                Example((3e6, 7e9, 1.3e11, 2e10), "where the memory decides"),
                Example((0, 7e6, 1.3e11, 2e10), "where there are no FLOPs"),
                Example((5e6, 0, 1.1e11, 3e10), "where no bytes move"),
                Example((3e10, 7e9, 1.3e11, 2e10), "where both are near"),
            ],
            f"{_SLOWER}, not their sum",
        ),
    ),
)
