"""Kernels of no family, as a user might write them, to check `autotune`.

They are a 5 x 5 box filter, a table of sums of absolute differences, a transposition and a causal filter along time.
None is a matrix product, a softmax, a norm or a reduction.
"""

# The bodies are Triton's language, not Python's: its types are tl.tensor and tl.constexpr.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["height", "width"])
def box_filter(x, y, height, width, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Compute y[i, j] = mean of the 5 x 5 values of x around (i, j), zeros outside."""
    rows = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    total = tl.zeros((BLOCK_H, BLOCK_W), dtype=tl.float32)
    for down in range(-2, 3):
        for right in range(-2, 3):
            r, c = rows[:, None] + down, columns[None, :] + right
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            total += tl.load(x + r * width + c, mask=inside, other=0.0)
    mask = (rows[:, None] < height) & (columns[None, :] < width)
    tl.store(y + rows[:, None] * width + columns[None, :], total / 25.0, mask=mask)


@triton.jit(do_not_specialize=["points", "centres", "depth"])
def absolute_differences(
    a, b, out, points, centres, depth, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Compute out[i, j] = sum over d of |a[i, d] - b[j, d]|."""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, depth, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        left = tl.load(
            a + p[:, None] * depth + d[None, :], mask=(p[:, None] < points) & (d[None, :] < depth), other=0.0
        )
        right = tl.load(
            b + c[:, None] * depth + d[None, :], mask=(c[:, None] < centres) & (d[None, :] < depth), other=0.0
        )
        total += tl.sum(tl.abs(left[:, None, :] - right[None, :, :]), axis=2)
    mask = (p[:, None] < points) & (c[None, :] < centres)
    tl.store(out + p[:, None] * centres + c[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["rows", "cols"])
def transposition(x, y, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute y = x transposed."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r[:, None] < rows) & (c[None, :] < cols)
    block = tl.load(x + r[:, None] * cols + c[None, :], mask=mask)
    tl.store(y + c[:, None] * rows + r[None, :], tl.trans(block), mask=tl.trans(mask))


@triton.jit(do_not_specialize=["steps", "channels"])
def causal_filter(x, taps, y, steps, channels, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute y[t, c] = sum over w < 4 of x[t - w, c] * taps[w, c], with zeros before the start."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for back in range(4):
        weight = tl.load(taps + back * channels + c, mask=c < channels, other=0.0)
        inside = (t[:, None] >= back) & (t[:, None] < steps) & (c[None, :] < channels)
        total += tl.load(x + (t[:, None] - back) * channels + c[None, :], mask=inside, other=0.0) * weight[None, :]
    tl.store(y + t[:, None] * channels + c[None, :], total, mask=(t[:, None] < steps) & (c[None, :] < channels))


@dataclass(frozen=True)
class OwnCase:
    """A kernel, its configurations, and shapes to tune one after the other."""

    name: str
    kernel: Any
    configs: tuple[Any, ...]
    key: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arguments: Callable[[Any, tuple[int, ...]], tuple[Any, ...]]
    grid: Callable[[tuple[int, ...]], Callable[[Any], tuple[int, ...]]]

    def with_random_sizes(self, seed: int) -> OwnCase:
        """Return the case with other sizes, from half to twice as large."""
        chance = random.Random(seed)
        shapes = tuple(tuple(round(n * 2.0 ** chance.uniform(-1, 1)) for n in shape) for shape in self.shapes)
        return dataclasses.replace(self, shapes=shapes)


def _box_configs() -> tuple[Any, ...]:
    sizes = product((1, 2, 4, 8, 16), (32, 64, 128, 256, 512), (1, 2, 4, 8))
    return tuple(
        triton.Config({"BLOCK_H": h, "BLOCK_W": w}, num_warps=warps, num_stages=2)
        for h, w, warps in sizes
        if 1 <= h * w // (32 * warps) <= 64
    )


def _difference_configs() -> tuple[Any, ...]:
    sizes = product((8, 16, 32, 64), (8, 16, 32, 64), (8, 16, 32), (2, 4, 8))
    return tuple(
        triton.Config({"BLOCK_P": p, "BLOCK_C": c, "BLOCK_D": d}, num_warps=warps, num_stages=2)
        for p, c, d, warps in sizes
        if 8 <= p * c * d // (32 * warps) <= 256
    )


def _block_configs(first: str, second: str) -> tuple[Any, ...]:
    sizes = product((1, 2, 4, 8, 16, 32, 64, 128), (16, 32, 64, 128, 256), (1, 2, 4, 8))
    return tuple(
        triton.Config({first: a, second: b}, num_warps=warps, num_stages=2)
        for a, b, warps in sizes
        if 1 <= a * b // (32 * warps) <= 64
    )


def _transposed_arguments(torch: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    x = torch.randn(shape, device="cuda")
    return x, torch.empty(shape[::-1], device="cuda"), *shape


def _filter_arguments(torch: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    x, taps = torch.randn(shape, device="cuda"), torch.randn((4, shape[1]), device="cuda")
    return x, taps, torch.empty_like(x), *shape


def _box_arguments(torch: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    x = torch.randn(shape, device="cuda")
    return x, torch.empty_like(x), *shape


def _difference_arguments(torch: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    points, centres, depth = shape
    a, b = torch.randn((points, depth), device="cuda"), torch.randn((centres, depth), device="cuda")
    return a, b, torch.empty((points, centres), device="cuda"), points, centres, depth


CASES = (
    OwnCase(
        "box filter",
        box_filter,
        _box_configs(),
        ("height", "width"),
        ((1080, 1920), (512, 512), (3000, 400), (2160, 3840), (700, 5000), (1500, 1500), (256, 8000), (4000, 3000)),
        _box_arguments,
        lambda shape: lambda meta: (math.ceil(shape[0] / meta["BLOCK_H"]), math.ceil(shape[1] / meta["BLOCK_W"])),
    ),
    OwnCase(
        "absolute differences",
        absolute_differences,
        _difference_configs(),
        ("points", "centres", "depth"),
        ((2000, 256, 64), (500, 500, 128), (8000, 64, 32), (1500, 1000, 96), (4000, 300, 48), (300, 2000, 200)),
        _difference_arguments,
        lambda shape: lambda meta: (math.ceil(shape[0] / meta["BLOCK_P"]), math.ceil(shape[1] / meta["BLOCK_C"])),
    ),
    OwnCase(
        "transposition",
        transposition,
        _block_configs("BLOCK_R", "BLOCK_C"),
        ("rows", "cols"),
        ((2048, 2048), (300, 9000), (5000, 512), (1000, 1000), (4096, 1500), (777, 3333), (8000, 2500)),
        _transposed_arguments,
        lambda shape: lambda meta: (math.ceil(shape[0] / meta["BLOCK_R"]), math.ceil(shape[1] / meta["BLOCK_C"])),
    ),
    OwnCase(
        "causal filter",
        causal_filter,
        _block_configs("BLOCK_T", "BLOCK_C"),
        ("steps", "channels"),
        ((2048, 1536), (8000, 256), (512, 4096), (4096, 768), (1000, 1000), (16000, 640), (300, 10000)),
        _filter_arguments,
        lambda shape: lambda meta: (math.ceil(shape[0] / meta["BLOCK_T"]), math.ceil(shape[1] / meta["BLOCK_C"])),
    ),
)


def _bench(call: Callable[[], Any], quantiles: Any = None) -> Any:
    # Launches run in a CUDA graph: single launches take a few microseconds, too little for two events.
    return triton.testing.do_bench_cudagraph(call, rep=10, quantiles=quantiles)


def run_case(case: OwnCase, cache: str) -> dict[str, Any]:
    """Tune each shape with `autotune`, then measure every configuration; report ratio, measurements and seconds."""
    import time

    import torch

    from tilewise.gpu.autotune import autotune

    tuned = autotune(list(case.configs), list(case.key), cache=cache, do_bench=_bench)(case.kernel)
    rows: list[dict[str, Any]] = []
    for shape in case.shapes:
        arguments, grid = case.arguments(torch, shape), case.grid(shape)
        start = time.perf_counter()
        tuned[grid](*arguments)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        chosen_config = tuned.best_config
        times = _time_all(case, grid, arguments)
        finalists = (chosen_config, *sorted(times, key=times.__getitem__)[:3])
        again = {config: _time(case, grid, arguments, config) for config in finalists}
        decision = tuned.session.last
        rows.append(
            {
                "shape": shape,
                "measured": decision.measurements if decision else 0,
                "configs": len(case.configs),
                "ratio": min(again.values()) / again[chosen_config],
                "seconds": seconds,
                "times_us": [round(1e3 * times[c], 4) if c in times else None for c in case.configs],
            }
        )
    later = [row["ratio"] for row in rows[3:]]
    return {
        "after_three_shapes": math.exp(sum(math.log(r) for r in later) / len(later)),
        "measured_after_three_shapes": sum(row["measured"] for row in rows[3:]) / len(later),
        "shapes": rows,
    }


def _time_all(case: OwnCase, grid: Any, arguments: tuple[Any, ...]) -> dict[Any, float]:
    times = {}
    for config in case.configs:
        try:
            times[config] = _time(case, grid, arguments, config)
        except Exception as error:  # the configuration does not fit this GPU
            print(f"{case.name}: {config}: {type(error).__name__}", flush=True)
    return times


def _time(case: OwnCase, grid: Any, arguments: tuple[Any, ...], config: Any) -> float:
    quantiles = _bench(lambda: case.kernel[grid](*arguments, **config.all_kwargs()), quantiles=(0.5, 0.2, 0.8))
    return float(quantiles[0])
