"""Checks of the profiling lesson: percentiles, FLOPs of a convolution, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.learn.checking import Exercise, require, same_number


def _percentile(answer: Callable[..., Any]) -> None:
    """Check the exercise `percentile`."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 100):
        samples = rng.exponential(size=count).tolist()
        before = list(samples)
        for q in (0, 50, 95, 100):
            call = f"percentile of {count} samples at {q}"
            hint = "sort, go to place q/100 * (n - 1), and interpolate between its two neighbours"
            same_number(answer(samples, q), float(np.percentile(before, q)), call, hint)
        require(samples == before, "the caller's list came back in another order: sort a copy")


def _conv_flops(answer: Callable[..., Any]) -> None:
    """Check the exercise `conv_flops`."""
    cases = (
        ((1, 1, 8, 8), (1, 1, 1, 1), 1, 0),
        ((2, 3, 32, 32), (16, 3, 3, 3), 1, 1),
        ((4, 8, 17, 9), (5, 8, 5, 3), 2, 1),
        ((1, 2, 10, 8), (3, 2, 3, 3), 2, 0),
    )
    for x_shape, w_shape, stride, padding in cases:
        (n, channels, height, width), (filters, _, kh, kw) = x_shape, w_shape
        rows, columns = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
        right = 2 * n * filters * rows * columns * channels * kh * kw
        call = f"conv_flops({x_shape}, {w_shape}, stride={stride}, padding={padding})"
        hint = (
            "for each image and filter there are (size + 2 * padding - kernel) // stride + 1 outputs along each axis; "
            "each is a sum over channels and kernel, and a multiply-add counts as 2"
        )
        per_output = 2 * n * filters * channels * kh * kw
        mistakes = (
            (right / n, "each image of the batch is convolved"),
            (right / 2, "a multiply-add counts as 2"),
            (right / channels, "each output sums over all input channels"),
            (right * channels / filters, "w has the filters first, then the input channels"),
            (right / (kh * kw), "each output sums over all kernel elements"),
            (per_output * height * width, "count outputs, of which there may be fewer than inputs"),
            (
                per_output * ((height - kh) // stride + 1) * ((width - kw) // stride + 1),
                "padding makes the input larger",
            ),
            (
                per_output * ((height + padding - kh) // stride + 1) * ((width + padding - kw) // stride + 1),
                "padding is added on both sides",
            ),
            (
                per_output * kh // kw * rows * ((width + 2 * padding - kh) // stride + 1),
                "a kernel has kh rows and kw columns, which may differ",
            ),
            (per_output * (height + 2 * padding - kh + 1) * (width + 2 * padding - kw + 1), "a stride skips outputs"),
        )
        work = answer(x_shape, w_shape, stride=stride, padding=padding)
        same_number(work, right, call, hint, mistakes=mistakes)


def _attainable(answer: Callable[..., Any]) -> None:
    """Check the exercise `least_seconds`."""
    cases = ((3e9, 7e6, 1.3e11, 2e10), (3e6, 7e9, 1.3e11, 2e10), (0, 7e6, 1.3e11, 2e10), (3e10, 7e9, 1.3e11, 2e10))
    for flops, bytes_moved, peak, bandwidth in cases:
        right = max(flops / peak, bytes_moved / bandwidth)
        call = f"least_seconds({flops:g}, {bytes_moved:g}, {peak:g}, {bandwidth:g})"
        hint = "flops / peak and bytes / bandwidth overlap at best, so the slower of the two decides, not their sum"
        exchanged = flops / bandwidth, bytes_moved / peak
        advice = "divide the FLOPs by the peak and the bytes by the bandwidth"
        mistakes = (
            (max(exchanged), advice),
            (sum(exchanged), advice),
            (max(flops // peak, bytes_moved // bandwidth), "divide with /, because // drops the fractions"),
        )
        same_number(answer(flops, bytes_moved, peak, bandwidth), right, call, hint, mistakes=mistakes)


EXERCISES = (
    Exercise("percentile", "the p-th percentile of timings, without NumPy", _percentile),
    Exercise("conv_flops", "the FLOPs of a convolution from its shapes", _conv_flops),
    Exercise("least_seconds", "the least time the roofline allows", _attainable),
)
