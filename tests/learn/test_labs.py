"""Labs: predictions come first and stay, grades follow this machine's measurements, and forged records are found."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tilewise import learn
from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.learn.labs import grade, statistics
from tilewise.learn.labs.labwork import Lab, read_token
from tilewise.learn.labs.questions import LIMITS, QUESTIONS, Question
from tilewise.learn.labs.record import machine_key, seal

MACHINES = {
    "fast": {"cpu": "fast", "isa": "avx512", "flops_per_second": 200e9, "bytes_per_second": 40e9},
    "slow": {"cpu": "slow", "isa": "neon", "flops_per_second": 20e9, "bytes_per_second": 6e9},
}


def pretend(monkeypatch, machine: dict) -> None:
    """Replace measurements by a model of a machine: times at 70 % of its roofline, factors that depend on it."""
    monkeypatch.setattr("tilewise.learn.labs.labwork.roofline", lambda: machine)
    digest = int(machine_key(machine), 16)

    def measure(question: Question, sizes):
        if question.work is not None:
            flops, bytes_moved = question.work(sizes)
            return max(flops / machine["flops_per_second"], bytes_moved / machine["bytes_per_second"]) / 0.7
        rng = np.random.default_rng([digest, len(question.name), sum(v for v in sizes.values() if isinstance(v, int))])
        factors = np.exp(rng.uniform(0, 3, 4))
        return [float(f) for f in factors] if question.unit == "choice" else float(factors[0])

    replaced = {
        lesson: tuple(
            Question(q.name, q.text, q.unit, q.draw, lambda sizes, q=q: measure(q, sizes), q.work) for q in questions
        )
        for lesson, questions in QUESTIONS.items()
    }
    monkeypatch.setattr("tilewise.learn.labs.labwork.QUESTIONS", replaced)


def take(lesson: str, file, student: str, answer) -> Lab:
    """Do a lab with the predictions of `answer(question, sizes, lab)`: a value and a limit."""
    work = Lab(lesson, file, student)
    for name, question in work.questions.items():
        work.predict(name, *answer(question, work.sizes(question), work))
    work.measure()
    return work


def honest(seed: int):
    """Predict from a pilot measurement on the same machine, wrong by about a quarter; know the limit."""
    rng = np.random.default_rng(seed)

    def answer(question, sizes, work):
        pilot = question.measure(sizes)
        if question.unit == "choice":
            return int(np.argmin(pilot)) if rng.random() < 0.8 else int(rng.integers(4)), ""
        return float(pilot) * math.exp(rng.normal(0, 0.25)), _limit(question, sizes, work)

    return answer


def _limit(question, sizes, work) -> str:
    if question.work is None:
        return ""
    flops, bytes_moved = question.work(sizes)
    machine = work.record["machine"]
    return LIMITS[int(bytes_moved / machine["bytes_per_second"] > flops / machine["flops_per_second"])]


def generated(question, sizes, work):
    """Predict without the machine: a typical laptop's roofline, and factors as textbooks give them."""
    if question.work is not None:
        flops, bytes_moved = question.work(sizes)
        return max(flops / 80e9, bytes_moved / 15e9), LIMITS[int(bytes_moved / 15e9 > flops / 80e9)]
    return (0, "") if question.unit == "choice" else (4.0, "")


def test_honest_students_get_the_same_grades_on_two_machines_with_different_keys(tmp_path, monkeypatch):
    means, keys = {}, {}
    for name, machine in MACHINES.items():
        pretend(monkeypatch, machine)
        works = [
            take(lesson, tmp_path / f"{name}-{lesson}-{student}.json", f"student {student}", honest(student))
            for student in range(20)
            for lesson in QUESTIONS
        ]
        means[name] = np.mean([work.grade().percent for work in works])
        entries = [entry for work in works for entry in work.record["entries"]]
        keys[name] = [entry["value"] for entry in entries if entry["kind"] == "measurement"]
    assert keys["fast"] != keys["slow"]
    assert abs(means["fast"] - means["slow"]) < 3 and min(means.values()) > 70


