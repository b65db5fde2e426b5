"""Analytic cost of matrix-product configurations: work, bytes moved, waves, and a first estimate of the runtime.

The times of the tensor cores, of memory and of the L2 cache follow from arithmetic (the roofline model, Williams et
al. 2009). What a model has to learn is how far a real kernel stays from them. All configurations of a problem are
computed at once, as columns: `columns` turns configurations into one array per field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError
from tilewise.gpu.devices import H200, Device, SustainedRates
from tilewise.store.problem import Config, Problem

# Fields of a configuration, in the older words that measurement stores, choice caches and recorded benchmarks spell.
SPLIT_K = "parts"  # slices that K is cut into for every output tile; 1 leaves K whole
STREAM_K = "tail"  # 1: K is cut for the tiles of the last, partly filled wave only
TRANSPOSED = "swapped"  # 1: the kernel computes the transposed product, for small m
_CUBLAS = "library"  # set in configurations that are a call of cuBLAS and not a kernel

CUBLAS = Config({_CUBLAS: 1})
# `addmm` with the bias added inside cuBLAS; without it PyTorch copies the bias into the output first.
CUBLAS_FUSED_BIAS = Config({_CUBLAS: 2})
Numbers = npt.NDArray[np.float64]
Columns = Mapping[str, Numbers]
MAX_SPLIT_K = 16
_SPLIT_K_SECONDS = 1.0e-6  # adding up the partial sums of split-K
_LOAD_LATENCY = 1.0e-6  # seconds from a load's issue to its data, with nothing else in flight
# Columns and the field of a configuration that each one is read from.
_FIELDS = {
    "block_m": "block_m", "block_n": "block_n", "block_k": "block_k", "warps": "warps", "stages": "stages",
    "group": "group", "tma": "tma", "persistent": "persistent", "split_k": SPLIT_K, "transposed": TRANSPOSED,
    "stream_k": STREAM_K,
}  # fmt: skip
_DEFAULTS = {"split_k": 1, "group": 1}  # where a configuration does not say; 0 for every other column


def is_cublas(config: Config) -> bool:
    """Tell whether a configuration stands for cuBLAS; the others are Triton kernels with a tile."""
    return _CUBLAS in config


def sustained_rates(device: Device) -> SustainedRates:
    """Return the measured rates of a GPU; raise `ConfigurationError` if it has none."""
    if device.sustained is None:
        raise ConfigurationError(f"The sustained rates of {device.name} were never measured; choose another device.")
    return device.sustained


def columns(configs: Sequence[Config]) -> dict[str, Numbers]:
    """Convert configurations to one array per setting, such as "block_m", in their order."""
    return {
        name: np.array([config.get(field, _DEFAULTS.get(name, 0)) for config in configs], np.float64)
        for name, field in _FIELDS.items()
    }


def fits(
    problem: Problem, of: Columns, shared_bytes: int, max_partial_sums: int, device: Device = H200
) -> npt.NDArray[np.bool_]:
    """Tell, for each configuration in columns, whether it can run the problem (see `ProductFamily.misfit`)."""
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    transposed = of["transposed"] > 0
    rows, cols = np.where(transposed, n, m), np.where(transposed, m, n)
    area = of["block_m"] * of["block_n"]
    tiles = np.ceil(rows / of["block_m"]) * np.ceil(cols / of["block_n"])
    steps = np.ceil(k / of["block_k"])
    # Pipelined tiles of both operands, barriers, and the output tile that a persistent kernel stages.
    shared = (of["block_m"] + of["block_n"]) * of["block_k"] * 2 * of["stages"] + 1024 + of["persistent"] * area
    # Stream-K splits the tiles of the last wave only, as many times as makes that wave shortest.
    stream_k, split_k = of["stream_k"] > 0, of["split_k"]
    last_wave_split = np.ones_like(tiles)
    last_wave_split[stream_k] = best_stream_k_split(tiles[stream_k], steps[stream_k], device)
    partial_sums = np.where(stream_k, tiles % device.multiprocessors * last_wave_split, tiles * split_k) * area
    # Every slice gets the same number of steps, rounded up; the last one must still have some.
    no_empty_slice = (split_k == 1) | (np.ceil(steps / split_k) * (split_k - 1) < steps)
    keeps_k_whole = (split_k == 1) & ~stream_k
    registers = (of["tma"] > 0) | (area / (32 * of["warps"]) <= max_accumulators(problem))
    gains_nothing = stream_k & (last_wave_split == 1)
    workspace = keeps_k_whole | (partial_sums <= max_partial_sums)
    return np.asarray((shared <= shared_bytes) & registers & no_empty_slice & ~gains_nothing & workspace, np.bool_)


def max_accumulators(problem: Problem) -> int:
    """Return the number of accumulators that a thread may hold in a kernel with plain loads.

    Rows of an odd number of elements or of element pairs are loaded in small pieces, and the addresses then take the
    registers of half the accumulators. Return analytic quantities of every configuration by name: times, counts,
    occupancy.

    "estimate" is a first guess of the runtime in seconds.
    """
    return 64 if min(_alignment(problem)[:2]) <= 1 else 128


def floor_seconds(problem: Problem, batch: int = 1, device: Device = H200) -> float:
    """Return the roofline bound: the larger of arithmetic and memory time, plus a launch."""
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    rates = sustained_rates(device)
    bytes_moved = 2.0 * (m * k + k * n + m * n)
    bound = max(2.0 * m * n * k / rates.tensor_flops, bytes_moved / rates.memory_bandwidth)
    return batch * bound + rates.launch_seconds


def _costs(problem: Problem, of: Columns, batch: int, device: Device) -> dict[str, Numbers]:
    """Compute times, counts and occupancy of every configuration by name; "estimate" is a first guess in seconds."""
    rates, sms = sustained_rates(device), device.multiprocessors
    transposed = of["transposed"] > 0
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    rows, cols = np.where(transposed, n, m), np.where(transposed, m, n)
    block_m, block_n, block_k = of["block_m"], of["block_n"], of["block_k"]
    tiles_m, tiles_n = np.ceil(rows / block_m), np.ceil(cols / block_n)
    tiles = tiles_m * tiles_n * batch
    units = tiles * of["split_k"]  # units of work: output tiles, or slices of K of them
    depth = np.ceil(k / block_k)
    steps = np.ceil(depth / of["split_k"])

    # Occupancy: programs resident on one multiprocessor, limited by shared memory and registers.
    shared = (block_m + block_n) * block_k * 2 * of["stages"] + of["persistent"] * block_m * block_n
    registers = block_m * block_n / (32 * of["warps"]) + 56
    by_shared = device.shared_bytes_per_block // np.maximum(shared, 1)
    by_registers = device.architecture.registers_per_multiprocessor // (32 * of["warps"] * registers)
    resident = np.clip(np.minimum(by_shared, by_registers), 1, 8)

    # Waves: how many units the busiest multiprocessor works through.
    per_sm = np.ceil(units / sms)
    stream_k = np.flatnonzero(of["stream_k"] > 0)
    per_sm[stream_k] = stream_k_waves(tiles[stream_k], depth[stream_k], device)

    # The tensor cores work on at least 64 rows, however few the tile has.
    work = 2 * np.maximum(block_m, 64) * block_n * block_k * steps
    arithmetic = per_sm * work / (rates.tensor_flops / sms)
    # Split-K writes and reads a float32 per element and slice.
    partial_bytes = np.where(of["split_k"] > 1, 8.0 * m * n * of["split_k"], 0.0) * batch
    memory = batch * 2 * (m * k + k * n + m * n) / rates.memory_bandwidth
    latency = per_sm / resident * steps * _LOAD_LATENCY / np.maximum(of["stages"] - 1, 1)
    # Every unit reads its tiles of both operands through the L2 cache.
    cache = (units * (block_m + block_n) * block_k * 2 * steps + partial_bytes) / rates.l2_bandwidth
    bound = np.maximum(np.maximum(arithmetic, memory), np.maximum(cache, latency))
    estimate = bound + rates.launch_seconds + _SPLIT_K_SECONDS * (of["split_k"] > 1)
    useful = rows * cols / (tiles_m * block_m * tiles_n * block_n)  # share of the tiles' area inside the output
    return {"estimate": estimate, "arithmetic": arithmetic, "memory": memory * np.ones_like(units), "cache": cache,
            "latency": latency, "units": units, "per_sm": per_sm, "resident": resident, "steps": steps, "tiles": tiles,
            "tiles_m": tiles_m, "tiles_n": tiles_n, "useful": useful}  # fmt: skip


def estimate_seconds(problem: Problem, of: Columns, batch: int = 1, device: Device = H200) -> Numbers:
    """Estimate every configuration's runtime in seconds by an analytic formula."""
    return _costs(problem, of, batch, device)["estimate"]


