"""Tables and progress displays for a terminal of any width.

A table that is too wide is listed row by row, so that no cell is truncated. Progress is a bar or a spinner on a
terminal, and plain lines in a log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int | None, str], None]  # done, total (None: unknown), description
Fallback = TypeVar("Fallback", Progress, None)


def table(
    headings: Sequence[str],
    rows: Iterable[Iterable[object]],
    title: str | None = None,
    left_aligned: Container[str] | None = None,
    **look: Any,
) -> Table:
    """Build a table; the first column, or those in `left_aligned`, is left-aligned and the others right-aligned."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", **look)
    for heading in headings:
        is_left = heading in (headings[:1] if left_aligned is None else left_aligned)
        result.add_column(heading, justify="left" if is_left else "right")
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))  # names may contain brackets, which are not markup
    return result


def show(table: Table, console: Console | None = None) -> None:
    """Print a table, or a list of its rows if the console is too narrow for it."""
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console()
    unlimited_width = console.options.update(width=10_000)
    if Measurement.get(console, unlimited_width, table).minimum <= console.width:
        console.print(table)
        return
    for line in _list_rows(table):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _list_rows(table: Table) -> list[str]:
    """Format the title, then each row: its first cell, followed by one line per other cell that is not empty."""
    headings = [str(column.header) for column in table.columns]
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    lines = [str(table.title)] if table.title else []
    for first, *others in rows:
        lines.append(first)
        lines += [f"  {heading}: {cell}" for heading, cell in zip(headings[1:], others, strict=True) if cell]
    return lines


@contextmanager
def progress_bar(fallback: Fallback) -> Iterator[Progress | Fallback]:
    """Yield a function that moves a progress bar; without a terminal, yield `fallback`."""
    if not sys.stderr.isatty():
        yield fallback
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` until the block ends: a spinner on a terminal, lines in a log. The yielded function updates it."""
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr, flush=True)
        yield lambda more: print(more, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update
