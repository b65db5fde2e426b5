"""The exercises of a lesson as a notebook to hand out: a cell for every function, with the tests that graders know."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from tilewise.learn.checking import check_lesson, exercises
from tilewise_arena.grading.judging import LAB

_LAB_STUB = '''def lab_token():
    """The line that `tilewise lab {lesson} --token` prints."""
    raise NotImplementedError
'''
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def unfinished(lesson: str) -> dict[str, str]:
    """Return the starter code (signature, docstring, stub) of each exercise of a lesson by function name."""
    text = (files("tilewise.learn") / "start" / f"{check_lesson(lesson)}.py").read_text(encoding="utf-8")
    sections = re.split(r"^(?=def )", text, flags=re.M)
    head = "\n".join(line for line in sections[0].splitlines() if line.startswith(("import ", "from ")))
    bodies = {section[4 : section.index("(")]: section.strip() + "\n" for section in sections[1:]}
    functions = {name: f"{head}\n\n\n{text}" if head else text for name, text in bodies.items()}
    return functions | {LAB: _LAB_STUB.format(lesson=lesson)}


def introduction(lesson: str) -> str:
    """Return the first cell of a lesson's notebook, in Markdown."""
    return (
        f"# {lesson.capitalize()}: exercises\n\nWrite the functions below. tilewise, installed from your course's "
        f"wheel or repository, checks them; `tilewise.learn.hint({lesson!r}, NAME)` helps with one of them."
    )


def tasks(lesson: str) -> dict[str, str]:
    lab = f"the token of your lab: predict with `tilewise lab {lesson}`, measure, decide, and print it with `--token`"
    return {exercise.name: exercise.task for exercise in exercises(lesson)} | {LAB: lab}


def visible_test(name: str) -> str:
    return f"assert callable({name})"


def hidden_test(lesson: str, name: str) -> str:
    """Return the code of the hidden nbgrader test that grades one exercise."""
    quiet = "import warnings\n\nwarnings.simplefilter('ignore')  # nbgrader takes a warning for a failure"
    if name == LAB:
        return f"{quiet}\nfrom tilewise_arena.grading import must_be_predicted\n\nmust_be_predicted({lesson!r})"
    return f"{quiet}\nfrom tilewise_arena.grading import must_be_solved\n\nmust_be_solved({lesson!r}, {name!r})"


def cell(kind: str, text: str, **metadata: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"cell_type": kind, "metadata": metadata, "source": text}
    return content | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(lesson: str, cells: list[dict[str, Any]]) -> str:
    """Assemble cells to the JSON text of a Jupyter notebook."""
    for number, content in enumerate(cells, 1):
        content["id"] = f"{lesson}-{number}"
    about = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
