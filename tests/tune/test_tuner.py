"""The tuner on a bench with known runtimes: choices, cache, other machines, crashes, two processes."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import tilewise.tune.choose.memory as memory_module
from tests.waiting import until
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import FILE, ChoiceFile, Decision
from tilewise.tune.choose.memory import measurements
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.families.cpu.family import get_family
from tilewise.tune.measure import TrialResult

SPEC = {"family": "matmul", "m": 64, "n": 64, "k": 64}
CONFIGS = [
    Config.of(
        block_m=m, block_n=n, block_k=64, register_m=6, register_n=16, pack_a=0, pack_b=p, threads_m=1, threads_n=1
    )
    for m in (8, 16, 32, 64) for n in (16, 32, 64) for p in (0, 1)
]  # fmt: skip
BEST = CONFIGS[15]


class MadeUpBench:
    """Runtimes by a rule; `broken` configurations crash."""

    kind, version, collection, margin, own_model = "cpu", "1", None, 0.0, True

    def __init__(self, identity: str = "made up", broken: Sequence[Config] = (), configs: Sequence[Config] = CONFIGS):
        self.machine = Machine("cpu", identity, {})
        self.broken, self.every, self.measured_configs = set(broken), list(configs), []

    def family(self, name: str) -> Any:
        return get_family(name)

    def problem(self, spec: Mapping[str, Any]) -> Problem:
        return get_family(str(spec["family"])).problem(spec)

    def configs(self, problem: Problem) -> Sequence[Config]:
        return self.every

    def default(self, problem: Problem) -> Config:
        return self.every[0]

    def candidates(self, problem: Problem) -> Sequence[Config]:
        return self.every

    def runs(self, problem, config):
        return True

    def elsewhere(self, problem, config):
        return []

    def confirm(self, problem, config):
        return None

    def forget(self) -> None: ...

    @contextlib.contextmanager
    def trial(self, problem: Problem, default: Config) -> Iterator[Any]:
        yield self

    def runtime(self, config: Config) -> float:
        away = [abs(math.log2(config.size(n) / BEST.size(n))) for n in ("block_m", "block_n")]
        return 1e5 * (1 + 0.2 * sum(away) + 0.1 * abs(config.size("pack_b") - BEST.size("pack_b")))

    def measure(self, config: Config) -> TrialResult:
        self.measured_configs.append(config)
        if config in self.broken:
            return TrialResult(None, None, "failed", "this configuration ended its process: its process died")
        return TrialResult(self.runtime(config), self.runtime(self.every[0]))

    def remeasure(self, configs: Sequence[Config]) -> list[float]:
        return [self.runtime(config) for config in configs]


@pytest.fixture
def messages() -> list[str]:
    return []


def tuner(tmp_path: Path, messages: list[str], bench: MadeUpBench | None = None, **options: Any) -> Tuner:
    return Tuner(bench or MadeUpBench(), cache=tmp_path, say=messages.append, **options)


def test_without_a_model_it_says_so_starts_with_the_default_and_finds_the_best(tmp_path, messages):
    bench = MadeUpBench()
    own = tuner(tmp_path, messages, bench)
    assert own.choose(SPEC).source == "default" and own.choose(SPEC).config == CONFIGS[0]
    decision = own.tune(SPEC, budget=14)
    assert "no trained model" in messages[0] and "analytical" in messages[0]
    assert bench.measured_configs[0] == CONFIGS[0]
    assert bench.runtime(decision.config) <= 1.1 * bench.runtime(BEST) and decision.source == "measured"
    assert len(set(bench.measured_configs)) == decision.measurements <= 14


def test_where_nobody_is_asked_no_candidates_are_listed(tmp_path, monkeypatch):
    def candidates_of(self, problem):
        raise AssertionError("nothing ranks them")

    monkeypatch.setattr(MadeUpBench, "candidates", candidates_of)
    assert Tuner(MadeUpBench(), cache=tmp_path).choose(SPEC).config == CONFIGS[0]


def test_what_one_shape_taught_saves_measurements_on_the_next(tmp_path, messages):
    bench = MadeUpBench()
    own = tuner(tmp_path, messages, bench)
    own.tune(SPEC, budget=14)
    bench.measured_configs.clear()
    decision = own.tune({**SPEC, "m": 80}, budget=3)
    assert bench.runtime(decision.config) <= 1.15 * bench.runtime(BEST)


def test_a_choice_is_kept_for_the_next_process_and_needs_no_measurement(tmp_path, messages):
    first = tuner(tmp_path, messages).tune(SPEC)
    bench = MadeUpBench()
    second = tuner(tmp_path, messages, bench)
    assert second.tune(SPEC).config == first.config and second.tune(SPEC).source == "cache"
    assert second.choose(SPEC).source == "cache" and not bench.measured_configs
    assert second.tune(SPEC, fresh=True).source == "measured"


def test_the_same_measurements_lead_to_the_same_choice(tmp_path, messages):
    results = [tuner(tmp_path / str(i), messages).tune(SPEC) for i in range(2)]
    assert results[0].steps == results[1].steps and results[0].config == results[1].config


def test_every_measurement_is_in_the_store(tmp_path, messages):
    bench = MadeUpBench()
    own = tuner(tmp_path, messages, bench)
    own.tune(SPEC, budget=6)
    with Store(own.store_file) as store:
        times = measurements(store, "matmul")[own.problem(SPEC)]
    assert set(times) == set(bench.measured_configs)


def test_the_store_is_read_again_only_when_something_was_written_to_it(tmp_path, messages, monkeypatch):
    reads: list[str] = []
    read_measurements = memory_module.measurements
    monkeypatch.setattr(
        memory_module, "measurements", lambda store, family: reads.append(family) or read_measurements(store, family)
    )
    own, other = tuner(tmp_path, messages), tuner(tmp_path, messages)
    problem, names = own.problem({**SPEC, "m": 96}), sorted(CONFIGS[0])
    assert own.memory.earlier(problem, names) is None and not reads  # no store yet
    other.tune(SPEC, budget=3)
    reads.clear()
    readings = [own.memory.earlier(problem, names) for _ in range(3)]
    assert len(reads) == 1 and readings[0] is not None and all(len(memory) == len(readings[0]) for memory in readings)
    other.tune({**SPEC, "m": 80}, budget=3)
    reads.clear()
    more = own.memory.earlier(problem, names)
    assert len(reads) == 1 and len(more) > len(readings[0])


def test_editing_the_list_of_configurations_keeps_choices_that_are_still_in_it(tmp_path, messages):
    tuner(tmp_path, messages).tune(SPEC, budget=14)
    shorter = MadeUpBench(configs=[BEST, *CONFIGS[:4]])
    assert tuner(tmp_path, messages, shorter).tune(SPEC).source == "cache"
    without = MadeUpBench(configs=[c for c in CONFIGS if c != BEST])
    again = tuner(tmp_path, messages, without)
    decision = again.tune(SPEC)
    assert decision.source == "measured" and decision.config != BEST
    assert any("no longer in the list" in note for note in again.choices.notes)


def test_a_choice_of_another_machine_or_version_is_left_alone_and_said(tmp_path, messages):
    tuner(tmp_path, messages).tune(SPEC)
    assert tuner(tmp_path, messages, MadeUpBench("another")).tune(SPEC).source == "measured"
    newer = MadeUpBench()
    newer.version = "2"
    assert tuner(tmp_path, messages, newer).tune(SPEC).source == "measured"
    assert any("another machine" in line for line in messages) and any("another version" in line for line in messages)
    assert tuner(tmp_path, messages).tune(SPEC).source == "cache"


@pytest.mark.parametrize("damage", [b"not json\n", b'{"format": 1}\n', b"\xff\xfe\x00", b'{"half": '])
def test_a_damaged_cache_costs_the_damaged_lines_only(tmp_path, messages, damage):
    first = tuner(tmp_path, messages).tune(SPEC)
    path = tmp_path / FILE
    path.write_bytes(damage + (b"" if damage.endswith(b"\n") else b"\n") + path.read_bytes() + damage)
    own = tuner(tmp_path, messages)
    assert own.tune(SPEC).source == "cache"
    assert any("damaged" in line for line in messages)
    own.tune({**SPEC, "m": 96})
    assert tuner(tmp_path, messages).tune({**SPEC, "m": 96}).source == "cache"
    assert tuner(tmp_path, messages).tune(SPEC).config == first.config


def test_a_choice_that_was_tampered_with_is_not_believed(tmp_path, messages):
    tuner(tmp_path, messages).tune(SPEC)
    path = tmp_path / FILE
    line = json.loads(path.read_text())
    line["config"]["block_m"] = 999
    path.write_text(json.dumps(line) + "\n")
    assert tuner(tmp_path, messages).tune(SPEC).source == "measured"


def test_a_damaged_store_is_put_aside_and_said(tmp_path, messages):
    own = tuner(tmp_path, messages)
    own.tune(SPEC)
    own.store_file.write_bytes(b"this is no database" * 100)
    for extra in (".sqlite-wal", ".sqlite-shm"):
        own.store_file.with_suffix(extra).unlink(missing_ok=True)
    assert tuner(tmp_path, messages).tune({**SPEC, "m": 96}).source == "measured"
    assert any("put aside" in line for line in messages)
    assert list(tmp_path.glob("*.damaged-*"))


def test_a_configuration_that_crashes_is_left_out_recorded_and_said(tmp_path, messages):
    bench = MadeUpBench(broken=[BEST, CONFIGS[0]])
    own = tuner(tmp_path, messages, bench)
    decision = own.tune(SPEC, budget=14)
    assert decision.config not in bench.broken and decision.source == "measured"
    assert any("configurations are left out" in line or "configuration is left out" in line for line in messages)
    with Store(own.store_file) as store:
        statuses = {config: status for config, status, _ in store.verdicts(store.kernels()[0])}
    assert statuses[CONFIGS[0]] == "failed"


def test_if_everything_crashes_the_default_is_the_choice_and_nothing_is_cached(tmp_path, messages):
    bench = MadeUpBench(broken=CONFIGS)
    decision = tuner(tmp_path, messages, bench).tune(SPEC, budget=4)
    assert decision.source == "default" and decision.config == CONFIGS[0]
    assert tuner(tmp_path, messages).choices.all() == []


def test_a_budget_below_one_and_an_unknown_device_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="budget"):
        Tuner(MadeUpBench(), cache=tmp_path, budget=0)
    with pytest.raises(ConfigurationError, match="no device"):
        Tuner("abacus", cache=tmp_path)


def _put(folder: str, number: int) -> None:
    choices = ChoiceFile(folder, "m", "1")
    for index in range(40):
        problem = Problem.of("matmul", m=number, n=index + 1, k=1)
        choices.put(Decision(problem, Config.of(block_m=index), "measured", 1.0 + index, None, 1, False))


def test_processes_that_write_at_once_lose_no_choice(tmp_path):
    spawn = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    writers = [spawn.Process(target=_put, args=(str(tmp_path), number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    choices = ChoiceFile(tmp_path, "m", "1")
    assert len(choices.all()) == 120 and not choices.notes


def test_a_second_process_waits_for_the_choice_of_the_first(tmp_path, messages, monkeypatch):
    own = tuner(tmp_path, messages)
    problem = own.problem(SPEC)
    monkeypatch.setattr(Store, "claim", lambda self, run, kernel: False)

    def finish_elsewhere() -> None:
        until(lambda: any("another process" in line for line in messages), "the tuner's note that it waits")
        ChoiceFile(tmp_path, own.device.machine.identity, own.device.version).put(
            Decision(problem, BEST, "measured", 1e5, None, 5, True)
        )

    other = threading.Thread(target=finish_elsewhere)
    other.start()
    decision = own.tune(SPEC)
    other.join()
    assert decision.source == "cache" and decision.config == BEST
    assert any("another process" in line for line in messages)
