"""Find a program's bottleneck and describe it in one sentence.

The profile's time is attributed to five causes. The time of a unit (a kernel, or an operation without one) goes to
memory bandwidth or compute by its roofline, unless a more specific cause explains it: an implementation far below the
roofline although a faster one exists (slow backend), memory allocated beyond the result (allocation), or a kernel so
short that the call dominates (Python overhead). Python code around units is overhead, except for the share explained by
allocating and filling fresh memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewise.profile.flops import MOVES_ONLY
from tilewise.profile.report.results import ProfileResults, ProfileRow, Unit, interruption_threshold
from tilewise.profile.units import bytes_, count, seconds, share

COMPUTE = "compute"
MEMORY = "memory bandwidth"
PYTHON = "Python overhead"
ALLOCATION = "allocation"
BACKEND = "slow backend"
_PLAN = "plan"  # the backend of a plan's ops (graph/executor.py)

_MAX_CALL_SECONDS = 20e-6  # upper bound for the overhead of calling a kernel from Python
_MIN_EXCESS_BYTES = 1 << 20  # smaller allocations are cheap because the allocator recycles them
# A layer that allocates more than this, and this many times its results, is reported even if it costs little time.
_EXTREME_BYTES, _EXTREME_FACTOR = 64 << 20, 16


@dataclass(frozen=True)
class Finding:
    """One cause of a program's runtime: its share of the time, the layer most affected, and advice."""

    kind: str
    share: float
    where: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class _TimeByCause:
    """Seconds attributed to each cause, in total and by layer and operation."""

    def __init__(self) -> None:
        self.causes = _Seconds()
        self.layers: dict[str, _Seconds] = defaultdict(_Seconds)
        self.ops: dict[str, _Seconds] = defaultdict(_Seconds)

    def add(self, cause: str, amount: float, layer: str, op: str = "") -> None:
        """Add seconds to a cause, and to its layer and operation."""
        if amount > 0:
            for seconds_by_name, name in ((self.causes, cause), (self.layers[cause], layer), (self.ops[cause], op)):
                seconds_by_name[name] += amount


class _Seconds(defaultdict[str, float]):
    """Seconds by name."""

    def __init__(self) -> None:
        super().__init__(float)

    def ranked(self) -> list[str]:
        """Return the names by their seconds, largest first."""
        return sorted(self, key=lambda name: -self[name])


def find_bottlenecks(results: ProfileResults) -> list[Finding]:
    """Return the causes of at least 10 % of the time each, largest first; at least one if anything ran."""
    if not results.by_layer or results.seconds <= 0:
        return []
    times = _attribute_time(results)
    ranked = times.causes.ranked()
    if _allocates_extremely(results) and ALLOCATION not in ranked[:1]:
        ranked = [ALLOCATION, *(cause for cause in ranked if cause != ALLOCATION)]
        times.add(ALLOCATION, 1e-12, _largest_allocator(results).name)
    findings = [_finding(cause, times, results) for cause in ranked]
    return [f for i, f in enumerate(findings) if i == 0 or f.share >= 0.1]


def _attribute_time(results: ProfileResults) -> _TimeByCause:
    """Attribute the time of all kernels, of Python code in layers, and of code outside layers to causes."""
    times = _TimeByCause()
    preferred = _preferred_backends()
    times_by_signature: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for unit in results.units:
        times_by_signature[_call_signature(unit)].append(unit.seconds)
    for unit in results.units:
        similar = times_by_signature[_call_signature(unit)]
        unit = replace(unit, seconds=min(unit.seconds, interruption_threshold(similar)))
        # Judge a backend by its fastest call, so that load on the machine is not blamed on the backend.
        if is_slow_backend(replace(unit, seconds=min(similar)), preferred):
            times.add(BACKEND, unit.seconds, unit.layer, unit.name)
        else:
            _attribute_unit(unit, times, results.machine.fresh_memory)
    # Memory that a layer allocates itself is usually filled by a copy, so it costs a read as well.
    seconds_per_byte = 1 / results.machine.fresh_memory + 1 / results.machine.memory_bandwidth(results.threads)
    for row in results.by_layer.values():
        own = row.own_seconds - row.interrupted_seconds
        allocation = min(own, _excess(row.own_allocated, 0) * seconds_per_byte)
        times.add(ALLOCATION, allocation, row.name)
        times.add(PYTHON, own - allocation, row.name)
    times.add(PYTHON, results.outside_seconds - results.outside_interrupted_seconds, _OUTSIDE)
    return times


