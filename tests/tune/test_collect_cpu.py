"""The CPU collector: the right is timed, the wrong never; killed at any moment it goes on; two share a store."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
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
from tilewise.costmodel.data.schema import NODE_FEATURES
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.store.aggregate import FIRST_FINAL_ROUND, open_measurements, read_measured
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Store
from tilewise.tune import collect
from tilewise.tune.families.cpu import conv2d as conv
from tilewise.tune.families.cpu import int8_matmul as int8
from tilewise.tune.families.cpu.family import aligned_copies, get_family
from tilewise.tune.families.cpu.matmul import Matmul, config_of, tile_of
from tilewise.tune.measure.collector import MeasurementRecorder
from tilewise.tune.measure.cpu import collector as cpu_collect
from tilewise.tune.measure.cpu.clock import MACHINE_COLUMNS, CpuClock
from tilewise.tune.measure.cpu.collector import CpuCollector, cpu_options, plan
from tilewise.tune.measure.export import export_folder, make_collection
from tilewise.tune.measure.sampling import Candidate, TimingSettings, time_all
from tilewise.tune.workloads import built_in_kernels, split_by_shape

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
SHAPES: list[dict[str, Any]] = [
    {"family": "matmul", "m": 24, "n": 40, "k": 32, "epilogue": "bias_gelu", "layout": "nt"},
    {"family": "matmul", "m": 16, "n": 48, "k": 20, "epilogue": "residual", "layout": "tn", "threads": 2},
    {"family": "batched_matmul", "batch": 3, "m": 8, "n": 24, "k": 16},
    {"family": "conv2d", "batch": 2, "channels": 5, "height": 16, "width": 13, "filters": 24, "kernel": 3, "padding": 1,
     "epilogue": "bias_relu"},
    {"family": "int8_matmul", "m": 19, "n": 40, "k": 45, "epilogue": "requantize"},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_collect, "CpuClock", SteadyClock)
    monkeypatch.setattr(cpu_collect, "one_run", steady_run)
    monkeypatch.setattr(cpu_collect, "real_cores", lambda: 2)  # a clock of our own does not mind if they are not there


def steady_run(run: Callable[[], Any]) -> float:
    run()
    return 7.5e4


def quietly(_: str) -> None:
    return


def gather(path: Path, shapes: list[dict[str, Any]] = SHAPES, **options: Any) -> Any:
    return collect("cpu", shapes=shapes, out=path, configs=10, say=quietly, **options)


@needs_native
def test_a_users_own_shapes_are_measured_and_exported_to_files_that_load(tmp_path: Path) -> None:
    result = gather(tmp_path / "s.sqlite")
    assert result.kernels == len(SHAPES)
    assert all(set(statuses) == {"ok"} for statuses in result.verdicts.values())
    with open_measurements(tmp_path / "s.sqlite") as store:
        export_folder(make_collection(store, "mine"), tmp_path / "out")
    dataset = load_dataset(tmp_path / "out", cache_dir=tmp_path / "cache", progress=False)
    own = dataset.schema.config_features[24:]
    assert own == (
        "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd", "threads", "default",
        *sorted(MACHINE_COLUMNS),
    )  # fmt: skip
    assert len(dataset.valid) and len(dataset.test)
    every = [*dataset.train, *dataset.valid, *dataset.test]
    for kernel in every:
        columns = dict(zip(own, kernel.config_feat[:, 24:].T, strict=True))
        assert columns["default"].sum() == 1
        assert kernel.target[columns["default"] > 0] == 1.0
        assert (columns["machine_lanes"] > 0).all() and (columns["machine_l1_kib"] > 0).all()
    configs = [kernel.n_configs for kernel in every]
    assert len(configs) == len(SHAPES)
    assert all(2 <= count <= 10 for count in configs), "twins count once, and a small register file has fewer tiles"
    assert sum(configs) == result.pairs
    assert all((kernel.config_feat[:, 24:26] > 0).all() for kernel in every)


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
        def time_left(self) -> bool:
            return sum(tally.batches for tally in self.tallies.values()) < stops_after

    from tilewise.store.problem import shapes_from

    kernels = shapes_from(SHAPES[:1], "test", lambda name, spec: get_family(name).problem(spec))
    options = cpu_options(
        max_configs=25, settings=TimingSettings(rounds=3, max_rounds=3, batch_configs=12, finalists=0)
    )
    with Store(tmp_path / "s.sqlite") as store:
        Stopping(kernels, store, options, quietly).run()
        assert store.counts()["kernels"] == 0
        first = store.counts()["timings"]
        assert 12 < first <= 24, "two batches: every configuration once"
        CpuCollector(kernels, store, options, quietly).run()
        counts = store.counts()
    assert counts["kernels"] == 1
    assert counts["pairs"] == first
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
        CpuCollector([Kernel("own", problem)], store, cpu_options(max_configs=40), quietly).run()
        verdicts = store.verdicts(Kernel("own", problem))
        wrong = {config.key for config, status, _ in verdicts if status == "wrong"}
        planted = {config.key for config, _, _ in verdicts if config.size("pack_a")}
        keys = {key for batch in store.batches(Kernel("own", problem)) for key in batch.runtime_ns}
    assert not default.size("pack_a"), "else nothing would be timed"
    assert wrong == planted
    assert keys
    assert not wrong & keys


def _raise(*_: Any) -> Any:
    raise RuntimeError("planted")


def _never_end(*_: Any) -> Any:
    while True:
        time.sleep(0.01)


@needs_native
@pytest.mark.parametrize(("harm", "reason"), [(_raise, "RuntimeError: planted"), (_never_end, "did not end within")])
def test_a_configuration_that_raises_or_never_ends_is_named_and_the_rest_measured(
    harm: Callable[[Any, Any], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = type("P", (Planted,), {"harm": staticmethod(harm)})()
    monkeypatch.setattr(cpu_collect, "get_family", lambda _: family)
    monkeypatch.setattr(CpuCollector, "limit_seconds", 0.1)
    problem = get_family("matmul").problem({"family": "matmul", "m": 240, "n": 320, "k": 160})
    with Store(tmp_path / "s.sqlite") as store:
        CpuCollector([Kernel("own", problem)], store, cpu_options(max_configs=12), quietly).run()
        verdicts = store.verdicts(Kernel("own", problem))
        assert store.finished() == {problem.key}
    assert {config.size("pack_a") for config, status, _ in verdicts if status == "failed"} == {1}
    assert all(reason in why for _, status, why in verdicts if status == "failed")
    assert sum(status == "ok" for _, status, _ in verdicts) > 2


@needs_native
def test_a_family_that_breaks_ends_its_kernel_and_not_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Matmul):
        def expected(self, problem: Problem, operands: Mapping[str, Any]) -> Any:
            if problem.size("m") == 8:
                raise ZeroDivisionError("planted")
            return super().expected(problem, operands)

    monkeypatch.setattr(cpu_collect, "get_family", lambda _: Broken())
    result = gather(tmp_path / "s.sqlite", many_shapes()[:2])
    assert result.kernels == 1
    assert any("ZeroDivisionError: planted" in failure for failure in result.failures)


@needs_native
def test_more_threads_than_cores_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    messages: list[str] = []
    greedy = {**many_shapes()[0], "threads": 3}
    collect("cpu", shapes=[greedy, many_shapes()[1]], out=tmp_path / "s.sqlite", configs=5, say=messages.append)
    assert "1 kernel left out: more threads" in messages[0]
    with pytest.raises(ConfigurationError, match="need more threads than"):
        gather(tmp_path / "s.sqlite", [greedy])


@needs_native
def test_a_tile_and_its_configuration_stand_for_each_other() -> None:
    problem = get_family("matmul").problem({"family": "matmul", "m": 64, "n": 64, "k": 64})
    for config in get_family("matmul").configs(problem)[:50]:
        assert config_of(tile_of(config)) == config


def _steadily() -> None:
    """In a process of its own: a clock of ours, and no ceilings of the machine, which take seconds to measure."""
    cpu_collect.CpuClock = SteadyClock  # type: ignore[misc]
    cpu_collect.one_run = steady_run
    importlib.import_module("tilewise.profile.machine").machine = lambda: None  # type: ignore[attr-defined]


def _collect_in_child(path: str) -> None:
    _steadily()
    collect("cpu", shapes=many_shapes()[:4], out=path, configs=10, say=quietly)


def many_shapes() -> list[dict[str, Any]]:
    return [{"family": "matmul", "m": 8 + number, "n": 32, "k": 24} for number in range(6)]


def _collect_and_tell(path: str, progress_file: str) -> None:
    """Collect; a byte in `told` for every timing that was taken, written before it goes to the store."""
    _steadily()
    file = os.open(progress_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    add = MeasurementRecorder.add

    def tell_and_add(self: Any, candidate: Candidate, runtime_ns: float) -> None:
        os.write(file, b".")
        add(self, candidate, runtime_ns)

    MeasurementRecorder.add = tell_and_add  # type: ignore[method-assign]
    collect("cpu", shapes=many_shapes()[:2], out=path, configs=12, say=quietly)


def _killed_after(path: Path, progress_file: Path, timings: int, more_seconds: float) -> None:
    """Let a collector take so many timings and a moment more, then kill it."""
    child = multiprocessing.get_context("spawn").Process(target=_collect_and_tell, args=(str(path), str(progress_file)))
    enough = (progress_file.stat().st_size if progress_file.exists() else 0) + timings
    child.start()
    while child.is_alive() and not (progress_file.exists() and progress_file.stat().st_size >= enough):
        time.sleep(0.0005)
    time.sleep(more_seconds)
    if child.pid is not None and child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
    child.join()


@needs_native
def test_killed_at_any_moment_it_loses_one_timing_at_most_and_goes_on(tmp_path: Path) -> None:
    path, log_path, chance = tmp_path / "s.sqlite", tmp_path / "told", np.random.default_rng(3)
    for kills in range(1, 4):
        _killed_after(path, log_path, int(chance.integers(1, 15)), float(chance.uniform(0, 0.003)))
        with Store(path) as store:
            timing_count = store.counts()["timings"]
        assert 0 <= log_path.stat().st_size - timing_count <= kills
    result = collect("cpu", shapes=many_shapes()[:2], out=path, configs=12, say=quietly)
    assert result.in_store["kernels"] == 2
    never_killed = collect("cpu", shapes=many_shapes()[:2], out=tmp_path / "n.sqlite", configs=12, say=quietly)
    assert result.in_store["pairs"] == never_killed.in_store["pairs"]
    with Store(path) as store:
        for kernel in store.kernels():
            batches = store.batches(kernel)
            assert not any(batch.open for batch in batches)
            keys = [key for batch in batches if not batch.disturbed for key in batch.runtime_ns]
            assert min(keys.count(key) for key in keys) >= 3
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@needs_native
@pytest.mark.parametrize(("drift", "counts"), [(1.02, True), (1.2, False)])
def test_a_batch_that_was_cut_off_counts_if_the_default_still_takes_what_it_took(
    drift: float, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOffError(BaseException):
        """Like Ctrl-C."""

    def cut_off(self: Any, kind: str, *parts: Any) -> None:
        report(self, kind, *parts)
        if kind == "timing":
            raise CutOffError

    report = MeasurementRecorder.__call__
    with monkeypatch.context() as patch:
        patch.setattr(MeasurementRecorder, "__call__", cut_off)
        with pytest.raises(CutOffError):
            gather(tmp_path / "s.sqlite", SHAPES[:1])

    class Drifted(SteadyClock):
        def time_units(self, units: Any) -> list[float]:
            return [time * drift for time in super().time_units(units)]

    monkeypatch.setattr(cpu_collect, "CpuClock", Drifted)
    gather(tmp_path / "s.sqlite", SHAPES[:1])
    with Store(tmp_path / "s.sqlite") as store:
        first, *others = store.batches(store.kernels()[0])
    assert len(first.runtime_ns) == 1
    assert first.disturbed is not counts
    again = sum(next(iter(first.runtime_ns)) in batch.runtime_ns for batch in others if batch.round < FIRST_FINAL_ROUND)
    rounds = cpu_collect.CPU_SETTINGS.rounds
    assert again == (rounds - 1 if counts else rounds)


@needs_native
def test_two_collectors_on_one_store_share_the_work(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    children = [
        multiprocessing.get_context("spawn").Process(target=_collect_in_child, args=(str(path),)) for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0, 0]
    with sqlite3.connect(path) as db:
        finished = db.execute("SELECT kernel, count(*) FROM finished GROUP BY kernel").fetchall()
        assert len(finished) == 4
        assert {count for _, count in finished} == {1}
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@needs_native
def test_a_store_from_a_gpu_is_refused_with_a_sentence(tmp_path: Path) -> None:
    from tilewise.store.store import Machine

    with Store(tmp_path / "s.sqlite") as store:
        store.begin(Machine("triton", "Some GPU", {}), 0, {})
    with pytest.raises(ConfigurationError, match="was measured on Some GPU"):
        gather(tmp_path / "s.sqlite")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not json", "is not JSON"),
        ("[]", "must contain a list"),
        ('{"family": "matmul"}', "must contain a list"),
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
    kernels = built_in_kernels("cpu", cores=2)
    assert len(kernels) >= 150
    threads = [kernel.problem.size("threads") for kernel in kernels]
    assert threads.count(2) >= 80
    assert sum(kernel.problem.family == "int8_matmul" for kernel in kernels) >= 40
    owner: dict[str, str] = {}
    for kernel in kernels:
        assert owner.setdefault(kernel.problem.shape_key, kernel.program) == kernel.program
    splits = split_by_shape(kernel.problem.shape_key for kernel in kernels)
    assert set(splits.values()) == {"train", "valid", "test"}
    fewer = split_by_shape(kernel.problem.shape_key for kernel in kernels[::4])
    assert all(splits[key] == split for key, split in fewer.items())
    assert len({kernel.name for kernel in kernels}) == len(kernels)


def test_a_machine_of_one_core_is_asked_for_one_thread() -> None:
    assert {kernel.problem.size("threads") for kernel in built_in_kernels("cpu", cores=1)} == {1}


def test_every_planned_problem_reads_back_from_its_own_json() -> None:
    for kernel in built_in_kernels("cpu", cores=2):
        spec = json.loads(kernel.problem.key)
        assert get_family(kernel.problem.family).problem(spec) == kernel.problem


def test_time_lost_to_others_marks_a_batch_as_disturbed() -> None:
    batches: list[Any] = []

    class Busy(CpuClock):
        watched = 0

        def time_units(self, units: Any) -> list[float]:
            return [1000.0 for _ in units]

        def watch(self) -> dict[str, float]:
            self.watched += 1
            return {"elsewhere": 0.4 if self.watched == 1 else 0.0}

    def report(kind: str, *parts: Any) -> None:
        batches.extend(parts if kind == "batch" else ())

    candidates = [Candidate(i, Config.of(i=i), [], unit=lambda: None) for i in range(4)]
    time_all(Busy(1, warm_up_seconds=0.0), TimingSettings(rounds=2, finalists=0), candidates, 0, report)
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


@needs_native
@pytest.mark.parametrize("epilogue", ["none", "bias", "bias_relu", "requantize"])
def test_integer_tiles_stand_for_their_configurations_and_give_numpys_numbers(epilogue: str) -> None:
    family = get_family("int8_matmul")
    problem = family.problem({"family": "int8_matmul", "m": 37, "n": 70, "k": 301, "epilogue": epilogue})
    operands = family.operands(problem, np.random.default_rng(1))
    expected = family.expected(problem, operands)
    assert expected.bound == 0
    for config in family.configs(problem)[::3]:
        assert int8.config_of(int8.tile_of(config)) == config
        assert (family.runner(problem, config, operands)() == expected.value).all()
        tile = family.tile(problem, config)
        assert [max(a, b) <= c for a, b, c in zip(tile["output"], tile["input"], (301, 301), strict=True)] == [True] * 2
    graph = family.graph(problem)
    types = [NODE_FEATURES[column] for column in np.flatnonzero(graph.node_feat.any(axis=0))]
    assert {"shape_element_type_is_u8", "shape_element_type_is_s8", "shape_element_type_is_s32"} <= set(types)


def test_an_integer_product_too_deep_for_32_bits_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="may exceed 32 bits"):
        get_family("int8_matmul").problem({"family": "int8_matmul", "m": 1, "n": 1, "k": 70_000})


def test_operands_lie_on_cache_lines_of_their_own_and_keep_values_and_order() -> None:
    rng = np.random.default_rng(0)
    settings = {
        "a": rng.standard_normal((5, 7), dtype=np.float32),
        "b": rng.standard_normal((2, 9, 3)).swapaxes(-1, -2),
        "c": rng.integers(0, 9, 4).astype(np.int32),
    }
    for name, array in aligned_copies(settings).items():
        assert np.array_equal(array, settings[name])
        assert array.dtype == settings[name].dtype
        assert array.strides == settings[name].strides
        assert array.ctypes.data % 64 == 0
    again = aligned_copies(settings)
    assert [a.ctypes.data % 4096 for a in again.values()] == [
        a.ctypes.data % 4096 for a in aligned_copies(settings).values()
    ]


@needs_native
def test_a_plan_counts_what_would_be_measured() -> None:
    kernels = [kernel for kernel in built_in_kernels("cpu", cores=1) if kernel.program.startswith("reference_mlp")]
    lines = plan(kernels, cpu_options(max_configs=20))
    assert sum(line["kernels"] for line in lines) == len(kernels)
    assert sum(line["configs"] for line in lines) == 20 * len(kernels)
    assert all(line["seconds"] > 0 for line in lines)


class NoisyClock(SteadyClock):
    """Takes a millionth of a second, more or less: no two tiles differ but by chance."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, warm_up_seconds=0.0)  # else the wall's clock would decide how many numbers are drawn
        self.noise = np.random.default_rng(0)

    def time_units(self, units: Any) -> list[float]:
        return [unit_ns * float(self.noise.normal(1, 0.01)) for unit_ns in super().time_units(units)]


