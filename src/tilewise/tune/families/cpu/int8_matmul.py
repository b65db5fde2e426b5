"""The CPU family `int8_matmul`: the native integer product with its tile as the configuration.

uint8 activations times int8 weights, accumulated in int32. The weights are packed once, as in a quantized layer, and no
tile changes the packing. The epilogue is `none` (int32 sums), `bias` or `bias_relu` (float32), or `requantize` (uint8
for the next layer). Results must match NumPy exactly: integer sums do not round, and the floats round at the same
points.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import int8_matmul_graph
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem, Value, read_spec
from tilewise.tune.families.cpu.family import (
    THREADS,
    Array,
    aligned_copies,
    all_tiles,
    config_for,
    product_blocks,
    require_native,
    tile_for,
)
from tilewise.tune.families.registry import Expected

EPILOGUES = ("none", "bias", "bias_relu", "requantize")
MAX_MULTIPLICATIONS = 1 << 34  # larger problems take too long to measure
MAX_DEPTH = 1 << 16  # 65,536 * 255 * 128 < 2**31: sums cannot overflow int32

config_of, tile_of = functools.partial(config_for, "int8_matmul"), functools.partial(tile_for, "int8_matmul")
_ZERO_POINT = 117  # of the requantized result; arbitrary
_KINDS = {"none": 0, "bias": 1, "bias_relu": 1, "requantize": 2}


class _Operands(dict[str, Array]):
    """The operands by name, and the layer with packed weights, which all configurations share."""

    layer: Any


class Int8Matmul:
    """y = epilogue(x @ w): x (m, k) uint8, w (k, n) int8, accumulated in int32."""

    name = "int8_matmul"
    takes_columns = True
    sizes: tuple[str, ...] = ("m", "n", "k")
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("int8",),
        "epilogue": EPILOGUES,
        "threads": THREADS,
    }

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a specification's sizes and fill in its defaults."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        m, n, k = _sizes(problem)
        if m * n * k > MAX_MULTIPLICATIONS:
            raise ConfigurationError(f"An int8_matmul of {m} x {n} x {k} is too large to measure.")
        if k > MAX_DEPTH:
            raise ConfigurationError(f"An int8_matmul of k = {k} may exceed 32 bits; k is at most {MAX_DEPTH}.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List all feasible tiles, the default first."""
        return all_tiles("int8_matmul", _sizes(problem), problem.size("threads"))

    def operands(self, problem: Problem, rng: np.random.Generator) -> Mapping[str, Array]:
        """Draw uniform random bytes, and scales with which results use most of the uint8 range."""
        m, n, k = _sizes(problem)
        padded = -(-k // 4) * 4
        x = rng.integers(0, 256, (m, padded), dtype=np.uint8)
        arrays: dict[str, Array] = {
            "x": x,
            "w": rng.integers(-128, 128, (n, k), dtype=np.int8),
            "offset": rng.integers(-10_000, 10_000, n, dtype=np.int32),
            # A standard deviation of about 40, so that uint8 results use most of their range.
            "scale": rng.uniform(0.5, 1.5, n).astype(np.float32) * np.float32(40 / (1e4 * np.sqrt(k))),
            "bias": rng.standard_normal(n, dtype=np.float32),
            "row_scale": rng.uniform(0.5, 1.5, m).astype(np.float32),
        }
        operands = _Operands(aligned_copies(arrays))
        operands.layer = _packed(problem, operands)
        return operands

    def expected(self, problem: Problem, operands: Mapping[str, Array]) -> Expected:
        """Compute the exact result; `requantize` pads rows to multiples of four with the zero point."""
        k = problem.size("k")
        # Products of bytes and sums of 65,536 of them are exact in float64, and its matrix product is fast.
        sums = operands["x"][:, :k].astype(np.float64) @ operands["w"].T.astype(np.float64) + operands["offset"]
        if problem.word("epilogue") == "none":
            return Expected(sums, 0.0)
        value = sums.astype(np.float32) * operands["scale"]
        if problem.word("epilogue") == "requantize":
            rounded = np.rint(value).astype(np.float64) + _ZERO_POINT
            padded_bytes = np.full((len(rounded), -(-rounded.shape[1] // 4) * 4), float(_ZERO_POINT))
            padded_bytes[:, : rounded.shape[1]] = np.clip(rounded, 0, 255)
            return Expected(padded_bytes, 0.0)
        value = value * operands["row_scale"][:, None] + operands["bias"]
        if problem.word("epilogue") == "bias_relu":
            value = np.maximum(value, np.float32(0))
        return Expected(value.astype(np.float64), 0.0)

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Array]) -> Callable[[], Array]:
        """Return a function that runs the packed layer on the operands with the tile `config`."""
        layer = operands.layer if isinstance(operands, _Operands) else _packed(problem, operands)
        epilogue = problem.word("epilogue")
        linear, x, tile, kind = layer.linear, operands["x"], tile_of(config), _KINDS[epilogue]
        row_scale = operands["row_scale"] if kind == 1 else None
        relu = epilogue == "bias_relu"
        return lambda: linear(x, kind, row_scale, relu, tile)

    def graph(self, problem: Problem) -> KernelGraph:
        return int8_matmul_graph(*_sizes(problem), problem.word("epilogue"))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        return product_blocks(problem, config)


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.size("m"), problem.size("n"), problem.size("k")


def _packed(problem: Problem, operands: Mapping[str, Array]) -> Any:
    """Pack the weights of a problem into a native layer."""
    n, k = operands["w"].shape
    weights, bias = operands["w"].reshape(n, 1, 1, k), operands["bias"]
    packed_bias = bias if "bias" in problem.word("epilogue") else None
    layer = require_native().Int8Layer(weights, operands["offset"], operands["scale"], packed_bias, (1, 1), (0, 0))
    layer.set_output(_ZERO_POINT, 0, 255)
    return layer
