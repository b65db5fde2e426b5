"""`tilewise tiles train --ray`: seeds, folds and settings tried side by side by Ray Tune, and the best one exported.

What a trial is follows from its number and the sweep's seed alone, and so does its result: a trial trains in a folder
of its own, goes on from its checkpoint when it is started again, and stops early by its own learning curve, never by
what others reached before it. So a sweep that was killed and resumed ends with the same best trial as one that was not.
Trials are compared by their metric on the valid split, over folds by the mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import read_json_input, write_atomic
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels, load_dataset
from tilewise.costmodel.models.trained import MODEL_FILE
from tilewise.costmodel.train.config import default_settings
from tilewise.errors import ConfigurationError, TilewiseError

_SHOWN = ("trial", "draw", "seed", "fold", "learning_rate", "weight_decay", "batch", "value", "epochs", "seconds")
_RESULT = "result.json"
_FOLD_SEED = 20_261_116


@dataclass(frozen=True)
class Sweep:
    """What is tried; plain values, which travel."""

    collection: str
    out: str
    model: str = "TileRanker"
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    seeds: int = 1
    folds: int = 1  # 1: the collection's own train and valid
    draws: int = 1  # settings that are tried, the given ones first
    limit: int | None = None
    cache_dir: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if min(self.seeds, self.folds, self.draws) < 1 or self.folds > 20:
            raise ConfigurationError("A sweep has at least one seed, one draw of settings and one fold, of 20 at most.")

    def trials(self) -> list[dict[str, Any]]:
        """Every trial: its number, settings, seed and fold."""
        found: list[dict[str, Any]] = []
        for draw in range(self.draws):
            for seed in range(self.seed, self.seed + self.seeds):
                for fold in range(self.folds):
                    number = len(found)
                    found.append({"trial": number, "draw": draw, "seed": seed, "fold": fold, **self.drawn(draw)})
        return found

    def drawn(self, draw: int) -> dict[str, Any]:
        """The settings of a draw: those given, then around them a random rate, decay, batch and slate."""
        base = default_settings(self.model, **self.settings)
        if not draw:
            return {"learning_rate": base.learning_rate, "weight_decay": base.weight_decay, "batch": base.batch}
        chance = np.random.default_rng([self.seed, draw])
        rate = base.learning_rate * 10 ** float(chance.uniform(-0.7, 0.5))
        decay = float(chance.choice([0.0, 0.005, 0.02, 0.05]))
        batch = max(2, round(base.batch * 2.0 ** float(chance.integers(-1, 2))))
        return {"learning_rate": float(f"{rate:.3g}"), "weight_decay": decay, "batch": batch}


def fold_of(data: Dataset, fold: int, folds: int) -> Dataset:
    """The collection with a fold of its train and valid kernels as valid, and the others as train. Programs stay
    together where there are enough of them."""
    if folds == 1:
        return data
    kernels = [*data.train[:], *data.valid[:]]
    programs = {kernel.program for kernel in kernels}
    whose = [kernel.program if len(programs) >= 2 * folds else kernel.name for kernel in kernels]
    units = sorted(set(whose))
    if len(units) < folds:
        raise ConfigurationError(f"{folds} folds need as many kernels, and this collection has {len(units)}.")
    order = np.random.default_rng(_FOLD_SEED).permutation(len(units))
    held = {units[int(index)] for index in order[fold::folds]}
    train = [kernel for kernel, unit in zip(kernels, whose, strict=True) if unit not in held]
    valid = [kernel for kernel, unit in zip(kernels, whose, strict=True) if unit in held]
    return dataset_from_kernels(train, valid, data.test[:], data.schema)


def run_trial(sweep: Sweep, trial: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train one trial in its folder; what is finished there is not trained again."""
    from tilewise.costmodel.train.loop import train
    from tilewise.costmodel.train.resumable import selection_value

    folder = Path(sweep.out) / f"trial_{trial['trial']:03}"
    done = _finished(folder / _RESULT, trial)
    if done is not None:
        return done
    data = load_dataset(sweep.collection, cache_dir=sweep.cache_dir, limit=sweep.limit, progress=False)
    chosen = {name: trial[name] for name in ("learning_rate", "weight_decay", "batch")}
    settings = default_settings(
        sweep.model, **{**sweep.settings, **chosen}, seed=trial["seed"], model_kwargs=dict(sweep.model_kwargs)
    )

    def told(row: dict[str, Any]) -> None:
        if "val_opa" in row:
            report({"epoch": row["epoch"] + 1, "value": selection_value(row, settings.select)})

    fold = fold_of(data, trial["fold"], sweep.folds)
    trained = train(fold, settings, out_dir=folder, device=sweep.device, progress=False, report=told)
    curve = [row for row in trained.record["curve"] if "val_opa" in row]
    value = max(selection_value(row, settings.select) for row in curve if row["epoch"] == trained.record["best_epoch"])
    result = {**trial, "value": value, "epochs": len(trained.record["curve"]), "seconds": trained.record["seconds"]}
    write_atomic(folder / _RESULT, json.dumps(result))
    return result


