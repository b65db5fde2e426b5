"""Run the stops of the tour one after another and write a report.

A stop that needs something that is not installed reports that, and the tour continues.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise._atomic import write_atomic
from tilewise._extension import native
from tilewise._system import cores, cpu_name
from tilewise.errors import TilewiseError
from tilewise.tour.page import page
from tilewise.tour.stops import Headline, Stop, Visit

Show = Callable[[int, Stop], None]


@dataclass(frozen=True)
class Tour:
    """The results of all stops, and the path of the report."""

    stops: list[Stop]
    report: Path
    facts: dict[str, Any]


def _stops() -> list[tuple[str, str, Callable[[Visit], Stop]]]:
    """Return (key, title, function) of every stop of the tour, in order."""
    from tilewise.tour.machine import machine_stop
    from tilewise.tour.ranking import ranking_stop
    from tilewise.tour.tuning import tuning_stop
    from tilewise.tour.walks import cnn_stop, gpt_stop

    return [
        ("machine", "This machine", machine_stop),
        ("ranking", "Which tile is fastest? Ranked without running", ranking_stop),
        ("tuning", "Three products tuned here", tuning_stop),
        ("cnn", "A CNN, step by step", cnn_stop),
        ("gpt", "A GPT, step by step", gpt_stop),
    ]


def _describe_environment(when: str) -> str:
    """Describe version, machine and time of the measurements."""
    kernels = f"{native.isa()} kernels" if native is not None else "NumPy only"
    machine = f"{cpu_name()}, {cores()} core{'s' * (cores() > 1)}, {kernels}"
    return f"tilewise {__version__} on {machine}. Measured here, {when}."


def headlines(facts: dict[str, Any]) -> list[Headline]:
    """Choose up to three numbers for the top of the report, from the stops that were not skipped."""
    numbers = []
    for key, what, cost in (
        ("cnn", "a CNN, from NumPy in float32 to pruned and INT8", "accuracy {}"),
        ("gpt", "a GPT, from NumPy without a cache to INT8 weights with one", "{} of the tokens are the same"),
    ):
        gains = facts.get(key, {}).get("speedup")
        if gains:
            last = list(gains)[-1]
            quality = cost.format(facts[key]["quality"][last])
            numbers.append(Headline(f"{gains[last]:,.1f}×", f"faster: {what}; {quality}."))
    errors = facts.get("ranking", {}).get("h200", {}).get("errors", {})
    if "default configuration" in errors:
        first, default = (100 * errors[name]["top1"] for name in ("shipped model", "default configuration"))
        sentence = f"slower than the best tile of a GPU, chosen without running one; the default: {default:.1f} %."
        numbers.append(Headline(f"{first:.1f} %", sentence))
    return numbers


def take_tour(
    folder: Path, quick: bool = False, show: Show = lambda *_: None, say: Callable[[str], None] = lambda _: None
) -> Tour:
    """Run every stop, call `show` after each, and write report.html and tour.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    visit = Visit(quick, folder, say)
    stops: list[Stop] = []
    facts: dict[str, Any] = {}
    for number, (key, title, make_stop) in enumerate(_stops(), 1):
        say(title)
        try:
            stop = make_stop(visit)
        except TilewiseError as error:
            stop = Stop(title, {"skipped": str(error)}, [f"Not shown: {error}"])
        stops.append(stop)
        facts[key] = stop.facts
        show(number, stop)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    report = folder / "report.html"
    busy = facts.get("machine", {}).get("unsteady")
    about = _describe_environment(when) + (" Other programs were running: take the times as rough." if busy else "")
    write_atomic(report, page(stops, about, headlines(facts)))
    write_atomic(folder / "tour.json", json.dumps({"when": when, **facts}, indent=1) + "\n")
    return Tour(stops, report, facts)
