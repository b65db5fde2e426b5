"""A dry run of otter-grader (as Gradescope runs it) and of nbgrader: right answers full, wrong ones with the reason,
hostile ones without harm. Needs both graders: `make test-grading` installs them into an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.learn.grading.submissions import HOSTILE, SOLUTION, WRONG, submission

pytestmark = pytest.mark.slow
IN_A_KERNEL = ("patches the check", "leaves a pickle for the grader", "is a notebook's magic")  # others: test_judging
NAMES = ("percentile", "conv_flops", "least_seconds")
otter = pytest.importorskip("otter", reason="otter-grader is not installed; `make test-grading` installs it")
pytest.importorskip("nbgrader", reason="nbgrader is not installed; `make test-grading` installs it")


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CANARY": str(cwd / "canary")}
    return subprocess.run([sys.executable, "-m", *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def assignment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("otter")
    done = run("tilewise.cli.app", "check", "profiling", "--otter", str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "profiling" / "dist"


def graded(assignment: Path, text: str, folder: Path) -> dict[str, Any]:
    """What Gradescope would be told of a submission."""
    student = json.loads((assignment / "student" / "profiling.ipynb").read_text())
    (folder / "profiling.ipynb").write_text(submission(text, student))
    (zipped,) = (assignment / "autograder").glob("*.zip")
    (folder / "canary").write_text("here")
    done = run("otter", "run", "-a", str(zipped), "profiling.ipynb", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "canary").exists()
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def points(report: dict[str, Any]) -> dict[str, float]:
    return {
        t["name"]: float(t["score"])
        for t in report["tests"]
        if t["name"] in ("percentile", "conv_flops", "least_seconds")
    }


def test_right_answers_get_full_marks(assignment: Path, tmp_path: Path) -> None:
    grades = graded(assignment, SOLUTION, tmp_path)
    assert points(grades) == {"percentile": 1.0, "conv_flops": 1.0, "least_seconds": 1.0, "lab_token": 0.0}


def test_a_wrong_answer_loses_its_point_and_is_told_why(assignment: Path, tmp_path: Path) -> None:
    grades = graded(assignment, WRONG, tmp_path)
    assert points(grades) == {"percentile": 0.0, "conv_flops": 1.0, "least_seconds": 1.0, "lab_token": 0.0}
    assert "interpolate between its two neighbours" in json.dumps(grades)


def test_hidden_tests_are_not_handed_out(assignment: Path) -> None:
    assert "must_be_solved" not in (assignment / "student" / "profiling.ipynb").read_text()


@pytest.mark.parametrize("trick", IN_A_KERNEL)
def test_a_hostile_answer_gets_nothing_and_does_nothing(assignment: Path, tmp_path: Path, trick: str) -> None:
    grades = graded(assignment, HOSTILE[trick], tmp_path)
    assert sum(points(grades).values()) == 0.0
    assert not Path("/tmp/tilewise-magic").exists()


def test_nbgrader_grades_right_wrong_and_hostile_answers(tmp_path: Path) -> None:
    done = run("tilewise.cli.app", "check", "profiling", "--nbgrader", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    process = run("nbgrader", "generate_assignment", "profiling", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    released = tmp_path / "release" / "profiling" / "profiling.ipynb"
    assert "must_be_solved" not in released.read_text()
    student = json.loads(released.read_text())
    handed = {"right": SOLUTION, "wrong": WRONG} | {f"hostile{i}": HOSTILE[t] for i, t in enumerate(IN_A_KERNEL)}
    for name, text in handed.items():
        place = tmp_path / "submitted" / name / "profiling" / "profiling.ipynb"
        place.parent.mkdir(parents=True)
        place.write_text(submission(text, student))
    run("nbgrader", "autograde", "profiling", cwd=tmp_path)
    assert run("nbgrader", "export", "--to", "grades.csv", cwd=tmp_path).returncode == 0
    rows = [line.split(",") for line in (tmp_path / "grades.csv").read_text().splitlines()]
    student_at, score_at = rows[0].index("student_id"), rows[0].index("score")
    scores = {row[student_at]: float(row[score_at]) for row in rows[1:]}
    assert scores == {name: {"right": 3.0, "wrong": 2.0}.get(name, 0.0) for name in handed}
    assert "interpolate" in (tmp_path / "autograded" / "wrong" / "profiling" / "profiling.ipynb").read_text()
