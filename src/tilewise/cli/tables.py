"""Tables on a terminal of any width, drawn where every word fits, else listed row by row, so that nothing is cut; and a
bar for work that says how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int, str], None]  # done, total, what is being done
Otherwise = TypeVar("Otherwise", Progress, None)


def show(table: Table, console: Console | None = None) -> None:
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console()
    wide = console.options.update(width=10_000)
    if Measurement.get(console, wide, table).minimum <= console.width:
        console.print(table)
        return
    for line in _listed(table):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _listed(table: Table) -> list[str]:
    """The title, then each row: its first cell, and under it a line for each of the others that is not empty."""
    headings = [str(column.header) for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    lines = [str(table.title)] if table.title else []
    for first, *others in rows:
        lines.append(first)
        lines += [f"  {heading}: {cell}" for heading, cell in zip(headings[1:], others, strict=True) if cell]
    return lines


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