def _finished(path: Path, trial: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of this very trial, where an earlier run has come to its end."""
    try:
        found = read_json_input(path)
    except TilewiseError:
        return None
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in trial.items()):
        return None
    return found if isinstance(found.get("value"), float) else None


@dataclass(frozen=True)
class SweepResult:
    """Every trial, and the best draw: its mean over folds and seeds, and the model that is exported."""

    trials: list[dict[str, Any]]
    best: dict[str, Any]
    mean: float
    model: str
    failures: list[str]


def best_of(trials: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], float]:
    """The draw with the highest mean over folds and seeds, and of it the highest trial; of equals the first."""
    draws: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in trials:
        draws[trial["draw"]].append(trial)
    means = {draw: statistics.fmean(t["value"] for t in members) for draw, members in draws.items()}
    finite = {draw: mean for draw, mean in means.items() if math.isfinite(mean)}
    if not finite:
        raise ConfigurationError("No trial of this sweep came to a result.")
    draw = min(finite, key=lambda number: (-finite[number], number))
    return dict(min(draws[draw], key=lambda trial: (-trial["value"], trial["trial"]))), finite[draw]


def run_sweep(
    sweep: Sweep, address: str, workers: int = 0, say: Callable[[dict[str, Any]], None] = lambda line: None
) -> SweepResult:
    """Run every trial on the cluster, one CPU each; the same call after a kill goes on with what is not finished."""
    from tilewise_fleet.cluster import join

    join(address)
    from ray import tune

    trials, out = sweep.trials(), Path(sweep.out).expanduser().absolute()
    sweep = dataclasses.replace(sweep, out=str(out))
    trainable = tune.with_resources(tune.with_parameters(_trainable(), sweep=sweep, trials=trials), {"cpu": 1})
    tuner = tune.Tuner(
        trainable,
        param_space={"number": tune.grid_search(list(range(len(trials))))},
        tune_config=tune.TuneConfig(max_concurrent_trials=workers or None, reuse_actors=True),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(out), verbose=0, callbacks=[_teller(say)],
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )  # fmt: skip
    shutil.rmtree(out / "tune", ignore_errors=True)  # what counts is in the trials' own folders
    grid = tuner.fit()
    failures = [str(error).strip().splitlines()[-1][:200] for error in grid.errors]
    found = [done for trial in trials if (done := _finished(out / f"trial_{trial['trial']:03}" / _RESULT, trial))]
    best, mean = best_of(found)
    target = out / MODEL_FILE
    write_atomic(target, (out / f"trial_{best['trial']:03}" / MODEL_FILE).read_bytes())
    write_atomic(out / "sweep.json", json.dumps({"best": best, "mean": mean, "trials": found}, indent=1))
    return SweepResult(found, best, mean, str(target), failures)


def _trainable() -> Any:
    """What a worker of Ray's does: one trial after the other, each on one thread. PyTorch is imported once for all."""
    from ray import tune

    class TrialWorker(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: Mapping[str, Any], sweep: Sweep, trials: Sequence[Mapping[str, Any]]) -> None:
            import torch

            torch.set_num_threads(1)
            self.sweep, self.trials, self.number = sweep, trials, int(config["number"])

        def step(self) -> dict[str, Any]:
            return {**run_trial(self.sweep, self.trials[self.number], lambda row: None), "done": True}

        def reset_config(self, new_config: Mapping[str, Any]) -> bool:
            self.number = int(new_config["number"])
            return True

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """A trial's checkpoint is in its own folder."""

        def load_checkpoint(self, checkpoint: Any) -> None:
            """As above."""

    return TrialWorker


def _teller(say: Callable[[dict[str, Any]], None]) -> Any:
    from ray.tune import Callback

    class Teller(Callback):  # type: ignore[misc]
        """One line a trial, when it ends."""

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            say({name: result[name] for name in _SHOWN if name in result})

    return Teller()
