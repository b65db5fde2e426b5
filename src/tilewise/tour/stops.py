"""Results of a stop of the tour: sentences, tables and bar charts, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of text; the first column is left-aligned, the others right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Bars:
    """Named values to draw as bars; `log` selects a logarithmic scale, `largest` the value of a full bar.

    Charts of one idea share `largest`, so that their bars can be compared.
    """

    title: str
    unit: str
    values: dict[str, float]
    log: bool = False
    largest: float | None = None


@dataclass(frozen=True)
class Headline:
    """One number for the top of the report, and the sentence that explains it."""

    number: str
    sentence: str


@dataclass(frozen=True)
class Stop:
    """One stop: `meaning` explains it in a sentence or two, `facts` holds the measurements as plain data."""

    title: str
    facts: dict[str, Any]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Bars] = ()
    meaning: str = ""


@dataclass(frozen=True)
class Visit:
    """Settings of a stop: fewer repetitions, the folder for files, and a function that reports progress."""

    quick: bool
    folder: Any  # pathlib.Path
    say: Callable[[str], None] = field(default=lambda _: None)
