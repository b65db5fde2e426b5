"""What limits a program, in one sentence.

The profile's time is dealt out to five causes. A unit's time goes to memory bandwidth or compute by its roofline,
unless a cause with a remedy of its own explains it better: an implementation far from the machine's ceiling while a
faster one exists (slow backend), blocks taken beyond the result (allocation), a kernel so short that calling it is the
cost (Python overhead). Python code around units is overhead, except the part that taking and filling fresh memory
explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewise.profile.flops import MOVES_ONLY
from tilewise.profile.report.results import ProfileResults, Row, Unit, limit_of_likes
from tilewise.profile.units import bytes_, count, seconds, share

COMPUTE = "compute"
MEMORY = "memory bandwidth"
PYTHON = "Python overhead"
ALLOCATION = "allocation"
BACKEND = "slow backend"

_CALLING = 20e-6  # the most that calling a kernel may cost; what is inefficient beyond it has another cause
_LARGE_EXCESS = 1 << 20
_EXTREME_BYTES, _EXTREME_FACTOR = 64 << 20, 16


@dataclass(frozen=True)
class Finding:
    """A cause, the share of the time it explains, where most of it is, and what to do."""

    kind: str
    share: float
    where: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class _Ledger:
    """Seconds by cause, and by cause and place."""

    def __init__(self) -> None:
        self.causes: dict[str, float] = defaultdict(float)
        self.layers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.ops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, cause: str, amount: float, layer: str, op: str = "") -> None:
        if amount > 0:
            self.causes[cause] += amount
            self.layers[cause][layer] += amount
            self.ops[cause][op] += amount

    def ranked(self) -> list[str]:
        return _largest(self.causes)

    def worst_layer(self, cause: str) -> str:
        return _largest(self.layers[cause])[0]

    def worst_ops(self, cause: str, most: int = 3) -> list[str]:
        return [op for op in _largest(self.ops[cause])[:most] if op]


def _largest(amounts: dict[str, float]) -> list[str]:
    return sorted(amounts, key=lambda name: -amounts[name])


def find_bottlenecks(results: ProfileResults) -> list[Finding]:
    """Causes that explain at least a tenth of the time, the largest first; at least one if anything was recorded."""
    if not results.by_layer or results.seconds <= 0:
        return []
    ledger = _deal_out(results)
    ranked = ledger.ranked()
    if _allocates_extremely(results) and ALLOCATION not in ranked[:1]:
        ranked = [ALLOCATION, *(cause for cause in ranked if cause != ALLOCATION)]
        ledger.add(ALLOCATION, 1e-12, _largest_allocator(results).name)
    findings = [_finding(cause, ledger, results) for cause in ranked]
    return [f for i, f in enumerate(findings) if i == 0 or f.share >= 0.1]


def _deal_out(results: ProfileResults) -> _Ledger:
    ledger = _Ledger()
    preferred = _preferred_backends()
    times = _times_by_likeness(results.units)
    for unit in results.units:
        like = times[_likeness(unit)]
        unit = replace(unit, seconds=min(unit.seconds, limit_of_likes(like)))
        if is_slow_backend(
            replace(unit, seconds=min(like)), preferred
        ):  # at its best, so that load is not blamed on it
            ledger.add(BACKEND, unit.seconds, unit.layer, unit.name)
        else:
            _deal_unit(unit, ledger, results.machine.fresh_memory)
    # What a layer takes itself, it fills with something it has to read: copies are the usual case.
    per_byte = 1 / results.machine.fresh_memory + 1 / results.machine.memory_bandwidth(results.threads)
    for row in results.by_layer.values():
        own = row.own_seconds - row.interrupted_seconds
        taking = min(own, _excess(row.own_allocated, 0) * per_byte)
        ledger.add(ALLOCATION, taking, row.name)
        ledger.add(PYTHON, own - taking, row.name)
    ledger.add(PYTHON, results.outside_seconds - results.outside_interrupted_seconds, _OUTSIDE)
    return ledger


def _likeness(unit: Unit) -> tuple[object, ...]:
    return unit.name, unit.layer, unit.phase, unit.shapes, unit.backend


def _times_by_likeness(units: list[Unit]) -> dict[tuple[object, ...], list[float]]:
    """The times of each operation in one place on one shape."""
    times: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for unit in units:
        times[_likeness(unit)].append(unit.seconds)
    return times


_OUTSIDE = "(outside the layers)"


def _deal_unit(unit: Unit, ledger: _Ledger, fresh_memory: float) -> None:
    left = unit.seconds
    if unit.name in MOVES_ONLY and unit.result_bytes > _LARGE_EXCESS:
        ledger.add(ALLOCATION, left, unit.layer, unit.name)
        return
    unexplained = max(left - unit.roofline_seconds, 0.0)
    taking = min(unexplained, _excess(unit.allocated, 4 * unit.result_bytes) / fresh_memory)
    ledger.add(ALLOCATION, taking, unit.layer, unit.name)
    left -= taking
    if unit.roofline_seconds < 0.2 * unit.seconds:
        calling = min(max(left - unit.roofline_seconds, 0.0), _CALLING)
        ledger.add(PYTHON, calling, unit.layer, unit.name)
        left -= calling
    ledger.add(MEMORY if unit.memory_bound else COMPUTE, left, unit.layer, unit.name)


def _excess(allocated: int, needed: int) -> float:
    """Bytes beyond what is needed, where that is worth a word."""
    return float(allocated - needed) if allocated - needed > _LARGE_EXCESS else 0.0


def _preferred_backends() -> dict[str, str]:
    """The implementation of each operation that the default backend asks first."""
    from tilewise.backend.registry import OptimizedBackend

    default = OptimizedBackend()
    return {op: default.implementations(op)[0].name for op in default.operations()}


def is_slow_backend(unit: Unit, preferred: dict[str, str]) -> bool:
    """A product far below the ceiling: on another implementation than the preferred one, or hopelessly so."""
    if not unit.flops or unit.seconds < 50e-6:
        return False
    reached = unit.roofline_seconds / unit.seconds
    passed_over = unit.backend != preferred.get(unit.name, unit.backend)
    return reached < 0.6 if passed_over else (reached < 0.03 and unit.seconds > 1e-3)


# --- blocks that are taken and hardly touched cost little time, but they are what is wrong ---


def _allocates_extremely(results: ProfileResults) -> bool:
    needed = sum(u.result_bytes for u in results.units)
    row = _largest_allocator(results)
    return row.own_allocated > max(_EXTREME_BYTES, _EXTREME_FACTOR * needed)


def _largest_allocator(results: ProfileResults) -> Row:
    return max(results.by_layer.values(), key=lambda row: row.own_allocated)


# --- the sentences ---


def _finding(cause: str, ledger: _Ledger, results: ProfileResults) -> Finding:
    where = ledger.worst_layer(cause)
    part = ledger.causes[cause] / results.seconds
    sentence = _SENTENCES[cause](results, where, ledger.worst_ops(cause), share(part))
    return Finding(cause, part, where, sentence)


def _compute(results: ProfileResults, where: str, ops: list[str], part: str) -> str:
    rows = [results.by_op[op] for op in ops if op in results.by_op]
    rate = sum(r.flops for r in rows) / max(sum(r.seconds for r in rows), 1e-12)
    reached = rate / results.machine.peak(results.threads)
    more = "use more threads, smaller numbers (INT8) or fewer (pruning)" if reached > 0.5 else "try a better tile"
    return (
        f"Compute: {part} of the time is arithmetic, most of it {_listed(ops)} in {_place(results, where)}, at "
        f"{count(rate)}FLOP/s ({share(reached)} of the peak); {more} to go faster."
    )


def _memory(results: ProfileResults, where: str, ops: list[str], part: str) -> str:
    rows = [results.by_op[op] for op in ops if op in results.by_op]
    moved = sum(r.bytes_moved for r in rows)
    rate = moved / max(sum(r.seconds for r in rows), 1e-12)
    return (
        f"Memory bandwidth: {part} of the time goes into {_listed(ops)}, most in {_place(results, where)}, which move "
        f"{bytes_(moved)} at {count(rate)}B/s and compute little; fuse the chain into one pass or work in place."
    )


def _python(results: ProfileResults, where: str, ops: list[str], part: str) -> str:
    row = results.by_layer.get(where)
    calls = row.calls if row else len(results.units)
    mean = row.unit_seconds / row.calls if row and row.calls else 0.0
    detail = f" ({calls} operations of {seconds(mean)} on average)" if row and calls > 3 else ""
    return (
        f"Python overhead: {part} of the time is spent around the kernels, most in {_place(results, where)}{detail}; "
        "replace loops by one operation on whole arrays."
    )


def _allocation(results: ProfileResults, where: str, ops: list[str], part: str) -> str:
    row = results.by_layer.get(where) or _largest_allocator(results)
    taken = row.own_allocated + row.allocated
    needed = sum(u.result_bytes for u in results.units if u.layer == row.name)
    copies = [op for op in ops if op in MOVES_ONLY]
    if copies:
        purpose = f"much of it for copies by {_listed(copies)}"
    else:
        purpose = f"for results of {bytes_(needed)}" + (f", most in {_listed(ops)}" if ops else "")
    return (
        f"Allocation: {_place(results, where)} takes {bytes_(taken)} of memory, {purpose} ({part} of the time); "
        "reuse buffers and avoid copies."
    )


def _backend(results: ProfileResults, where: str, ops: list[str], part: str) -> str:
    row = results.by_op[ops[0]]
    name = max(row.backends, key=lambda b: row.backends[b])
    best = _preferred_backends().get(ops[0], name)
    advice = f"switch to the {best!r} backend" if best != name else "look at its shape and type: none suits it well"
    return (
        f"Slow backend: {part} of the time is {ops[0]} in {_place(results, where)} on the {name!r} backend, at "
        f"{share(row.roofline_share)} of what this machine can do; {advice}."
    )


_SENTENCES: dict[str, Callable[[ProfileResults, str, list[str], str], str]] = {
    COMPUTE: _compute,
    MEMORY: _memory,
    PYTHON: _python,
    ALLOCATION: _allocation,
    BACKEND: _backend,
}


def _place(results: ProfileResults, layer: str) -> str:
    if layer == _OUTSIDE:
        return "code outside the layers"
    row = results.by_layer.get(layer)
    return f"layer {(row and row.label) or layer}" if layer else "the model itself"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "operations"
