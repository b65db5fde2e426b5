"""Rank the configurations of any Triton kernel by the work in its intermediate representation, without running them.

An analytic estimate (roofline, latency and occupancy) comes first. Two sets of regression trees correct it: one
predicts the ratio of the runtime to the estimate, the other how a configuration compares with the list's average. They
were trained on our families of kernels on an H200 (`tools/ship_ranker.py`). Scores are logarithms of runtimes, up to a
constant per list. Prediction needs NumPy alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise._safetensors import load_arrays
from tilewise.errors import FileFormatError
from tilewise.gpu.devices import Device, exceeds_limits
from tilewise.gpu.pinning.ir import WorkSummary

RANKER = "ranker"  # the first word of its name in lock files
FILE = Path(__file__).parent / "h200_ranker.safetensors"
Numbers = npt.NDArray[np.float64]
# Rates of the analytic estimate; the trees correct it, so they need to be right within a factor of two.
_LOAD_SECONDS = 0.9e-6  # from a load's issue to its data, under load
_STEP_SECONDS = 0.5e-6  # of a loop's iteration without a pipeline
_REDUCTION_SECONDS = 0.15e-6  # per doubling of the threads
_LAUNCH_SECONDS = 2e-6
_CLOCK, _LANES = 1.7e9, 128  # per second; float32 operations per cycle and multiprocessor
_FIXED_REGISTERS = 24  # of a thread, for addresses and loop counters
_CHUNK_ROWS = 128  # rows that the trees read at once: some 25,000 nodes stay in the cache
TOO_LARGE = 10.0  # added to the score: behind all others
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
                     "fresh_dot_results", "uses_tma", "loop_stages", "atomics")
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
    products = of["dot_flops"] * programs / rate / last_wave
    operations = of["elementwise"] + 4 * of["special"] + 2 * of["reduced"]
    arithmetic = operations * programs / (sms * _LANES * _CLOCK) / last_wave
    steps = np.where(in_loop, of["trips"] * _STEP_SECONDS / np.maximum(stages - 1, 1), 0)
    chain = np.ceil(waves) * (steps + of["reductions"] * _REDUCTION_SECONDS * np.log2(2 * warps) + 1e-6)
    bounds = (memory, cache, loads, products, arithmetic, chain)
    estimate = _LAUNCH_SECONDS + np.maximum.reduce(bounds)

    # fmt: off
    columns = [
        _log(estimate * 1e9), *(_log(bound * 1e9) for bound in bounds), _log(estimate / np.maximum(memory, 1e-9)),
        _log(threads), stages, _log(programs), _log(waves), last_wave, resident, _log(registers),
        _log(of["largest_tensor"] / threads), _log(of["accumulators"] / threads + 0.01),
        _log(of["loop_load_bytes"] / threads + 0.01), _log(of["first_load_bytes"] / threads + 0.01),
        _log(of["trips"] + 1), _log(of["reductions"] + 1), _log(of["reduced"] / threads + 1),
        _log(of["dot_m"] + 1), _log(of["dot_n"] + 1), _log(of["dot_k"] + 1),
        _log(of["dot_m"] * of["dot_n"] / warps + 1), _log(shared + 1), of["dot_bits"], _log(in_flight),
        _log(narrowest), _log(of["chained_loads"] + 1),
        _log(of["special"] / np.maximum(of["elementwise"], 1) + 0.001), _log(total / np.maximum(unique, 1)),
        of["uses_tma"], _log(of["dot_m"] / (16 * warps) + 0.01), of["accumulators"] / threads > 128,
        _log(of["dot_results"] / threads + 0.01), _log(of["atomics"] * programs + 1),
        (of["accumulators"] + of["fresh_dot_results"]) / threads,
    ]
    # fmt: on
    return np.stack(columns, axis=1), estimate


def relative(rows: Numbers) -> Numbers:
    """Append to every row its difference from the mean row of the list."""
    return np.concatenate([rows, rows - rows.mean(axis=0)], axis=1)


def _log(values: Numbers) -> Numbers:
    return np.log2(np.maximum(values, 1e-3))


class Trees:
    """Regression trees as flat arrays: inner nodes compare a feature with a threshold, leaves hold a value."""

    def __init__(self, arrays: dict[str, npt.NDArray[np.generic]], name: str) -> None:
        """Read the arrays `name.feature`, `name.threshold`, `name.left`, `name.right`, `name.value`, `name.root`."""
        indices = (arrays[f"{name}.{column}"] for column in ("feature", "left", "right", "root"))
        self._feature, self._left, self._right, self._root = (array.astype(np.int64) for array in indices)
        self._threshold, self._value = (arrays[f"{name}.{part}"].astype(np.float64) for part in ("threshold", "value"))
        nodes = len(self._feature)
        children = np.stack([self._left, self._right])
        inner = self._feature >= 0
        # Children come behind their parent, so that a walk ends.
        if not (children[:, inner] > np.flatnonzero(inner)).all() or (children >= nodes).any():
            raise ValueError("trees whose nodes are in order")

    def predict(self, rows: Numbers) -> Numbers:
        """Return, for each row of features, the sum of all trees' predictions."""
        # Splits on columns that are equal in all rows are decided once: `skip` leads from a node past such splits.
        nodes, is_equal = np.arange(len(self._feature)), (rows == rows[:1]).all(axis=0)
        inner, feature = self._feature >= 0, np.maximum(self._feature, 0)
        first = rows[0, feature] if len(rows) else np.zeros(len(nodes))
        child = np.where(first <= self._threshold, self._left, self._right)
        skip = np.where(inner & is_equal[feature], child, nodes)
        while not np.array_equal(skip, further := skip[skip]):
            skip = further
        left, right = skip[self._left], skip[self._right]
        roots = skip[self._root]
        totals = np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = np.ascontiguousarray(rows[start : start + _CHUNK_ROWS])
            node = np.tile(roots, len(chunk))  # (rows x trees,)
            offset = np.repeat(np.arange(len(chunk)) * chunk.shape[1], len(roots))
            flat, active = chunk.ravel(), np.flatnonzero(inner[node])
            while len(active):
                here = node[active]
                goes_left = flat[offset[active] + feature[here]] <= self._threshold[here]
                node[active] = there = np.where(goes_left, left[here], right[here])
                active = active[inner[there]]
            totals[start : start + len(chunk)] = self._value[node].reshape(len(chunk), len(roots)).sum(axis=1)
        return totals


class KernelRanker:
    """Ranks configurations of any Triton kernel by trained regression trees."""

    def __init__(self, path: Path = FILE) -> None:
        """Read the trees from a model file."""
        arrays, _ = load_arrays(path)
        self.name = f"{RANKER} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        try:
            self._ratio, self._relative = Trees(arrays, "ratio"), Trees(arrays, "relative")
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} is not a ranker of kernels: it lacks {error}.") from error

    def scores(self, candidates: Sequence[RankedCandidate], device: Device) -> Numbers:
        """Return one score per candidate, a logarithm of its runtime up to a constant; lower is faster."""
        rows, estimate = features(candidates, device)
        by_ratio = self._ratio.predict(rows) + np.log(estimate)
        scores = (by_ratio - by_ratio.mean() + self._relative.predict(relative(rows))) / 2
        scores = scores + TOO_LARGE * np.array([is_too_large(candidate, device) for candidate in candidates])
        # Rounding keeps the order the same on machines whose logarithms differ in the last bit.
        return np.asarray(np.round(scores, 6))


@lru_cache(maxsize=1)
def shipped_ranker() -> KernelRanker | None:
    """Load the ranker that is installed with tilewise; None if the file is missing."""
    return KernelRanker() if FILE.is_file() else None
