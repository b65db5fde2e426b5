"""The families `matmul` and `batched_matmul`: both run `kernels/matmul.py` and share its binaries.

A layout has one letter per operand: "n" for row-major, "t" for column-major. PyTorch's Linear, x @ weight.T, is "nt".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import matmul_graph
from tilewise.errors import ConfigurationError
from tilewise.gpu.devices import H200
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

EPILOGUES = ("none", "bias", "bias_relu", "bias_gelu", "residual")
LAYOUTS = ("nn", "nt", "tn", "tt")
GROUPS = (1, 8)
DEFAULT = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3, "group": 8}
_TENSORS = ("a", "b", "c", "bias", "residual")
_INTEGERS = ("m_units", "n_units", "k_units", "a_batch", "b_batch", "c_batch", "group")


def _tiles(element_bytes: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (block_m, block_n, block_k, warps, stages) whose tile fits into registers and shared memory."""
    block_ks = (32, 64, 128) if element_bytes == 2 else (16, 32, 64)
    for block_m, block_n, block_k in product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), block_ks):
        for warps in (4, 8):
            accumulators = block_m * block_n // (32 * warps)  # per thread
            if not 4 <= accumulators <= 128 or (warps == 8 and accumulators < 16):
                continue
            for stages in (2, 3, 4, 5):
                if (block_m + block_n) * block_k * element_bytes * stages <= H200.shared_bytes_per_block:
                    yield block_m, block_n, block_k, warps, stages


