"""`tilewise collect … --ray`: runs a campaign, with a live table of the slots or one line of JSON per event."""

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
    from tilewise_fleet.campaign import CampaignStatus

Report = Callable[[dict[str, Any], "CampaignStatus"], None]


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
    """Measure kernels of this kind on the Ray cluster at `address`, and print the progress."""
    from tilewise.store.store import Store
    from tilewise.tune.measure.collector import load_plugins, read_kernels, store_location
    from tilewise_fleet.campaign import run_campaign
    from tilewise_fleet.cluster import require_ray
    from tilewise_fleet.slot import Campaign

    require_ray()
    if finals:
        raise ConfigurationError("--finals are timed on one machine: leave out --ray, or --finals.")
    load_plugins(plugins)
    kernels = tuple((kernel.program, dict(kernel.problem)) for kernel in read_kernels(kind, shapes))
    location = store_location(out, kind)
    if not isinstance(location, str):
        location = str(Path(os.path.abspath(location)))  # noqa: PTH100 - the file need not exist yet
    Store(location).close()  # creates the store, or raises an error before anything is started
    campaign = Campaign(
        store=location, kind=kind, kernels=kernels, seed=seed, configs=configs, device=device,
        plugins=tuple(plugins), minutes=minutes,
    )  # fmt: skip
    with _reporting(as_json) as report:
        try:
            status = run_campaign(campaign, address, report)
        except KeyboardInterrupt:
            typer.echo("Stopped. The store has all measurements so far; the same command continues.", err=True)
            raise typer.Exit(130) from None
    summary = status.as_dict()
    if as_json:
        typer.echo(json.dumps({"event": "end", **summary}))
        return
    for failure in summary["failures"][:10]:
        typer.echo(failure, err=True)
    typer.echo(f"{status.kernels} kernels with {status.pairs:,} pairs measured on {len(status.slots)} slots.")
    if not status.finished:
        typer.echo("The time was up before everything was measured; the same command continues.")


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[Report]:
    """Yield the function that prints events: as JSON, as plain lines, or as a live table on a terminal."""
    if as_json:
        yield lambda event, status: typer.echo(json.dumps(event))
    elif not sys.stderr.isatty():
        yield _print_event
    else:
        with _live() as report:
            yield report


def _print_event(event: dict[str, Any], status: CampaignStatus) -> None:
    """Print a line for each slot that starts or is lost, and for every tenth measured kernel."""
    if event["event"] != "measured":
        typer.echo(f"{event['slot']}: {event['event']} {event.get('machine', event.get('why', ''))}", err=True)
    elif status.kernels % 10 == 0:
        typer.echo(f"{pluralize(status.kernels, 'kernel')}, {pluralize(status.pairs, 'pair')}", err=True)


@contextlib.contextmanager
def _live() -> Iterator[Report]:
    """Yield a reporter that shows the campaign's status as a live table on standard error."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield lambda event, status: live.update(_table(status))


def _table(status: CampaignStatus) -> Any:
    """Build the live table, one row per slot."""
    headings = ("slot", "machine", "state", "kernels", "pairs", "pairs/s", "failures", "restarts")
    rows = [
        (s.slot, s.machine, s.state, s.kernels, f"{s.pairs:,}", f"{s.pairs_per_s:.0f}", s.failures, s.restarts)
        for s in status.slots.values()
    ]
    return table(headings, rows, left_aligned=headings[:3])
