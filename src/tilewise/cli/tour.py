"""`tilewise tour`: demonstrate the package on this machine with the data that ships with it."""

from __future__ import annotations

import json
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tilewise.cli.every import AsJson, option, output_folder
from tilewise.cli.tables import show, table

if TYPE_CHECKING:
    from tilewise.tour import Stop


def tour(
    quick: Annotated[bool, option("Fewer repetitions, for a quicker and rougher look.")] = False,
    out: Annotated[Path, output_folder(help="Folder for report.html, tour.json and the predictions.")] = Path(
        "out/tour"
    ),
    browser: Annotated[bool, option("Open the report in a browser.", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what tilewise does on this machine: ceilings, ranked and tuned tiles, a CNN and a GPT step by step.

    Example: tilewise tour --quick --open
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from tilewise.tour import take_tour
    from tilewise.tour.page import NEXT

    console = Console(stderr=as_json)
    with console.status("starting") as status:  # prints nothing in a log
        done = take_tour(
            out,
            quick,
            lambda n, stop: None if as_json else _print(console, n, stop),
            lambda text: status.update(f"{text} …"),
        )
    if as_json:
        print(json.dumps({"report": str(done.report), **done.facts}, indent=1))
    else:
        console.print(f"\nThe report with the pictures: {done.report}", soft_wrap=True, highlight=False)
        console.print("\n[bold]What next[/bold]", highlight=False)
        for line in NEXT:
            console.print(Padding(Text(line.replace("`", "")), (0, 0, 0, 3), expand=False))
    if browser and not webbrowser.open(done.report.resolve().as_uri()):
        print(f"no browser could be opened; the report is {done.report}", file=sys.stderr)


def _print(console: object, number: int, stop: Stop) -> None:
    """Print one stop of the tour: its title, sentences and tables."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    assert isinstance(console, Console)
    console.print(f"\n[bold]{number}. {stop.title}[/bold]", highlight=False)
    for line in (*filter(None, [stop.meaning]), *stop.lines):
        console.print(Padding(Text(line), (0, 0, 0, 3), expand=False))
    for stop_table in stop.tables:
        show(table(stop_table.headings, stop_table.rows, box=None, pad_edge=False, padding=(0, 2)), console)
