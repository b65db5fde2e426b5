"""The CPU collector: the right is timed, the wrong never; killed at any moment it goes on; two share a store."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steady_clock import SteadyClock

from tilewise._extension import native
from tilewise.costmodel import load_dataset
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.tune import collect
from tilewise.tune.cpu import collect as cpu_collect
from tilewise.tune.cpu import conv
from tilewise.tune.cpu.collect import CpuCollector, CpuOptions
from tilewise.tune.cpu.family import get_family
from tilewise.tune.cpu.machine import CpuClock
from tilewise.tune.cpu.matmul import Matmul, config_of, tile_of
from tilewise.tune.cpu.programs import cpu_kernels
from tilewise.tune.export import export_folder, make_collection
from tilewise.tune.measured import open_measurements
from tilewise.tune.problem import Config, Kernel, Problem
from tilewise.tune.programs import split_of
from tilewise.tune.rounds import Candidate, Settings, time_all
from tilewise.tune.store import Store

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
SHAPES: list[dict[str, Any]] = [
    {"family": "matmul", "m": 24, "n": 40, "k": 32, "epilogue": "bias_gelu", "layout": "nt"},
    {"family": "matmul", "m": 16, "n": 48, "k": 20, "epilogue": "residual", "layout": "tn", "threads": 2},
    {"family": "batched_matmul", "batch": 3, "m": 8, "n": 24, "k": 16},
    {"family": "conv2d", "batch": 2, "channels": 5, "height": 16, "width": 13, "filters": 24, "kernel": 3, "padding": 1,
     "epilogue": "bias_relu"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_collect, "CpuClock", SteadyClock)


def quietly(_: str) -> None:
    return


def gather(path: Path, shapes: list[dict[str, Any]] = SHAPES, **options: Any) -> Any:
    return collect("cpu", shapes=shapes, out=path, configs=10, say=quietly, **options)


@needs_native
def test_a_users_own_shapes_are_measured_and_exported_to_files_that_load(tmp_path: Path) -> None:
    result = gather(tmp_path / "s.sqlite")
    assert result.kernels == len(SHAPES)
    assert result.pairs == 10 * len(SHAPES)
    assert all(set(statuses) == {"ok"} for statuses in result.verdicts.values())
    with open_measurements(tmp_path / "s.sqlite") as store:
        export_folder(make_collection(store, "mine"), tmp_path / "out")
    dataset = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    assert dataset.schema.config_features[24:] == (
        "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd",
    )  # fmt: skip
    assert [kernel.n_configs for kernel in dataset.train] == [10, 10, 10, 10]
    assert all((kernel.config_feat[:, 24:26] > 0).all() for kernel in dataset.train)


@needs_native
def test_a_second_call_finds_everything_done(tmp_path: Path) -> None:
    gather(tmp_path / "s.sqlite")
    again = gather(tmp_path / "s.sqlite")
    assert again.kernels == 0
    assert again.in_store["kernels"] == len(SHAPES)


@needs_native
def test_stopped_within_a_kernel_it_goes_on_from_the_batches_it_has(tmp_path: Path) -> None:
    stops_after = 2

    class Stopping(CpuCollector):
        def _time_left(self) -> bool:
            return sum(tally.batches for tally in self.tallies.values()) < stops_after

    from tilewise.tune.specs import shapes_from

    kernels = shapes_from(SHAPES[:1], "test", lambda name, spec: get_family(name).problem(spec))
    options = CpuOptions(max_configs=25, settings=Settings(rounds=3, max_rounds=3, batch_configs=12))
    with Store(tmp_path / "s.sqlite") as store:
        Stopping(kernels, store, options, quietly).run()
        assert store.counts()["kernels"] == 0
        first = store.counts()["timings"]
        assert first == 24
        CpuCollector(kernels, store, options, quietly).run()
        counts = store.counts()
    assert counts["kernels"] == 1
    assert counts["pairs"] == 24
    with sqlite3.connect(tmp_path / "s.sqlite") as db:
        query = "SELECT count(*) FROM timing JOIN batch ON batch.id = batch WHERE run = 2 GROUP BY config"
        again = {count for (count,) in db.execute(query)}
    assert again == {2}, "with one timing of the first run, two more make three rounds"


class Planted(Matmul):
    """A product that is wrong, in a way of its own, wherever A is packed."""

    name = "planted"
    harm: Callable[[Any, Any], Any]

    def __init__(self) -> None:
        self.memory: Any = None  # what the last run that wrote anything left behind

    def runner(self, problem: Problem, config: Config, operands: Mapping[str, Any]) -> Callable[[], Any]:
        run = super().runner(problem, config, operands)

        def right() -> Any:
            self.memory = run()
            return self.memory

        def wrong() -> Any:
            return type(self).harm(run(), self.memory)

        return wrong if config.size("pack_a") else right


def _lose_a_product(out: Any, _: Any) -> Any:
    out[-1, -1] += 0.25
    return out


def _make_nan(out: Any, _: Any) -> Any:
    out[0, 0] = np.nan
    return out


def _write_nothing(out: Any, memory: Any) -> Any:
    return np.zeros_like(out) if memory is None else memory.copy()


@needs_native
@pytest.mark.parametrize("harm", [_lose_a_product, _make_nan, _write_nothing])
def test_a_planted_wrong_kernel_is_caught_and_never_timed(
    harm: Callable[[Any, Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = type("P", (Planted,), {"harm": staticmethod(harm)})()
    monkeypatch.setattr(cpu_collect, "get_family", lambda _: family)
    problem = get_family("matmul").problem({"family": "matmul", "m": 240, "n": 320, "k": 160})

    with Store(tmp_path / "s.sqlite") as store:
        default = family.configs(problem)[0]
        CpuCollector([Kernel("own", problem)], store, CpuOptions(max_configs=40), quietly).run()
        verdicts = store.verdicts(Kernel("own", problem))
        wrong = {config.key for config, status, _ in verdicts if status == "wrong"}
        planted = {config.key for config, _, _ in verdicts if config.size("pack_a")}
        timed = {key for batch in store.batches(Kernel("own", problem)) for key in batch.runtime_ns}
    assert not default.size("pack_a"), "else nothing would be timed"
    assert wrong == planted
    assert timed
    assert not wrong & timed


@needs_native
def test_a_tile_and_its_configuration_stand_for_each_other() -> None:
    problem = get_family("matmul").problem({"family": "matmul", "m": 64, "n": 64, "k": 64})
    for config in get_family("matmul").configs(problem)[:50]:
        assert config_of(tile_of(config)) == config


def _collect_in_child(path: str) -> None:
    cpu_collect.CpuClock = SteadyClock  # type: ignore[misc]
    collect("cpu", shapes=many_shapes(), out=path, configs=30, say=quietly)


def many_shapes() -> list[dict[str, Any]]:
    return [{"family": "matmul", "m": 8 + number, "n": 32, "k": 24} for number in range(6)]


@needs_native
@pytest.mark.parametrize("after", [0.5, 0.8, 1.1])
def test_killed_at_any_moment_it_goes_on_and_every_batch_is_whole(after: float, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    child = multiprocessing.get_context("spawn").Process(target=_collect_in_child, args=(str(path),))
    child.start()
    time.sleep(after)
    if child.pid is not None and child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    before = 0
    if path.exists():
        with Store(path) as store:
            before = store.counts()["timings"]
    result = collect("cpu", shapes=many_shapes(), out=path, configs=30, say=quietly)
    assert result.in_store["kernels"] == 6
    assert result.in_store["pairs"] == 6 * 29
    assert result.in_store["timings"] >= max(before, 3 * 6 * 29)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@needs_native
def test_two_collectors_on_one_store_share_the_work(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    children = [
        multiprocessing.get_context("spawn").Process(target=_collect_in_child, args=(str(path),)) for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    with sqlite3.connect(path) as db:
        finished = db.execute("SELECT kernel, count(*) FROM finished GROUP BY kernel").fetchall()
        assert len(finished) == 6
        assert {count for _, count in finished} == {1}
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@needs_native
def test_a_store_from_a_gpu_is_refused_with_a_sentence(tmp_path: Path) -> None:
    from tilewise.tune.store import Machine

    with Store(tmp_path / "s.sqlite") as store:
        store.begin(Machine("triton", "Some GPU", {}), 0, {})
    with pytest.raises(ConfigurationError, match="was measured on Some GPU"):
        gather(tmp_path / "s.sqlite")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not json", "is not readable as JSON"),
        ("[]", "must hold a list"),
        ('{"family": "matmul"}', "must hold a list"),
        ('[{"m": 4}]', 'item 1 must be an object with a "family"'),
        ('[{"family": "sorting"}]', "There is no CPU kernel family 'sorting'"),
        ('[{"family": "matmul", "m": 4, "n": 4}]', "needs k, a positive integer"),
        ('[{"family": "matmul", "m": 4, "n": 4, "k": -1}]', "needs k, a positive integer"),
        ('[{"family": "matmul", "m": 4, "n": 4, "k": 4, "dtype": "bf16"}]', "dtype of a matmul problem is one of fp32"),
        ('[{"family": "matmul", "m": 4, "n": 4, "k": 4, "depth": 1}]', "has no 'depth'"),
        ('[{"family": "matmul", "m": 99999, "n": 99999, "k": 99999}]', "too large to measure"),
        ('[{"family": "matmul", "m": 4, "n": 4, "k": 4, "program": "../x"}]', "letters, digits and underscores"),
    ],
)
def test_a_bad_list_of_shapes_is_one_sentence(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text(content)
    with pytest.raises(TilewiseError, match=sentence.replace("(", r"\(")):
        collect("cpu", shapes=tmp_path / "shapes.json", out=tmp_path / "s.sqlite")
    assert not (tmp_path / "s.sqlite").exists()


@pytest.mark.parametrize("options", [{"minutes": 0}, {"configs": 1}, {"configs": -2}, {"shapes": "missing.json"}])
def test_settings_that_mean_nothing_are_one_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, FileFormatError)):
        collect("cpu", out=tmp_path / "s.sqlite", **options)
    with pytest.raises(ConfigurationError, match="no collector 'tpu'"):
        collect("tpu")


def test_the_cpu_programs_meet_the_collections_size_and_share_no_shape_between_splits() -> None:
    kernels = cpu_kernels()
    assert len(kernels) >= 150
    owner: dict[str, str] = {}
    for kernel in kernels:
        assert owner.setdefault(kernel.problem.shape_key, kernel.program) == kernel.program
    assert {split_of(kernel.program) for kernel in kernels} == {"train", "valid", "test"}
    assert len({kernel.name for kernel in kernels}) == len(kernels)


def test_every_planned_problem_reads_back_from_its_own_json() -> None:
    for kernel in cpu_kernels():
        spec = json.loads(kernel.problem.key)
        assert get_family(kernel.problem.family).problem(spec) == kernel.problem


def test_time_lost_to_others_marks_a_batch_as_disturbed() -> None:
    class Busy(CpuClock):
        calls = 0

        def time_units(self, units: Any) -> list[float]:
            self.calls += 1
            return [1000.0 for _ in units]

        def watch(self) -> dict[str, float]:
            return {"elsewhere": 0.4 if self.calls == 1 else 0.0}

    candidates = [Candidate(i, Config.of(i=i), [], unit=lambda: None) for i in range(4)]
    batches: list[Any] = []
    time_all(Busy(1, warm_up_seconds=0.0), Settings(rounds=2), candidates, 0, batches.append)
    assert [batch.disturbed for batch in batches] == [True, False, False]
    assert all(len(candidate.times) == 2 for candidate in candidates[1:])


@needs_native
def test_a_kernel_that_was_disturbed_throughout_is_left_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disturbed(SteadyClock):
        def watch(self) -> dict[str, float]:
            return {"elsewhere": 0.5}

    monkeypatch.setattr(cpu_collect, "CpuClock", Disturbed)
    assert gather(tmp_path / "s.sqlite", SHAPES[:1]).kernels == 0
    monkeypatch.setattr(cpu_collect, "CpuClock", SteadyClock)
    assert gather(tmp_path / "s.sqlite", SHAPES[:1]).kernels == 1


@needs_native
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (1, 2), (5, 1)])
def test_a_convolutions_tile_and_its_configuration_stand_for_each_other(kernel: int, stride: int) -> None:
    spec = {"batch": 1, "channels": 8, "height": 20, "width": 14, "filters": 40, "kernel": kernel, "stride": stride}
    family = get_family("conv2d")
    problem = family.problem({"family": "conv2d", "padding": kernel // 2, **spec})
    configs = family.configs(problem)
    assert len(configs) > 10
    for config in configs:
        assert conv.config_of(conv.tile_of(config)) == config
        for bounds, shape in zip(family.tile(problem, config).values(), ((40, 8), (1, 40), (1, 8)), strict=True):
            assert tuple(bounds[:2]) <= shape


def test_a_convolution_whose_kernel_does_not_fit_is_one_sentence() -> None:
    spec = {"family": "conv2d", "batch": 1, "channels": 1, "height": 2, "width": 9, "filters": 1, "kernel": 3}
    with pytest.raises(ConfigurationError, match="larger than its padded input"):
        get_family("conv2d").problem(spec)
