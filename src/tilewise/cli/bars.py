"""A bar on a terminal for work that says how far it is; in a log, whatever the work says without one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Progress = Callable[[int, int, str], None]  # done, total, what is being done
Otherwise = TypeVar("Otherwise", Progress, None)


@contextmanager
def progress_bar(otherwise: Otherwise) -> Iterator[Progress | Otherwise]:
    """Moves a bar on a terminal, and is `otherwise` where there is none."""
    if not sys.stderr.isatty():
        yield otherwise
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
