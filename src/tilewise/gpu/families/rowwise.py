"""The families that work along the rows of a matrix: `softmax`, `layer_norm`, `rms_norm` and `reduction`.

They are memory-bound, so the runtime depends on how many bytes are in flight: rows and columns per program, warps and
pipeline stages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import norm_graph, reduction_graph, softmax_graph
from tilewise.errors import ConfigurationError
from tilewise.gpu.families.family import (
    DTYPES,
    ELEMENT_BYTES,
    MAX_ELEMENTS,
    Binary,
    Launch,
    Operands,
    alignment_unit,
    guarded_output,
    random_tensor,
)
from tilewise.store.problem import Config, Problem, Value, read_spec
from tilewise.tune.families.registry import Expected

_BLOCK_COLS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Relative rounding error of a result, by dtype.
_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}


@cache
def _space(rows_choices: tuple[int, ...], column_choices: tuple[int, ...]) -> tuple[Config, ...]:
    """Return configurations with these block sizes that have 1 to 64 elements per thread, and 1 or 3 stages."""
    configs = []
    for rows, cols, warps, stages in product(rows_choices, column_choices, (1, 2, 4, 8, 16), (1, 3)):
        if 1 <= rows * cols // (32 * warps) <= 64:
            configs.append(Config.of(block_rows=rows, block_cols=cols, warps=warps, stages=stages))
    return tuple(configs)


@cache
def _binary(
    kernel: str,
    tensors: tuple[str, ...],
    dtype: str,
    constants: tuple[tuple[str, Value | bool], ...],
    config: Config,
) -> Binary:
    """Describe one compilation of a row-wise kernel: its tensors, all of one dtype, constants, warps and stages."""
    signature = (*((name, f"*{DTYPES[dtype]}") for name in tensors), ("rows", "i32"), ("col_units", "i32"))
    blocks = (
        ("BLOCK_ROWS", config.size("block_rows")),
        ("BLOCK_COLS", config.size("block_cols")),
        ("STAGES", config.size("stages")),
    )
    return Binary(f"rowwise:{kernel}", signature, (*constants, *blocks), config.size("warps"), config.size("stages"))


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@cache
def _normalisation_space(row_block: int) -> tuple[Config, ...]:
    """List configurations for rows that fit into a block of `row_block` columns, the default first.

    A block that holds the whole row has no loop, so its number of stages does not matter.
    """
    default = _default_config(row_block)
    configs = [default]
    for config in _space((1, 2, 4, 8, 16), _BLOCK_COLS):
        block = config.size("block_cols")
        if (block < row_block or (block == row_block and config.size("stages") == 1)) and config != default:
            configs.append(config)
    return tuple(configs)


@cache
def _row_reduction_space(max_cols: int) -> tuple[Config, ...]:
    """List configurations for reducing rows, with blocks of at most `max_cols` columns, the default first."""
    default = _default_config(min(max_cols, 4096))
    space = _space((1, 2, 4, 8, 16), _BLOCK_COLS)
    return (default, *(c for c in space if c.size("block_cols") <= max_cols and c != default))


@cache
def _column_reduction_space(max_rows: int, max_cols: int) -> tuple[Config, ...]:
    """List configurations for reducing columns, with blocks no larger than the matrix, the default first."""
    default = Config.of(block_rows=32, block_cols=min(128, max_cols), warps=4, stages=1)
    space = _space((8, 16, 32, 64, 128, 256), (16, 32, 64, 128, 256))
    fits = (c for c in space if c.size("block_cols") <= max_cols and c.size("block_rows") <= max(max_rows, 8))
    return (default, *(c for c in fits if c != default))


class _Rowwise:
    """Base of the row-wise families: a (rows, cols) input, one program per block of rows."""

    name = ""
    takes_columns = True
    sizes = ("rows", "cols")
    fits_by = ()  # every configuration fits every problem
    choices: Mapping[str, Sequence[Value]] = {"dtype": ("bf16", "fp32", "fp16")}
    rounding_slack = 1e-5

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check the sizes and settings of an operation on a (rows, cols) matrix."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        if problem.size("rows") * problem.size("cols") > MAX_ELEMENTS:
            raise ConfigurationError(f"A {self.name} of {problem.size('rows')} x {problem.size('cols')} is too large.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List configurations whose block holds the whole row or is narrower than it."""
        return _normalisation_space(max(_next_power_of_two(problem.size("cols")), _BLOCK_COLS[0]))

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        return None

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random inputs and an output whose buffer shows writes past its end."""
        rows, cols, dtype = problem.size("rows"), problem.size("cols"), problem.word("dtype")
        shapes = {"x": (rows, cols), **self._vectors(cols)}
        inputs = {name: random_tensor(torch, shape, dtype, device, generator) for name, shape in shapes.items()}
        out, guarded = guarded_output(torch, self._output_shape(problem), dtype, device)
        return Operands(inputs, out, guarded)

    def _vectors(self, cols: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the operands other than x by name, such as the weight's."""
        return {}

    def _output_shape(self, problem: Problem) -> tuple[int, ...]:
        return (problem.size("rows"), problem.size("cols"))

    def bytes_moved(self, problem: Problem) -> int:
        elements = problem.size("rows") * problem.size("cols") + math.prod(self._output_shape(problem))
        return elements * ELEMENT_BYTES[problem.word("dtype")]

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it: grid (a program per `block_rows` rows) and arguments."""
        rows, cols = problem.size("rows"), problem.size("cols")
        tensors = (operands.inputs["x"], operands.out, *(operands.inputs[name] for name in self._vectors(cols)))
        grid = (math.ceil(rows / config.size("block_rows")), 1, 1)
        return Launch(grid, (*tensors, rows, cols // alignment_unit(cols, problem.word("dtype"))))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        block = [config.size("block_rows"), config.size("block_cols")]
        return {"kernel": [], "output": block, "input": block}

    def _binary(self, kernel: str, problem: Problem, config: Config, **constants: Value | bool) -> Binary:
        """Describe the compilation of `kernel`: tensor dtypes, compile-time constants, warps and stages."""
        tensors = ("x", "y", *self._vectors(problem.size("cols")))
        constexprs = {**constants, "COL_UNIT": alignment_unit(problem.size("cols"), problem.word("dtype"))}
        if kernel != "reduce_kernel":
            constexprs["SINGLE"] = config.size("block_cols") >= problem.size("cols")
        return _binary(kernel, tensors, problem.word("dtype"), tuple(constexprs.items()), config)

    def _with_tolerance(self, problem: Problem, value: Any) -> Expected:
        """Return the correct result with the tolerance of the problem's dtype."""
        return Expected(value, value.abs() * (2 * _ROUNDING[problem.word("dtype")]) + self.rounding_slack)