def _call_signature(unit: Unit) -> tuple[object, ...]:
    """Return a key that is equal for comparable calls: same operation, layer, shapes and backend."""
    return unit.name, unit.layer, unit.phase, unit.shapes, unit.backend


_OUTSIDE = "(outside the layers)"


def _attribute_unit(unit: Unit, times: _TimeByCause, fresh_memory: float) -> None:
    """Attribute a kernel call's time: to allocation, then call overhead, then its roofline limit."""
    remaining = unit.seconds
    # A large copy is counted as allocation, because avoiding the copy is the remedy.
    if unit.name in MOVES_ONLY and unit.result_bytes > _MIN_EXCESS_BYTES:
        times.add(ALLOCATION, remaining, unit.layer, unit.name)
        return
    unexplained = max(remaining - unit.roofline_seconds, 0.0)
    allocation = min(unexplained, _excess(unit.allocated, 4 * unit.result_bytes) / fresh_memory)
    times.add(ALLOCATION, allocation, unit.layer, unit.name)
    remaining -= allocation
    # A kernel far above its roofline time is dominated by the call, up to the maximum cost of a call.
    if unit.roofline_seconds < 0.2 * unit.seconds:
        call_overhead = min(max(remaining - unit.roofline_seconds, 0.0), _MAX_CALL_SECONDS)
        times.add(PYTHON, call_overhead, unit.layer, unit.name)
        remaining -= call_overhead
    times.add(MEMORY if unit.memory_bound else COMPUTE, remaining, unit.layer, unit.name)


def _excess(allocated: int, required: int) -> float:
    """Return the bytes allocated beyond those required; 0 if below 1 MiB."""
    return float(allocated - required) if allocated - required > _MIN_EXCESS_BYTES else 0.0


def _preferred_backends() -> dict[str, str]:
    """Return, for each operation, the first implementation in the default backend's order."""
    from tilewise.backend.registry import OptimizedBackend

    default = OptimizedBackend()
    return {op: default.implementations(op)[0].name for op in default.operations()}


def is_slow_backend(unit: Unit, preferred: dict[str, str]) -> bool:
    """Tell whether a matrix product was slow because of its backend: below 60 % of the roofline.

    The preferred backend must be below 3 %. Calls under 50 µs (1 ms on the preferred backend) are not judged, because
    the call overhead dominates them. Nor are the ops of a plan, which no backend replaces.
    """
    if not unit.flops or unit.seconds < 50e-6 or unit.backend == _PLAN:
        return False
    efficiency = unit.roofline_seconds / unit.seconds
    if unit.backend != preferred.get(unit.name, unit.backend):
        return efficiency < 0.6
    return efficiency < 0.03 and unit.seconds > 1e-3


# --- Large blocks that are allocated and hardly used cost little time, but are worth reporting ---


def _allocates_extremely(results: ProfileResults) -> bool:
    """Tell whether one layer allocates far more memory than all results together occupy."""
    result_bytes = sum(u.result_bytes for u in results.units)
    row = _largest_allocator(results)
    return row.own_allocated > max(_EXTREME_BYTES, _EXTREME_FACTOR * result_bytes)


def _largest_allocator(results: ProfileResults) -> ProfileRow:
    return max(results.by_layer.values(), key=lambda row: row.own_allocated)


# --- Sentences for the report ---


def _finding(cause: str, times: _TimeByCause, results: ProfileResults) -> Finding:
    """Return the finding about a cause: its share of the time, its main layer, and a sentence."""
    where = times.layers[cause].ranked()[0]
    fraction = times.causes[cause] / results.seconds
    worst_ops = [op for op in times.ops[cause].ranked()[:3] if op]
    sentence = _SENTENCES[cause](results, where, worst_ops, share(fraction))
    return Finding(cause, fraction, where, sentence)


def _work_and_rate(results: ProfileResults, ops: list[str], kind: str) -> tuple[int, float]:
    """Return the FLOPs (or bytes, by `kind`) of some operations, in total and per second."""
    rows = [results.by_op[op] for op in ops if op in results.by_op]
    work = sum(getattr(row, kind) for row in rows)
    return work, work / max(sum(row.seconds for row in rows), 1e-12)


