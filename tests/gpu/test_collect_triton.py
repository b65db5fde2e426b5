"""The Triton collector with fake child processes: what is stored, what is skipped, and what survives a crash."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import fake_workers
import numpy as np
import pytest

from tests.waiting import PATIENCE
from tilewise.errors import UnavailableError
from tilewise.gpu.families.family import get_family
from tilewise.gpu.measure.collector import TritonCollector
from tilewise.profile.timing import workers
from tilewise.store.aggregate import read_measured
from tilewise.store.problem import Kernel, Problem
from tilewise.store.store import Store
from tilewise.tune.choose.scores import shipped_scores
from tilewise.tune.measure.collector import Options, balanced
from tilewise.tune.measure.sampling import TimingSettings
from tilewise.tune.workloads import built_in_kernels, split_of


@pytest.fixture(autouse=True)
def _imports_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from one process that has already imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tilewise.gpu.measure.collector"])
    monkeypatch.setattr(workers, "_spawn", context)


def _matmul(m: int) -> Kernel:
    return Kernel("test", Problem.of("matmul", dtype="bf16", m=m, n=64, k=64, epilogue="none", layout="nt"))


class _FakeCollector(TritonCollector):
    serve_compiler = staticmethod(fake_workers.compile_nothing)
    silence_seconds = 1.0


class _Healthy(_FakeCollector):
    serve_gpu = staticmethod(fake_workers.serve_healthy)


class _Crashing(_FakeCollector):
    serve_gpu = staticmethod(fake_workers.serve_crashing)


class _Hanging(_FakeCollector):
    serve_gpu = staticmethod(fake_workers.serve_hanging)


class _Absent(_FakeCollector):
    serve_gpu = staticmethod(fake_workers.serve_absent)


def _collect(kind: type[TritonCollector], path: Path, kernels: list[Kernel], configs: int = 12) -> TritonCollector:
    messages: list[str] = []
    with Store(path) as store:
        collector = kind(kernels, store, Options(minutes=2, processes=1, max_configs=configs), messages.append)
        collector.run()
    return collector


def _verdicts(path: Path) -> Counter[str]:
    with sqlite3.connect(path) as db:
        return Counter(status for (status,) in db.execute("SELECT status FROM verdict"))


def test_everything_measured_is_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    collector = _collect(_Healthy, path, [_matmul(8), _matmul(24)], configs=0)
    with Store(path, create=False) as store:
        assert len(store.finished()) == 2
        finals = 2 * TimingSettings().finalists * TimingSettings().final_rounds
        rounds = sum(3 * (t.pairs - t.kernels) for t in collector.tallies.values())
        assert store.counts()["timings"] == rounds + finals


def test_configurations_that_do_not_fit_or_compile_are_skipped_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    _collect(_Healthy, path, [_matmul(8)], configs=0)
    with sqlite3.connect(path) as db:
        reasons = dict(db.execute("SELECT status, reason FROM verdict WHERE status != 'ok'").fetchall())
    assert reasons["misfit"] == "shared memory: 300000 bytes needed, 232448 available"
    assert reasons["failed"] == "does not compile: planted"


@pytest.mark.parametrize("kind", [_Crashing, _Hanging])
def test_a_configuration_that_crashes_or_hangs_is_identified_and_the_others_measured(
    tmp_path: Path, kind: type[TritonCollector], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = get_family("matmul")
    problem = _matmul(8).problem
    deadly = next(c for c in family.configs(problem) if c["block_m"] == 32)
    harmless = [c for c in family.configs(problem) if c["block_m"] == 64][:5]
    selected = [family.configs(problem)[0], *harmless, deadly]
    monkeypatch.setattr("tilewise.gpu.measure.collector.pick_configs", lambda *_: list(selected))
    path = tmp_path / "s.sqlite"
    _collect(kind, path, [_matmul(8)])
    with sqlite3.connect(path) as db:
        bad = db.execute(
            "SELECT key, reason FROM verdict JOIN config ON config.id = config WHERE status = 'failed'"
        ).fetchall()
    assert [key for key, _ in bad] == [deadly.key]
    assert "ended the process" in bad[0][1]
    with Store(path) as store:
        assert len(store.finished()) == 1
        assert store.counts()["pairs"] == len(harmless)


def test_a_second_run_continues_where_the_first_stopped(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    _collect(_Healthy, path, [_matmul(8)])
    with Store(path) as store:
        again = _Healthy([_matmul(8), _matmul(24)], store, Options(max_configs=12))
        assert [p.kernel for p in again.waiting] == [_matmul(24)]


def test_training_kernels_can_be_sampled_with_thin(tmp_path: Path) -> None:
    kernels = [Kernel("drawn", _matmul(520).problem), Kernel("drawn", _matmul(72).problem)]
    held_out = Kernel("drawn_b", _matmul(136).problem)
    with Store(tmp_path / "s.sqlite") as store:
        waiting = {p.kernel: p for p in _Healthy([*kernels, held_out], store, Options(thin=40)).waiting}
    family = get_family("matmul")
    assert len(waiting[held_out].configs) > 300
    samples = [waiting[kernel].configs for kernel in kernels]
    for kernel, configs in zip(kernels, samples, strict=True):
        space = family.configs(kernel.problem)
        scores = shipped_scores("h200", "", "triton")[0].scores(kernel.problem, space)
        best_ranked = {space[index] for index in np.argsort(scores, kind="stable")[:20]}
        assert len(set(configs)) == len(configs) == 40 and configs[0] == space[0]
        assert len(best_ranked & set(configs)) >= 20
    assert set(samples[0][21:]) != set(samples[1][21:])  # every kernel has its own random sample


class _Dying(_Healthy):
    """Kills itself when the `countdown`-th message of a kind arrives, before handling it."""

    kind, countdown = "", 0

    def _on_gpu_message(self, message: Any) -> None:
        if message[0] == self.kind:
            self.countdown -= 1
            if self.countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super()._on_gpu_message(message)


SETTINGS = TimingSettings(rounds=3, max_rounds=3, batch_configs=4, finalists=0)


def _collect_and_die(path: str, kind: str = "", count: int = 0) -> None:
    with Store(path) as store:
        options = Options(minutes=2, processes=1, max_configs=12, settings=SETTINGS)
        collector = _Dying([_matmul(8)], store, options, lambda _: None)
        collector.kind, collector.countdown = kind, count
        collector.run()


def _in_child(*arguments: Any) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_collect_and_die, args=arguments)
    child.start()
    child.join(PATIENCE)


def _timings(path: Path) -> int:
    with Store(path) as store:
        return store.counts()["timings"]


@pytest.mark.parametrize(
    ("kind", "count", "stored"),
    [("timing", 1, 0), ("timing", 3, 2), ("batch", 1, 4), ("done", 1, None)],
)
def test_a_killed_collector_has_stored_every_timing_and_the_next_one_continues(
    kind: str, count: int, stored: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "s.sqlite"
    _in_child(str(path), kind, count)
    first = _timings(path)
    assert stored in (None, first)
    _collect_and_die(str(path))
    with Store(path) as store:
        (kernel,) = store.kernels()
        batches = store.batches(kernel)
        assert store.finished() == {kernel.problem.key}
    assert not any(batch.open or batch.disturbed for batch in batches)
    repeats = Counter(key for batch in batches for key in batch.runtime_ns)
    assert set(repeats.values()) == {3}, "the second run continues the first, and counts its timings once"


def test_an_interrupted_batch_counts_only_if_the_default_takes_as_long_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sqlite"
    _in_child(str(path), "timing", 3)
    monkeypatch.setattr(
        workers, "_spawn", multiprocessing.get_context("spawn")
    )  # spawned processes read the new environment
    monkeypatch.setenv("FAKE_SLOWER", "1.5")
    _collect_and_die(str(path))
    with Store(path) as store:
        first, *others = store.batches(store.kernels()[0])
        (problem,) = read_measured(store)
    assert first.disturbed and not first.open and len(first.runtime_ns) == 2
    assert set(Counter(key for batch in others for key in batch.runtime_ns).values()) == {3}
    assert {timing.repeats for timing in problem.timings if timing.config != problem.default} == {3}
    assert problem.default_ns == 1350.0


def test_two_collectors_share_a_store_without_measuring_twice(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_collect_in_child, args=(str(path),)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
    assert [child.exitcode for child in children] == [0, 0]
    with Store(path) as store:
        kernels = store.kernels()
        assert len(kernels) == len(store.finished()) == 6
        assert not any(batch.open for kernel in kernels for batch in store.batches(kernel))
        assert all(len({batch.run for batch in store.batches(kernel)}) == 1 for kernel in kernels)


def test_finals_can_be_added_to_finished_kernels(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        _Healthy([_matmul(64)], store, Options(minutes=2, processes=1, settings=SETTINGS), lambda _: None).run()
        finals = Options(minutes=2, processes=1, finals=True)
        again = _Healthy(store.kernels(), store, finals, lambda _: None)
        (pending,) = again.waiting
        assert len(pending.configs) == 1 + 3 * finals.settings.finalists
        (tally,) = again.run().values()
        assert tally.kernels == 1
        (problem,) = read_measured(store)
        assert not _Healthy(store.kernels(), store, finals, lambda _: None).waiting
    repeats = Counter(timing.repeats for timing in problem.timings if timing.config != problem.default)
    assert repeats[finals.settings.final_rounds] == finals.settings.finalists
    assert repeats[3] == len(problem.timings) - 1 - finals.settings.finalists


def _collect_in_child(path: str) -> None:
    _collect(_Healthy, Path(path), [_matmul(8 * i) for i in range(1, 7)])


def test_without_a_gpu_there_is_one_error_message(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no CUDA GPU"):
        _collect(_Absent, tmp_path / "s.sqlite", [_matmul(8)])


def test_every_prefix_of_the_order_is_balanced() -> None:
    kernels = built_in_kernels("triton")
    whole = Counter(k.problem.family for k in kernels)
    for share in (0.25, 0.5, 0.75):
        part = Counter(k.problem.family for k in balanced(kernels, seed=3)[: int(share * len(kernels))])
        for family, count in whole.items():
            assert abs(part[family] - share * count) <= 3


def test_the_gpu_programs_meet_the_collections_size() -> None:
    kernels = built_in_kernels("triton")
    assert len(kernels) >= 300
    assert len({k.problem.family for k in kernels}) >= 6
    assert sum(len(get_family(k.problem.family).configs(k.problem)) for k in kernels) >= 60_000


def test_no_shape_is_in_two_programs_or_two_splits() -> None:
    kernels = built_in_kernels("triton")
    owners: dict[str, set[str]] = {}
    splits: dict[str, set[str]] = {}
    for kernel in kernels:
        owners.setdefault(kernel.problem.shape_key, set()).add(kernel.program)
        splits.setdefault(kernel.problem.shape_key, set()).add(split_of(kernel.program))
    assert all(len(programs) == 1 for programs in owners.values())
    assert all(len(names) == 1 for names in splits.values())


def test_every_built_in_problem_survives_a_json_round_trip() -> None:
    for kernel in built_in_kernels("triton"):
        spec = json.loads(kernel.problem.key)
        assert get_family(kernel.problem.family).problem(spec) == kernel.problem


def test_configurations_are_distinct() -> None:
    for problem in {k.problem.family: k.problem for k in built_in_kernels("triton")}.values():
        configs = get_family(problem.family).configs(problem)
        assert len(set(configs)) == len(configs) > 20
