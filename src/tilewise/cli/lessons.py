"""`tilewise check` and `tilewise lab`: check the exercises of a lesson, and grade predictions of measurements."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise._addons import require
from tilewise.cli.every import AsJson, one_of, output_folder
from tilewise.errors import ConfigurationError

_LESSONS = ("profiling", "acceleration", "quantization", "pruning", "caching", "benchmarking", "costmodel")
Lesson = Annotated[str | None, one_of(*_LESSONS, declare=typer.Argument)]


def check(
    lesson: Lesson = None,
    file: Annotated[Path | None, typer.Option(help="Your answers (default: LESSON.py in this folder).")] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Write the file with the exercises to fill in, and stop.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Check only this exercise.")] = None,
    hint: Annotated[str | None, typer.Option(help="Print a hint for this exercise and stop.")] = None,
    more: Annotated[bool, typer.Option("--more", help="With --hint: a longer hint.")] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Show what you have solved so far, and stop.")] = False,
    otter: Annotated[
        Path | None,
        output_folder(help="Folder for otter-grader assignments with a Gradescope zip: write them, and stop."),
    ] = None,
    nbgrader: Annotated[Path | None, output_folder(help="Folder for an nbgrader course: write it, and stop.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds that an exercise may run.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check the exercises of a lesson (docs/learn); the exit code is 0 if all are solved, else 1.

    Example: tilewise check quantization --start, then, with the answers written: tilewise check quantization
    """
    from tilewise import learn
    from tilewise.errors import ConfigurationError, MissingFileError
    from tilewise.learn.checking import exercise_names
    from tilewise.learn.notebook import remember, verdict_lines

    if otter is not None or nbgrader is not None:
        _hand_out(lesson, otter, nbgrader)
        return
    if lesson is None and (start or only or hint or file):
        raise ConfigurationError(f"Name the lesson too: {', '.join(learn.LESSONS)}.")
    if more and hint is None:
        raise ConfigurationError("--more makes a hint longer: give it with --hint EXERCISE.")
    if progress or lesson is None:
        _show_progress(as_json)
        return
    exercise_names(lesson, only)
    if hint is not None:
        learn.hint(lesson, hint, 2 if more else 1)
        return
    path = file if file is not None else Path(f"{lesson}.py")
    if start:
        file_option = "" if file is None else f" --file {shlex.quote(str(file))}"
        print(f"Write your answers into {learn.start(lesson, path)}, then run: tilewise check {lesson}{file_option}")
        return
    if file is None and not path.exists():
        raise MissingFileError(f"{path} does not exist; `tilewise check {lesson} --start` writes it to fill in.")
    with _progress() as show:
        results = learn.check(lesson, path, time_limit, only=only, progress=show)
    if as_json:
        print(json.dumps([vars(result) for result in results], indent=1))
    else:
        print("\n".join(verdict_lines(results)))
    storage_error = remember(lesson, results)
    if storage_error:
        print(storage_error, file=sys.stderr)
    if not all(result.solved for result in results):
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows, on a terminal, which exercise is being checked."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from tilewise.cli.tables import waiting

    with waiting("starting") as update:
        yield lambda name: update(f"checking {name}")


def _show_progress(as_json: bool) -> None:
    """Print the solved exercises of every lesson, and the command for the next lesson."""
    from tilewise.learn import progress
    from tilewise.learn.checking import exercise_names
    from tilewise.learn.notebook import lines

    if as_json:
        print(json.dumps(progress(), indent=1))
        return
    print("\n".join(lines()))
    lesson = next((name for name, solved in progress().items() if len(solved) < len(exercise_names(name))), None)
    if lesson is not None:
        begin = f"`tilewise check {lesson} --start` writes {lesson}.py to fill in; "
        print(f"Next: {'' if Path(f'{lesson}.py').exists() else begin}`tilewise check {lesson}` checks {lesson}.py.")


