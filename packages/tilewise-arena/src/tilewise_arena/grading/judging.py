"""Checks of notebooks that students hand in, without running their code in the grader's process.

Graders run a student's cells and the tests in one kernel, where the cells could change the tests. Therefore the cells
are removed before anything runs: their text goes to a file, stubs replace them, and the tests ask for a verdict on the
file. The verdict comes from `checking`, whose process never runs an answer. The answer runs in another process: in the
sandbox of the competition's plugins if the system supports it, and always with resource limits.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise._files import read_input
from tilewise.errors import UnavailableError
from tilewise.learn.checking import Exercise, Result, answering, check, exercises, feedback, require
from tilewise.learn.labs import LabGrade, grade
from tilewise.learn.labs.labwork import read_token
from tilewise.learn.remote import MessageChannel

ANSWERS = "tilewise-answers.py"
LAB = "lab_token"  # the student's function that returns the token of the lab
UNSANDBOXED = "TILEWISE_UNSANDBOXED_GRADING"
_MOST_TEXT = 1 << 20
_PASSING_PERCENT = 50.0  # of a lab's points
_SECONDS = 10.0  # of an exercise; a right answer takes a fraction of one


def check_answers(lesson: str, path: Path, seconds: float = _SECONDS) -> list[Result]:
    """Check a file of answers, each answer in a sandbox if the system has one."""
    return check(lesson, path, seconds, confined)


def must_be_solved(lesson: str, name: str, folder: Path | None = None) -> None:
    """Raise AssertionError with feedback if the answer to an exercise, taken from a notebook, is wrong."""
    exercise = next(e for e in exercises(lesson) if e.name == name)
    path = (folder or Path()) / ANSWERS
    read_input(path, _MOST_TEXT)
    message = feedback(exercise, path, _SECONDS, confined)
    assert not message, f"{name}: {message}"


def must_be_predicted(lesson: str, folder: Path | None = None) -> None:
    """Raise AssertionError unless the answers contain the token of a lab with at least half of its points.

    The student's function `lab_token()` runs in the sandbox and returns the line that `tilewise lab LESSON --token`
    printed; the record in it is verified and graded here.
    """
    graded: list[LabGrade] = []

    def check_token(answer: Callable[..., Any]) -> None:
        record = read_token(str(answer()))
        require(record["lesson"] == lesson, f"this is the lab of {record['lesson']}, not of {lesson}")
        graded.append(grade(record))

    path = (folder or Path()) / ANSWERS
    read_input(path, _MOST_TEXT)
    message = feedback(Exercise(LAB, "the token of the lab", check_token), path, _SECONDS, confined)
    assert not message, f"lab_token: {message}"
    remarks = "; ".join([q.remark for q in graded[0].questions] + graded[0].remarks)
    assert graded[0].percent >= _PASSING_PERCENT, f"the lab has {graded[0].percent:.0f} % of its points: {remarks}"


@contextmanager
def confined(path: Path, name: str, deadline: float) -> Iterator[MessageChannel]:
    """Start a process with a student's file, in a sandbox if the system has one; yields the channel to it."""
    from tilewise_arena.sandbox import bubblewrap

    reason = bubblewrap.unavailable_reason()
    if reason:
        _check_unsandboxed(reason)
        with answering(path, name, deadline) as channel:
            yield channel
        return
    with tempfile.TemporaryDirectory(prefix="tilewise-answers-") as folder:
        copied = Path(folder) / "answers.py"
        shutil.copyfile(path, copied)
        copied.chmod(0o644)
        Path(folder).chmod(0o755)
        module, arguments = "tilewise_arena.grading.confined", (name, str(bubblewrap.fresh_user()))
        seconds = max(deadline - time.monotonic(), 0.0)
        with bubblewrap.start_process(Path(folder), module, arguments, 1, False, seconds) as sandboxed:
            process = sandboxed.process
            assert process.stdin is not None and process.stdout is not None
            channel = MessageChannel(process.stdout.fileno(), process.stdin.fileno(), deadline)
            channel.send({"rules": bubblewrap.seccomp_filter().hex()})
            yield channel


def _check_unsandboxed(reason: str) -> None:
    """Raise UnavailableError unless grading without a sandbox is allowed; print a warning if it is."""
    if os.environ.get(UNSANDBOXED) != "1":
        raise UnavailableError(
            f"students' code is not graded without a sandbox ({reason}); set {UNSANDBOXED}=1 only on a machine that "
            "you would let any of them use"
        )
    print(f"WARNING: students' code runs without a sandbox, because {UNSANDBOXED}=1 ({reason})", file=sys.stderr)


def extract_code(notebook: dict[str, Any], lesson: str, is_test: Callable[[dict[str, Any]], bool]) -> str:
    """Move a student's code out of a notebook: replace it by stubs in place, except in tests, and return it."""
    sources: list[str] = []
    for cell in notebook.get("cells", []):
        if cell.get("cell_type") != "code" or is_test(cell):
            continue
        sources.append(plain_code(_source(cell)))
        cell["source"] = ""
    names = [*(exercise.name for exercise in exercises(lesson)), LAB]
    stubs = "\n".join(f"def {name}(*_, **__): ..." for name in names)
    first = next((c for c in notebook.get("cells", []) if c.get("cell_type") == "code" and not is_test(c)), None)
    if first is not None:
        first["source"] = stubs
    return "\n\n".join(text for text in sources if text.strip())


def plain_code(text: str) -> str:
    """Return a cell's code without notebook commands (%, !, ?) and the grader's own lines."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("%", "!", "?"))]
    return "\n".join(line for line in lines if not line.startswith(("import otter", "grader")))


def keep_answers(folder: Path, text: str) -> None:
    write_atomic(folder / ANSWERS, text[:_MOST_TEXT] + "\n")


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(str(part) for part in source) if isinstance(source, list) else str(source)
