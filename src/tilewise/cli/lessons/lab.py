"""`tilewise lab`: predict a measurement, seal the prediction, then measure on this machine and be graded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.every import AsJson, one_of
from tilewise.errors import ConfigurationError


def lab(
    lesson: Annotated[
        str | None,
        one_of(
            "profiling",
            "acceleration",
            "quantization",
            "pruning",
            "caching",
            "benchmarking",
            "costmodel",
            declare=typer.Argument,
        ),
    ] = None,
    predict: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, for a time NAME=SECONDS,LIMIT; repeat it for each question.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure and grade; needs all predictions.")] = False,
    decide: Annotated[str | None, typer.Option(help="Decision log: 'NUMBERS | WHY | TRADE-OFF'.")] = None,
    token: Annotated[bool, typer.Option("--token", help="Print the record as a line to hand in.")] = False,
    statistics: Annotated[
        Path | None, typer.Option(help="For teachers: a folder of lab files; print statistics per question and stop.")
    ] = None,
    student: Annotated[str, typer.Option(help="Your name; the sizes are drawn for it.")] = "",
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
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not NAME=VALUE or NAME=SECONDS,LIMIT") from None


def _print_lab(work: Any) -> None:
    """Print the questions of the current attempt, and the grades of the measured ones."""
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
    show(table(list(rows[0]), cells, "Labs", left=("lesson", "question")))
