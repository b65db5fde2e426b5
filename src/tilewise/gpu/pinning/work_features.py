"""Estimate a kernel's runtime analytically from its work, and compute the inputs of the ranker's trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.gpu.devices import Device, exceeds_limits
from tilewise.gpu.pinning.ir import WorkSummary

Numbers = npt.NDArray[np.float64]
# Rates of the analytic estimate; the trees correct it, so they need to be right within a factor of two.
_LOAD_SECONDS = 0.9e-6  # from a load's issue to its data, under load
_STEP_SECONDS = 0.5e-6  # of a loop's iteration without a pipeline
_REDUCTION_SECONDS = 0.15e-6  # per doubling of the threads
_LAUNCH_SECONDS = 2e-6
CLOCK, _LANES = 1.7e9, 128  # per second; float32 operations per cycle and multiprocessor
_MMA_SLOWDOWN = 0.6  # further time of a product by mma.sync, in times that wgmma takes; arbitrary, the trees correct it
_FIXED_REGISTERS = 24  # of a thread, for addresses and loop counters
_SUSTAINED_SHARE = 0.85  # of the data sheet's rates, where no measured ones exist


@dataclass(frozen=True)
class RankedCandidate:
    """A configuration to rank: its work per program, launch settings, and the bytes of all tensors."""

    work: WorkSummary
    programs: int
    warps: int
    stages: int
    unique_bytes: float


def shared_bytes(candidate: RankedCandidate) -> float:
    """Estimate the shared memory of pipelined products: the operands of all stages but the one in use."""
    work = candidate.work
    return work.dot_operand_bytes * max(candidate.stages - 1, 1) if work.trips else 0.0


def is_too_large(candidate: RankedCandidate, device: Device) -> bool:
    """Tell whether a configuration exceeds the device's shared memory or a thread's registers."""
    live = max(candidate.work.accumulators, candidate.work.dot_results) / (32 * candidate.warps)
    return exceeds_limits(device, shared_bytes(candidate), live)


def features(candidates: Sequence[RankedCandidate], device: Device) -> tuple[Numbers, Numbers]:
    """Return the trees' features, one row per candidate, and an analytic runtime estimate in seconds for each."""
    of = {
        name: np.array([float(getattr(c.work, name)) for c in candidates])
        for name in ("loaded_bytes", "stored_bytes", "dot_flops", "elementwise", "special", "reduced", "reductions",
                     "trips", "chained_loads", "loop_load_bytes", "first_load_bytes", "dot_operand_bytes",
                     "accumulators", "largest_tensor", "dot_m", "dot_n", "dot_k", "dot_bits", "dot_results",
                     "fresh_dot_results", "wgmma_flops", "uses_tma", "loop_stages", "atomics")
    }  # fmt: skip
    programs, warps, stages, unique = (
        np.array([float(getattr(c, name)) for c in candidates])
        for name in ("programs", "warps", "stages", "unique_bytes")
    )
    narrowest = np.array([float(min((s[-1] for s in c.work.shapes if s), default=1)) for c in candidates])
    threads, in_loop = 32 * warps, of["trips"] > 0
    # Triton pipelines loops with products, and loops that ask for it; other loops wait for their loads.
    stages = np.where(of["loop_stages"] > 0, of["loop_stages"], np.where(of["dot_flops"] > 0, stages, 1.0))
    sms, architecture = device.multiprocessors, device.architecture

    # Occupancy: programs resident on one multiprocessor.
    shared = np.where(in_loop, of["dot_operand_bytes"] * np.maximum(stages, 1), 0)
    registers = np.clip((of["accumulators"] + of["largest_tensor"] / 2) / threads + _FIXED_REGISTERS, 32, 255)
    limits = (
        architecture.registers_per_multiprocessor // (registers * threads),
        architecture.shared_bytes_per_multiprocessor // (shared + 1024),
        architecture.max_warps // warps,
    )
    resident = np.clip(np.minimum.reduce(limits), 1, architecture.max_blocks)
    slots = sms * resident
    waves = programs / slots
    last_wave = np.maximum(waves / np.ceil(waves), 0.05)  # share of the slots that are busy on average

    # Times by each limit: memory, caches, loads in flight (Little's law), tensor cores, other arithmetic, latency.
    sustained = device.sustained
    bandwidth = sustained.memory_bandwidth if sustained else _SUSTAINED_SHARE * device.memory_bandwidth
    l2_bandwidth = sustained.l2_bandwidth if sustained else 1.6 * bandwidth
    tensor_rate = sustained.tensor_flops if sustained else _SUSTAINED_SHARE * device.tensor_flops.get("fp16", 1e14)
    total = (of["loaded_bytes"] + of["stored_bytes"]) * programs
    depth = np.where(in_loop & (stages > 1), np.maximum(stages - 1, 1), 1)
    per_program = of["loop_load_bytes"] * depth + np.where(in_loop, 0, of["first_load_bytes"])
    in_flight = per_program * np.minimum(programs, slots)
    memory, cache = unique / bandwidth, total / l2_bandwidth
    loads = total / np.maximum(in_flight, 1) * _LOAD_SECONDS
    rate = tensor_rate * np.where(of["dot_bits"] == 32, 0.5, 1)
    # Fewer than 64 rows, or than the four warps of a group, are multiplied by the slower instruction of Ampere.
    by_group = np.where(warps >= 4, of["wgmma_flops"], 0)
    products = (of["dot_flops"] + _MMA_SLOWDOWN * (of["dot_flops"] - by_group)) * programs / rate / last_wave
    operations = of["elementwise"] + 4 * of["special"] + 2 * of["reduced"]
    arithmetic = operations * programs / (sms * _LANES * CLOCK) / last_wave
    steps = np.where(in_loop, of["trips"] * _STEP_SECONDS / np.maximum(stages - 1, 1), 0)
    chain = np.ceil(waves) * (steps + of["reductions"] * _REDUCTION_SECONDS * np.log2(2 * warps) + 1e-6)
    bounds = (memory, cache, loads, products, arithmetic, chain)
    estimate = _LAUNCH_SECONDS + np.maximum.reduce(bounds)

    # fmt: off
    columns = [
        log2(estimate * 1e9), *(log2(bound * 1e9) for bound in bounds), log2(estimate / np.maximum(memory, 1e-9)),
        log2(threads), stages, log2(programs), log2(waves), last_wave, resident, log2(registers),
        log2(of["largest_tensor"] / threads), log2(of["accumulators"] / threads + 0.01),
        log2(of["loop_load_bytes"] / threads + 0.01), log2(of["first_load_bytes"] / threads + 0.01),
        log2(of["trips"] + 1), log2(of["reductions"] + 1), log2(of["reduced"] / threads + 1),
        log2(of["dot_m"] + 1), log2(of["dot_n"] + 1), log2(of["dot_k"] + 1),
        log2(of["dot_m"] * of["dot_n"] / warps + 1), log2(shared + 1), of["dot_bits"], log2(in_flight),
        log2(narrowest), log2(of["chained_loads"] + 1),
        log2(of["special"] / np.maximum(of["elementwise"], 1) + 0.001), log2(total / np.maximum(unique, 1)),
        of["uses_tma"], log2(of["dot_m"] / (16 * warps) + 0.01), of["accumulators"] / threads > 128,
        log2(of["dot_results"] / threads + 0.01), log2(of["atomics"] * programs + 1),
        (of["accumulators"] + of["fresh_dot_results"]) / threads, by_group / np.maximum(of["dot_flops"], 1),
    ]
    # fmt: on
    return np.stack(columns, axis=1), estimate


def relative(rows: Numbers) -> Numbers:
    """Append to every row its difference from the mean row of the list."""
    return np.concatenate([rows, rows - rows.mean(axis=0)], axis=1)


def log2(values: Numbers) -> Numbers:
    return np.log2(np.maximum(values, 1e-3))
