"""Measuring one kernel: check every configuration against PyTorch, then time the right ones in shuffled batches.

How a runtime is taken (docs/collections.md has the reasons):
- A unit is a CUDA graph of launches that together last about `unit_ms`. Operands rotate through several sets, so
  that what does not fit into the L2 cache comes from memory, as it would in a program.
- A batch is up to `batch_configs` units in shuffled order with the default configuration before and after. Each round
  goes over all configurations once; there are at least `rounds`, and more for those that still scatter.
- A batch whose two default readings disagree with each other or with the kernel's own median was disturbed: it is
  kept, marked, and measured again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.tune.problem import Config, Problem
from tilewise.tune.triton.compiling import use_cache
from tilewise.tune.triton.device import Device, MisfitError
from tilewise.tune.triton.family import Operands, get_family
from tilewise.tune.triton.graphs import Run


@dataclass(frozen=True)
class Settings:
    """How long and how often; the defaults are what the embedded collection was measured with."""

    unit_ms: float = 0.8
    max_launches: int = 96
    rounds: int = 3
    max_rounds: int = 6
    batch_configs: int = 32
    scatter: float = 0.01
    disturbed: float = 0.03
    max_sets: int = 16
    slowest_ms: float = 25.0


@dataclass(frozen=True)
class Job:
    """A kernel to measure. `careful`: synchronise after each configuration and say which one is next, so
    that one that kills the process can be named."""

    problem: Problem
    configs: tuple[Config, ...]  # the default first
    seed: int
    settings: Settings = field(default_factory=Settings)
    careful: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a configuration: ok, misfit, wrong, failed or slow; and why."""

    config: Config
    status: str
    reason: str = ""
    registers: int = 0
    spills: int = 0


@dataclass(frozen=True)
class Batch:
    """Timings of one batch, nanoseconds per launch; configurations by their place in the job. The default's time is the
    mean of its two readings."""

    round: int
    configs: tuple[int, ...]
    runtime_ns: tuple[float, ...]
    default_ns: float
    disturbed: bool
    watch: dict[str, float]


Report = Callable[[Any], None]


@dataclass
class _Candidate:
    index: int
    config: Config
    runs: list[Run]  # one for each operand set
    estimate_ns: float = 0.0
    launches: int = 1
    unit: Run | None = None
    times: list[float] = field(default_factory=list)


def measure(device: Device, job: Job, report: Report) -> None:
    """Send a Verdict list and Batches to `report`; each message is complete in itself."""
    sets = _operand_sets(device, job)
    candidates = _check_all(device, job, sets, report)
    if not candidates or candidates[0].config != job.configs[0]:
        return  # without the default there is nothing to normalise by; the verdicts say why
    _make_units(device, job, candidates)
    while device.notes:
        report(("note", device.notes.pop(0)))
    _time_all(device, job, candidates, report)


def _operand_sets(device: Device, job: Job) -> list[Operands]:
    """Enough sets of operands that one is out of the L2 cache by the time its turn comes again, within reason."""
    family = get_family(job.problem.family)
    generator = device.torch.Generator(device=device.torch_device).manual_seed(job.seed)
    footprint = max(family.bytes_moved(job.problem), 1)
    count = min(max(1, math.ceil(2.5 * device.l2_bytes / footprint)), job.settings.max_sets)
    return [family.operands(job.problem, device.torch, device.torch_device, generator) for _ in range(count)]


def _check_all(device: Device, job: Job, sets: Sequence[Operands], report: Report) -> list[_Candidate]:
    """Run every configuration once into a poisoned output and compare; time a second run roughly."""
    family, torch = get_family(job.problem.family), device.torch
    expected = family.expected(job.problem, torch, sets[0])
    right = torch.zeros(len(job.configs), dtype=torch.bool, device=device.torch_device)
    verdicts: dict[Config, Verdict] = {}
    candidates: list[_Candidate] = []
    for index, config in enumerate(job.configs):
        if job.careful:
            report(("next", config))
        binary = family.binary(job.problem, config)
        try:
            runs = [device.prepare(binary, family.launch(job.problem, config, operands)) for operands in sets]
        except MisfitError as error:
            verdicts[config] = Verdict(config, "misfit", str(error))
            continue
        registers, spills = device.registers(binary)
        verdicts[config] = Verdict(config, "ok", "", registers, spills)
        sets[0].guarded.fill_(math.nan)
        runs[0]()
        out, guard = sets[0].out, sets[0].guarded[sets[0].out.numel() :]
        close = ((out.float() - expected.value).abs() <= expected.bound).all()
        right[index] = close & guard.isnan().all()
        if job.careful:
            device.synchronize()
        candidates.append(_Candidate(index, config, runs))
    device.synchronize()
    right_list = right.tolist()
    kept = []
    for candidate in candidates:
        if right_list[candidate.index]:
            kept.append(candidate)
        else:
            verdicts[candidate.config] = Verdict(candidate.config, "wrong", "the result differs from PyTorch's")
    kept = list(_estimate(device, job, kept, verdicts))
    report(("verdicts", list(verdicts.values())))
    return kept


