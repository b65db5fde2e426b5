"""What a stop of the tour has to show: sentences, tables and bar charts, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is on the left, the others on the right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Bars:
    """Named values to be drawn as bars; on a logarithmic scale where they differ by orders of magnitude."""

    title: str
    unit: str
    values: dict[str, float]
    log: bool = False


@dataclass(frozen=True)
class Stop:
    """One stop: `meaning` says in a sentence or two what to see, `facts` is what was measured, as plain data."""

    title: str
    facts: dict[str, Any]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Bars] = ()
    meaning: str = ""


@dataclass(frozen=True)
class Visit:
    """How a stop should go: with fewer repetitions, where to leave files, and a way to tell what it is doing."""

    quick: bool
    folder: Any  # pathlib.Path
    say: Callable[[str], None] = field(default=lambda _: None)
