"""The family `product`: matrix products run by the kernel of `kernel.py`, with cuBLAS as one of the configurations.

A configuration is a tile with warps and pipeline stages, and a way to run it: TMA descriptors or plain loads,
`persistent` programs, split-K, stream-K, or the transposed product (for small m). The cuBLAS call has no tile. Which
configurations a problem allows is known before anything is compiled: TMA needs rows of whole 16 bytes, a slice of K
must not be empty, and tiles must fit into shared memory and registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tilewise.gpu.devices import H200
from tilewise.gpu.families.family import (
    CUBLAS_CALL,
    DTYPES,
    ELEMENT_BYTES,
    Binary,
    Launch,
    Operands,
    alignment_unit,
)
from tilewise.gpu.families.matmul import TritonMatmul
from tilewise.gpu.products.roofline import (
    CUBLAS,
    MAX_SPLIT_K,
    SPLIT_K,
    STREAM_K,
    TRANSPOSED,
    best_stream_k_split,
    is_cublas,
    max_accumulators,
)
from tilewise.store.problem import Config, Problem, Value

_SPLIT_K_FACTORS = (2, 3, 4, 6, 8, 12, MAX_SPLIT_K)
_SMALL_SIZE = 256  # m or n up to which narrow tiles are in the search space
MAX_PARTIAL_SUMS = 1 << 24  # float32 values in the workspace: 64 MiB
_BARRIER_BYTES = 1024  # of shared memory
_POINTERS = ("c", "bias", "residual")
_INTEGERS = ("m_units", "n_units", "k_units", "group", "split_k", "full_tiles")
_LARGE_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
_NARROW_TILES = (
    (64, 8), (64, 16), (64, 32), (128, 8), (128, 16), (128, 32), (256, 16), (256, 32),
    (16, 32), (16, 64), (16, 128), (16, 256), (32, 64), (32, 128), (32, 256),
)  # fmt: skip
_TRANSPOSED_LAYOUT = {"n": "t", "t": "n"}


class _ProductTile(NamedTuple):
    """A tile's block sizes, for 16-bit elements, with its warps and pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    @property
    def area(self) -> int:
        return self.block_m * self.block_n


