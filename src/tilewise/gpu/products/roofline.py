"""What a configuration of a product means on a GPU, in numbers: work, bytes, waves, and a first guess of its time.

The idea: the tensor cores' time, memory's time and the L2 cache's time are arithmetic; what a model has to learn is
how far a kernel stays from them. All configurations of a problem are worked out at once, as columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tilewise.store.problem import Config, Problem

Numbers = npt.NDArray[np.float64]
MULTIPROCESSORS = 132  # of the GPU that the model is for, and what a kernel starts where nobody says otherwise
MOST_PARTS = 16
_SHARED_BYTES = 227 * 1024
_FLOPS = 8.0e14  # of tensor cores in 16 bits, as far as clocks and power let them
_MEMORY = 4.3e12  # bytes a second
_L2 = 7.0e12
_START = 2.0e-6  # seconds of a launch that nothing hides
FIELDS = ("block_m", "block_n", "block_k", "warps", "stages", "group", "tma", "persistent", "parts", "swapped",
          "tail")  # fmt: skip


def columns(configs: Sequence[Config]) -> dict[str, Numbers]:
    """The settings of kernels as columns; where a configuration does not say, 1 for parts and group and 0 else."""
    usual = {"parts": 1, "group": 1}
    return {name: np.array([c.get(name, usual.get(name, 0)) for c in configs], np.float64) for name in FIELDS}


def fits(problem: Problem, of: Mapping[str, Numbers], shared_bytes: int, most_sums: int) -> npt.NDArray[np.bool_]:
    """Which configurations of `Product` can run a problem: what its `misfit` says of one, for all at once."""
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    swapped = of["swapped"] > 0
    rows, cols = np.where(swapped, n, m), np.where(swapped, m, n)
    area = of["block_m"] * of["block_n"]
    tiles = np.ceil(rows / of["block_m"]) * np.ceil(cols / of["block_n"])
    steps = np.ceil(k / of["block_k"])
    shared = (of["block_m"] + of["block_n"]) * of["block_k"] * 2 * of["stages"] + 1024 + of["persistent"] * area
    tail, parts = of["tail"] > 0, of["parts"]
    tail_parts = np.ones_like(tiles)
    tail_parts[tail] = best_parts(tiles[tail], steps[tail])
    sums = np.where(tail, tiles % MULTIPROCESSORS * tail_parts, tiles * parts) * area
    none_empty = (parts == 1) | (np.ceil(steps / parts) * (parts - 1) < steps)
    whole = (parts == 1) & ~tail
    registers = (of["tma"] > 0) | (area / (32 * of["warps"]) <= most_accumulators(problem))
    found = (
        (shared <= shared_bytes) & registers & none_empty & ~(tail & (tail_parts == 1)) & (whole | (sums <= most_sums))
    )
    return np.asarray(found, np.bool_)


def most_accumulators(problem: Problem) -> int:
    """How many sums a thread may keep where tiles come by plain loads: rows of an odd number of elements, or of an odd
    number of pairs, are loaded piece by piece, and the addresses take the registers of half the sums."""
    return 64 if row_unit(problem) <= 2 else 128


def row_unit(problem: Problem) -> int:
    """The elements, up to 8, that the rows of both operands are a multiple of."""
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    layout = problem.word("layout")
    return min(math.gcd(m if layout[0] == "t" else k, 8), math.gcd(k if layout[1] == "t" else n, 8))


def floor_seconds(problem: Problem, batch: int = 1) -> float:
    """What no kernel goes below: arithmetic or memory, whichever is more, and a launch."""
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    return batch * max(2.0 * m * n * k / _FLOPS, 2.0 * (m * k + k * n + m * n) / _MEMORY) + _START


def _worked_out(problem: Problem, of: Mapping[str, Numbers], batch: int) -> dict[str, Numbers]:
    """Times, counts and bytes of each configuration; `guess` is a first guess of the seconds."""
    swapped = of["swapped"] > 0
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    rows, cols = np.where(swapped, n, m), np.where(swapped, m, n)
    block_m, block_n, block_k = of["block_m"], of["block_n"], of["block_k"]
    tiles_m, tiles_n = np.ceil(rows / block_m), np.ceil(cols / block_n)
    tiles = tiles_m * tiles_n * batch
    units = tiles * of["parts"]
    depth = np.ceil(k / block_k)
    steps = np.ceil(depth / of["parts"])
    shared = (block_m + block_n) * block_k * 2 * of["stages"] + of["persistent"] * block_m * block_n
    registers = block_m * block_n / (32 * of["warps"]) + 56
    beside = np.clip(np.minimum(_SHARED_BYTES // np.maximum(shared, 1), 65536 // (32 * of["warps"] * registers)), 1, 8)
    per_sm = np.ceil(units / MULTIPROCESSORS)
    tail = np.flatnonzero(of["tail"] > 0)
    per_sm[tail] = tail_waves(tiles[tail], depth[tail])
    work = 2 * np.maximum(block_m, 64) * block_n * block_k * steps
    arithmetic = per_sm * work / (_FLOPS / MULTIPROCESSORS)
    sums = np.where(of["parts"] > 1, 8.0 * m * n * of["parts"], 0.0) * batch
    memory = batch * 2 * (m * k + k * n + m * n) / _MEMORY
    latency = per_sm / beside * steps * 1.0e-6 / np.maximum(of["stages"] - 1, 1)
    cache = (units * (block_m + block_n) * block_k * 2 * steps + sums) / _L2
    guess = np.maximum(np.maximum(arithmetic, memory), np.maximum(cache, latency)) + _START + 1e-6 * (of["parts"] > 1)
    filled = rows * cols / (tiles_m * block_m * tiles_n * block_n)
    return {"guess": guess, "arithmetic": arithmetic, "memory": memory * np.ones_like(units), "cache": cache,
            "latency": latency, "units": units, "per_sm": per_sm, "beside": beside, "steps": steps, "tiles": tiles,
            "tiles_m": tiles_m, "tiles_n": tiles_n, "filled": filled}  # fmt: skip


def first_guess(problem: Problem, of: Mapping[str, Numbers], batch: int = 1) -> Numbers:
    """Seconds by arithmetic alone."""
    return _worked_out(problem, of, batch)["guess"]


def features(problem: Problem, of: Mapping[str, Numbers], batch: int = 1) -> Numbers:
    """One row a configuration; the first column is the logarithm of a first guess of the seconds."""
    worked = _worked_out(problem, of, batch)
    guess, arithmetic, memory, cache, latency = (
        worked[name] for name in ("guess", "arithmetic", "memory", "cache", "latency")
    )
    units, per_sm, beside, steps, tiles = (worked[name] for name in ("units", "per_sm", "beside", "steps", "tiles"))
    tiles_m, tiles_n, filled = worked["tiles_m"], worked["tiles_n"], worked["filled"]
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    block_m, block_n, block_k = of["block_m"], of["block_n"], of["block_k"]
    waves = units / (MULTIPROCESSORS * beside)
    # Too few programs in flight cannot ask for all the bandwidth there is.
    in_flight = np.minimum(units, MULTIPROCESSORS * beside) * (block_m + block_n) * block_k * 2 * (of["stages"] - 1)
    last = units / (MULTIPROCESSORS * beside * np.ceil(waves))
    layout, epilogue = problem.word("layout"), problem.word("epilogue")
    whole = np.where(of["tail"] > 0, tiles // MULTIPROCESSORS * MULTIPROCESSORS, 0)
    ones = np.ones_like(units)
    log = np.log
    # fmt: off
    found = [
        log(guess), log(arithmetic), log(memory), log(cache), log(latency), log(in_flight), log(units),
        np.log1p(waves), np.log1p(per_sm), last, units / (MULTIPROCESSORS * per_sm), filled, beside, log(steps),
        log(m) * ones, log(n) * ones, log(k) * ones,
        np.log2(block_m), np.log2(block_n), np.log2(block_k), np.log2(of["warps"]), of["stages"],
        np.minimum(of["group"], 8) / 8, of["tma"], of["persistent"], of["swapped"], of["tail"],
        of["tail"] * np.log1p(tiles - whole), np.log2(of["parts"]),
        log(np.minimum(tiles_m, 64)), log(np.minimum(tiles_n, 64)), (block_m < 64) * ones,
        float(layout[0] == "t") * ones, float(layout[1] == "t") * ones,
        float(problem.word("dtype") == "fp16") * ones, float("bias" in epilogue) * ones,
        float("gelu" in epilogue) * ones, float(epilogue == "residual") * ones,
        *(unit * ones for unit in alignment(problem)),
    ]
    # fmt: on
    return np.stack(found, axis=1)


def _tail_costs(tiles: Numbers, steps: Numbers) -> Numbers:
    """Steps that the last wave takes, for every number of parts its tiles may be cut into (rows: 1 to 16). Adding a
    part's sums up costs about half a step; parts that would leave one empty are out of the question."""
    left = tiles % MULTIPROCESSORS
    parts = np.arange(1.0, MOST_PARTS + 1)[:, None]
    each = np.ceil(steps / parts)
    cost = np.ceil(left * parts / MULTIPROCESSORS) * each + np.where(parts > 1, 1.0 + 0.5 * parts, 0.0)
    return np.asarray(np.where((each * (parts - 1) < steps) & ((left > 0) | (parts == 1)), cost, np.inf))


