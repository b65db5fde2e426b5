"""The belief, the search on it and the calibration of both: on runtimes made up by a rule that is known."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import ConfigurationError
from tilewise.tune.search.calibration import (
    Calibration,
    Case,
    _played,
    calibration_path,
    config_logs,
    fit_prior,
    fit_rule,
    load_calibration,
    play,
    save_calibration,
)
from tilewise.tune.search.gaussian_process import BLIND, Belief, Memory, Prior
from tilewise.tune.search.loop import Rule, search, settle


def made_up(seed: int, configs: int = 80, error: float = 0.1) -> Case:
    """Runtimes that are smooth in the configuration, and scores that are off by a smooth error."""
    chance = np.random.default_rng(seed)
    x = chance.integers(0, 6, (configs, 4)).astype(float)
    away = x - chance.uniform(1, 4, 4)
    logs = 0.05 * (away**2).sum(axis=1) + 0.02 * chance.standard_normal(configs)
    wrong = error * (x @ chance.standard_normal(4)) / 4  # the same mistake for all that are alike
    return Case(f"k{seed}", logs + wrong, x, np.exp(logs))


def test_a_measurement_moves_the_neighbours_and_leaves_the_distant_alone():
    x = np.array([[0.0], [0.5], [20.0]])
    belief = Belief([0.0, 0.0, 0.0], x, Prior(own=0.01))
    belief.learn(2, 0.0)
    belief.learn(0, 0.3)
    assert belief.mean[belief.leaders == 1][0] == pytest.approx(0.29, abs=0.03)
    assert belief.mean[belief.leaders == 2][0] == pytest.approx(0.0, abs=0.01)


def twins(seed: int) -> Case:
    """Every configuration twice, told apart by a setting that changes nothing."""
    case = made_up(seed, configs=40)
    features = np.vstack([np.hstack([case.features, np.full((40, 1), half)]) for half in (1.0, 3.0)])
    names = ("kernel_bounds_0", "kernel_bounds_1", "output_bounds_0", "warps", "group")
    return Case(case.name, np.tile(case.scores, 2), features, np.tile(case.runtime, 2), names)


def test_a_setting_that_changes_nothing_is_found_out_and_its_twins_are_not_measured():
    prior = fit_prior([twins(seed) for seed in range(12)], noise=0.01)
    assert prior.weights["group"] < 0.2 < prior.weights["warps"]
    assert set(prior.weights) == {"group", "warps"}  # bounds are called differently by each family
    five = Rule(gain=0.0, sure=0.0, budget=5)

    def distinct(prior: Prior) -> int:
        plays = [play(twins(seed), prior, five).steps for seed in range(20, 32)]
        return sum(len({step.index % 40 for step in steps}) for steps in plays)

    nameless = [dataclasses.replace(twins(seed), names=()) for seed in range(12)]
    assert distinct(prior) > distinct(fit_prior(nameless, noise=0.01))
    kept = Prior.from_dict(json.loads(json.dumps(dataclasses.asdict(prior))))
    assert kept == prior


def test_weights_that_are_no_numbers_are_refused():
    for weights in ({"group": -1.0}, {"group": math.inf}, {"group": "much"}, [1.0]):
        with pytest.raises((ValueError, TypeError)):
            Prior.from_dict({"slope": 1.0, "weights": weights})


def test_settings_of_a_recorded_kernel_are_those_that_vary_each_once():
    names = ("kernel_bounds_0", "kernel_bounds_sum", "output_bounds_0", "warps", "stages")
    logs, kept = config_logs(np.array([[16, 3, 16, 4, 2], [32, 5, 32, 8, 2]], np.float32), names)
    assert sorted(kept) == ["output_bounds_0", "warps"]
    assert logs[0, kept.index("warps")] == pytest.approx(math.log2(5))


def test_nothing_is_measured_twice_and_a_failed_one_is_not_asked_for_again():
    case = made_up(0, configs=12)
    asked: list[int] = []

    def measure(index: int) -> float | None:
        asked.append(index)
        return None if index % 3 == 0 else float(case.runtime[index])

    found = search(Belief(case.scores, case.features, Prior()), measure, Rule(gain=0.0, budget=50))
    assert sorted(asked) == list(range(12))
    assert found.best is not None and found.best % 3 != 0
    assert found.reason == "every promising configuration is measured"


def test_when_everything_fails_there_is_no_choice_and_it_says_so():
    case = made_up(1, configs=5)
    found = search(Belief(case.scores, case.features, Prior()), lambda index: None, Rule(budget=9))
    assert found.best is None and found.runtime_ns is None and not found.sure
    assert "no configuration" in found.reason


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_the_same_measurements_give_the_same_steps_and_a_result_that_was_measured(seed: int):
    case = made_up(seed)
    first, second = (play(case, Prior(), Rule(gain=0.01, sure=0.1, budget=8)) for _ in range(2))
    assert first == second
    assert first.runtime_ns == pytest.approx(min(s.runtime_ns for s in first.steps if s.runtime_ns))
    assert len({step.index for step in first.steps}) == first.measurements
    assert first.measurements == 8 or (first.measurements < 8 and first.reason == "the rest cannot pay")


def test_updating_finds_better_configurations_than_the_scores_order_alone():
    cases = [made_up(seed, error=0.4) for seed in range(30)]
    updated, ordered = [], []
    for case in cases:
        found = play(case, Prior(spread=0.3, own=0.03), Rule(gain=0.0, budget=6))
        updated.append((found.runtime_ns or math.inf) / case.best)
        ordered.append(case.runtime[np.argsort(case.scores)[:6]].min() / case.best)
    assert np.mean(updated) < np.mean(ordered)


def test_other_shapes_teach_a_kernel_without_any_model():
    chance = np.random.default_rng(3)
    x = chance.integers(0, 5, (60, 3)).astype(float)
    wanted = np.array([1.0, 3.0, 2.0])
    logs = 0.2 * ((x - wanted) ** 2).sum(axis=1)
    rows = chance.permutation(60)[:24]
    shape = np.repeat([0, 1], 12)
    memory = Memory(shape, shape[:, None] * 1.0, x[rows], np.zeros(24), logs[rows] + 3.0 * shape)
    taught = Belief(np.zeros(60), x, BLIND, memory, np.array([2.0])).portfolio(1)[0]
    assert logs[taught] <= np.quantile(logs, 0.15)


def test_what_a_model_got_wrong_on_one_shape_counts_for_its_like_and_not_for_a_distant_one():
    case, prior = made_up(8), Prior(spread=0.2, kin=0.5, shape_length=1.0)
    alone = Belief(case.scores, case.features, prior)
    rows = np.arange(6)
    for away, least, most in ((0.0, 1e-2, np.inf), (8.0, 0.0, 1e-6)):
        sizes = np.array([[10.0, 10.0 + away]])
        logs = np.log(case.runtime[rows]) + 0.3 * (rows % 2)  # as the scores do not say
        memory = Memory(np.zeros(6, int), np.repeat(sizes, 6, 0), case.features[rows], case.scores[rows], logs)
        told = Belief(case.scores, case.features, prior, memory, np.array([10.0, 10.0]))
        moved = np.ptp((told.mean - alone.mean)[1:])
        assert least <= moved <= most
        assert np.all(np.diag(told.covariance) <= np.diag(alone.covariance) + 1e-9)


def test_claims_hold_as_often_as_promised_on_kernels_that_were_not_calibrated_on():
    known = [made_up(seed) for seed in range(200, 320)]
    prior = fit_prior(known, 0.01)
    rule, few = fit_rule(_played(known, prior)), fit_rule(_played(known[:30], prior))
    assert few.sure == 0  # thirty right ones in thirty say too little
    played = [(play(case, prior, rule), case) for case in (made_up(seed) for seed in range(100, 160))]
    claims = [(f.runtime_ns or math.inf) <= 1.01 * case.best for f, case in played if f.sure]
    assert rule.sure > 0 and len(claims) > 8
    assert np.mean(claims) >= 0.95
    assert np.mean([found.measurements for found, _ in played]) <= 4


def test_a_calibration_is_kept_beside_its_model_and_refused_for_another(tmp_path: Path):
    model = tmp_path / "m.safetensors"
    model.write_bytes(b"weights")
    saved = Calibration(Prior(slope=0.4), Rule(0.02, 0.1), "", 12)
    save_calibration(model, saved)
    found = load_calibration(model)
    assert found is not None and dataclasses.replace(found, model="") == saved
    model.write_bytes(b"other weights")
    assert load_calibration(model) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"prior": 3}', '{"prior": {"slope": "x"}, "rule": {}}'])
def test_a_damaged_calibration_is_no_calibration(tmp_path: Path, content: str):
    model = tmp_path / "m.safetensors"
    model.write_bytes(b"weights")
    calibration_path(model).write_text(content)
    assert load_calibration(model) is None


def test_a_prior_with_a_meaningless_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        Prior.from_dict({"slope": -1})
    with pytest.raises(ValueError, match="rule"):
        Rule.from_dict({"gain": 0.1, "sure": 7})
    assert json.loads(json.dumps(dataclasses.asdict(Prior.from_dict({"slope": 2, "unknown": 1}))))["slope"] == 2


def test_too_few_validation_kernels_are_one_sentence():
    from tilewise.tune.search.calibration import calibrate

    with pytest.raises(ConfigurationError, match="at least 5"):
        calibrate(None, [], ())  # type: ignore[arg-type]


def test_a_configuration_that_is_oddly_fast_for_one_shape_is_believed_to_be_so_for_others():
    x = np.array([[float(a), float(b)] for a in range(8) for b in range(8)])
    odd = 27
    logs = np.where(np.arange(64) == odd, -0.3, 0.0)
    shape = np.repeat([0, 1], 20)
    rows = np.concatenate([[odd], np.delete(np.arange(64), odd)[:39]])
    memory = Memory(shape, shape[:, None] * 1.0, x[rows], np.zeros(40), logs[rows] + 3.0 * shape)
    beliefs = [dataclasses.replace(BLIND, quirk=share) for share in (0.0, BLIND.quirk)]
    without, told = (float(Belief(np.zeros(64), x, prior, memory, np.array([2.0])).mean[odd]) for prior in beliefs)
    assert told < 1.5 * without < 0


def test_a_belief_that_explores_gives_every_other_measurement_to_what_no_shape_has_tried():
    x = np.array([[float(a), float(b)] for a in range(6) for b in range(6)])
    tried = np.arange(0, 30)
    memory = Memory(np.zeros(30, int), np.zeros((30, 1)), x[tried], np.zeros(30), 0.1 * x[tried].sum(axis=1))
    belief = Belief(np.zeros(36), x, BLIND, memory, np.array([1.0]))
    belief.explores = True
    picked = []
    for _ in range(6):
        index = belief.next()
        assert index is not None
        picked.append(index)
        belief.learn(index, 0.1 * float(x[index].sum()))
    assert picked[1::2] == [30, 31, 32]  # those of them that are believed fastest
    assert any(index < 30 for index in picked[::2])


def test_readings_that_surprise_widen_the_doubt_and_expected_ones_narrow_it():
    scores, features = np.linspace(0, 0.4, 12), np.arange(12.0)[:, None]
    prior = Prior(slope=1.0, spread=0.05, length=1.0, own=0.05, firmness=3.0)

    def doubt(off: float, firmness: float) -> float:
        belief = Belief(scores, features, dataclasses.replace(prior, firmness=firmness))
        for index, log_runtime in ((0, 5.0), (3, 5.0 + scores[3] + off), (6, 5.0 + scores[6] + off)):
            belief.learn(index, log_runtime)
        return belief.doubt().gain

    assert doubt(0.0, 3.0) < doubt(0.0, 0.0)
    assert doubt(0.25, 3.0) > doubt(0.25, 0.0)
    assert doubt(0.25, 1e9) == pytest.approx(doubt(0.25, 0.0), rel=1e-6)


def test_a_judge_made_late_knows_what_was_measured_before():
    scores, features = np.linspace(0, 0.4, 12), np.arange(12.0)[:, None]
    prior = Prior(slope=1.0, spread=0.05, own=0.05).tightened(0.3, 0.5, 0.5)
    early, late = Belief(scores, features, prior), Belief(scores, features, prior)
    assert early._judge() is not None
    for belief in (early, late):
        belief.learn(0, 5.0)
        belief.refuse(2)
        belief.learn(5, 5.2)
    assert early._judge() is not None
    assert early.doubt() == late.doubt()


def test_final_readings_decide_alone_and_others_count_with_those_before():
    scores, features = np.zeros(4), np.arange(4.0)[:, None]

    def measured() -> Belief:
        belief = Belief(scores, features, Prior(spread=0.3, own=0.3, noise=0.001))
        for index, log_runtime in enumerate((5.0, 5.005, 5.009, 5.4)):
            belief.learn(index, log_runtime)
        return belief

    asked: list[int] = []

    def again(few):
        asked.extend(few)
        return [math.exp({0: 5.004, 1: 5.008, 2: 5.002}[index]) for index in few]

    assert settle(measured(), again, 0.02, final=True) == 2
    assert asked == [0, 1, 2]  # not the one far behind
    assert settle(measured(), again, 0.02) == 0
    assert settle(measured(), lambda few: [None] * len(few), 0.02, final=True) == 0
    alone = Belief(scores, features, Prior())
    alone.learn(3, 5.0)
    assert settle(alone, lambda few: pytest.fail("nothing to settle"), 0.02, final=True) == 3
    assert settle(Belief(scores, features, Prior()), again, 0.02) is None
