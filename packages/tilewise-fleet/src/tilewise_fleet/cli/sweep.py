"""`tilewise tiles train --ray`: one line a trial, then the best of them."""

from __future__ import annotations

import json
from typing import Any

import typer

from tilewise.errors import ConfigurationError


def on_ray(address: str, as_json: bool, workers: int, **options: Any) -> None:
    """Run a sweep on a cluster, and tell how it goes."""
    from tilewise_fleet.cluster import require_ray
    from tilewise_fleet.sweep import Sweep, run_sweep

    require_ray()
    given = {name: value for name, value in options.pop("settings").items() if value is not None}
    if "max_seconds" in given:
        raise ConfigurationError("A sweep's trials end by epochs, which can be repeated: leave out --max-seconds.")
    sweep = Sweep(settings=given, **options)
    typer.echo(f"{len(sweep.trials())} trials in {sweep.out}; the same command goes on after a stop.", err=True)
    found = run_sweep(sweep, address, workers, _as_json if as_json else _plainly)
    for failure in found.failures:
        typer.echo(failure, err=True)
    if as_json:
        typer.echo(json.dumps({"best": found.best, "mean": found.mean, "model": found.model}))
        return
    best = found.best
    settings = f"learning rate {best['learning_rate']:g}, weight decay {best['weight_decay']:g}, batch {best['batch']}"
    typer.echo(f"Best is trial {best['trial']} ({settings}, seed {best['seed']}): {best['value']:.4f}; {found.model}")


def _as_json(line: dict[str, Any]) -> None:
    typer.echo(json.dumps(line))


def _plainly(line: dict[str, Any]) -> None:
    typer.echo(
        f"trial {line['trial']:3}  seed {line['seed']}  fold {line['fold']}  rate {line['learning_rate']:<8g} "
        f"decay {line['weight_decay']:<6g} batch {line['batch']:<3}  value {line['value']:.4f}  "
        f"{line['epochs']} epochs  {line['seconds']:.1f} s"
    )
