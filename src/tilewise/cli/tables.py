"""Tables on a terminal of any width, drawn where every word fits, else listed row by row, so that nothing is cut; and
what shows that work goes on: a bar where it says how far it is, else a spinner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int | None, str], None]  # done, total where it is known, what is being done
Otherwise = TypeVar("Otherwise", Progress, None)


def table(
    headings: Sequence[str],
    rows: Iterable[Iterable[object]],
    title: str | None = None,
    left: Container[str] | None = None,
    **look: Any,
) -> Table:
    """A table whose first column, or those named in `left`, is on the left and the others on the right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", **look)
    for heading in headings:
        is_left = heading in (headings[:1] if left is None else left)
        made.add_column(heading, justify="left" if is_left else "right")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))  # what people call things is text, not markup
    return made


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


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Say `what` is going on until the block ends, and more as it is told: a spinner on a terminal, lines in a log."""
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr, flush=True)
        yield lambda more: print(more, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update
