"""The Gaussian process, the search on it and its calibration: on runtimes made up by a rule that is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.costmodel.models.files import shipped_file
from tilewise.errors import ConfigurationError
from tilewise.tune.choose.decide import SearchStep, search
from tilewise.tune.choose.scores import shipped_scores
from tilewise.tune.search.calibration import (
    NEVER,
    STAGES,
    Case,
    calibrate,
    claims_text,
    config_logs,
    error_groups,
    evaluate_claims,
    fit,
    fit_confidence_bounds,
    is_gpu_space,
    replay_stages,
)
from tilewise.tune.search.confidence import (
    Claim,
    _hyperparameters,
    calibration_path,
    load_calibration,
    save_calibration,
)
from tilewise.tune.search.gaussian_process import Earlier, GaussianProcess, Hyperparameters

NARROW = Hyperparameters(1.0, 0.3, 0.15, 2.0, 0.05, 0.01)


def made_up(seed: int, configs: int = 80, error: float = 0.1) -> Case:
    """Runtimes that are smooth in the configuration, and scores that are off by a smooth error."""
    chance = np.random.default_rng(seed)
    x = chance.integers(0, 6, (configs, 4)).astype(float)
    away = x - chance.uniform(1, 4, 4)
    logs = 0.05 * (away**2).sum(axis=1) + 0.02 * chance.standard_normal(configs)
    wrong = error * (x @ chance.standard_normal(4)) / 4  # the same mistake for all that are alike
    return Case(f"k{seed}", logs + wrong, x, np.exp(logs))


def play(
    case: Case, hyper: Hyperparameters = NARROW, budget: int = 5, worth: float = 0.0
) -> tuple[list[SearchStep], str]:
    return search(case.process(hyper), lambda index: float(case.runtime[index]), budget, worth)


def reached(case: Case, outcome: tuple[list[SearchStep], str]) -> float:
    """The best that was measured over the best there is."""
    return min(float(case.runtime[step.index]) for step in outcome[0]) / case.best


def test_a_measurement_moves_the_neighbours_and_leaves_the_distant_alone():
    x = np.array([[0.0], [0.5], [20.0]])
    process = GaussianProcess([0.0, 0.0, 0.0], x, dataclasses.replace(NARROW, nugget=0.01))
    process.observe(2, 0.0)
    process.observe(0, 0.3)
    assert process.mean[process.followed == 1][0] == pytest.approx(0.29, abs=0.03)
    assert process.mean[process.followed == 2][0] == pytest.approx(0.0, abs=0.01)


def test_mean_and_covariance_are_those_of_the_conditional_normal_distribution():
    case, hyper = made_up(4, configs=9), NARROW
    process = case.process(hyper)
    mean, covariance = process.mean.copy(), process.covariance.copy()
    order = process.followed
    readings = {int(order[2]): 0.1, int(order[5]): 0.4}
    level = 0.1 - mean[2]  # the first reading settles what the mean's zero stands for
    for index, logs in readings.items():
        process.observe(index, logs)
    observed_at = [2, 5]
    own = covariance[np.ix_(observed_at, observed_at)] + hyper.noise**2 * np.eye(2)
    gain = covariance[:, observed_at] @ np.linalg.inv(own)
    expected = mean + level + gain @ (np.array([0.1, 0.4]) - (mean + level)[observed_at])
    np.testing.assert_allclose(process.mean, expected, atol=1e-9)
    np.testing.assert_allclose(process.covariance, covariance - gain @ covariance[observed_at], atol=1e-9)


def test_without_scores_every_configuration_of_a_large_space_can_be_measured():
    x = np.linspace(0.0, 40.0, 1000)[:, None]
    process = GaussianProcess(np.zeros(1000), x, Hyperparameters())
    steps, _ = search(process, lambda index: float(np.exp(0.1 * abs(x[index, 0] - 35.0))), 25)
    assert len(process.followed) == 1000 and any(step.index >= 400 for step in steps)
    assert 0.0 <= process.value_of_information() < 1.0


def test_expected_improvement_is_that_of_draws():
    case = made_up(5, configs=20)
    process = case.process(NARROW)
    process.observe(0, 0.0)
    places = process.open()
    deviation = np.sqrt(np.diag(process.covariance)[places])
    noise = np.random.default_rng(0).standard_normal((19, 50_000))
    improvement = np.maximum(-(process.mean[places][:, None] + deviation[:, None] * noise), 0).mean(axis=1)
    np.testing.assert_allclose(process.expected_improvement(places), improvement, rtol=0.05, atol=1e-3)


def test_the_value_of_information_falls_to_nothing_as_everything_is_measured():
    case = made_up(6, configs=10)
    process = case.process(NARROW)
    values = [process.value_of_information()]
    for index in range(10):
        process.observe(index, float(np.log(case.runtime[index])))
        values.append(process.value_of_information())
    assert values[0] > 0.01 and values[-1] == 0.0 and values[5] < values[0]


def twins(seed: int) -> Case:
    """Every configuration twice, told apart by a setting that changes nothing."""
    case = made_up(seed, configs=40)
    features = np.vstack([np.hstack([case.features, np.full((40, 1), half)]) for half in (1.0, 3.0)])
    names = ("kernel_bounds_0", "kernel_bounds_1", "output_bounds_0", "warps", "group")
    return Case(case.name, np.tile(case.scores, 2), features, np.tile(case.runtime, 2), names)


def test_a_setting_that_changes_nothing_is_found_out_and_its_twins_are_not_measured():
    hyper = fit([twins(seed) for seed in range(12)], noise=0.01)
    assert hyper.ard["group"] < 0.2 < hyper.ard["warps"]
    assert set(hyper.ard) == {"group", "warps"}  # bounds are called differently by each family

    def distinct(hyper: Hyperparameters) -> int:
        plays = [play(twins(seed), hyper)[0] for seed in range(20, 32)]
        return sum(len({step.index % 40 for step in steps}) for steps in plays)

    nameless = [dataclasses.replace(twins(seed), names=()) for seed in range(12)]
    assert distinct(hyper) > distinct(fit(nameless, noise=0.01))


def test_settings_of_a_recorded_kernel_are_those_that_vary_each_once():
    names = ("kernel_bounds_0", "kernel_bounds_sum", "output_bounds_0", "warps", "stages")
    logs, varying = config_logs(np.array([[16, 3, 16, 4, 2], [32, 5, 32, 8, 2]], np.float32), names)
    assert sorted(varying) == ["output_bounds_0", "warps"]
    assert logs[0, varying.index("warps")] == pytest.approx(math.log2(5))


def test_the_shipped_gpu_model_is_measured_in_its_own_order_and_the_cpu_model_is_not():
    gpu, cpu = (load_calibration(shipped_file(name)) for name in ("h200", "cpu"))
    assert gpu is not None and gpu.by_score and cpu is not None and not cpu.by_score
    assert is_gpu_space(("warps", "stages", "group")) and not is_gpu_space(("tile_m", "threads"))


def test_nothing_is_measured_twice_and_a_failed_one_is_not_asked_for_again():
    case = made_up(0, configs=12)
    requests: list[int] = []

    def measure(index: int) -> float | None:
        requests.append(index)
        return None if index % 3 == 0 else float(case.runtime[index])

    process = case.process(NARROW)
    _, reason = search(process, measure, 50)
    assert sorted(requests) == list(range(12))
    assert process.best is not None and process.best % 3 != 0
    assert reason == "every promising configuration is measured" and process.exhausted


def test_when_everything_fails_there_is_no_choice_and_it_says_so():
    process = made_up(1, configs=5).process(NARROW)
    _, reason = search(process, lambda index: None, 9)
    assert process.best is None and "no configuration" in reason


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, derandomize=True, deadline=None)
def test_the_same_measurements_give_the_same_steps_and_a_result_that_was_measured(seed: int):
    case = made_up(seed)
    first, second = (play(case, budget=8, worth=0.01) for _ in range(2))
    assert first == second
    steps, reason = first
    assert len({step.index for step in steps}) == len(steps)
    assert len(steps) == 8 or reason == "the rest cannot pay"


def test_updating_finds_better_configurations_than_the_scores_order_alone():
    cases = [made_up(seed, error=0.4) for seed in range(30)]
    hyper = dataclasses.replace(NARROW, signal=0.3, nugget=0.03)
    updated = [reached(case, play(case, hyper, 6)) for case in cases]
    ordered = [case.runtime[np.argsort(case.scores)[:6]].min() / case.best for case in cases]
    assert np.mean(updated) < np.mean(ordered)


def test_other_shapes_teach_a_kernel_without_any_model():
    chance = np.random.default_rng(3)
    x = chance.integers(0, 5, (60, 3)).astype(float)
    logs = 0.2 * ((x - np.array([1.0, 3.0, 2.0])) ** 2).sum(axis=1)
    rows = chance.permutation(60)[:24]
    task = np.repeat([0, 1], 12)
    earlier = Earlier(task, task[:, None] * 1.0, x[rows], np.zeros(24), logs[rows] + 3.0 * task)
    process = GaussianProcess(np.zeros(60), x, Hyperparameters(), earlier, np.array([2.0]))
    first = process.first()
    assert process.tasks == 2 and first is not None and logs[first] <= np.quantile(logs, 0.15)


def test_a_task_of_nearly_the_same_size_counts_and_a_distant_one_need_not():
    case, hyper = made_up(8), dataclasses.replace(NARROW, signal=0.2, far=0.0, near=0.5, task_length_scale=1.0)
    alone = case.process(hyper)
    rows = np.arange(6)
    for away, least, most in ((0.0, 1e-2, np.inf), (8.0, 0.0, 1e-6)):
        sizes = np.array([[10.0, 10.0 + away]])
        logs = np.log(case.runtime[rows]) + 0.3 * (rows % 2)  # as the scores do not say
        earlier = Earlier(np.zeros(6, int), np.repeat(sizes, 6, 0), case.features[rows], case.scores[rows], logs)
        informed = GaussianProcess(case.scores, case.features, hyper, earlier, np.array([10.0, 10.0]))
        difference = np.ptp((informed.mean - alone.mean)[1:])
        assert least <= difference <= most
        assert np.all(np.diag(informed.covariance) <= np.diag(alone.covariance) + 1e-9)


def test_a_calibration_is_kept_beside_its_model_and_refused_for_another(tmp_path: Path):
    model = tmp_path / "m.safetensors"
    model.write_bytes(b"weights")
    saved = dataclasses.replace(fit([twins(seed) for seed in range(3)], 0.01), confidence_bounds={0: 2.0, 5: 0.25})
    for by_score in (False, True):
        saved = dataclasses.replace(saved, by_score=by_score)
        save_calibration(model, saved)
        assert load_calibration(model) == saved
    model.write_bytes(b"other weights")
    assert load_calibration(model) is None


def test_on_another_device_no_claim_is_made():
    case, hyper = twins(0), dataclasses.replace(NARROW, confidence_bounds={0: 0.0})
    assert Claim(case.process(hyper)).after(0)
    assert Claim(case.process(hyper.elsewhere())).after(0) is None
    assert Claim(case.process(hyper.elsewhere())).after(8) is None


def test_the_shipped_model_claims_nothing_on_a_gpu_it_was_not_trained_on():
    own, _ = shipped_scores("h200", "NVIDIA H200", "triton", 0.0)
    other, _ = shipped_scores("h200", "NVIDIA A100", "triton", 0.0, own=False)
    assert own is not None and other is not None
    assert own.hyper.confidence_bounds and not other.hyper.confidence_bounds


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"prior": 3}', '{"prior": {"slope": "x"}, "model": ""}'])
def test_a_damaged_calibration_is_no_calibration(tmp_path: Path, content: str):
    model = tmp_path / "m.safetensors"
    model.write_bytes(b"weights")
    calibration_path(model).write_text(content)
    assert load_calibration(model) is None


def test_a_calibration_with_a_meaningless_number_is_refused():
    assert _hyperparameters({"slope": 2, "unknown": 1}).coefficient == 2
    for weights in ({"group": -1.0}, {"group": math.inf}, {"group": "much"}, [1.0]):
        with pytest.raises((ValueError, TypeError)):
            _hyperparameters({"slope": 1.0, "weights": weights})
    with pytest.raises(ValueError, match="finite"):
        _hyperparameters({"slope": -1})
    with pytest.raises(ValueError, match="positive"):
        _hyperparameters({"length": 0})


def test_too_few_validation_kernels_are_one_sentence():
    with pytest.raises(ConfigurationError, match="at least 5"):
        calibrate(None, [], ())  # type: ignore[arg-type]


def test_sure_within_five_per_cent_is_mostly_right_and_said_more_often_after_measuring():
    fitted, test_cases = ([made_up(seed, error=0.06) for seed in seeds] for seeds in (range(80), range(100, 160)))
    sure = fit_confidence_bounds(fitted, NARROW, [case.name for case in fitted])
    assert set(sure) == set(STAGES) and min(sure.values()) < NEVER
    claims = evaluate_claims(test_cases, dataclasses.replace(NARROW, confidence_bounds=sure))
    assert (
        claims[8]["said"] > max(0, claims[0]["said"] - 0.05)
        and claims[8]["right"] > 0.85
        and claims[8]["close"] > claims[0]["close"]
    )
    assert "after 8 claimed for" in claims_text(claims)


def test_a_guesser_is_never_sure_and_a_model_without_bounds_says_nothing():
    chance = np.random.default_rng(0)
    guesses = [dataclasses.replace(made_up(s), scores=chance.standard_normal(80), default=3) for s in range(40)]
    assert fit_confidence_bounds(guesses, NARROW, [case.name for case in guesses])[0] == NEVER
    assert set(fit_confidence_bounds(guesses, NARROW, ["one"] * 40).values()) == {NEVER}  # nothing to judge it by
    process = guesses[0].process(dataclasses.replace(NARROW, confidence_bounds={0: NEVER, 3: 0.0}))
    claim = Claim(process)
    assert claim.after(0) is False and claim.after(2) is False and claim.after(4) is True
    assert Claim(guesses[0].process(NARROW)).after(5) is None
    process.observe(0, 0.0)
    for index in process.followed:
        process.refuse(int(index))
    assert process.chance_within(0.05) == 1.0 and process.value_of_information() == 0.0


def test_a_claim_stands_until_something_much_faster_is_found():
    hyper = dataclasses.replace(NARROW, confidence_bounds={0: 0.0, 1: NEVER})
    for second, stands in ((-0.03, True), (-0.2, False)):
        process = made_up(3).process(hyper)
        claim = Claim(process)
        first, other = (int(index) for index in process.followed[:2])
        assert claim.after(0) is True
        process.observe(first, 0.0)
        assert claim.after(1) is True  # knowing more takes nothing back
        process.observe(other, second)
        assert claim.after(2) is stands
    process = made_up(3).process(hyper)
    claim = Claim(process)
    assert claim.after(0) is True
    process.refuse(int(process.followed[0]))
    process.observe(int(process.followed[1]), 0.0)
    assert claim.after(1) is False  # it was made of a configuration that does not run


def test_claims_counted_over_kernels_are_those_made_of_each():
    cases = [made_up(seed, error=0.06) for seed in range(30)]
    hyper = dataclasses.replace(NARROW, confidence_bounds={0: 0.7, 1: 0.8, 3: 0.9, 5: 0.6, 8: 0.95})
    claim_counts = dict.fromkeys(STAGES, 0)
    for case in cases:
        process, logs = case.process(hyper), np.log(case.runtime)
        claim = Claim(process)
        for count in range(STAGES[-1] + 1):
            if count:
                index = process.next()
                assert index is not None
                process.observe(index, float(logs[index]))
            if count in STAGES:
                claim_counts[count] += claim.after(count) is True
    assert {count: row["said"] * len(cases) for count, row in evaluate_claims(cases, hyper).items()} == pytest.approx(
        claim_counts
    )
    assert len(replay_stages(cases[0], hyper)[0]) == len(STAGES)


def test_kernels_that_err_together_are_programs_or_shapes():
    assert error_groups(["a_1", "a_2", "b_1"], ["c_9"]) == ["a", "a", "b"]
    assert error_groups(["a.x_1", "a.y_1", "b_2"], ["b_9"]) == ["1", "1", "2"]