def features(problem: Problem, of: Columns, batch: int = 1, device: Device = H200) -> Numbers:
    """Return the roofline model's features, one row per configuration in `of`; column 0 is log(estimated seconds)."""
    costs, sms = _costs(problem, of, batch, device), device.multiprocessors
    units, per_sm, resident, steps, tiles = (costs[name] for name in ("units", "per_sm", "resident", "steps", "tiles"))
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    block_m, block_n, block_k = of["block_m"], of["block_n"], of["block_k"]
    slots = sms * resident
    waves = units / slots
    # Too few programs in flight cannot request the full memory bandwidth.
    bytes_in_flight = np.minimum(units, slots) * (block_m + block_n) * block_k * 2 * (of["stages"] - 1)
    last_wave = units / (slots * np.ceil(waves))
    full_wave_tiles = np.where(of["stream_k"] > 0, tiles // sms * sms, 0)
    layout, epilogue = problem.word("layout"), problem.word("epilogue")
    ones = np.ones_like(units)
    log = np.log
    # fmt: off
    feature_columns = [
        log(costs["estimate"]), log(costs["arithmetic"]), log(costs["memory"]), log(costs["cache"]),
        log(costs["latency"]), log(bytes_in_flight), log(units),
        np.log1p(waves), np.log1p(per_sm), last_wave, units / (sms * per_sm), costs["useful"], resident,
        log(steps), log(m) * ones, log(n) * ones, log(k) * ones,
        np.log2(block_m), np.log2(block_n), np.log2(block_k), np.log2(of["warps"]), of["stages"],
        np.minimum(of["group"], 8) / 8, of["tma"], of["persistent"], of["transposed"], of["stream_k"],
        of["stream_k"] * np.log1p(tiles - full_wave_tiles), np.log2(of["split_k"]),
        log(np.minimum(costs["tiles_m"], 64)), log(np.minimum(costs["tiles_n"], 64)), (block_m < 64) * ones,
        float(layout[0] == "t") * ones, float(layout[1] == "t") * ones,
        float(problem.word("dtype") == "fp16") * ones, float("bias" in epilogue) * ones,
        float("gelu" in epilogue) * ones, float(epilogue == "residual") * ones,
        *(value * ones for value in _alignment(problem)),
    ]
    # fmt: on
    return np.stack(feature_columns, axis=1)


def _stream_k_costs(tiles: Numbers, steps: Numbers, device: Device) -> Numbers:
    """Return the loop steps of the last wave for each number of slices that its tiles may be split into along K.

    Row i holds the cost of i + 1 slices. Adding up one slice's partial sums costs about half a step. A split that would
    leave a slice empty costs infinity.
    """
    last_wave_tiles = tiles % device.multiprocessors
    split = np.arange(1.0, MAX_SPLIT_K + 1)[:, None]
    slice_steps = np.ceil(steps / split)
    reduction = np.where(split > 1, 1.0 + 0.5 * split, 0.0)
    cost = np.ceil(last_wave_tiles * split / device.multiprocessors) * slice_steps + reduction
    possible = (slice_steps * (split - 1) < steps) & ((last_wave_tiles > 0) | (split == 1))
    return np.asarray(np.where(possible, cost, np.inf))


def best_stream_k_split(tiles: Numbers, steps: Numbers, device: Device = H200) -> Numbers:
    """Return the number of slices that makes the last wave shortest; 1 where splitting does not help."""
    return np.asarray(_stream_k_costs(tiles, steps, device).argmin(axis=0) + 1.0)


def stream_k_waves(tiles: Numbers, steps: Numbers, device: Device = H200) -> Numbers:
    """Return the number of waves if the last one is split optimally: full waves plus a fraction."""
    last_wave = _stream_k_costs(tiles, steps, device).min(axis=0) / steps
    return np.asarray(tiles // device.multiprocessors + last_wave)


def _alignment(problem: Problem) -> list[float]:
    """Return features of how well row lengths divide, which limits the width of loads.

    The values are the power of two, up to 2**6, in the row lengths of a, b and the result; whether 16-byte and 4-byte
    loads are possible; and whether m and k are multiples of 64.
    """
    m, n, k = (problem.size(name) for name in ("m", "n", "k"))
    layout = problem.word("layout")
    rows = (m if layout[0] == "t" else k, k if layout[1] == "t" else n, n)
    powers = [math.log2(math.gcd(row, 64)) for row in rows]
    smallest = min(powers[:2])
    return [*powers, float(smallest >= 3), float(smallest >= 1), float(m % 64 == 0), float(k % 64 == 0)]


def cublas_features(problem: Problem, batch: int = 1, device: Device = H200) -> Numbers:
    """Return the feature row of the model of cuBLAS: sizes, and how well usual tiles fill the GPU."""
    m, n, k = (float(problem.size(name)) for name in ("m", "n", "k"))
    layout, epilogue = problem.word("layout"), problem.word("epilogue")
    rates, sms = sustained_rates(device), device.multiprocessors
    row = [np.log(floor_seconds(problem, batch, device)), np.log(m), np.log(n), np.log(k)]
    for rows, cols in ((128, 256), (256, 128), (128, 128), (64, 64)):  # tiles that cuBLAS often uses
        units = np.ceil(m / rows) * np.ceil(n / cols) * batch
        per_sm = np.ceil(units / sms)
        row += [units / (sms * per_sm), np.log1p(per_sm), m * n * batch / (units * rows * cols)]
    bytes_moved = 2 * batch * (m * k + k * n + m * n)
    row += [np.log(2 * m * n * k * batch / rates.tensor_flops), np.log(bytes_moved / rates.memory_bandwidth)]
    row += [float(layout[0] == "t"), float(layout[1] == "t"), float(problem.word("dtype") == "fp16")]
    row += [float("bias" in epilogue), float("relu" in epilogue or "gelu" in epilogue), float(epilogue == "residual")]
    return np.array([[*row, *_alignment(problem), float(m == 1), float(n == 1)]])
