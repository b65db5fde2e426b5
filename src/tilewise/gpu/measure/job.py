"""Measure one kernel on a GPU: check every configuration against PyTorch, then time the correct ones (`sampling`).

A unit is a CUDA graph of launches that together last about `unit_ms`. Launches rotate through several sets of operands,
so that operands are read from memory and not from the L2 cache, as in a program.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import CUBLAS_CALL, Operands, get_family
from tilewise.gpu.measure.compiler import use_cache
from tilewise.gpu.measure.execution import Gpu
from tilewise.store.problem import Config, Problem
from tilewise.store.reader import Verdict
from tilewise.store.store import BatchRow
from tilewise.tune.families.registry import Expected
from tilewise.tune.measure.sampling import Candidate, Report, Run, TimedBatch, TimingSettings, resume, time_all


@dataclass(frozen=True)
class Job:
    """A kernel to measure.

    With `careful` the GPU process synchronises after each configuration and reports which one is next, so that a
    configuration that ends the process can be identified.
    """

    problem: Problem
    configs: tuple[Config, ...]  # the default first
    seed: int
    settings: TimingSettings = field(default_factory=TimingSettings)
    careful: bool = False
    earlier: tuple[BatchRow, ...] = ()  # batches that the store already has
    finals: bool = False  # time the finalists only


__all__ = ["Job", "TimedBatch", "TimingSettings", "Verdict", "measure", "serve"]


def measure(device: Gpu, job: Job, report: Report) -> None:
    """Send Verdicts and timings to `report` as they are obtained; each message is complete in itself."""
    sets = operand_sets(device, job)
    candidates = _check_all(device, job, sets, report)
    if not candidates or candidates[0].config != job.configs[0]:
        return  # runtimes are normalised by the default's; the verdicts say why it failed
    _make_units(device, job, candidates)
    while device.notes:
        report("note", device.notes.pop(0))
    resume(device, job.settings, candidates, job.earlier, report)
    time_all(device, job.settings, candidates, job.seed, report, finals_only=job.finals)


def operand_sets(device: Gpu, job: Job) -> list[Operands]:
    """Allocate enough sets of operands that each has left the L2 cache when it is used again, up to `max_sets`."""
    family = get_family(job.problem.family)
    generator = device.torch.Generator(device=device.torch_device).manual_seed(job.seed)
    footprint = max(family.bytes_moved(job.problem), 1)
    count = min(max(1, math.ceil(2.5 * device.l2_bytes / footprint)), job.settings.max_sets)
    return [family.operands(job.problem, device.torch, device.torch_device, generator) for _ in range(count)]


def _check_all(device: Gpu, job: Job, sets: Sequence[Operands], report: Report) -> list[Candidate]:
    """Run every configuration once into an output filled with NaN and compare it; estimate the time of a second run."""
    family, torch = get_family(job.problem.family), device.torch
    expected = family.expected(job.problem, torch, sets[0])
    # Comparisons stay on the GPU until the end, so that it never waits for the host.
    right = torch.zeros(len(job.configs), dtype=torch.bool, device=device.torch_device)
    verdicts: dict[Config, Verdict] = {}
    candidates: list[Candidate] = []
    for index, config in enumerate(job.configs):
        if job.careful:
            report("next", config)
        binary = family.binary(job.problem, config)
        try:
            runs = [device.prepare(binary, family.launch(job.problem, config, operands)) for operands in sets]
        except UnavailableError as error:
            verdicts[config] = Verdict(config, "misfit", str(error))
            continue
        registers, spills = device.registers(binary)
        verdicts[config] = Verdict(config, "ok", details={"registers": registers, "spills": spills})
        right[index] = is_right(sets[0], expected, runs[0], is_cublas=binary.kernel == CUBLAS_CALL)
        if job.careful:
            device.synchronize()
        candidates.append(Candidate(index, config, runs))
    device.synchronize()
    right_list = right.tolist()
    correct = [candidate for candidate in candidates if right_list[candidate.index]]
    wrong = [candidate.config for candidate in candidates if not right_list[candidate.index]]
    verdicts |= {config: Verdict(config, "wrong", "the result differs from PyTorch's") for config in wrong}
    fast_enough = list(_estimate(device, job, correct, verdicts))
    report("verdicts", list(verdicts.values()))
    return fast_enough


def is_right(operands: Operands, expected: Expected, run: Run, *, is_cublas: bool = False) -> Any:
    """Run once; return, as a tensor, whether the result is correct and nothing outside of the output was written."""
    # NaN shows elements that the kernel does not write; behind the output it must stay.
    operands.guarded.fill_(math.nan)
    run()
    out, guard = operands.out, operands.guarded[operands.out.numel() :]
    # cuBLAS may round intermediate sums, so its result only has to be finite.
    close = out.isfinite() if is_cublas else (out.float() - expected.value).abs() <= expected.bound
    return close.all() & guard.isnan().all()


def _estimate(
    device: Gpu, job: Job, candidates: list[Candidate], verdicts: dict[Config, Verdict]
) -> Iterator[Candidate]:
    """Estimate each candidate's time from one launch; record candidates above `slowest_ms` as slow and drop them."""
    for candidate, runtime_ns in zip(candidates, device.time_units([c.runs[0] for c in candidates]), strict=True):
        candidate.estimate_ns = max(runtime_ns, 500.0)
        is_default = candidate.config == job.configs[0]
        if candidate.estimate_ns > job.settings.slowest_ms * 1e6 and not is_default:
            reason = f"one run took {candidate.estimate_ns / 1e6:.1f} ms"
            verdicts[candidate.config] = Verdict(candidate.config, "slow", reason)
            continue
        yield candidate


def _make_units(device: Gpu, job: Job, candidates: Sequence[Candidate]) -> None:
    """Capture the timed unit of every candidate: launches that last about `unit_ms`."""
    for candidate in candidates:
        sets = len(candidate.runs)
        launches = round(job.settings.unit_ms * 1e6 / candidate.estimate_ns)
        launches = min(max(launches, 1), job.settings.max_launches)
        if launches > sets:
            launches = max(1, round(launches / sets)) * sets  # every set is used equally often
        candidate.launches = launches
        # If not all sets are used, neighbouring candidates start with different ones.
        offset = candidate.index if launches < sets else 0
        candidate.unit = device.unit([candidate.runs[(offset + i) % sets] for i in range(launches)])


def serve(connection: Any, kind: str, shared: dict[str, Any]) -> None:
    """Run the GPU process: open the device, describe it, then receive jobs and send messages."""
    from tilewise.gpu.measure.execution import open_device

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
        job = connection.recv()
        start = time.perf_counter()
        try:
            # The collector stores the messages while the GPU continues.
            measure(device, job, lambda *message: connection.send(message))
        except Exception as error:  # a failure concerns this kernel alone; the collector records it
            connection.send(("failed", f"{type(error).__name__}: {error}"[:500], traceback.format_exc()[-3000:]))
            return  # a CUDA error may have destroyed the context, so the collector starts a new process
        connection.send(("done", time.perf_counter() - start))