def _measured_without_finals(path: Path, configs: int = 40) -> None:
    from tilewise.store.problem import shapes_from

    kernels = shapes_from(many_shapes()[:1], "test", lambda name, spec: get_family(name).problem(spec))
    settings = dataclasses.replace(cpu_collect.CPU_SETTINGS, finalists=0, max_rounds=3)
    options = cpu_options(max_configs=configs, settings=settings)
    with Store(path) as store:
        CpuCollector(kernels, store, options, quietly).run()


@needs_native
def test_finals_of_a_finished_kernel_are_added_once_and_the_best_is_no_longer_the_luckiest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.sqlite"
    monkeypatch.setattr(cpu_collect, "CpuClock", NoisyClock)
    _measured_without_finals(path)
    with Store(path) as store:
        (before,) = read_measured(store)
        assert store.finished_from(FIRST_FINAL_ROUND) == set()
    assert collect("cpu", out=path, finals=True, say=quietly).kernels == 1
    assert collect("cpu", out=path, finals=True, say=quietly).kernels == 0
    with Store(path) as store:
        (after,) = read_measured(store)
    best = [min(timing.runtime_ns for timing in m.timings) / m.default_ns for m in (before, after)]
    assert best[0] + 0.004 < best[1] < 1.003
    assert len(after.timings) == len(before.timings)
    repeats = sorted(timing.repeats for timing in after.timings)
    assert repeats[0] == 3
    settings = cpu_collect.CPU_SETTINGS
    assert repeats[-settings.finalists] >= settings.final_rounds


