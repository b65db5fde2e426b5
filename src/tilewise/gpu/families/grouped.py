"""The families `grouped_matmul` (routed tokens times experts' weights) and `block_fp8_matmul`, of `kernels/grouped.py`.

A fused mixture-of-experts layer is two grouped products: tokens x hidden -> 2 x intermediate, and each routed row x
intermediate -> hidden. The configurations are those that vLLM's and SGLang's benchmark scripts search, so that a choice
can be written to their files; the default is the rule that vLLM uses without a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from tilewise.costmodel.hlo.graph import KernelGraph
from tilewise.costmodel.hlo.operations import matmul_graph
from tilewise.errors import ConfigurationError
from tilewise.gpu.devices import H200, find_device
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

UNIT = 16  # elements that n and k must be multiples of: 16 bytes of the smallest number type
SCALE_BLOCK = 128  # side of the square blocks of weights that share a scale, as in DeepSeek-V3
_TENSORS = ("a", "b", "c", "a_scale", "b_scale", "slots", "experts")
_INTEGERS = ("rows", "row_blocks", "n_units", "k_units", "top_k", "group")
_RESULTS = {"fp8": "bf16"}  # number type of the result where it is not that of the operands


@cache
def search_list(block_ns: tuple[int, ...], block_ks: tuple[int, ...], default: Config) -> tuple[Config, ...]:
    """List the configurations of vLLM's search for NVIDIA GPUs, the default first."""
    axes = ((16, 32, 64, 128, 256), block_ns, block_ks, (1, 16, 32, 64), (4, 8), (2, 3, 4, 5))
    names = ("block_m", "block_n", "block_k", "group", "warps", "stages")
    configs = [Config(dict(zip(names, values, strict=True))) for values in product(*axes)]
    # More than 256 accumulators per thread cannot be held in its registers.
    fitting = [c for c in configs if c.size("block_m") * c.size("block_n") <= 256 * 32 * c.size("warps")]
    return (default, *(config for config in fitting if config != default))


def default_config(tokens: int, experts: int, block_scaled: bool) -> Config:
    """Return the configuration that vLLM uses for a shape without a tuned file; Triton's defaults complete it."""
    if block_scaled:
        return Config.of(block_m=64, block_n=SCALE_BLOCK, block_k=SCALE_BLOCK, group=32, warps=4, stages=3)
    if tokens <= experts:
        return Config.of(block_m=16, block_n=32, block_k=64, group=1, warps=4, stages=3)
    return Config.of(block_m=64, block_n=64, block_k=32, group=8, warps=4, stages=3)


