"""Checks of the profiling lesson: percentiles, FLOPs of a convolution, and the roofline."""

from __future__ import annotations

import math

import numpy as np

from tilewise.learn.checking import Exercise
from tilewise.learn.differential import Example, Mistakes, differential

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


def _draw_samples(rng: np.random.Generator) -> tuple[list[float], float]:
    return rng.lognormal(0, 2, rng.integers(1, 40)).tolist(), 100 * float(rng.beta(0.5, 0.5))


def _exchanged(samples: list[float], q: float) -> float:
    """Interpolate with the weights of the two neighbours exchanged: a common mistake."""
    ordered, position = sorted(samples), q / 100 * (len(samples) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] * (position - low) + ordered[high] * (low + 1 - position)


def conv_flops(x_shape: Shape, w_shape: Shape, stride: int = 1, padding: int = 0) -> int:
    (n, channels, height, width), (filters, _, kh, kw) = x_shape, w_shape
    rows, columns = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    return 2 * n * filters * rows * columns * channels * kh * kw


def _draw_convolution(rng: np.random.Generator) -> tuple[Shape, Shape, int, int]:
    n, channels, filters, kh, kw = map(int, rng.integers(1, 6, 5))
    height, width = int(kh + rng.integers(0, 20)), int(kw + rng.integers(0, 20))
    return (n, channels, height, width), (filters, channels, kh, kw), int(rng.integers(1, 5)), int(rng.integers(0, 4))


def least_seconds(flops: float, bytes_moved: float, peak_flops: float, bandwidth: float) -> float:
    return max(flops / peak_flops, bytes_moved / bandwidth)


_SLOWER = "flops / peak and bytes / bandwidth overlap at best, so the slower of the two decides"

MISTAKES: dict[str, Mistakes] = {
    "percentile": [
        (
            "the nearer of the two neighbours weighs more: s[i] * (1 - f) + s[i + 1] * f, with the fraction f",
            _exchanged,
        ),
        ("count places from the smallest, not from the largest", lambda samples, q: np.percentile(samples, 100 - q)),
    ],
    "conv_flops": [
        (
            "w has the filters first, then the input channels",
            lambda x, w, *more, **options: conv_flops(x, w, *more, **options) * x[1] / w[0],
        ),
        (
            "the convolution has no bias: count its products and sums only",
            lambda x, w, *more, **options: conv_flops(x, w, *more, **options) * (1 + 1 / (2 * x[1] * w[2] * w[3])),
        ),
        (
            "w_shape[2] is kh, along the height, and w_shape[3] is kw",
            lambda x, w, *more, **options: conv_flops(x, (*w[:2], w[3], w[2]), *more, **options),
        ),
        (
            "w_shape[2] is kh, along the height, and w_shape[3] is kw",
            lambda x, w, *more, **options: conv_flops(x, (*w[:3], w[2]), *more, **options),
        ),
        (
            "x has its channels before height and width",
            lambda x, w, *more, **options: conv_flops((x[0], x[3], *x[1:3]), w, *more, **options),
        ),
    ],
    "least_seconds": [
        ("that is the faster one", lambda flops, traffic, peak, bandwidth: min(flops / peak, traffic / bandwidth)),
        (
            "that is the reciprocal: divide the FLOPs by the peak and the bytes by the bandwidth",
            lambda flops, traffic, peak, bandwidth: 1 / min(flops / peak, traffic / bandwidth),
        ),
        (
            "divide with /, because // drops the fractions",
            lambda flops, traffic, peak, bandwidth: max(flops // peak, traffic // bandwidth),
        ),
    ],
}

EXERCISES = (
    Exercise(
        "percentile",
        "the p-th percentile of timings, without NumPy",
        differential(
            percentile,
            _percentile_cases,
            _draw_samples,
            "sort, go to place q/100 * (n - 1), and interpolate between its two neighbours",
            mistakes=MISTAKES["percentile"],
        ),
    ),
    Exercise(
        "conv_flops",
        "the FLOPs of a convolution from its shapes",
        differential(
            conv_flops,
            lambda: (
                [
                    Example((x, w), about, {"stride": stride, "padding": padding})
                    for x, w, stride, padding, about in (
                        ((1, 1, 8, 8), (1, 1, 1, 1), 1, 0, "for one filter of one element"),
                        ((2, 3, 32, 32), (16, 3, 3, 3), 1, 1, "with padding"),
                        ((4, 8, 17, 9), (5, 8, 5, 3), 2, 1, "with stride and padding"),
                        ((1, 2, 10, 8), (3, 2, 3, 3), 2, 0, "with stride 2"),
                        ((3, 4, 9, 14), (6, 4, 1, 4), 3, 2, "with stride 3 and padding 2"),
                        (
                            (64, 512, 57, 56),
                            (512, 512, 3, 3),
                            1,
                            1,
                            "for a layer of a large network: its FLOPs need more than 32 bits",
                        ),
                    )
                ]
                + [Example(((2, 3, 7, 9), (4, 3, 3, 2)), "where stride and padding are not given")]
            ),
            _draw_convolution,
            "for each image and filter there are (size + 2 * padding - kernel) // stride + 1 outputs along each axis; "
            "each is a sum over channels and kernel, and a multiply-add counts as 2",
            mistakes=MISTAKES["conv_flops"],
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
            lambda rng: tuple(10 ** rng.uniform((3, 3, 9, 8), (12, 12, 14, 12))),
            f"{_SLOWER}, not their sum",
            mistakes=MISTAKES["least_seconds"],
        ),
    ),
)