@needs_native
def test_finals_in_which_the_machine_is_slower_than_it_was_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slower(SteadyClock):
        def time_units(self, units: Any) -> list[float]:
            return [1.25 * unit_ns for unit_ns in super().time_units(units)]

    path = tmp_path / "s.sqlite"
    _measured_without_finals(path)
    with Store(path) as store:
        before = read_measured(store)
    monkeypatch.setattr(cpu_collect, "CpuClock", Slower)
    assert collect("cpu", out=path, finals=True, say=quietly).kernels == 0
    with Store(path) as store:
        assert [m.timings for m in read_measured(store)] == [m.timings for m in before]
        assert not store.finished_from(FIRST_FINAL_ROUND)


def test_finals_want_a_store_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="does not exist"):
        collect("cpu", out=tmp_path / "no.sqlite", finals=True)


def test_a_unit_takes_what_its_fastest_piece_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.profile.timing import clock
    from tilewise.tune.measure.cpu.clock import time_in_pieces

    readings = iter([0, 700, 700, 1200, 1200, 1900])  # three pieces of 700, 500 and 700 ns
    runs: list[int] = []
    monkeypatch.setattr(clock, "perf_counter_ns", lambda: next(readings))
    assert time_in_pieces(lambda: runs.append(1), 3, 4) == 3 * 500 and len(runs) == 12


@needs_native
def test_all_configurations_of_a_kernel_are_timed_in_as_many_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeds: set[int] = set()
    make_units = cpu_collect.CpuCollector._make_units

    def note(self: Any, candidates: Any) -> None:
        make_units(self, candidates)
        seeds.update(candidate.unit.args[1] for candidate in candidates)
        assert all(candidate.launches == math.prod(candidate.unit.args[1:]) >= 1 for candidate in candidates)

    monkeypatch.setattr(cpu_collect.CpuCollector, "_make_units", note)
    gather(tmp_path / "s.sqlite", SHAPES[:1])
    assert len(seeds) == 1