def _hand_out(lesson: str | None, otter: Path | None, nbgrader: Path | None) -> None:
    """Write assignments for otter-grader or nbgrader, of one lesson or of all."""
    from tilewise.learn.checking import LESSONS, check_lesson

    grading = require("tilewise_arena.grading", "writing assignments for a grader")
    lessons = LESSONS if lesson is None else (check_lesson(lesson),)
    for name in lessons if otter is not None else ():
        assert otter is not None
        print(f"{name}: hand out {otter / name / 'dist' / 'student'}, upload {grading.write_assignment(name, otter)}")
    if nbgrader is not None:
        course = grading.write_course(lessons, nbgrader)
        print(f"{course}: now, in that folder, nbgrader generate_assignment {lessons[0]}")


# --- tilewise lab ---


def lab(
    lesson: Lesson = None,
    predict: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, for a time NAME=SECONDS,LIMIT; repeat it for each question.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure and grade; needs all predictions.")] = False,
    decide: Annotated[str | None, typer.Option(help="Decision log: 'NUMBERS | WHY | TRADE-OFF'.")] = None,
    token: Annotated[bool, typer.Option("--token", help="Print the record as a line to hand in.")] = False,
    statistics: Annotated[
        Path | None, typer.Option(help="For teachers: a folder of lab files; print statistics per question and stop.")
    ] = None,
    student: Annotated[str, typer.Option(help="Your name, from which the problem sizes are drawn.")] = "",
    file: Annotated[Path | None, typer.Option(help="The lab's record.", show_default="lab-LESSON.json")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict before you measure: predictions are sealed, then graded on a log scale against this machine.

    Example: tilewise lab profiling --predict product_time=0.002,compute --predict copy_time=0.01,memory --measure
    """
    from tilewise.learn.labs import lab as open_lab

    if statistics is not None:
        _print_statistics(statistics, as_json)
        return
    if lesson is None:
        raise ConfigurationError("Name the lesson whose lab to do, such as `tilewise lab profiling`.")
    work = open_lab(lesson, student, file)
    for text in predict or ():
        name, _, answer = text.partition("=")
        value, _, limit = answer.partition(",")
        work.predict(name, _number(value, text), limit.strip())
    if measure:
        work.measure()
    if decide is not None:
        sentences = [sentence.strip() for sentence in decide.split("|")]
        if len(sentences) != 3:
            raise ConfigurationError("a decision has three parts: 'NUMBERS | WHY | TRADE-OFF'")
        work.decide(*sentences)
    if token:
        print(work.token())
    elif as_json:
        result = work.grade()
        facts = {"percent": result.percent, "questions": [vars(question) for question in result.questions]}
        print(json.dumps(facts | {"attempts": result.attempts, "remarks": result.remarks}, indent=1))
    else:
        _print_lab(work)


def _number(value: str, text: str) -> float:
    """Parse a number of a `NAME=VALUE` option; `text` is the whole option, for the error message."""
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not NAME=VALUE or NAME=SECONDS,LIMIT") from None


def _print_lab(work: Any) -> None:
    """Print the questions of the lab's current attempt, and the grades of the measured ones."""
    print(work)
    result = work.grade()
    for question in result.questions:
        print(f"  {question.name}: {question.points:.0%} of its points; {question.remark}")
    if result.questions:
        print(f"{result.percent:.0f} % of the lab, attempt {result.questions[0].attempt}")
        print("\n".join(f"  Decision log: {remark}" for remark in result.remarks) or "  Decision log: complete")


def _print_statistics(folder: Path, as_json: bool) -> None:
    """Print mean points, errors and attempts of each question over the records in a folder."""
    from tilewise._files import read_json_input
    from tilewise.cli.tables import show, table
    from tilewise.learn.labs import statistics

    rows = statistics(read_json_input(path) for path in sorted(folder.rglob("lab-*.json")))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        raise ConfigurationError(f"{folder} has no lab-*.json with a measurement")
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    show(table(list(rows[0]), cells, "Labs", left_aligned=("lesson", "question")))