@cache
def _space(element_bytes: int) -> tuple[Config, ...]:
    """List the configurations for operands with elements of this many bytes, the default first.

    Each tile and warp count has two of the four stage counts, even or odd ones, to halve the space.
    """
    default_block_k = DEFAULT["block_k"] if element_bytes == 2 else DEFAULT["block_k"] // 2
    default = Config({**DEFAULT, "block_k": default_block_k})
    configs = [default]
    for block_m, block_n, block_k, warps, stages in _tiles(element_bytes):
        # Tiles alternate between odd and even stage counts, so that both are sampled evenly over the space.
        parity = (block_m.bit_length() + block_n.bit_length() + block_k.bit_length() + warps // 4) % 2
        if stages % 2 != parity and (block_m, block_n, block_k, warps, stages) != (128, 128, default_block_k, 8, 3):
            continue
        for group in GROUPS:
            config = Config.of(
                block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages, group=group
            )
            if config != default:
                configs.append(config)
    return tuple(configs)


class TritonMatmul:
    """Matrix product, c = epilogue(a @ b), a (m, k), b (k, n)."""

    name = "matmul"
    takes_columns = True
    sizes: tuple[str, ...] = ("m", "n", "k")
    fits_by = ("dtype",)  # the fields of a problem that `misfit` reads
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("bf16", "fp16", "tf32"),
        "epilogue": EPILOGUES,
        "layout": LAYOUTS,
    }

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a product's sizes and settings; too large ones raise `ConfigurationError`."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        batch, m, n, k = _shape(problem)
        if max(m * k, k * n, m * n) > MAX_ELEMENTS or batch > 65535:
            raise ConfigurationError(f"A {self.name} of {batch} x {m} x {n} x {k} is too large to measure.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        return _space(ELEMENT_BYTES[problem.word("dtype")])

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Return why a configuration cannot run on this GPU (shared memory), or None."""
        tile = (config.size("block_m") + config.size("block_n")) * config.size("block_k")
        stage_bytes = tile * ELEMENT_BYTES[problem.word("dtype")] * config.size("stages")
        return f"shared memory: {stage_bytes} bytes of {shared_bytes}" if stage_bytes > shared_bytes else None

    def binary(self, problem: Problem, config: Config) -> Binary:
        words = (problem.word("dtype"), problem.word("layout"), problem.word("epilogue"))
        return _binary(*words, _units(problem), config)

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random a, b, bias and residual, and a guarded output; a batch dimension comes first."""
        batch, m, n, k = _shape(problem)
        layout, dtype = problem.word("layout"), problem.word("dtype")
        shapes = {"a": (batch, k, m) if layout[0] == "t" else (batch, m, k)}
        shapes["b"] = (batch, n, k) if layout[1] == "t" else (batch, k, n)
        inputs = {
            name: random_tensor(torch, shape, dtype, device, generator)
            for name, shape in {**shapes, "bias": (n,)}.items()
        }
        out, guarded = guarded_output(torch, (batch, m, n), dtype, device)
        residual = problem.word("epilogue") == "residual"
        inputs["residual"] = (
            random_tensor(torch, (batch, m, n), dtype, device, generator) if residual else inputs["bias"]
        )
        return Operands(inputs, out, guarded)

    def bytes_moved(self, problem: Problem) -> int:
        """Count the bytes of both operands, of the output and of the residual if there is one."""
        batch, m, n, k = _shape(problem)
        outputs = 2 if problem.word("epilogue") == "residual" else 1
        return batch * (m * k + k * n + outputs * m * n) * ELEMENT_BYTES[problem.word("dtype")]

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute the product and its epilogue in float32; return it with its tolerance."""
        layout, epilogue = problem.word("layout"), problem.word("epilogue")
        a, b = operands.inputs["a"].float(), operands.inputs["b"].float()
        value = (a.mT if layout[0] == "t" else a) @ (b.mT if layout[1] == "t" else b)
        # Sums of k products of magnitude 1; tensor cores truncate the last bits. A missing product would cost 1.
        slack = 1e-4 + 2e-4 * math.sqrt(problem.size("k"))
        if epilogue.startswith("bias"):
            value = value + operands.inputs["bias"].float()
        if epilogue == "bias_relu":
            value = value.relu_()
        if epilogue == "bias_gelu":
            value = torch.nn.functional.gelu(value)
        if epilogue == "residual":
            value = value + operands.inputs["residual"].float()
        rounding = {"bf16": 2.0**-7, "fp16": 2.0**-10, "tf32": 2.0**-18}[problem.word("dtype")]
        return Expected(value, value.abs() * rounding + slack)

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it: grid (a program per output tile and batch item) and arguments."""
        batch, m, n, k = _shape(problem)
        unit_m, unit_n, unit_k = _units(problem)
        programs = math.ceil(m / config.size("block_m")) * math.ceil(n / config.size("block_n"))
        tensors = (*(operands.inputs[name] for name in ("a", "b")), operands.out)
        epilogue_tensors = (operands.inputs["bias"], operands.inputs["residual"])
        sizes = (m // unit_m, n // unit_n, k // unit_k, m * k // unit_k, k * n // unit_k, m * n // unit_n)
        return Launch((programs, batch, 1), (*tensors, *epilogue_tensors, *sizes, config.size("group")))

    def graph(self, problem: Problem) -> KernelGraph:
        """Describe the product and its epilogue to the cost model."""
        _, m, n, k = _shape(problem)
        sizes = (problem.size("batch") if "batch" in problem else 0, m, n, k)
        return matmul_graph(problem.word("dtype"), sizes, problem.word("layout"), problem.word("epilogue"))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """Return the tile of weights ("kernel"), output and input of one program, a size per dimension."""
        m, n, k = (config.size(name) for name in ("block_m", "block_n", "block_k"))
        lead = [1] if "batch" in problem else []
        return {"kernel": [*lead, k, n], "output": [*lead, m, n], "input": [*lead, m, k]}


def batched_matmul() -> TritonMatmul:
    """Return the kernel family of batched products, c[i] = a[i] @ b[i]: problems, configurations and data."""
    family = TritonMatmul()
    family.name, family.sizes = "batched_matmul", ("batch", "m", "n", "k")
    family.choices = {**TritonMatmul.choices, "epilogue": ("none",)}
    return family


def _shape(problem: Problem) -> tuple[int, int, int, int]:
    """Return batch, m, n and k."""
    batch = problem.size("batch") if "batch" in problem else 1
    return batch, problem.size("m"), problem.size("n"), problem.size("k")


@cache
def _binary(dtype: str, layout: str, epilogue: str, units: tuple[int, int, int], config: Config) -> Binary:
    """Describe one compilation of `matmul_kernel`: types and constants; `units` are powers of two dividing m, n, k."""
    constants: tuple[tuple[str, Value | bool], ...] = (
        *zip(("UNIT_M", "UNIT_N", "UNIT_K"), units, strict=True),
        ("A_TRANSPOSED", layout[0] == "t"),
        ("B_TRANSPOSED", layout[1] == "t"),
        ("EPILOGUE", epilogue),
        ("BLOCK_M", config.size("block_m")),
        ("BLOCK_N", config.size("block_n")),
        ("BLOCK_K", config.size("block_k")),
    )
    element = f"*{DTYPES[dtype]}"
    signature = (*((name, element) for name in _TENSORS), *((name, "i32") for name in _INTEGERS))
    return Binary("matmul:matmul_kernel", signature, constants, config.size("warps"), config.size("stages"))


@lru_cache(maxsize=64)
def _units(problem: Problem) -> tuple[int, int, int]:
    """Return powers of two that divide m, n and k (m only if a is column-major), which allow wide loads."""
    _, m, n, k = _shape(problem)
    dtype = problem.word("dtype")
    unit_m = alignment_unit(m, dtype) if problem.word("layout")[0] == "t" else 1
    return unit_m, alignment_unit(n, dtype), alignment_unit(k, dtype)
