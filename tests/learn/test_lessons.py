"""Every lesson runs from top to bottom, in the order its code is printed, and draws its picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import learn
from tilewise._extension import native

DOCS = Path(__file__).resolve().parents[2] / "docs" / "learn"
PARTS = ["The question", "Before and after", "The picture", "When it fails", "Exercises"]


def code_of(lesson: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (DOCS / f"{lesson}.md").read_text(), re.M | re.S))


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_lesson_runs_from_top_to_bottom(lesson, tmp_path):
    env = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code_of(lesson)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    if native is None and done.returncode and "compiled kernels" in done.stderr.splitlines()[-1]:
        pytest.skip("this lesson needs the compiled kernels")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{lesson}.png").stat().st_size > 5000


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_a_lesson_has_all_its_parts_and_names_its_exercises(lesson):
    text = (DOCS / f"{lesson}.md").read_text()
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert f"tilewise check {lesson} --start" in text
    for exercise in learn.checking.exercises(lesson):
        assert f"`{exercise.name}`" in text


def test_the_list_of_lessons_is_whole():
    text = (DOCS / "README.md").read_text()
    assert re.findall(r"\((\w+)\.md\)", text) == list(learn.LESSONS)
