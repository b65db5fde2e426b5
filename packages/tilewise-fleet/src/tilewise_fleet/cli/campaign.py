"""`tilewise collect … --ray`: a live table of the slots at work, or a line of JSON for everything that happens."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilewise._wording import pluralize
from tilewise.cli.tables import table
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise_fleet.campaign import Told

Report = Callable[[dict[str, Any], "Told"], None]


def on_ray(
    kind: str,
    address: str,
    as_json: bool,
    *,
    shapes: Path | None,
    minutes: float,
    out: Path | str | None,
    seed: int,
    configs: int | None,
    finals: bool,
    plugins: Sequence[str],
    device: str = "cuda",
) -> None:
    """Measure on a cluster, and tell how it goes."""
    from tilewise.store.store import Store
    from tilewise.tune.measure.collect import load_plugins, read_kernels, store_place
    from tilewise_fleet.campaign import run_campaign
    from tilewise_fleet.cluster import require_ray
    from tilewise_fleet.slot import Campaign

    require_ray()
    if finals:
        raise ConfigurationError("--finals are timed on one machine: leave out --ray, or --finals.")
    load_plugins(plugins)
    kernels = tuple((kernel.program, dict(kernel.problem)) for kernel in read_kernels(kind, shapes))
    place = store_place(out, kind)
    where = place if isinstance(place, str) else str(Path(os.path.abspath(place)))  # noqa: PTH100 - need not exist yet
    Store(where).close()  # made, or refused with a sentence, before anything is started
    campaign = Campaign(where, kind, kernels, seed, configs, device, tuple(plugins), minutes)
    with _reporting(as_json) as report:
        try:
            told = run_campaign(campaign, address, report)
        except KeyboardInterrupt:
            typer.echo("Stopped; what was measured is in the store, and the same command goes on.", err=True)
            raise typer.Exit(130) from None
    facts = told.as_dict()
    if as_json:
        typer.echo(json.dumps({"event": "end", **facts}))
        return
    for failure in facts["failures"][:10]:
        typer.echo(failure, err=True)
    typer.echo(f"{facts['kernels']} kernels with {facts['pairs']:,} pairs measured on {len(facts['slots'])} slots.")
    if not told.finished:
        typer.echo("Time was up before everything was measured; the same command goes on.")


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[Report]:
    if as_json:
        yield lambda event, told: typer.echo(json.dumps(event))
    elif not sys.stderr.isatty():
        yield _plainly
    else:
        with _live() as report:
            yield report


def _plainly(event: dict[str, Any], told: Told) -> None:
    """A line for each start and loss, and for every tenth kernel."""
    kernels = sum(line.kernels for line in told.lines.values())
    if event["event"] != "measured":
        typer.echo(f"{event['slot']}: {event['event']} {event.get('machine', event.get('why', ''))}", err=True)
    elif kernels % 10 == 0:
        typer.echo(
            f"{pluralize(kernels, 'kernel')}, {pluralize(sum(line.pairs for line in told.lines.values()), 'pair')}",
            err=True,
        )


@contextlib.contextmanager
def _live() -> Iterator[Report]:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda event, told: live.update(_table(told))


def _table(told: Told) -> Any:
    headings = ("slot", "machine", "state", "kernels", "pairs", "pairs/s", "failures", "restarts")
    rows = [
        (n.place, n.machine, n.state, n.kernels, f"{n.pairs:,}", f"{n.pairs_per_s:.0f}", n.failures, n.restarts)
        for n in told.lines.values()
    ]
    return table(headings, rows, left=headings[:3])
