"""nbgrader: a course folder with a source notebook for every lesson, and the step that keeps answers out of the kernel.

`nbgrader autograde` runs a student's cells before its tests in one kernel. The course's configuration puts
`IsolateAnswers` before that: it moves solution cells to a file, which is judged in a separate process.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise_arena.grading.judging import extract_code, keep_answers
from tilewise_arena.grading.notebooks import cell, hidden_test, introduction, notebook, tasks, unfinished, visible_test

_CONFIG = '''"""The course "tilewise" for nbgrader; answers are judged apart from the kernel that grades them."""

from nbgrader.preprocessors import (
    AssignLatePenalties, CheckCellMetadata, ClearOutput, DeduplicateIds, Execute, LimitOutput, OverwriteCells,
    OverwriteKernelspec, SaveAutoGrades,
)
from tilewise_arena.grading.nbgrader import apart

c = get_config()
c.CourseDirectory.course_id = "tilewise"
c.ClearSolutions.code_stub = {"python": "# write it above"}
c.Autograde.sanitize_preprocessors = [
    ClearOutput, DeduplicateIds, OverwriteKernelspec, OverwriteCells, CheckCellMetadata
]
c.Autograde.autograde_preprocessors = [
    apart(), Execute, LimitOutput, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata
]
'''

_NOTHING_HIDDEN = "### BEGIN SOLUTION\n### END SOLUTION"  # without this nbgrader clears the whole cell


def source(lesson: str) -> str:
    """Return a lesson's notebook with solutions, from which nbgrader generates the students' version."""
    cells = [cell("markdown", introduction(lesson))]
    texts = unfinished(lesson)
    for name, task in tasks(lesson).items():
        tests = f"{visible_test(name)}\n### BEGIN HIDDEN TESTS\n{hidden_test(lesson, name)}\n### END HIDDEN TESTS"
        cells += [
            cell("markdown", f"## `{name}`\n\nWrite {task}."),
            cell("code", f"{texts[name]}{_NOTHING_HIDDEN}", nbgrader=_role(name, solution=True)),
            cell("code", tests, nbgrader=_role(f"test-{name}", grade=True)),
        ]
    return notebook(lesson, cells)


def _role(name: str, grade: bool = False, solution: bool = False) -> dict[str, Any]:
    """Return nbgrader metadata for a cell: a graded, locked test (one point), a solution, or plain text."""
    points = {"points": 1} if grade else {}
    role = {"grade": grade, "grade_id": name, "locked": grade, "schema_version": 3, "solution": solution, "task": False}
    return role | points


def write_course(lessons: Iterable[str], folder: Path) -> Path:
    """Write nbgrader's configuration and the source notebooks to `folder`; return the configuration's path."""
    for lesson in lessons:
        write_atomic(folder / "source" / lesson / f"{lesson}.ipynb", source(lesson))
    write_atomic(folder / "nbgrader_config.py", _CONFIG)
    return folder / "nbgrader_config.py"


def apart() -> Any:
    """Define and return the nbgrader preprocessor that moves students' code into a separate file."""
    base: Any = import_module("nbgrader.preprocessors").NbGraderPreprocessor

    class IsolateAnswers(base):  # type: ignore[misc]
        """Preprocessor that moves a student's code to a file next to the notebook, leaving stubs."""

        def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
            """Move the code of one notebook to a file; return the notebook and resources."""
            folder = Path(resources["metadata"]["path"])
            lesson = str(resources["nbgrader"]["assignment"])
            keep_answers(folder, extract_code(nb, lesson, _is_test))
            return nb, resources

    return IsolateAnswers


def _is_test(part: dict[str, Any]) -> bool:
    return bool(part.get("metadata", {}).get("nbgrader", {}).get("grade"))
