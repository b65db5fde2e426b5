"""`tilewise check`: the exercises of a lesson, judged with a sentence for each wrong answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def check(
    lesson: Annotated[
        str,
        typer.Argument(help="profiling, acceleration, quantization, pruning, caching, benchmarking or costmodel."),
    ],
    file: Annotated[Path | None, typer.Option(help="Your answers; LESSON.py in this folder unless given.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Write the unfinished exercises, and stop.")] = False,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds an exercise may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Check the exercises of a lesson (docs/learn); exit code 0 when all are solved, 1 when not.

    Example: tilewise check quantization --start, then, with the answers written: tilewise check quantization
    """
    from tilewise import learn

    path = file if file is not None else Path(f"{lesson}.py")
    if start:
        print(f"Write your answers into {learn.start(lesson, path)}, then run: tilewise check {lesson}")
        return
    results = learn.check(lesson, path, time_limit)
    if as_json:
        print(json.dumps([vars(result) for result in results], indent=1))
    else:
        for result in results:
            print(f"{'✓' if result.solved else '✗'} {result.name}: {result.task}")
            if not result.solved:
                print(f"    {result.feedback}")
        solved = sum(result.solved for result in results)
        print(f"{solved} of {len(results)} solved" + ("" if solved < len(results) else "; well done"))
    if not all(result.solved for result in results):
        raise typer.Exit(1)