@pytest.mark.parametrize("machine", MACHINES)
def test_answers_generated_without_the_machine_get_less_than_half(machine, tmp_path, monkeypatch):
    pretend(monkeypatch, MACHINES[machine])
    works = [
        take(lesson, tmp_path / f"{lesson}-{student}.json", f"student {student}", generated)
        for student in range(8)
        for lesson in QUESTIONS
    ]
    assert np.mean([work.grade().percent for work in works]) < 50


@pytest.fixture
def finished(tmp_path, monkeypatch):
    pretend(monkeypatch, MACHINES["fast"])
    return take("profiling", tmp_path / "lab-profiling.json", "ada", honest(1))


def test_nothing_is_measured_before_it_is_predicted(tmp_path, monkeypatch):
    pretend(monkeypatch, MACHINES["fast"])
    work = Lab("profiling", tmp_path / "lab.json", "ada")
    with pytest.raises(ConfigurationError, match="predict before you measure: product_time, copy_time"):
        work.measure()
    work.predict("product_time", 1e-3, "compute")
    assert json.loads((tmp_path / "lab.json").read_text())["entries"][0]["value"] == 1e-3
    with pytest.raises(ConfigurationError, match="does not change"):
        work.predict("product_time", 2e-3, "compute")
    for value, limit, message in ((0, "memory", "positive"), (1.0, "", "needs its limit")):
        with pytest.raises(ConfigurationError, match=message):
            work.predict("copy_time", value, limit)


def test_a_changed_record_is_found(finished):
    record = json.loads(json.dumps(finished.record))
    record["entries"][0]["value"] *= 2
    with pytest.raises(FileFormatError, match="entry 1 of the lab was changed"):
        grade(record)
    record = json.loads(json.dumps(finished.record))
    del record["entries"][0]
    with pytest.raises(FileFormatError, match="changed"):
        grade(record)
    forged = dict(finished.record, entries=[finished.record["entries"][2]])
    forged["entries"][0] |= {"seal": seal(machine_key(forged["machine"]), forged["entries"][0])}
    with pytest.raises(FileFormatError, match="before it was predicted"):
        grade(forged)
    for nonsense in (None, {}, {"format": "tilewise lab 1", "lesson": "profiling"}, {"entries": 3}):
        with pytest.raises(FileFormatError):
            grade(nonsense)


def test_attempts_are_limited_and_draw_new_sizes(finished):
    sizes = [finished.record["entries"][0]["sizes"]]
    for _ in range(2):
        sizes.append(finished.sizes(finished.questions["product_time"]))
        for name in finished.questions:
            finished.predict(name, 1.0, "memory")
        finished.measure()
    with pytest.raises(ConfigurationError, match="all 3 attempts"):
        finished.predict("product_time", 1.0, "memory")
    assert len({str(size) for size in sizes}) > 1 and "All attempts are used" in str(finished)
    assert finished.grade().percent == 0


def test_a_decision_log_is_read_for_numbers_reason_and_trade_off(finished):
    missing = finished.decide("it was quick", "because", "nothing")
    assert len(missing) == 3
    seconds = finished.grade().questions[0].measured
    why = "the copy is limited by memory on this machine"
    assert finished.decide(f"{seconds * 1e3:.3g} ms", why, "larger tiles are faster but cost memory") == []


def test_a_token_carries_the_record_and_statistics_pool_students(finished):
    assert read_token(finished.token()) == finished.record
    with pytest.raises(FileFormatError):
        read_token("nonsense")
    (row, other) = statistics([finished.record, finished.record])
    assert (row["question"], row["students"]) == ("product_time", 2) and 0 <= other["mean points"] <= 1


def test_a_lab_on_this_machine_measures_what_it_says(tmp_path):
    work = learn.lab("benchmarking", "ada", tmp_path / "lab.json")
    work.predict("batch_gain", 5.0)
    result = work.measure()
    assert result.questions[0].measured > 0.5 and "measured" in result.questions[0].remark