def _stage_counts(block_m: int, block_n: int, block_k: int) -> list[int]:
    """Return pipeline depths to try: the deepest that fits, one less, and the deepest with two programs per SM."""
    stage_bytes = (block_m + block_n) * block_k * 2
    deepest = min(H200.shared_bytes_per_block // stage_bytes, 6)
    two_programs = min(H200.shared_bytes_per_block // 2 // stage_bytes, 5)
    return sorted({stages for stages in (deepest, deepest - 1, two_programs) if stages >= 2})


def _tiles(narrow: bool) -> Iterator[_ProductTile]:
    """Yield block sizes and warps for 16-bit elements; `narrow` tiles are for small m or n."""
    for block_m, block_n in _NARROW_TILES if narrow else _LARGE_TILES:
        for block_k, warps in product((64, 128, 256) if narrow else (64, 128), (4, 8)):
            accumulators = block_m * block_n // (32 * warps)  # per thread
            if not 2 <= accumulators <= 128 or (warps == 8 and accumulators < 32):
                continue
            for stages in _stage_counts(block_m, block_n, block_k):
                yield _ProductTile(block_m, block_n, block_k, warps, stages)


def _schedules(tile: _ProductTile, tma: bool) -> Iterator[dict[str, int]]:
    """Yield the scheduling settings (stages, TMA, split-K, ...) to try with a tile."""
    for group in (1, 8):
        plain = {"persistent": 0, SPLIT_K: 1, "group": group, STREAM_K: 0}
        yield plain
        if tile.area >= 64 * 64:
            yield {**plain, STREAM_K: 1}
        if tma and tile.area >= 64 * 128 and min(tile.block_m, tile.block_n) >= 64:
            yield {**plain, "persistent": 1}
    for split_k in _SPLIT_K_FACTORS if tile.area <= 128 * 128 else _SPLIT_K_FACTORS[:3]:
        yield {"persistent": 0, SPLIT_K: split_k, "group": 1, STREAM_K: 0}


@cache
def _space(tma: bool, small_m: bool, small_n: bool, element_bytes: int) -> tuple[Config, ...]:
    """Return all configurations: cuBLAS as the default first, then every tile with every schedule.

    Tiles of wider elements span as many bytes of K as those of 16-bit elements.
    """
    configs = [CUBLAS]
    tiles = [(tile, 0) for tile in _tiles(narrow=False)]
    if small_m:  # the transposed product has many rows for the tensor cores and few columns
        tiles += [(tile, 1) for tile in _tiles(narrow=True) if tile.block_m >= 64]
    if small_n:
        tiles += [(tile, 0) for tile in _tiles(narrow=True) if tile.block_m >= 64]
    if small_m:  # tiles of few rows, without transposing
        tiles += [(tile, 0) for tile in _tiles(narrow=True) if tile.block_m < 64]
    for tile, transposed in dict.fromkeys(tiles):
        for schedule in _schedules(tile, tma):
            if schedule["group"] > 1 and transposed:
                continue
            # Wider elements get a smaller block_k, so that a tile spans the same bytes.
            values = {**tile._asdict(), "block_k": 2 * tile.block_k // element_bytes, "tma": int(tma)}
            configs.append(Config({**values, **schedule, TRANSPOSED: transposed}))
    return tuple(configs)


class ProductFamily(TritonMatmul):
    """c = epilogue(a @ b), a (m, k), b (k, n), by cuBLAS or by a kernel."""

    name = "product"

    def configs(self, problem: Problem) -> Sequence[Config]:
        """List the configurations to rank for a product; cuBLAS, the default, is first."""
        m, n, _ = sizes(problem)
        element_bytes = ELEMENT_BYTES[problem.word("dtype")]
        return _space(supports_tma(problem), m <= _SMALL_SIZE, n <= _SMALL_SIZE, element_bytes)

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        """Return why a configuration cannot run the problem, or None."""
        if is_cublas(config):
            return None
        # Barriers take shared memory in addition to the tiles; a persistent kernel also stages its output tile.
        reserved = _BARRIER_BYTES + config.size("persistent") * config.size("block_m") * config.size("block_n")
        too_large = super().misfit(problem, config, shared_bytes - reserved)
        if too_large is not None:
            return too_large
        if config.size("tma") and not supports_tma(problem):
            return "TMA needs rows of whole 16 bytes"
        accumulators = config.size("block_m") * config.size("block_n") // (32 * config.size("warps"))
        if not config.size("tma") and accumulators > max_accumulators(problem):
            return f"registers: {accumulators} accumulators per thread beside the addresses of element-wise loads"
        steps = math.ceil(problem.size("k") / config.size("block_k"))
        split_k = config.size(SPLIT_K)
        if split_k > 1 and math.ceil(steps / split_k) * (split_k - 1) >= steps:
            return f"{split_k} slices of {steps} steps leave one slice empty"
        if config.get(STREAM_K, 0) and split_work(problem, config).split_k == 1:
            return "splitting the last wave gains nothing"
        if workspace_sizes(problem, config)[0] > MAX_PARTIAL_SUMS:
            return "the partial sums exceed the workspace"
        return None

    def binary(self, problem: Problem, config: Config) -> Binary:
        """Describe the compilation of a kernel; for cuBLAS, which needs none, return the binary `CUBLAS_CALL`."""
        if is_cublas(config):
            return Binary(CUBLAS_CALL, (), (), 0, 0)
        transposed, tma = bool(config.size(TRANSPOSED)), bool(config.size("tma"))
        return _binary(
            dtype=problem.word("dtype"),
            layout=_layout(problem, transposed),
            epilogue=problem.word("epilogue"),
            units=_units(problem, transposed, tma),
            splits_k=_splits_k(config),
            constants=_compile_time_values(config),
        )

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        """Allocate random matrices and a workspace that is large enough for every configuration."""
        operands = super().operands(problem, torch, device, generator)
        for name in ("a", "b", "residual"):
            if operands.inputs[name].dim() == 3:
                operands.inputs[name] = operands.inputs[name][0]
        operands.out = operands.out[0]
        m, n, _ = sizes(problem)
        partial_sums = min(MAX_PARTIAL_SUMS, MAX_SPLIT_K * (m + 256) * (n + 256))
        operands.scratch["partial_sums"] = torch.empty(partial_sums, dtype=torch.float32, device=device)
        operands.scratch["counters"] = torch.zeros((m // 8 + 1) * (n // 8 + 1), dtype=torch.int32, device=device)
        return operands

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        """Describe the launch, without running it: grid and arguments of a kernel, or a function that calls cuBLAS."""
        if is_cublas(config):
            return Launch((1, 1, 1), (), cublas_call(problem, operands))
        transposed, tma = bool(config.size(TRANSPOSED)), bool(config.size("tma"))
        m, n, k = sizes(problem)
        m, n = (n, m) if transposed else (m, n)
        a, b = (operands.inputs[name] for name in (("b", "a") if transposed else ("a", "b")))
        units = _units(problem, transposed, tma)
        split = split_work(problem, config)
        programs = split.full_tiles + (split.tiles - split.full_tiles) * split.split_k
        if config.size("persistent"):
            programs = min(programs, int(operands.scratch.get("multiprocessors", H200.multiprocessors)))
        if tma:
            layout = _layout(problem, transposed)
            bm, bn, bk = (config.size(name) for name in ("block_m", "block_n", "block_k"))
            a = _descriptor(a, [bk, bm] if layout[0] == "t" else [bm, bk])
            b = _descriptor(b, [bn, bk] if layout[1] == "t" else [bk, bn])
        workspace = operands.scratch["partial_sums"], operands.scratch["counters"]
        tensors = (a, b, operands.out, operands.inputs["bias"], operands.inputs["residual"], *workspace)
        counts = tuple(size // unit for size, unit in zip((m, n, k), units, strict=True))
        integers = (*counts, config.size("group"), split.split_k, split.full_tiles)
        return Launch((programs, 1, 1), (*tensors, *integers))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        """Return the tile of weights ("kernel"), output and input of one program; empty for cuBLAS."""
        if "block_m" not in config:  # also called with one column per field, where cuBLAS is not a configuration
            return {"kernel": [], "output": [], "input": []}
        return super().tile(problem, config)


def cublas_call(problem: Problem, operands: Operands) -> Callable[[], Any]:
    """Return a function that computes the product by PyTorch: cuBLAS, then a separate pass for an activation."""
    import torch

    layout, epilogue, out = problem.word("layout"), problem.word("epilogue"), operands.out
    a, b = operands.inputs["a"], operands.inputs["b"]
    a, b = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
    if epilogue == "none":
        return lambda: torch.mm(a, b, out=out)
    addend = operands.inputs["residual" if epilogue == "residual" else "bias"]
    if epilogue == "bias_relu":
        return lambda: torch.addmm(addend, a, b, out=out).relu_()
    if epilogue == "bias_gelu":
        gelu = torch.ops.aten.gelu.out
        return lambda: gelu(torch.addmm(addend, a, b, out=out), out=out)
    return lambda: torch.addmm(addend, a, b, out=out)


class WorkSplit(NamedTuple):
    """Division of a launch's output tiles: the first `full_tiles` keep K whole, the others split it."""

    split_k: int
    full_tiles: int
    tiles: int


def split_work(problem: Problem, config: Config) -> WorkSplit:
    """Divide a problem's output tiles into those computed whole and those whose K is cut into slices."""
    m, n, k = sizes(problem)
    m, n = (n, m) if config.size(TRANSPOSED) else (m, n)
    tiles = math.ceil(m / config.size("block_m")) * math.ceil(n / config.size("block_n"))
    if not config.get(STREAM_K, 0):
        return WorkSplit(config.size(SPLIT_K), 0 if config.size(SPLIT_K) > 1 else tiles, tiles)
    # Stream-K: tiles that fill whole waves keep K whole, the rest is sliced.
    split_k = _stream_k_split(tiles, math.ceil(k / config.size("block_k")))
    return WorkSplit(split_k, tiles // H200.multiprocessors * H200.multiprocessors, tiles)


@lru_cache(maxsize=4096)
def _stream_k_split(tiles: int, steps: int) -> int:
    return int(best_stream_k_split(np.array([float(tiles)]), np.array([float(steps)]))[0])


def workspace_sizes(problem: Problem, config: Config) -> tuple[int, int]:
    """Count the float32 partial sums and the counters that a configuration needs; none if K is whole."""
    if is_cublas(config) or not _splits_k(config):
        return 0, 0
    split = split_work(problem, config)
    sliced_tiles = split.tiles - split.full_tiles
    return sliced_tiles * split.split_k * config.size("block_m") * config.size("block_n"), sliced_tiles


def _splits_k(config: Config) -> bool:
    return config.size(SPLIT_K) > 1 or bool(config.get(STREAM_K, 0))


def as_16_bit(problem: Problem) -> tuple[Problem, int]:
    """Return an equivalent 16-bit product, whose time the model can predict, and the factor that its K is longer by.

    The model knows 16-bit products only; a tf32 product keeps memory and the tensor cores as busy as a bf16 one with
    twice the K.
    """
    factor = ELEMENT_BYTES[problem.word("dtype")] // 2
    if factor == 1:
        return problem, 1
    return Problem({**problem, "dtype": "bf16", "k": factor * problem.size("k")}), factor


def supports_tma(problem: Problem) -> bool:
    """Tell whether the rows of both operands are multiples of 16 bytes, as TMA descriptors need them."""
    m, n, k = sizes(problem)
    layout = problem.word("layout")
    rows = (m if layout[0] == "t" else k, k if layout[1] == "t" else n)
    return all(row * ELEMENT_BYTES[problem.word("dtype")] % 16 == 0 for row in rows)


def sizes(problem: Problem) -> tuple[int, int, int]:
    """Return m, n and k."""
    return problem.size("m"), problem.size("n"), problem.size("k")


def _layout(problem: Problem, transposed: bool) -> str:
    """Return the layouts of a and b as the kernel receives them; if `transposed`, it computes c.T = b.T @ a.T."""
    layout = problem.word("layout")
    return _TRANSPOSED_LAYOUT[layout[1]] + _TRANSPOSED_LAYOUT[layout[0]] if transposed else layout


def _compile_time_values(config: Config) -> tuple[int, ...]:
    """Return the fields of a configuration that are compiled into its binary."""
    names = ("block_m", "block_n", "block_k", "warps", "stages", "tma", "persistent", TRANSPOSED)
    return tuple(config.size(name) for name in names)


def _units(problem: Problem, transposed: bool, tma: bool) -> tuple[int, int, int]:
    """Return powers of two that divide m, n and k; 1 where the compiler gains nothing from the knowledge.

    Only the contiguous sizes of plain loads and of the store matter.
    """
    m, n, k = sizes(problem)
    m, n = (n, m) if transposed else (m, n)
    dtype, layout = problem.word("dtype"), _layout(problem, transposed)
    unit_m = alignment_unit(m, dtype) if transposed or (layout[0] == "t" and not tma) else 1
    unit_n = alignment_unit(n, dtype) if not transposed or (layout[1] == "n" and not tma) else 1
    return unit_m, unit_n, 1 if tma else alignment_unit(k, dtype)


def _descriptor(tensor: Any, block: list[int]) -> Any:
    """Return a TMA descriptor of `tensor` for loads of shape `block`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@cache
def _binary(
    *, dtype: str, layout: str, epilogue: str, units: tuple[int, int, int], splits_k: bool, constants: tuple[int, ...]
) -> Binary:
    """Describe one compilation of `product_kernel`; `constants` are those of `_compile_time_values`."""
    block_m, block_n, block_k, warps, stages, tma, persistent, transposed = constants
    constexprs: tuple[tuple[str, Value | bool], ...] = (
        *zip(("UNIT_M", "UNIT_N", "UNIT_K"), units, strict=True),
        ("TMA", bool(tma)),
        ("PERSISTENT", bool(persistent)),
        ("A_TRANSPOSED", layout[0] == "t"),
        ("B_TRANSPOSED", layout[1] == "t"),
        ("C_TRANSPOSED", bool(transposed)),
        ("EPILOGUE", epilogue),
        ("SPLITS_K", splits_k),
        ("BLOCK_M", block_m),
        ("BLOCK_N", block_n),
        ("BLOCK_K", block_k),
    )
    element = DTYPES[dtype]
    left = f"{block_k},{block_m}" if layout[0] == "t" else f"{block_m},{block_k}"
    right = f"{block_n},{block_k}" if layout[1] == "t" else f"{block_k},{block_n}"
    signature = (
        ("a", f"tensordesc<{element}[{left}]>" if tma else f"*{element}"),
        ("b", f"tensordesc<{element}[{right}]>" if tma else f"*{element}"),
        *((name, f"*{element}") for name in _POINTERS),
        ("partial_sums", "*fp32"),
        ("counters", "*i32"),
        *((name, "i32") for name in _INTEGERS),
    )
    return Binary("tilewise.gpu.products.kernel:product_kernel", signature, constexprs, warps, stages)
