"""The families `matmul` and `batched_matmul`: both run `kernels/matmul.py`, and share its binaries.

A layout has a letter per operand: n as written, t transposed in memory ("nt" is PyTorch's Linear: x @ weight.T).
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
from tilewise.gpu.families.family import (
    DTYPES,
    ELEMENT_BYTES,
    MAX_ELEMENTS,
    Binary,
    Launch,
    Operands,
    draw,
    guarded_output,
    unit_of,
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
    """Block sizes, warps and stages that keep a thread busy, its accumulator in registers and the stages in memory."""
    depths = (32, 64, 128) if element_bytes == 2 else (16, 32, 64)
    for block_m, block_n, block_k in product((16, 32, 64, 128, 256), (16, 32, 64, 128, 256), depths):
        for warps in (4, 8):
            per_thread = block_m * block_n // (32 * warps)
            if not 4 <= per_thread <= 128 or (warps == 8 and per_thread < 16):
                continue
            for stages in (2, 3, 4, 5):
                if (block_m + block_n) * block_k * element_bytes * stages <= 227 * 1024:
                    yield block_m, block_n, block_k, warps, stages


@cache
def _space(element_bytes: int) -> tuple[Config, ...]:
    """The default, then the others. Stages are thinned: two of them per tile and warp count, chosen by the tile."""
    depth = DEFAULT["block_k"] if element_bytes == 2 else DEFAULT["block_k"] // 2
    default = Config({**DEFAULT, "block_k": depth})
    chosen = [default]
    for block_m, block_n, block_k, warps, stages in _tiles(element_bytes):
        parity = (block_m.bit_length() + block_n.bit_length() + block_k.bit_length() + warps // 4) % 2
        if stages % 2 != parity and (block_m, block_n, block_k, warps, stages) != (128, 128, depth, 8, 3):
            continue
        for group in GROUPS:
            config = Config.of(
                block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages, group=group
            )
            if config != default:
                chosen.append(config)
    return tuple(chosen)


class Matmul:
    """c = epilogue(a @ b): a (m, k), b (k, n)."""

    name = "matmul"
    sizes: tuple[str, ...] = ("m", "n", "k")
    fits_by = ("dtype",)  # what of a problem `misfit` looks at
    choices: Mapping[str, Sequence[Value]] = {
        "dtype": ("bf16", "fp16", "tf32"),
        "epilogue": EPILOGUES,
        "layout": LAYOUTS,
    }

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        batch, m, n, k = _shape(problem)
        if max(m * k, k * n, m * n) > MAX_ELEMENTS or batch > 65535:
            raise ConfigurationError(f"A {self.name} of {batch} x {m} x {n} x {k} is too large to measure.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        return _space(ELEMENT_BYTES[problem.word("dtype")])

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        tile = (config.size("block_m") + config.size("block_n")) * config.size("block_k")
        needed = tile * ELEMENT_BYTES[problem.word("dtype")] * config.size("stages")
        return f"shared memory: {needed} bytes of {shared_bytes}" if needed > shared_bytes else None

    def binary(self, problem: Problem, config: Config) -> Binary:
        words = (problem.word("dtype"), problem.word("layout"), problem.word("epilogue"))
        return _binary(*words, _units(problem), config)

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        batch, m, n, k = _shape(problem)
        layout, dtype = problem.word("layout"), problem.word("dtype")
        shapes = {"a": (batch, k, m) if layout[0] == "t" else (batch, m, k)}
        shapes["b"] = (batch, n, k) if layout[1] == "t" else (batch, k, n)
        inputs = {
            name: draw(torch, shape, dtype, device, generator) for name, shape in {**shapes, "bias": (n,)}.items()
        }
        out, guarded = guarded_output(torch, (batch, m, n), dtype, device)
        residual = problem.word("epilogue") == "residual"
        inputs["residual"] = draw(torch, (batch, m, n), dtype, device, generator) if residual else inputs["bias"]
        return Operands(inputs, out, guarded)

    def bytes_moved(self, problem: Problem) -> int:
        batch, m, n, k = _shape(problem)
        outputs = 2 if problem.word("epilogue") == "residual" else 1
        return batch * (m * k + k * n + outputs * m * n) * ELEMENT_BYTES[problem.word("dtype")]

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        layout, epilogue = problem.word("layout"), problem.word("epilogue")
        a, b = operands.inputs["a"].float(), operands.inputs["b"].float()
        value = (a.mT if layout[0] == "t" else a) @ (b.mT if layout[1] == "t" else b)
        # Sums of k products of size one, in any order; tensor cores cut the last bits. One lost product would cost 1.
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
        batch, m, n, k = _shape(problem)
        unit_m, unit_n, unit_k = _units(problem)
        programs = math.ceil(m / config.size("block_m")) * math.ceil(n / config.size("block_n"))
        tensors = (*(operands.inputs[name] for name in ("a", "b")), operands.out)
        extras = (operands.inputs["bias"], operands.inputs["residual"])
        sizes = (m // unit_m, n // unit_n, k // unit_k, m * k // unit_k, k * n // unit_k, m * n // unit_n)
        return Launch((programs, batch, 1), (*tensors, *extras, *sizes, config.size("group")))

    def graph(self, problem: Problem) -> KernelGraph:
        _, m, n, k = _shape(problem)
        sizes = (problem.size("batch") if "batch" in problem else 0, m, n, k)
        return matmul_graph(problem.word("dtype"), sizes, problem.word("layout"), problem.word("epilogue"))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        m, n, k = (config.size(name) for name in ("block_m", "block_n", "block_k"))
        lead = [1] if "batch" in problem else []
        return {"kernel": [*lead, k, n], "output": [*lead, m, n], "input": [*lead, m, k]}


def batched_matmul() -> Matmul:
    """c[i] = a[i] @ b[i] for i in batch."""
    family = Matmul()
    family.name, family.sizes = "batched_matmul", ("batch", "m", "n", "k")
    family.choices = {**Matmul.choices, "epilogue": ("none",)}
    return family


def _shape(problem: Problem) -> tuple[int, int, int, int]:
    batch = problem.size("batch") if "batch" in problem else 1
    return batch, problem.size("m"), problem.size("n"), problem.size("k")


@cache
def _binary(dtype: str, layout: str, epilogue: str, units: tuple[int, int, int], config: Config) -> Binary:
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
    """What m, n and k are multiples of; m matters only where it is the contiguous one."""
    _, m, n, k = _shape(problem)
    dtype = problem.word("dtype")
    return unit_of(m, dtype) if problem.word("layout")[0] == "t" else 1, unit_of(n, dtype), unit_of(k, dtype)
