"""Tables on a terminal of any width: drawn where every word fits, else listed row by row, so that nothing is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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
