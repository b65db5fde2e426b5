"""One decision: what is kept, scored, remembered and measured, with made-up runtimes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.decide import Scores, decide
from tilewise.tune.choose.memory import Memory
from tilewise.tune.measure import TrialResult
from tilewise.tune.search.gaussian_process import Hyperparameters

PROBLEM = Problem.of("product", m=64, n=64)
CONFIGS = [Config.of(block=2**i, warps=w) for i in range(3, 9) for w in (1, 2, 4)]


def scores_of(logs: Sequence[float], margin: float = 0.05) -> Scores:
    """Scores that are off by a little, in logarithms."""
    return Scores(Hyperparameters(1.0, 0.1, 0.05, 1.0, 0.02, 0.01, far=0.0, near=0.0), np.array(logs), margin)


class Bench:
    """Runtimes by configuration; the first reading of a `lucky` one is too short."""

    def __init__(
        self, runtime: dict[Config, float], lucky: Config | None = None, broken: Sequence[Config] = ()
    ) -> None:
        self.runtime, self.lucky, self.broken = runtime, lucky, broken
        self.measured_configs: list[Config] = []
        self.again: list[Config] = []

    def measure(self, config: Config) -> TrialResult:
        self.measured_configs.append(config)
        if config in self.broken:
            return TrialResult(None, None, "failed", "it does not run")
        short = 0.98 if config == self.lucky else 1.0
        return TrialResult(self.runtime[config] * short, self.runtime[CONFIGS[0]])

    def remeasure(self, configs: Sequence[Config]) -> list[float | None]:
        self.again += configs
        return [self.runtime[config] for config in configs]


def away_from(best: Config) -> dict[Config, float]:
    return {c: 100.0 * (1 + 0.2 * abs(math.log2(c.size("block") / best.size("block"))) + 0.05 * abs(
        math.log2(c.size("warps") / best.size("warps")))) for c in CONFIGS}  # fmt: skip


RUNTIME = away_from(CONFIGS[10])
LOGS = [math.log(RUNTIME[c]) for c in CONFIGS]


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path, Machine("made-up", "one", {}), "1", tmp_path / "store.sqlite")


def remember(memory: Memory, problem: Problem, best: Config) -> None:
    with memory.open_store() as store:
        run = store.begin(Machine("made-up", "one", {}), 0, {})
        store.add_batch(run, Kernel("own", problem), 0, 1.0, list(away_from(best).items())[::2])


def test_a_choice_that_was_kept_is_taken_and_nothing_is_measured(memory: Memory):
    memory.choices.put(Decision(PROBLEM, CONFIGS[3], "measured", 5.0, None, 2, False))
    bench = Bench(RUNTIME)
    decision = decide(PROBLEM, CONFIGS, scores_of(LOGS), memory, bench)
    assert (decision.config, decision.source, decision.runtime_ns) == (
        CONFIGS[3],
        "cache",
        5.0,
    ) and not bench.measured_configs
    assert decide(PROBLEM, CONFIGS, scores_of(LOGS), memory, bench, fresh=True).source == "measured"
    assert decide(PROBLEM, CONFIGS[:3], scores_of(LOGS[:3]), memory, None).source != "cache"  # no longer in the list


def test_unmeasured_the_best_score_is_taken_if_it_promises_more_than_the_margin():
    assert decide(PROBLEM, CONFIGS, scores_of(LOGS)).config == CONFIGS[10]
    assert decide(PROBLEM, CONFIGS, scores_of(LOGS)).source == "model"
    stays = decide(PROBLEM, CONFIGS, scores_of(LOGS, margin=5.0))
    assert (stays.config, stays.source) == (CONFIGS[0], "default") and "default" in stays.reason
    second = decide(PROBLEM, CONFIGS, scores_of(LOGS), usable=lambda config: config != CONFIGS[10])
    assert second.config == CONFIGS[int(np.argsort(LOGS, kind="stable")[1])]


def test_with_nothing_to_go_by_the_default_is_the_choice():
    assert decide(PROBLEM, CONFIGS).config == CONFIGS[0]


def test_measuring_stays_within_its_budget_and_finds_what_the_scores_point_at():
    bench = Bench(RUNTIME)
    decision = decide(PROBLEM, CONFIGS, scores_of(LOGS), None, bench, budget=4)
    assert decision.config == CONFIGS[10] and decision.measurements == len(bench.measured_configs) == 4
    assert decision.speedup == pytest.approx(RUNTIME[CONFIGS[0]] / 100.0) and not decision.sure


def test_with_by_score_configurations_are_measured_in_the_order_of_the_scores():
    # The scores rank the slowest configurations first; expected improvement would leave that order.
    reversed_scores = [-log for log in LOGS]
    model = scores_of(reversed_scores)
    model = dataclasses.replace(model, hyper=dataclasses.replace(model.hyper, by_score=True))
    bench = Bench(RUNTIME, broken=[CONFIGS[int(np.argsort(reversed_scores, kind="stable")[2])]])
    decide(PROBLEM, CONFIGS, model, None, bench, budget=6)
    assert bench.measured_configs[0] == CONFIGS[int(np.argmin(reversed_scores))]
    order = [config for config in np.argsort(reversed_scores, kind="stable") if config]  # the default is timed anyway
    assert [CONFIGS.index(config) for config in bench.measured_configs if config != CONFIGS[0]][:5] == order[:5]


def test_a_lucky_reading_does_not_win_over_one_in_turns():
    runtime = {**RUNTIME, CONFIGS[13]: 101.0}
    logs = [math.log(runtime[c]) for c in CONFIGS]
    bench = Bench(runtime, lucky=CONFIGS[13])
    decision = decide(PROBLEM, CONFIGS, scores_of(logs), None, bench)
    assert decision.config == CONFIGS[10] and {CONFIGS[10], CONFIGS[13]} <= set(bench.again)


def test_the_default_stays_where_nothing_is_half_a_per_cent_faster():
    same = dict.fromkeys(CONFIGS, 100.0) | {CONFIGS[4]: 99.7}
    assert decide(PROBLEM, CONFIGS, scores_of([0.0] * len(CONFIGS)), None, Bench(same), budget=18).config == CONFIGS[0]


def test_one_that_fails_is_left_out_and_one_that_is_not_usable_is_not_taken():
    bench = Bench(RUNTIME, broken=[CONFIGS[10]])
    decision = decide(PROBLEM, CONFIGS, scores_of(LOGS), None, bench, usable=lambda config: config.size("warps") != 4)
    assert decision.config != CONFIGS[10] and decision.config.size("warps") != 4
    assert any("does not run" in note for note in decision.notes)
    nothing = decide(PROBLEM, CONFIGS, None, None, Bench(RUNTIME, broken=CONFIGS), budget=3)
    assert (nothing.source, nothing.config, nothing.runtime_ns) == ("default", CONFIGS[0], None)


def test_without_a_model_other_problems_of_the_kernel_teach_and_may_save_every_measurement(memory: Memory):
    for m in (48, 56, 72, 80):
        remember(memory, Problem.of("product", m=m, n=64), CONFIGS[10])
    bench = Bench(RUNTIME)
    decision = decide(PROBLEM, CONFIGS, None, memory, bench, budget=3)
    assert RUNTIME[decision.config] <= 1.1 * min(RUNTIME.values()) and decision.measurements == 3
    with Store(memory.store_file) as store:
        assert len(store.kernels()) == 4  # deciding writes nothing by itself
    unmeasured = decide(PROBLEM, CONFIGS, None, memory, bench, least=0, worth=0.5)
    assert unmeasured.measurements <= 1