def _compute(results: ProfileResults, where: str, ops: list[str], time_share: str) -> str:
    """Return advice on layer `where` if arithmetic limits it, with the rate reached.

    `time_share` is its share as text.
    """
    _, rate = _work_and_rate(results, ops, "flops")
    efficiency = rate / results.machine.peak(results.threads)
    advice = "use more threads, INT8 or pruning" if efficiency > 0.5 else "try a better tile"
    return (
        f"Compute: {time_share} of the time is arithmetic, most of it {_join_names(ops)} in "
        f"{_layer_text(results, where)}, at {count(rate)}FLOP/s ({share(efficiency)} of the peak); "
        f"{advice} to go faster."
    )


def _memory(results: ProfileResults, where: str, ops: list[str], time_share: str) -> str:
    """Return advice on layer `where` if memory bandwidth limits it, with the rate that operations `ops` reach."""
    bytes_moved, rate = _work_and_rate(results, ops, "bytes_moved")
    return (
        f"Memory bandwidth: {time_share} of the time is spent in {_join_names(ops)}, most in "
        f"{_layer_text(results, where)}, moving {bytes_(bytes_moved)} at {count(rate)}B/s with little arithmetic; "
        "fuse these operations or work in place."
    )


def _python(results: ProfileResults, where: str, ops: list[str], time_share: str) -> str:
    """Return advice on layer `where` if the time between its kernels, in Python, limits the program."""
    row = results.by_layer.get(where)
    calls = row.calls if row else len(results.units)
    mean = row.unit_seconds / row.calls if row and row.calls else 0.0
    detail = f" ({calls} operations of {seconds(mean)} on average)" if row and calls > 3 else ""
    advice = "replace loops by one operation on whole arrays"
    if any(unit.backend == _PLAN for unit in results.units):
        advice = "a plan's call has this cost once, so a larger batch shares it among more inputs"
    elif where not in ("", _OUTSIDE):  # a layer, which a plan runs without Python between the operations
        advice = "tilewise.compile runs a network in native calls, without this overhead"
    return (
        f"Python overhead: {time_share} of the time is spent outside kernels, most in "
        f"{_layer_text(results, where)}{detail}; {advice}."
    )


def _allocation(results: ProfileResults, where: str, ops: list[str], time_share: str) -> str:
    """Return advice on layer `where` if memory allocation limits it: whether copies or large results are the cause."""
    row = results.by_layer.get(where) or _largest_allocator(results)
    allocated = row.own_allocated + row.allocated
    result_bytes = sum(u.result_bytes for u in results.units if u.layer == row.name)
    copies = [op for op in ops if op in MOVES_ONLY]
    if copies:
        purpose = f"much of it for copies by {_join_names(copies)}"
    else:
        purpose = f"for results of {bytes_(result_bytes)}" + (f", most in {_join_names(ops)}" if ops else "")
    return (
        f"Allocation: {_layer_text(results, where)} allocates {bytes_(allocated)} of memory, {purpose} "
        f"({time_share} of the time); reuse buffers and avoid copies."
    )


def _backend(results: ProfileResults, where: str, ops: list[str], time_share: str) -> str:
    """Return advice on layer `where` if its operations `ops` ran on a slower implementation than available."""
    row = results.by_op[ops[0]]
    name = max(row.backends, key=lambda b: row.backends[b])
    best = _preferred_backends().get(ops[0], name)
    advice = f"switch to the {best!r} backend" if best != name else "no backend handles this shape and type well"
    return (
        f"Slow backend: {time_share} of the time is {ops[0]} in {_layer_text(results, where)} on the {name!r} backend, "
        f"at {share(row.roofline_share)} of the roofline; {advice}."
    )


_SENTENCES: dict[str, Callable[[ProfileResults, str, list[str], str], str]] = {
    COMPUTE: _compute,
    MEMORY: _memory,
    PYTHON: _python,
    ALLOCATION: _allocation,
    BACKEND: _backend,
}


def _layer_text(results: ProfileResults, layer: str) -> str:
    """Return a layer's name for a sentence; "" is the model itself."""
    if layer == _OUTSIDE:
        return "code outside the layers"
    row = results.by_layer.get(layer)
    return f"layer {(row and row.label) or layer}" if layer else "the model itself"


def _join_names(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "operations"