def _estimate(
    device: Device, job: Job, candidates: list[_Candidate], verdicts: dict[Config, Verdict]
) -> Iterator[_Candidate]:
    """A rough time of each, from one launch; the hopelessly slow ones are recorded as such and left out."""
    for candidate, runtime_ns in zip(candidates, device.time_units([c.runs[0] for c in candidates]), strict=True):
        candidate.estimate_ns = max(runtime_ns, 500.0)
        is_default = candidate.config == job.configs[0]
        if candidate.estimate_ns > job.settings.slowest_ms * 1e6 and not is_default:
            reason = f"one run took {candidate.estimate_ns / 1e6:.1f} ms"
            verdicts[candidate.config] = Verdict(candidate.config, "slow", reason)
            continue
        yield candidate


def _make_units(device: Device, job: Job, candidates: Sequence[_Candidate]) -> None:
    for candidate in candidates:
        sets = len(candidate.runs)
        wanted = round(job.settings.unit_ms * 1e6 / candidate.estimate_ns)
        launches = min(max(wanted, 1), job.settings.max_launches)
        if launches > sets:
            launches = max(1, round(launches / sets)) * sets  # each set equally often
        candidate.launches = launches
        # Where not all sets are used, neighbours start at different ones.
        offset = candidate.index if launches < sets else 0
        candidate.unit = device.unit([candidate.runs[(offset + i) % sets] for i in range(launches)])


def _time_all(device: Device, job: Job, candidates: Sequence[_Candidate], report: Report) -> None:
    settings, chance = job.settings, random.Random(job.seed)
    default = candidates[0]
    _warm_up(device, default)
    defaults: list[float] = []
    pending = list(candidates[1:])
    for number in range(settings.max_rounds):
        order = list(pending)
        chance.shuffle(order)
        queue = [order[i : i + settings.batch_configs] for i in range(0, len(order), settings.batch_configs)] or [[]]
        again = 0
        while queue:
            chosen = queue.pop(0)
            batch = _time_batch(device, settings, default, chosen, number, defaults)
            report(("batch", batch))
            if batch.disturbed and again < 3:
                again += 1
                queue.append(chosen)
                continue
            defaults.append(batch.default_ns)
            for candidate, runtime in zip(chosen, batch.runtime_ns, strict=True):
                candidate.times.append(runtime)
        if number + 1 >= settings.rounds:
            pending = [c for c in pending if _scatter(c.times) > settings.scatter]
            if not pending:
                return


def _warm_up(device: Device, default: _Candidate) -> None:
    """Bring the clock up: an idle GPU runs at a fifth of it."""
    assert default.unit is not None
    until = time.perf_counter() + device.warm_up_seconds
    while time.perf_counter() < until:
        device.time_units([default.unit])


def _time_batch(
    device: Device,
    settings: Settings,
    default: _Candidate,
    chosen: Sequence[_Candidate],
    number: int,
    earlier: Sequence[float],
) -> Batch:
    """The default, the chosen ones, the default again; and one default before them all that is not counted."""
    assert default.unit is not None
    units = [default.unit, default.unit, *(c.unit for c in chosen if c.unit is not None), default.unit]
    times = device.time_units(units)[1:]
    watch = device.watch()
    first, last = times[0] / default.launches, times[-1] / default.launches
    default_ns = (first + last) / 2
    usual = statistics.median([*earlier, default_ns])
    disturbed = abs(first / last - 1) > settings.disturbed or abs(default_ns / usual - 1) > settings.disturbed
    runtimes = tuple(t / c.launches for t, c in zip(times[1:-1], chosen, strict=True))
    return Batch(number, tuple(c.index for c in chosen), runtimes, default_ns, disturbed, watch)


def _scatter(times: Sequence[float]) -> float:
    """Relative standard deviation of the repeats, around their median."""
    return statistics.stdev(times) / statistics.median(times) if len(times) > 1 else math.inf


def serve(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    """The GPU process's life: open the device, say what it is, then jobs in and messages out."""
    from tilewise.tune.triton.device import open_device

    use_cache(shared["cache"])
    try:
        device = open_device(kind)
    except Exception as error:
        connection.send(("unavailable", str(error)))
        return
    for name in shared.get("plugins", ()):
        __import__(name)
    connection.send(("device", device.describe()))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        start = time.perf_counter()
        try:
            measure(device, job, connection.send)
        except Exception as error:  # one kernel's failure must not end the collection; the parent records it
            connection.send(("failed", f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-3000:]))
            return  # a CUDA error may have cost the context: the parent starts a fresh process
        connection.send(("done", time.perf_counter() - start))