class GroupedMatmul:
    """Triton grouped products: every token times the weights of `top_k` of the `experts`, drawn at random."""

    name = "grouped_matmul"
    takes_columns = True
    sizes: tuple[str, ...] = ("tokens", "top_k", "experts", "n", "k")
    choices: Mapping[str, Sequence[Value]] = {"dtype": ("bf16", "fp16", "fp8"), "scales": ("none", "tensor", "block")}

    def problem(self, spec: Mapping[str, Value]) -> Problem:
        """Check a specification; FP8 operands must have scales, other dtypes must not."""
        problem = read_spec(self.name, spec, self.sizes, self.choices)
        if any(problem.size(name) % UNIT for name in ("n", "k")):
            raise ConfigurationError(f"n and k of a {self.name} must be multiples of {UNIT}.")
        if problem.size("top_k") > problem.size("experts") if "top_k" in problem else False:
            raise ConfigurationError("top_k cannot exceed the number of experts.")
        if (_scales(problem) != "none") != (_dtype(problem) == "fp8"):
            raise ConfigurationError("FP8 operands need scales=tensor or scales=block, and others scales=none.")
        return problem

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List the configurations that vLLM's tuner searches; block_k is at most `SCALE_BLOCK` with block scales."""
        block_scaled = _scales(problem) == "block"
        tokens, _, experts = _routing_sizes(problem)
        default = default_config(tokens, experts, block_scaled)
        return search_list((32, 64, 128, 256), (64, 128) if block_scaled else (64, 128, 256), default)

    def rank(self, problem: Problem, configs: Sequence[Config], hardware: str) -> Any:
        """Score configurations by the ranker for serving kernels; lower is faster. An unknown GPU counts as H200."""
        from tilewise.gpu.serving import ServingShape, shipped_serving_ranker

        tokens, _, experts = _routing_sizes(problem)
        dtype = "fp8_w8a8" if _dtype(problem) == "fp8" else "bf16"
        shape = ServingShape(problem.size("n"), problem.size("k"), 0, dtype, _scales(problem) == "block")
        if "experts" in problem:  # a file's n is the intermediate size, half of the first product's columns
            shape = ServingShape(max(1, problem.size("n") // 2), 0, experts, dtype, _scales(problem) == "block")
        device = find_device(hardware) or H200
        return shipped_serving_ranker().scores(shape, tokens, device, configs)

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Return why a configuration cannot run on this GPU (shared memory), or None."""
        # The compiler keeps the operands of all stages but one, whose tile may still be in use.
        tile = (config.size("block_m") + config.size("block_n")) * config.size("block_k")
        tile_bytes = tile * ELEMENT_BYTES[_dtype(problem)] * max(config.size("stages") - 1, 1)
        return f"shared memory: {tile_bytes} bytes of {shared_bytes}" if tile_bytes > shared_bytes else None

    def binary(self, problem: Problem, config: Config) -> Binary:
        return _binary(_dtype(problem), _scales(problem), "experts" in problem, config)

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random tokens, weights and scales, the output, and rows sorted by expert for each block_m."""
        tokens, top_k, experts = _routing_sizes(problem)
        n, k, dtype = problem.size("n"), problem.size("k"), _dtype(problem)
        inputs = {"a": random_tensor(torch, (tokens, k), dtype, device, generator)}
        inputs["b"] = random_tensor(torch, (experts, n, k), dtype, device, generator)
        k_blocks, n_blocks = math.ceil(k / SCALE_BLOCK), math.ceil(n / SCALE_BLOCK)
        per_block = _scales(problem) == "block"
        shapes = {
            "a_scale": (tokens, k_blocks) if per_block else (1,),
            "b_scale": (experts, n_blocks, k_blocks) if per_block else (experts,),
        }
        for name, shape in shapes.items():
            inputs[name] = 0.5 + torch.rand(*shape, generator=generator, device=device, dtype=torch.float32)
        out, guarded = guarded_output(torch, (tokens * top_k, n), _RESULTS.get(dtype, dtype), device)
        # (rows,): the expert of each row of the output
        routes = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k, dim=1).indices.flatten()
        scratch = {"routes": routes}
        for block_m in (16, 32, 64, 128, 256):
            scratch[f"slots{block_m}"], scratch[f"experts{block_m}"] = sort_by_expert(torch, routes, experts, block_m)
        return Operands(inputs, out, guarded, scratch)

    def bytes_moved(self, problem: Problem) -> int:
        """Count the bytes read and written at least once: tokens, weights of experts in use, and 2-byte outputs."""
        tokens, top_k, experts = _routing_sizes(problem)
        n, k, size = problem.size("n"), problem.size("k"), ELEMENT_BYTES[_dtype(problem)]
        return (tokens * k + min(experts, tokens * top_k) * n * k) * size + 2 * tokens * top_k * n

    def expected(self, problem: Problem, torch: Any, operands: Operands) -> Expected:
        """Compute the product in float32, expert by expert; return it with its tolerance."""
        _, top_k, experts = _routing_sizes(problem)
        k, inputs, per_block = problem.size("k"), operands.inputs, _scales(problem) == "block"
        a, routes = inputs["a"].float(), operands.scratch["routes"]
        if per_block:
            a = a * inputs["a_scale"].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
        value = torch.zeros(operands.out.shape, dtype=torch.float32, device=a.device)
        for expert in range(experts):
            slots = (routes == expert).nonzero()[:, 0]
            if not len(slots):
                continue
            weights = inputs["b"][expert].float()
            if per_block:
                scale = inputs["b_scale"][expert].repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
                weights = weights * scale[: weights.shape[0], :k]
            value[slots] = a[slots // top_k] @ weights.mT
            if _scales(problem) == "tensor":
                value[slots] *= inputs["a_scale"] * inputs["b_scale"][expert]
        # Sums of k products of magnitude 1. FP8 tensor cores keep 14 bits of a sum; a missing step would cost 4.
        slack = 0.05 + 0.05 * math.sqrt(k) if _dtype(problem) == "fp8" else 1e-4 + 2e-4 * math.sqrt(k)
        rounding = 2.0**-10 if _dtype(problem) == "fp16" else 2.0**-7
        return Expected(value, value.abs() * rounding + slack)

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it: grid (a program per output tile) and arguments."""
        block_m, inputs = config.size("block_m"), operands.inputs
        slots, experts = (operands.scratch[f"{name}{block_m}"] for name in ("slots", "experts"))
        rows, n = operands.out.shape
        programs = len(experts) * math.ceil(n / config.size("block_n"))
        tensors = (inputs["a"], inputs["b"], operands.out, inputs["a_scale"], inputs["b_scale"], slots, experts)
        _, top_k, _ = _routing_sizes(problem)
        sizes = (rows, len(experts), n // UNIT, problem.size("k") // UNIT, top_k, config.size("group"))
        return Launch((programs, 1, 1), (*tensors, *sizes))

    def graph(self, problem: Problem) -> KernelGraph:
        """Describe the grouped product to the cost model as one (batched) product over all routed tokens."""
        tokens, top_k, experts = _routing_sizes(problem)
        lead = experts if "experts" in problem else 0
        return matmul_graph("bf16", (lead, tokens * top_k, problem.size("n"), problem.size("k")), "nt", "none")

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """Return the tile of weights ("kernel"), output and input of one program, a size per dimension."""
        m, n, k = (config.size(name) for name in ("block_m", "block_n", "block_k"))
        lead = [1] if "experts" in problem else []
        return {"kernel": [*lead, k, n], "output": [*lead, m, n], "input": [*lead, m, k]}


def block_fp8_matmul() -> GroupedMatmul:
    """Create the family of FP8 products with one scale per block, x @ weight.T."""
    family = GroupedMatmul()
    family.name, family.sizes, family.choices = "block_fp8_matmul", ("m", "n", "k"), {}
    return family


def sort_by_expert(torch: Any, routes: Any, experts: int, block_m: int) -> tuple[Any, Any]:
    """Sort rows by expert, with each expert's rows padded to whole blocks; return them and the expert of each block.

    Padding entries equal the number of rows. `routes` has the expert of each row, (rows,).
    """
    counts = torch.bincount(routes, minlength=experts)
    blocks = (counts + block_m - 1) // block_m
    order = torch.argsort(routes, stable=True)
    # A row's place: the start of its expert's blocks, plus its position among that expert's rows.
    starts = (torch.cumsum(blocks, 0) - blocks) * block_m
    firsts = torch.cumsum(counts, 0) - counts
    sorted_routes = routes[order]
    places = starts[sorted_routes] + torch.arange(len(routes), device=routes.device) - firsts[sorted_routes]
    slots = torch.full((int(blocks.sum()) * block_m,), len(routes), dtype=torch.int32, device=routes.device)
    slots[places] = order.to(torch.int32)
    block_experts = torch.repeat_interleave(torch.arange(experts, device=routes.device), blocks)
    return slots, block_experts.to(torch.int32)


def _routing_sizes(problem: Problem) -> tuple[int, int, int]:
    """Return (tokens, experts per token, experts) of a problem; a plain product has one expert."""
    if "experts" in problem:
        return problem.size("tokens"), problem.size("top_k"), problem.size("experts")
    return problem.size("m"), 1, 1


def _dtype(problem: Problem) -> str:
    return problem.word("dtype") if "dtype" in problem else "fp8"


def _scales(problem: Problem) -> str:
    """Return how operands are scaled: "none", "tensor" or, by default, "block" (of 128)."""
    return problem.word("scales") if "scales" in problem else "block"


@cache
def _binary(dtype: str, scales: str, routed: bool, config: Config) -> Binary:
    """Describe one compilation of `grouped_kernel`: argument types, scaling, compile-time constants, warps, stages."""
    constants: tuple[tuple[str, Value | bool], ...] = (
        ("UNIT", UNIT),
        ("ROUTED", routed),
        ("SCALES", scales),
        ("SCALE_BLOCK", SCALE_BLOCK),
        *((name.upper(), config.size(name)) for name in ("block_m", "block_n", "block_k")),
    )
    element, result = f"*{DTYPES[dtype]}", f"*{DTYPES[_RESULTS.get(dtype, dtype)]}"
    types = dict(zip(_TENSORS, (element, element, result, "*fp32", "*fp32", "*i32", "*i32"), strict=True))
    signature = (*types.items(), *((name, "i32") for name in _INTEGERS))
    return Binary("grouped:grouped_kernel", signature, constants, config.size("warps"), config.size("stages"))
