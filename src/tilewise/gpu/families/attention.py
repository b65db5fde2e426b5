"""The family `attention`: the forward pass, causal or not; several query heads may share a key head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import attention_graph
from tilewise.errors import ConfigurationError
from tilewise.gpu.devices import H200
from tilewise.gpu.families.family import (
    DTYPES,
    ELEMENT_BYTES,
    Binary,
    Launch,
    Operands,
    guarded_output,
    random_tensor,
)
from tilewise.store.problem import Config, Problem, Value, read_spec
from tilewise.tune.families.registry import Expected


@cache
def _space(head: int) -> tuple[Config, ...]:
    """Return all configurations (block sizes, warps, stages) to consider for a head size, the default first."""
    default = Config.of(block_m=128, block_n=64, warps=4 if head <= 64 else 8, stages=3)
    configs = [default]
    for block_m, block_n, warps, stages in product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        # Registers hold the scores and the output, shared memory the queries and the pipelined keys and values.
        accumulators = block_m * (block_n + head) // (32 * warps)
        shared_bytes = 2 * block_n * head * 2 * stages + block_m * head * 2
        if not 8 <= accumulators <= 192 or shared_bytes > H200.shared_bytes_per_block or (warps == 8 and block_m < 64):
            continue
        if (block_m, block_n) == (16, 16) and stages > 2:
            continue
        config = Config.of(block_m=block_m, block_n=block_n, warps=warps, stages=stages)
        if config != default:
            configs.append(config)
    return tuple(configs)


class TritonAttention:
    """Attention, out = softmax(q k^T / sqrt(head)) v, over (batch, heads, length, head)."""

    name = "attention"
    takes_columns = True
    sizes = ("batch", "heads", "kv_heads", "queries", "keys")
    fits_by = ("dtype", "head")
    choices: Mapping[str, Sequence[Value]] = {"dtype": ("bf16", "fp16"), "head": (64, 128, 32), "causal": (0, 1)}

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a specification; `kv_heads` defaults to `heads` and `keys` to `queries`."""
        completed = {"kv_heads": spec.get("heads", 0), "keys": spec.get("queries", 0), **spec}
        problem = read_spec(self.name, completed, self.sizes, self.choices)
        if problem.size("heads") % problem.size("kv_heads"):
            raise ConfigurationError("heads of an attention problem must be a multiple of kv_heads.")
        if problem.size("causal") and problem.size("queries") > problem.size("keys"):
            raise ConfigurationError("A causal attention problem needs at least as many keys as queries.")
        if problem.size("batch") * problem.size("heads") > 65535:
            raise ConfigurationError("An attention problem may have at most 65535 heads over its batch.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        return _space(problem.size("head"))

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Return why a configuration cannot run on this GPU (shared memory), or None."""
        element = ELEMENT_BYTES[problem.word("dtype")]
        stage_bytes = 2 * config.size("block_n") * problem.size("head") * element * config.size("stages")
        return f"shared memory: {stage_bytes} bytes of {shared_bytes}" if stage_bytes > shared_bytes else None

    def binary(self, problem: Problem, config: Config) -> Binary:
        return _binary(problem.word("dtype"), problem.size("head"), bool(problem.size("causal")), config)

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random q, k and v, and an output in a larger buffer that reveals stray writes."""
        batch, heads, queries, head = (problem.size(name) for name in ("batch", "heads", "queries", "head"))
        dtype = problem.word("dtype")
        shapes = {
            "q": (batch, heads, queries, head),
            "k": (batch, problem.size("kv_heads"), problem.size("keys"), head),
            "v": (batch, problem.size("kv_heads"), problem.size("keys"), head),
        }
        inputs = {name: random_tensor(torch, shape, dtype, device, generator) for name, shape in shapes.items()}
        out, guarded = guarded_output(torch, shapes["q"], dtype, device)
        return Operands(inputs, out, guarded)

    def bytes_moved(self, problem: Problem) -> int:
        rows = 2 * problem.size("heads") * problem.size("queries") + 2 * problem.size("kv_heads") * problem.size("keys")
        return problem.size("batch") * rows * problem.size("head") * ELEMENT_BYTES[problem.word("dtype")]

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute attention in float32, batch item by batch item; return it with its tolerance."""
        queries, keys = problem.size("queries"), problem.size("keys")
        # One item at a time: the float32 scores of a whole batch may not fit into memory.
        sharing = problem.size("heads") // problem.size("kv_heads")
        values, norms = [], []
        for q, k, v in zip(*(operands.inputs[name] for name in ("q", "k", "v")), strict=True):  # (heads, length, head)
            k, v = k.float().repeat_interleave(sharing, 0), v.float().repeat_interleave(sharing, 0)
            scores = q.float() @ k.mT / math.sqrt(problem.size("head"))  # (heads, queries, keys)
            if problem.size("causal"):
                visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
                scores = scores.masked_fill_(~visible, float("-inf"))
            weights = scores.softmax(-1)
            values.append(weights @ v)
            norms.append(weights.square().sum(-1, keepdim=True).sqrt())
        value, weight_norm = torch.stack(values), torch.stack(norms)
        # The softmax weights are rounded to the operands' dtype before the second product. These errors are
        # independent, so their sum grows with the norm of the weights. The tolerance is eight such deviations plus the
        # rounding of the result.
        rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11}[problem.word("dtype")]
        return Expected(value, value.abs() * (2 * rounding) + weight_norm * (8 * rounding) + 1e-4)

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it: grid (a program per head and block of queries), arguments."""
        grid = (
            math.ceil(problem.size("queries") / config.size("block_m")),
            problem.size("batch") * problem.size("heads"),
            1,
        )
        tensors = (*(operands.inputs[name] for name in ("q", "k", "v")), operands.out)
        sharing = problem.size("heads") // problem.size("kv_heads")
        scale = 1.0 / math.sqrt(problem.size("head"))
        return Launch(grid, (*tensors, problem.size("queries"), problem.size("keys"), sharing, scale))

    def graph(self, problem: Problem) -> KernelGraph:
        sizes = [problem.size(name) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head")]
        return attention_graph(problem.word("dtype"), *sizes, causal=bool(problem.size("causal")))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        queries = [1, 1, config.size("block_m"), problem.size("head")]
        return {"kernel": [1, 1, config.size("block_n"), problem.size("head")], "output": queries, "input": queries}


@cache
def _binary(dtype: str, head: int, causal: bool, config: Config) -> Binary:
    """Describe one compilation of `attention_kernel`: argument types, compile-time constants, warps and stages."""
    element = f"*{DTYPES[dtype]}"
    signature = (
        *((name, element) for name in ("q", "k", "v", "out")),
        *((name, "i32") for name in ("queries", "keys", "sharing")),
        ("scale", "fp32"),
    )
    constants: tuple[tuple[str, Value | bool], ...] = (
        ("HEAD", head),
        ("CAUSAL", causal),
        ("BLOCK_M", config.size("block_m")),
        ("BLOCK_N", config.size("block_n")),
    )
    return Binary("attention:attention_kernel", signature, constants, config.size("warps"), config.size("stages"))
