"""The family `product`: matrix products as `kernel.py` runs them, and the library's own call beside them.

A configuration is a tile with warps and stages, and ways to run it: `tma` (descriptors or plain loads), `persistent`,
`parts` of K, `tail` (only the tiles of the last wave are cut, in as many parts as share them best), `swapped` (the
transposed problem, for few rows). `library` is PyTorch's call, which has no tile. Which of
them a problem can take is known before anything is compiled: descriptors want rows of whole 16 bytes, a part of K must
not be empty, tiles must fit shared memory and registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np

from tilewise.gpu.families.family import (
    DTYPES,
    ELEMENT_BYTES,
    LIBRARY_CALL,
    Binary,
    Launch,
    Operands,
    unit_of,
)
from tilewise.gpu.families.matmul import Matmul
from tilewise.gpu.products.roofline import MOST_PARTS, MULTIPROCESSORS, best_parts, most_accumulators
from tilewise.store.problem import Config, Problem, Value

LIBRARY = Config.of(library=1)
PARTS = (2, 3, 4, 6, 8, 12, MOST_PARTS)
FEW = 256  # rows or columns up to which narrow tiles are worth a try
MOST_SUMS = 1 << 24  # float32 values in the workspace
_SHARED_BYTES = 232_448
_TENSORS = ("c", "bias", "residual")
_INTEGERS = ("m_units", "n_units", "k_units", "group", "parts", "whole")
_WIDE = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
_NARROW = (
    (64, 8), (64, 16), (64, 32), (128, 8), (128, 16), (128, 32), (256, 16), (256, 32),
    (16, 32), (16, 64), (16, 128), (16, 256), (32, 64), (32, 128), (32, 256),
)  # fmt: skip
_FLIPPED = {"n": "t", "t": "n"}


def _stages(block_m: int, block_n: int, block_k: int) -> list[int]:
    """The deepest pipeline that fits, the one below it, and the deepest that leaves room for a second program."""
    step = (block_m + block_n) * block_k * 2
    deepest = min(_SHARED_BYTES // step, 6)
    beside = min(_SHARED_BYTES // 2 // step, 5)
    return sorted({stages for stages in (deepest, deepest - 1, beside) if stages >= 2})


def _tiles(narrow: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """Block sizes, warps and stages in 16-bit numbers; narrow ones are for few rows or few columns."""
    for block_m, block_n in _NARROW if narrow else _WIDE:
        for block_k, warps in product((64, 128, 256) if narrow else (64, 128), (4, 8)):
            per_thread = block_m * block_n // (32 * warps)
            if not 2 <= per_thread <= 128 or (warps == 8 and per_thread < 32):
                continue
            for stages in _stages(block_m, block_n, block_k):
                yield block_m, block_n, block_k, warps, stages


def _ways(tile: tuple[int, int, int, int, int], tma: bool) -> Iterator[tuple[int, int, int, int]]:
    """How a tile may be run: persistent, parts of K, group, tail."""
    area = tile[0] * tile[1]
    for group in (1, 8):
        yield 0, 1, group, 0
        if area >= 64 * 64:
            yield 0, 1, group, 1
        if tma and area >= 64 * 128 and min(tile[:2]) >= 64:
            yield 1, 1, group, 0
    for parts in PARTS if area <= 128 * 128 else PARTS[:3]:
        yield 0, parts, 1, 0


@cache
def _space(tma: bool, few_rows: bool, few_columns: bool, element_bytes: int) -> tuple[Config, ...]:
    """The library first, as the default; then tiles in every way of running them. Of wider numbers, tiles take as many
    bytes of K as of 16-bit ones."""
    found = [LIBRARY]
    tiles = [(tile, 0) for tile in _tiles(narrow=False)]
    if few_rows:  # the transposed problem: many rows of tensor cores, few columns; or tiles of few rows as they are
        tiles += [(tile, 1) for tile in _tiles(narrow=True) if tile[0] >= 64]
    if few_columns:
        tiles += [(tile, 0) for tile in _tiles(narrow=True) if tile[0] >= 64]
    if few_rows:
        tiles += [(tile, 0) for tile in _tiles(narrow=True) if tile[0] < 64]
    for tile, swapped in dict.fromkeys(tiles):
        for persistent, parts, group, tail in _ways(tile, tma):
            if group > 1 and swapped:
                continue
            values = dict(zip(("block_m", "block_n", "block_k", "warps", "stages"), tile, strict=True))
            values["block_k"] = 2 * values["block_k"] // element_bytes
            ways = {"group": group, "tma": int(tma), "persistent": persistent, "parts": parts, "swapped": swapped}
            ways["tail"] = tail
            found.append(Config({**values, **ways}))
    return tuple(found)


class Product(Matmul):
    """c = epilogue(a @ b), a (m, k), b (k, n), by the library or by a kernel."""

    name = "product"

    def configs(self, problem: Problem) -> Sequence[Config]:
        m, n, _ = sizes(problem)
        return _space(takes_descriptors(problem), m <= FEW, n <= FEW, ELEMENT_BYTES[problem.word("dtype")])

    def misfit(self, problem: Problem, config: Config, shared_bytes: int) -> str | None:
        if "library" in config:
            return None
        # Barriers lie beside the tiles, and where the next tile is on its way, so does the result on its way out.
        beside = 1024 + config.size("persistent") * config.size("block_m") * config.size("block_n")
        too_large = super().misfit(problem, config, shared_bytes - beside)
        if too_large is not None:
            return too_large
        if config.size("tma") and not takes_descriptors(problem):
            return "rows are no multiples of 16 bytes, as descriptors want them"
        per_thread = config.size("block_m") * config.size("block_n") // (32 * config.size("warps"))
        if not config.size("tma") and per_thread > most_accumulators(problem):
            return f"registers: {per_thread} sums a thread beside the addresses of single loads"
        steps = math.ceil(problem.size("k") / config.size("block_k"))
        parts, tail = config.size("parts"), config.get("tail", 0)
        if parts > 1 and math.ceil(steps / parts) * (parts - 1) >= steps:
            return f"{parts} parts of {steps} steps leave one empty"
        if tail and cut(problem, config)[0] == 1:
            return "the last wave gains nothing by being cut"
        if workspace(problem, config)[0] > MOST_SUMS:
            return "the parts' sums are too many to keep"
        return None

    def binary(self, problem: Problem, config: Config) -> Binary:
        if "library" in config:
            return Binary(LIBRARY_CALL, (), (), 0, 0)
        swapped, tma = bool(config.size("swapped")), bool(config.size("tma"))
        words = (problem.word("dtype"), _layout(problem, swapped), problem.word("epilogue"))
        return _binary(*words, _units(problem, swapped, tma), _in_parts(config), _compiled(config))

    def operands(self, problem: Problem, torch: Any, device: str, generator: Any) -> Operands:
        found = super().operands(problem, torch, device, generator)
        for name in ("a", "b", "residual"):
            if found.inputs[name].dim() == 3:
                found.inputs[name] = found.inputs[name][0]
        found.out = found.out[0]
        m, n, _ = sizes(problem)
        most = min(MOST_SUMS, MOST_PARTS * (m + 256) * (n + 256))
        found.scratch["partial"] = torch.empty(most, dtype=torch.float32, device=device)
        found.scratch["arrived"] = torch.zeros((m // 8 + 1) * (n // 8 + 1), dtype=torch.int32, device=device)
        return found

    def launch(self, problem: Problem, config: Config, operands: Operands) -> Launch:
        if "library" in config:
            return Launch((1, 1, 1), (), library_call(problem, operands))
        swapped, tma = bool(config.size("swapped")), bool(config.size("tma"))
        m, n, k = sizes(problem)
        m, n = (n, m) if swapped else (m, n)
        a, b = (operands.inputs[name] for name in (("b", "a") if swapped else ("a", "b")))
        units = _units(problem, swapped, tma)
        parts, whole, tiles = cut(problem, config)
        programs = whole + (tiles - whole) * parts
        if config.size("persistent"):
            programs = min(programs, int(operands.scratch.get("multiprocessors", MULTIPROCESSORS)))
        if tma:
            layout, (bm, bn, bk) = _layout(problem, swapped), _blocks(config)
            a = _descriptor(a, [bk, bm] if layout[0] == "t" else [bm, bk])
            b = _descriptor(b, [bn, bk] if layout[1] == "t" else [bk, bn])
        partial, arrived = operands.scratch["partial"], operands.scratch["arrived"]
        extras = (operands.out, operands.inputs["bias"], operands.inputs["residual"], partial, arrived)
        counts = tuple(size // unit for size, unit in zip((m, n, k), units, strict=True))
        return Launch((programs, 1, 1), (a, b, *extras, *counts, config.size("group"), parts, whole))

    def tile(self, problem: Problem, config: Config) -> Mapping[str, Sequence[int]]:
        if "block_m" not in config:
            return {"kernel": [], "output": [], "input": []}
        return super().tile(problem, config)


def library_call(problem: Problem, operands: Operands) -> Callable[[], Any]:
    """PyTorch's way to the same result, which is the vendor's library and, for an activation, one pass more."""
    import torch

    layout, epilogue, out = problem.word("layout"), problem.word("epilogue"), operands.out
    a, b = operands.inputs["a"], operands.inputs["b"]
    a, b = a.T if layout[0] == "t" else a, b.T if layout[1] == "t" else b
    if epilogue == "none":
        return lambda: torch.mm(a, b, out=out)
    added = operands.inputs["residual" if epilogue == "residual" else "bias"]
    if epilogue == "bias_relu":
        return lambda: torch.addmm(added, a, b, out=out).relu_()
    if epilogue == "bias_gelu":
        gelu = torch.ops.aten.gelu.out
        return lambda: gelu(torch.addmm(added, a, b, out=out), out=out)
    return lambda: torch.addmm(added, a, b, out=out)


def cut(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Into how many parts K is cut, how many tiles are left whole, and how many there are."""
    m, n, k = sizes(problem)
    m, n = (n, m) if config.size("swapped") else (m, n)
    tiles = math.ceil(m / config.size("block_m")) * math.ceil(n / config.size("block_n"))
    if not config.get("tail", 0):
        return config.size("parts"), 0 if config.size("parts") > 1 else tiles, tiles
    parts = _tail_parts(tiles, math.ceil(k / config.size("block_k")))
    return parts, tiles // MULTIPROCESSORS * MULTIPROCESSORS, tiles