def best_parts(tiles: Numbers, steps: Numbers) -> Numbers:
    """How many parts make the last wave shortest; 1 where there is none."""
    return np.asarray(_tail_costs(tiles, steps).argmin(axis=0) + 1.0)


def tail_waves(tiles: Numbers, steps: Numbers) -> Numbers:
    """Waves where the tiles of the last one are cut into parts that share it best: whole ones, and what is left."""
    return np.asarray(tiles // MULTIPROCESSORS + _tail_costs(tiles, steps).min(axis=0) / steps)


def alignment(problem: Problem) -> list[float]:
    """How well rows divide: the elements, in doublings up to 64, that every row of a, of b and of the result is a
    multiple of; whether loads of 16 bytes are possible, and whether loads of 4 are; m and k to a tile."""
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    layout = problem.word("layout")
    rows = (m if layout[0] == "t" else k, k if layout[1] == "t" else n, n)
    units = [math.log2(math.gcd(row, 64)) for row in rows]
    least = min(units[:2])
    return [*units, float(least >= 3), float(least >= 1), float(m % 64 == 0), float(k % 64 == 0)]


def library_features(problem: Problem, batch: int = 1) -> Numbers:
    """What a library's time may depend on: the sizes, and how tiles it is likely to use fill the GPU."""
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    layout, epilogue = problem.word("layout"), problem.word("epilogue")
    found = [np.log(floor_seconds(problem, batch)), np.log(m), np.log(n), np.log(k)]
    for rows, cols in ((128, 256), (256, 128), (128, 128), (64, 64)):
        units = np.ceil(m / rows) * np.ceil(n / cols) * batch
        per_sm = np.ceil(units / MULTIPROCESSORS)
        found += [units / (MULTIPROCESSORS * per_sm), np.log1p(per_sm), m * n * batch / (units * rows * cols)]
    found += [np.log(2 * m * n * k * batch / _FLOPS), np.log(2 * batch * (m * k + k * n + m * n) / _MEMORY)]
    found += [float(layout[0] == "t"), float(layout[1] == "t"), float(problem.word("dtype") == "fp16")]
    found += [float("bias" in epilogue), float("relu" in epilogue or "gelu" in epilogue), float(epilogue == "residual")]
    return np.array([[*found, *alignment(problem), float(m == 1), float(n == 1)]])
