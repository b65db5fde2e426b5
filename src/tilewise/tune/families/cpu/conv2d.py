"""The CPU family `conv2d`: the native convolution with its tile as the configuration.

The algorithm (direct, Winograd) is part of the configuration, like the tile. Filters and strides are square, and
padding is the same on all sides. The number of threads belongs to the problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.backend.numpy_ops import conv2d as numpy_conv2d
from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import conv_graph
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem, Value, read_spec
from tilewise.tune.families.cpu.family import (
    THREADS,
    Array,
    aligned_copies,
    all_tiles,
    at_most,
    config_for,
    normal,
    require_native,
    tile_for,
)
from tilewise.tune.families.registry import Expected

EPILOGUES = ("none", "bias", "bias_relu", "residual")
MAX_MULTIPLICATIONS = 1 << 33  # larger problems take too long to measure

config_of, tile_of = functools.partial(config_for, "conv2d"), functools.partial(tile_for, "conv2d")


class Conv2dFamily:
    """y = epilogue(conv2d(x, w)): x (batch, channels, height, width), w (filters, channels, kernel, kernel)."""

    name = "conv2d"
    takes_columns = True
    sizes: tuple[str, ...] = ("batch", "channels", "height", "width", "filters", "kernel")
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("fp32",),
        "stride": (1, 2, 3, 4),
        "padding": tuple(range(12)),
        "epilogue": EPILOGUES,
        "threads": THREADS,
    }

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a specification's sizes and fill in its defaults."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        rows, columns = _spatial(problem)
        if min(rows, columns) < 1:
            raise ConfigurationError("The filter of this conv2d is larger than its padded input.")
        if multiplications(problem) > MAX_MULTIPLICATIONS:
            raise ConfigurationError(
                f"A conv2d of {multiplications(problem):,} multiplications is too large to measure."
            )
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List all feasible tiles, the default first."""
        return all_tiles("conv2d", tile_shape(problem), problem.size("threads"))

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Draw a normally distributed input and filters, and the epilogue's operands."""
        x_shape, w_shape = _shapes(problem)
        draw = functools.partial(normal, rng)
        operands = {"x": draw(x_shape), "w": draw(w_shape)}
        if "bias" in problem.word("epilogue"):
            operands["bias"] = draw((w_shape[0],))
        if problem.word("epilogue") == "residual":
            operands["residual"] = draw((x_shape[0], w_shape[0], *_spatial(problem)))
        return aligned_copies(operands)

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """Compute the result in float64, with a tolerance that allows for Winograd's rounding."""
        value = numpy_conv2d(
            operands["x"].astype(np.float64), operands["w"].astype(np.float64), **_geometry(problem)
        )  # fmt: skip
        if "bias" in operands:
            value = value + operands["bias"][:, None, None]
        if "residual" in operands:
            value = value + operands["residual"]
        if problem.word("epilogue") == "bias_relu":
            value = np.maximum(value, 0)
        # Winograd's transforms amplify rounding about tenfold, and the rounding of a long sum grows with its length; a
        # lost product would cost about 0.5.
        inner = problem.size("channels") * problem.size("kernel") ** 2
        return Expected(value, 1e-4 + 2e-5 * float(np.sqrt(inner)) + 3e-7 * inner)

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """Return a function that runs the native convolution on the operands with the tile `config`."""
        conv2d, tile, x, w = require_native().conv2d, tile_of(config), operands["x"], operands["w"]
        extras: dict[str, Any] = {name: operands[name] for name in ("bias", "residual") if name in operands}
        if problem.word("epilogue").endswith("relu"):
            extras["activation"] = "relu"
        return lambda: conv2d(x, w, tile=tile, **_geometry(problem), **extras)

    def graph(self, problem: Problem) -> KernelGraph:
        """Describe the convolution and its epilogue to the cost model."""
        x_shape, w_shape = _shapes(problem)
        geometry = _geometry(problem)
        return conv_graph(x_shape, w_shape, geometry["stride"], geometry["padding"], 1, problem.word("epilogue"))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """Return the tile of filters ("kernel"), output and input that one block computes, a size per dimension."""
        rows, columns = _spatial(problem)
        winograd: Any = config.size("winograd")  # a number, or a column of them
        side = 1 + 3 * (winograd == 1) + (winograd == 2)  # outputs of a unit
        height = at_most(-(-config.size("block_m") // -(-columns // side)) * side, rows)
        filters = at_most(config.size("block_n"), problem.size("filters"))
        channels, kernel, stride = (problem.size(name) for name in ("channels", "kernel", "stride"))
        reach = [(extent - 1) * stride + kernel for extent in (height, columns)]
        return {
            "kernel": [filters, channels, kernel, kernel],
            "output": [1, filters, height, columns],
            "input": [1, channels, *reach],
        }


def multiplications(problem: Problem) -> int:
    """Return the number of multiplications by the direct algorithm."""
    (n, c, _, _), (o, _, kh, kw) = _shapes(problem)
    rows, columns = _spatial(problem)
    return n * o * rows * columns * c * kh * kw


def tile_shape(problem: Problem) -> tuple[int, ...]:
    """Return a problem's sizes as the tuple that `tile_space("conv2d", ...)` takes."""
    x_shape, w_shape = _shapes(problem)
    geometry = _geometry(problem)
    return (*x_shape, w_shape[0], *w_shape[2:], *geometry["stride"], *geometry["padding"], 1)


def _shapes(problem: Problem) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Shapes of the input (N, C, H, W) and of the filters (O, C, K, K)."""
    batch, channels, height, width, filters, kernel = (problem.size(name) for name in Conv2dFamily.sizes)
    return (batch, channels, height, width), (filters, channels, kernel, kernel)


def _geometry(problem: Problem) -> dict[str, tuple[int, int]]:
    """Return stride and padding as the keyword arguments of a convolution."""
    stride, padding = problem.size("stride"), problem.size("padding")
    return {"stride": (stride, stride), "padding": (padding, padding)}


def _spatial(problem: Problem) -> tuple[int, int]:
    """Return height and width of the result."""
    kernel, stride, padding = (problem.size(name) for name in ("kernel", "stride", "padding"))
    rows, columns = (
        (problem.size(name) + 2 * padding - kernel) // stride + 1 for name in ("height", "width")
    )  # fmt: skip
    return rows, columns