class Normalisation(_Rowwise):
    """Normalisation of each row of x.

    - `softmax`
    - `layer_norm`: (x - mean) / sqrt(variance + 1e-5) * weight + bias
    - `rms_norm`: x / sqrt(mean of squares + 1e-5) * weight
    """

    def __init__(self, name: str, rounding_slack: float) -> None:
        self.name, self.rounding_slack = name, rounding_slack

    def _vectors(self, cols: int) -> dict[str, tuple[int, ...]]:
        return {} if self.name == "softmax" else {"weight": (cols,), "bias": (cols,)}

    def binary(self, problem: Problem, config: Config) -> Binary:
        """Describe the compiled kernel of a softmax, layer norm or RMS norm."""
        if self.name == "softmax":
            return self._binary("softmax_kernel", problem, config)
        return self._binary("norm_kernel", problem, config, RMS=self.name == "rms_norm")

    def graph(self, problem: Problem) -> KernelGraph:
        sizes = problem.word("dtype"), problem.size("rows"), problem.size("cols")
        return softmax_graph(*sizes) if self.name == "softmax" else norm_graph(*sizes, rms=self.name == "rms_norm")

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute the correct result of a problem in float32 from its operands; return it with a tolerance."""
        x = operands.inputs["x"].float()
        if self.name == "softmax":
            return self._with_tolerance(problem, x.softmax(-1))
        weight, bias = (operands.inputs[name].float() for name in ("weight", "bias"))
        if self.name == "rms_norm":
            return self._with_tolerance(problem, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
        return self._with_tolerance(problem, torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5))


softmax, layer_norm, rms_norm = (
    functools.partial(Normalisation, name, slack)
    for name, slack in (("softmax", 1e-6), ("layer_norm", 1e-4), ("rms_norm", 1e-4))
)


class TritonReduction(_Rowwise):
    """Sum or maximum of x along an axis: axis 1 gives one number per row, axis 0 one per column."""

    name = "reduction"
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("bf16", "fp32", "fp16"),
        "axis": (1, 0),
        "operation": ("sum", "max"),
    }

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List block sizes and warps for a reduction along rows (axis 1) or columns (axis 0)."""
        rows, cols = (_next_power_of_two(problem.size(name)) for name in ("rows", "cols"))
        if problem.size("axis") == 1:
            return _row_reduction_space(max(cols, _BLOCK_COLS[0]))
        return _column_reduction_space(rows, max(cols, 32))

    def _output_shape(self, problem: Problem) -> tuple[int, ...]:
        return (problem.size("rows" if problem.size("axis") == 1 else "cols"),)

    def binary(self, problem: Problem, config: Config) -> Binary:
        axis, operation = problem.size("axis"), problem.word("operation")
        return self._binary("reduce_kernel", problem, config, AXIS=axis, OPERATION=operation)

    def graph(self, problem: Problem) -> KernelGraph:
        sizes = (problem.size("rows"), problem.size("cols"), problem.size("axis"))
        return reduction_graph(problem.word("dtype"), *sizes, problem.word("operation"))

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute the sum or maximum with PyTorch; return it with its tolerance."""
        x, axis = operands.inputs["x"].float(), problem.size("axis")
        if problem.word("operation") == "max":
            return self._with_tolerance(problem, x.amax(axis))
        # Sums in another order differ by an error that grows with the root of their length.
        expected = self._with_tolerance(problem, x.double().sum(axis).float())
        return Expected(expected.value, expected.bound + 3e-6 * x.shape[axis] ** 0.5)

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it; a reduction along axis 0 has a program per column block."""
        row_launch = super().launch(problem, config, operands)
        if problem.size("axis") == 1:
            return row_launch
        return Launch((math.ceil(problem.size("cols") / config.size("block_cols")), 1, 1), row_launch.arguments)

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        block = [config.size("block_rows"), config.size("block_cols")]
        return {"kernel": [], "output": [block[1 - problem.size("axis")]], "input": block}


def _default_config(cols: int) -> Config:
    """Return the usual hand-written setting: one row per program, warps by the row's length."""
    width = min(cols, _BLOCK_COLS[-1])
    return Config.of(block_rows=1, block_cols=width, warps=4 if width <= 2048 else 8, stages=1)