@lru_cache(maxsize=4096)
def _tail_parts(tiles: int, steps: int) -> int:
    return int(best_parts(np.array([float(tiles)]), np.array([float(steps)]))[0])


def workspace(problem: Problem, config: Config) -> tuple[int, int]:
    """How many float32 sums and how many counters a configuration wants; none where K is whole."""
    if "library" in config or not _in_parts(config):
        return 0, 0
    parts, whole, tiles = cut(problem, config)
    return (tiles - whole) * parts * config.size("block_m") * config.size("block_n"), tiles - whole


def _in_parts(config: Config) -> bool:
    return config.size("parts") > 1 or bool(config.get("tail", 0))


def in_sixteen_bits(problem: Problem) -> tuple[Problem, int]:
    """The product of 16-bit numbers that reads as many bytes and keeps tensor cores busy as long, and how many times as
    long its K is: what a model of 16-bit products is asked in the place of tf32."""
    times = ELEMENT_BYTES[problem.word("dtype")] // 2
    return (problem if times == 1 else Problem({**problem, "dtype": "bf16", "k": times * problem.size("k")})), times


def takes_descriptors(problem: Problem) -> bool:
    """Whether the rows of both operands are whole 16 bytes."""
    m, n, k = sizes(problem)
    layout = problem.word("layout")
    rows = (m if layout[0] == "t" else k, k if layout[1] == "t" else n)
    return all(row * ELEMENT_BYTES[problem.word("dtype")] % 16 == 0 for row in rows)


def sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.size("m"), problem.size("n"), problem.size("k")


def _layout(problem: Problem, swapped: bool) -> str:
    """The operands' layouts as the kernel sees them; the transposed problem has b transposed first."""
    layout = problem.word("layout")
    return _FLIPPED[layout[1]] + _FLIPPED[layout[0]] if swapped else layout


def _blocks(config: Config) -> tuple[int, int, int]:
    return config.size("block_m"), config.size("block_n"), config.size("block_k")


def _compiled(config: Config) -> tuple[int, ...]:
    """What of a configuration is baked into its binary."""
    names = ("block_m", "block_n", "block_k", "warps", "stages", "tma", "persistent", "swapped")
    return tuple(config.size(name) for name in names)


def _units(problem: Problem, swapped: bool, tma: bool) -> tuple[int, int, int]:
    """What sizes are multiples of, where the compiler gains by it: the contiguous ones of loads and of the store."""
    m, n, k = sizes(problem)
    m, n = (n, m) if swapped else (m, n)
    dtype, layout = problem.word("dtype"), _layout(problem, swapped)
    unit_m = unit_of(m, dtype) if swapped or (layout[0] == "t" and not tma) else 1
    unit_n = unit_of(n, dtype) if not swapped or (layout[1] == "n" and not tma) else 1
    return unit_m, unit_n, 1 if tma else unit_of(k, dtype)


def _descriptor(tensor: Any, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@cache
def _binary(
    dtype: str, layout: str, epilogue: str, units: tuple[int, int, int], in_parts: bool, compiled: tuple[int, ...]
) -> Binary:
    block_m, block_n, block_k, warps, stages, tma, persistent, swapped = compiled
    constants: tuple[tuple[str, Value | bool], ...] = (
        *zip(("UNIT_M", "UNIT_N", "UNIT_K"), units, strict=True),
        ("TMA", bool(tma)),
        ("PERSISTENT", bool(persistent)),
        ("A_TRANSPOSED", layout[0] == "t"),
        ("B_TRANSPOSED", layout[1] == "t"),
        ("SWAPPED", bool(swapped)),
        ("EPILOGUE", epilogue),
        ("IN_PARTS", in_parts),
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
        *((name, f"*{element}") for name in _TENSORS),
        ("partial", "*fp32"),
        ("arrived", "*i32"),
        *((name, "i32") for name in _INTEGERS),
    )
    return Binary("tilewise.gpu.products.kernel:product_kernel", signature, constants, warps, stages)
