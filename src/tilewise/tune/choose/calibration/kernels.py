"""The kernels that a calibration measures: a few dozen, one for each regime in which a default is decided otherwise.

Products from a few rows to matrices beyond the caches, in the layouts that layers and their gradients have; some with
leading sizes that are powers of two, where rows evict each other; convolutions of the first, middle and last layers of
a network, with and without Winograd's choice; integer products. Each on one thread, the larger ones on all as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilewise._system import real_cores
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.problem import Problem

_PRODUCTS = (
    # m, n, k, layout
    (512, 512, 512, "nn"), (384, 768, 768, "nt"), (64, 1024, 1024, "nn"), (1024, 256, 256, "nt"),
    (256, 1000, 512, "nn"), (700, 700, 700, "nn"), (130, 4096, 256, "nn"),
    (197, 256, 64, "nn"), (2000, 96, 400, "nn"), (16, 768, 3072, "nt"),
    (300, 300, 2000, "nn"), (96, 2304, 768, "nt"), (128, 128, 128, "nn"), (60, 500, 333, "nn"), (768, 768, 384, "tn"),
    (32, 2048, 512, "nn"), (1500, 64, 576, "nn"), (256, 256, 256, "nt"), (96, 3136, 288, "nn"), (1000, 1000, 100, "nn"),
    (200, 200, 200, "tn"), (48, 300, 1500, "nt"), (1024, 1024, 512, "nn"), (80, 80, 1000, "nn"), (512, 2048, 512, "nt"),
    (400, 1600, 64, "nn"), (24, 1500, 700, "nn"), (90, 120, 60, "nt"),
)  # fmt: skip
_CONVOLUTIONS = (
    # batch, channels, size, filters, kernel, stride
    (8, 3, 32, 32, 3, 1), (8, 32, 32, 64, 3, 1), (1, 64, 56, 64, 3, 1), (4, 128, 16, 128, 3, 1),
    (1, 256, 14, 256, 3, 1), (8, 64, 16, 128, 1, 1), (1, 3, 112, 32, 7, 2), (16, 32, 16, 32, 3, 2),
    (2, 48, 28, 96, 5, 1), (1, 128, 28, 128, 3, 1),
)  # fmt: skip
_INTEGERS = ((64, 512, 512), (256, 768, 768), (1024, 128, 288), (16, 1000, 1024), (400, 256, 1024), (32, 96, 2048))
SHARED = 4_000_000  # multiplications from which a kernel is measured on all threads, too


def calibration_kernels(threads: int | None = None) -> list[Problem]:
    """What to measure with one thread and with so many (all, unless told), the regimes mixed from the start."""
    most = threads or real_cores()
    return [
        get_family(str(spec["family"])).problem({**spec, "threads": count})
        for spec, work in _spread()
        for count in ((1, most) if work >= SHARED and most > 1 else (1,))
    ]


def _spread() -> Iterator[tuple[dict[str, Any], int]]:
    """Products, convolutions and integer products in turns, so that a run that was cut short has some of each."""
    kinds = [list(_products()), list(_convolutions()), list(_integers())]
    longest = len(kinds[0])
    for index in range(longest):
        for kind in kinds:
            step = longest / len(kind)
            if int(index / step) != int((index - 1) / step) or not index:
                yield kind[int(index / step)]


def _products() -> Iterator[tuple[dict[str, Any], int]]:
    for m, n, k, layout in _PRODUCTS:
        yield {"family": "matmul", "m": m, "n": n, "k": k, "layout": layout}, m * n * k


def _convolutions() -> Iterator[tuple[dict[str, Any], int]]:
    for batch, channels, size, filters, kernel, stride in _CONVOLUTIONS:
        sizes = {"batch": batch, "channels": channels, "height": size, "width": size, "filters": filters}
        spec = {"family": "conv2d", **sizes, "kernel": kernel, "stride": stride, "padding": kernel // 2}
        yield spec, batch * filters * channels * (size * kernel // stride) ** 2


def _integers() -> Iterator[tuple[dict[str, Any], int]]:
    for m, n, k in _INTEGERS:
        yield {"family": "int8_matmul", "m": m, "n": n, "k": k, "epilogue": "requantize"}, m * n * k
