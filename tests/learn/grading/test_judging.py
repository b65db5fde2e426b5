"""Judging what was handed in: a student's cells are taken out of a notebook, and hostile ones get nothing, in or out of
a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learn.grading.submissions import HOSTILE, SOLUTION, WRONG
from tilewise.errors import UnavailableError
from tilewise.learn.checking import LESSONS, check, exercises
from tilewise.learn.labs import Lab
from tilewise_arena.grading import check_answers, must_be_predicted, must_be_solved
from tilewise_arena.grading.judging import ANSWERS, extract_code, keep_answers
from tilewise_arena.grading.nbgrader import source
from tilewise_arena.grading.notebooks import unfinished
from tilewise_arena.grading.otter import master
from tilewise_arena.sandbox import bubblewrap

TRICKS = sorted(set(HOSTILE) - {"is a notebook's magic"})
needs_sandbox = pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason())
DANGEROUS = ("starts processes", "takes all memory", "removes files")  # only in the sandbox


def answers(tmp_path: Path, text: str) -> Path:
    keep_answers(tmp_path, text)
    return tmp_path / ANSWERS


def test_right_answers_are_solved_and_wrong_ones_are_told_why(tmp_path: Path) -> None:
    answers(tmp_path, SOLUTION)
    must_be_solved("profiling", "percentile", tmp_path)
    answers(tmp_path, WRONG)
    with pytest.raises(AssertionError, match="interpolate between its two neighbours"):
        must_be_solved("profiling", "percentile", tmp_path)


@needs_sandbox
@pytest.mark.parametrize("trick", TRICKS)
def test_in_the_sandbox_a_hostile_answer_gets_nothing(trick: str, tmp_path: Path) -> None:
    assert not any(result.solved for result in check_answers("profiling", answers(tmp_path, HOSTILE[trick]), 0.5))


@pytest.mark.parametrize("trick", sorted(set(TRICKS) - set(DANGEROUS)))
def test_without_a_sandbox_it_gets_nothing_either(trick: str, tmp_path: Path) -> None:
    assert not any(result.solved for result in check("profiling", answers(tmp_path, HOSTILE[trick]), 0.5))


def test_grading_stops_without_a_sandbox_unless_told_otherwise(tmp_path, monkeypatch, capsys) -> None:
    path = answers(tmp_path, SOLUTION)
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: "there is no bwrap")
    monkeypatch.delenv("TILEWISE_UNSANDBOXED_GRADING", raising=False)
    with pytest.raises(UnavailableError, match="not graded without a sandbox"):
        check_answers("profiling", path)
    monkeypatch.setenv("TILEWISE_UNSANDBOXED_GRADING", "1")
    must_be_solved("profiling", "percentile", tmp_path)
    assert "WARNING: students' code runs without a sandbox" in capsys.readouterr().err


def test_a_lab_is_graded_from_its_token_and_a_forged_one_is_refused(tmp_path: Path) -> None:
    work = Lab("benchmarking", tmp_path / "lab.json", "ada")
    work.predict("batch_gain", 5.0)
    work.measure()
    good = f"def lab_token():\n    return {work.token()!r}\n"
    answers(tmp_path, good)
    if work.grade().percent >= 50:
        must_be_predicted("benchmarking", tmp_path)
    for text, reason in (
        (good.replace("c$", "d$")[:-9] + "'\n", "lab_token"),
        ("def lab_token():\n    return 3\n", "token"),
    ):
        answers(tmp_path, text)
        with pytest.raises(AssertionError, match=reason):
            must_be_predicted("benchmarking", tmp_path)


def test_a_students_code_is_taken_out_of_a_notebook() -> None:
    cells = [
        {"cell_type": "markdown", "source": "text"},
        {"cell_type": "code", "source": ["import otter\n", "grader = otter.Notebook()\n"]},
        {"cell_type": "code", "source": "%matplotlib inline\n!rm -rf x\ndef percentile(samples, q):\n    return 1"},
        {"cell_type": "code", "source": "must_be_solved()", "metadata": {"test": True}},
    ]
    code = extract_code({"cells": cells}, "profiling", lambda cell: "test" in cell.get("metadata", {}))
    assert code == "def percentile(samples, q):\n    return 1"
    remaining = "".join("".join(cell["source"]) for cell in cells)
    assert (
        "return 1" not in remaining and "def percentile(*_, **__): ..." in remaining and "must_be_solved()" in remaining
    )


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_exercise_is_in_the_assignments(lesson: str) -> None:
    for exercise in exercises(lesson):
        assert f"def {exercise.name}(" in unfinished(lesson)[exercise.name]
        for text in (master(lesson), source(lesson)):
            assert f"must_be_solved('{lesson}', '{exercise.name}')" in text
