"""otter-grader: a master notebook for `otter assign`, and the plugin that keeps a student's code out of the grader.

otter runs a submission and its hidden tests in one kernel and unpickles what that kernel leaves as results. The plugin
is run before: it takes the student's cells out, so that the kernel runs tests alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise.errors import UnavailableError
from tilewise_arena.grading.judging import extract_code, keep_answers
from tilewise_arena.grading.notebooks import cell, hidden_test, introduction, notebook, tasks, unfinished, visible_test

_CONFIG = """# ASSIGNMENT CONFIG
name: tilewise-{lesson}
init_cell: true
export_cell: true
check_all_cell: false
run_tests: false
solutions_pdf: false
overwrite_requirements: true
requirements:
  - otter-grader
  - tilewise-arena
generate:
  show_stdout: true
  show_hidden: true
plugins:
  - {plugin}:
      lesson: {lesson}
"""
_PLUGIN = "tilewise_arena.grading.otter.IsolatingPlugin"


def master(lesson: str) -> str:
    """Return a lesson's notebook from which `otter assign` makes the student's notebook and the autograder."""
    cells = [cell("raw", _CONFIG.format(lesson=lesson, plugin=_PLUGIN)), cell("markdown", introduction(lesson))]
    texts = unfinished(lesson)
    for name, task in tasks(lesson).items():
        cells += [
            cell("raw", f"# BEGIN QUESTION\nname: {name}\npoints: 1"),
            cell("markdown", f"## `{name}`\n\nWrite {task}."),
            cell("raw", "# BEGIN SOLUTION"),
            cell("code", texts[name]),
            cell("raw", "# END SOLUTION"),
            cell("raw", "# BEGIN TESTS"),
            cell("code", f'""" # BEGIN TEST CONFIG\npoints: 0\n""" # END TEST CONFIG\n{visible_test(name)}'),
            cell("code", f"# HIDDEN\n{hidden_test(lesson, name)}"),
            cell("raw", "# END TESTS"),
            cell("raw", "# END QUESTION"),
        ]
    return notebook(lesson, cells)


def write_assignment(lesson: str, folder: Path) -> Path:
    """Write the master, student notebook and Gradescope zip into `folder`/LESSON; return the zip's path."""
    if find_spec("otter") is None:
        raise UnavailableError("writing an otter-grader assignment needs otter-grader: pip install otter-grader")
    target = folder / lesson
    write_atomic(target / f"{lesson}.ipynb", master(lesson))
    shutil.rmtree(target / "dist", ignore_errors=True)
    command = [sys.executable, "-m", "otter", "assign", f"{lesson}.ipynb", "dist", "--no-run-tests"]
    process = subprocess.run(command, cwd=target, capture_output=True, text=True)
    archives = sorted((target / "dist" / "autograder").glob("*.zip"))
    if process.returncode or not archives:
        message = (process.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UnavailableError(f"otter assign made no autograder for {lesson}: {message[:300]}")
    return archives[0]


class IsolatingPlugin:
    """Otter plugin that checks a student's code in a separate process, never in the grader's kernel."""

    IMPORTABLE_NAME = _PLUGIN

    def __init__(
        self, submission_path: str, submission_metadata: dict[str, Any], plugin_config: dict[str, Any]
    ) -> None:
        self._folder, self._lesson = Path(submission_path).parent, str(plugin_config["lesson"])

    def before_execution(self, submission: Any) -> Any:
        keep_answers(self._folder, extract_code(submission, self._lesson, lambda _: False))
        return submission

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Ignore the other events that otter reports to plugins."""

    during_assign = during_generate = from_notebook = notebook_export = before_grading = after_grading = _nothing

    def generate_report(self) -> str:
        return ""
