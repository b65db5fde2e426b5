"""`tilewise tiles train --ray`: runs a sweep and prints one line per trial, then the best trial."""

from __future__ import annotations

import json
from typing import Any

import typer

from tilewise.errors import ConfigurationError


def on_ray(address: str, as_json: bool, workers: int, **options: Any) -> None:
    """Run a hyperparameter sweep with `workers` trials at once on the Ray cluster at `address`."""
    from tilewise_fleet.cluster import require_ray
    from tilewise_fleet.sweep import Sweep, run_sweep

    require_ray()
    settings = {name: value for name, value in options.pop("settings").items() if value is not None}
    if "max_seconds" in settings:
        raise ConfigurationError("A sweep limits its trials by epochs only, to be repeatable; leave out --max-seconds.")
    sweep = Sweep(settings=settings, **options)
    typer.echo(f"{len(sweep.trials())} trials in {sweep.out}; the same command continues after a stop.", err=True)
    result = run_sweep(sweep, address, workers, _print_json if as_json else _print_trial)
    for failure in result.failures:
        typer.echo(failure, err=True)
    if as_json:
        typer.echo(json.dumps({"best": result.best, "mean": result.mean, "model": result.model}))
        return
    best = result.best
    text = f"learning rate {best['learning_rate']:g}, weight decay {best['weight_decay']:g}, batch {best['batch']}"
    typer.echo(f"Best is trial {best['trial']} ({text}, seed {best['seed']}): {best['value']:.4f}; {result.model}")


def _print_json(row: dict[str, Any]) -> None:
    typer.echo(json.dumps(row))


def _print_trial(row: dict[str, Any]) -> None:
    """Print one line about a finished trial: settings, validation value, epochs and seconds."""
    typer.echo(
        f"trial {row['trial']:3}  seed {row['seed']}  fold {row['fold']}  rate {row['learning_rate']:<8g} "
        f"decay {row['weight_decay']:<6g} batch {row['batch']:<3}  value {row['value']:.4f}  "
        f"{row['epochs']} epochs  {row['seconds']:.1f} s"
    )
