"""`tilewise tiles train --ray`: a hyperparameter sweep with Ray Tune over settings, seeds and folds.

A trial's settings and result depend only on its number and the sweep's seed. Each trial trains in its own folder,
resumes from its checkpoint if it is started again, and stops early by its own learning curve, never by comparison with
other trials. A sweep that was killed and resumed therefore ends with the same best trial as an uninterrupted one.
Trials are compared by their metric on the validation split, averaged over folds. The best model is exported.
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

from tilewise._atomic import write_atomic
from tilewise._files import read_json_input
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels, load_dataset
from tilewise.costmodel.models.files import MODEL_FILE
from tilewise.costmodel.training.config import default_settings
from tilewise.errors import ConfigurationError, TilewiseError

_FIELDS = (
    "trial",
    "draw",
    "seed",
    "fold",
    "learning_rate",
    "weight_decay",
    "batch",
    "value",
    "epochs",
    "seconds",
)
_RESULT = "result.json"
_FOLD_SEED = 20_261_116  # arbitrary; the folds of a collection are the same in every sweep


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep, as plain values that Ray can send to its workers."""

    collection: str
    out: str
    model: str = "TileRanker"
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    seeds: int = 1
    folds: int = 1  # 1: use the train and validation splits of the collection
    draws: int = 1  # number of settings to try: `settings` first, then random ones
    limit: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if min(self.seeds, self.folds, self.draws) < 1 or self.folds > 20:
            raise ConfigurationError("A sweep needs at least one seed, one draw of settings, and 1 to 20 folds.")

    def trials(self) -> list[dict[str, Any]]:
        """Return all trials as dicts of number, settings, seed and fold."""
        trials: list[dict[str, Any]] = []
        for draw in range(self.draws):
            for seed in range(self.seed, self.seed + self.seeds):
                for fold in range(self.folds):
                    row = {"trial": len(trials), "draw": draw, "seed": seed, "fold": fold}
                    trials.append(row | self.draw_settings(draw))
        return trials

    def draw_settings(self, draw: int) -> dict[str, Any]:
        """Return the settings of draw number `draw`: 0 is the base settings, others are random variations."""
        base = default_settings(self.model, **self.settings)
        if not draw:
            return {"learning_rate": base.learning_rate, "weight_decay": base.weight_decay, "batch": base.batch}
        rng = np.random.default_rng([self.seed, draw])
        rate = base.learning_rate * 10 ** float(rng.uniform(-0.7, 0.5))  # log-uniform, a factor of 0.2 to 3.2
        decay = float(rng.choice([0.0, 0.005, 0.02, 0.05]))
        batch = max(2, round(base.batch * 2.0 ** float(rng.integers(-1, 2))))  # half, the same or double
        return {"learning_rate": float(f"{rate:.3g}"), "weight_decay": decay, "batch": batch}


def fold_of(data: Dataset, fold: int, folds: int) -> Dataset:
    """Return the dataset for cross-validation fold `fold`: its kernels are the valid split, all others the train split.

    Kernels of a program stay in one fold if there are at least two programs per fold.
    """
    if folds == 1:
        return data
    kernels = [*data.train[:], *data.valid[:]]
    programs = {kernel.program for kernel in kernels}
    groups = [kernel.program if len(programs) >= 2 * folds else kernel.name for kernel in kernels]
    names = sorted(set(groups))
    if len(names) < folds:
        raise ConfigurationError(f"{folds} folds need as many kernels, and this collection has {len(names)}.")
    order = np.random.default_rng(_FOLD_SEED).permutation(len(names))
    valid_names = {names[int(index)] for index in order[fold::folds]}
    train = [kernel for kernel, group in zip(kernels, groups, strict=True) if group not in valid_names]
    valid = [kernel for kernel, group in zip(kernels, groups, strict=True) if group in valid_names]
    return dataset_from_kernels(train, valid, data.test[:], data.schema)


def run_trial(sweep: Sweep, trial: Mapping[str, Any], report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train one trial in its folder and return its result; a finished one is not repeated."""
    from tilewise.costmodel.training.loop import train
    from tilewise.costmodel.training.resumable import selection_value

    folder = Path(sweep.out) / f"trial_{trial['trial']:03}"
    stored = read_result(folder / _RESULT, trial)
    if stored is not None:
        return stored
    data = load_dataset(sweep.collection, limit=sweep.limit, progress=False)
    drawn_settings = {name: trial[name] for name in ("learning_rate", "weight_decay", "batch")}
    settings = default_settings(
        sweep.model, **{**sweep.settings, **drawn_settings}, seed=trial["seed"], model_kwargs=dict(sweep.model_kwargs)
    )

    def on_epoch(row: dict[str, Any]) -> None:
        if "val_opa" in row:
            report({"epoch": row["epoch"] + 1, "value": selection_value(row, settings.select)})

    fold = fold_of(data, trial["fold"], sweep.folds)
    trained = train(fold, settings, out_dir=folder, device=sweep.device, progress=False, report=on_epoch)
    curve = [row for row in trained.record["curve"] if "val_opa" in row]
    value = max(selection_value(row, settings.select) for row in curve if row["epoch"] == trained.record["best_epoch"])
    result = {**trial, "value": value, "epochs": len(trained.record["curve"]), "seconds": trained.record["seconds"]}
    write_atomic(folder / _RESULT, json.dumps(result))
    return result


def read_result(path: Path, trial: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the result file of a trial; returns None if it is missing, damaged, or of a trial with other settings."""
    try:
        result = read_json_input(path)
    except TilewiseError:
        return None
    if not isinstance(result, dict) or any(result.get(name) != value for name, value in trial.items()):
        return None
    return result if isinstance(result.get("value"), float) else None


@dataclass(frozen=True)
class SweepResult:
    """The results of all trials, the best trial, its draw's mean over folds and seeds, and the exported model."""

    trials: list[dict[str, Any]]
    best: dict[str, Any]
    mean: float
    model: str
    failures: list[str]


def best_of(trials: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], float]:
    """Return the best trial of the draw with the highest mean over folds and seeds, and that mean."""
    draws: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for trial in trials:
        draws[trial["draw"]].append(trial)
    means = {draw: statistics.fmean(t["value"] for t in members) for draw, members in draws.items()}
    finite = {draw: mean for draw, mean in means.items() if math.isfinite(mean)}
    if not finite:
        raise ConfigurationError("No trial of this sweep finished with a result.")
    draw = min(finite, key=lambda number: (-finite[number], number))
    return dict(min(draws[draw], key=lambda trial: (-trial["value"], trial["trial"]))), finite[draw]


def run_sweep(
    sweep: Sweep, address: str, workers: int = 0, report: Callable[[dict[str, Any]], None] = lambda row: None
) -> SweepResult:
    """Run all trials on the cluster, one CPU each; a repeated call runs only unfinished trials."""
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
            name="tune", storage_path=str(out), verbose=0, callbacks=[_trial_callback(report)],
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    )  # fmt: skip
    shutil.rmtree(out / "tune", ignore_errors=True)  # Ray's state; results are in the folders of the trials
    grid = tuner.fit()
    failures = [str(error).strip().splitlines()[-1][:200] for error in grid.errors]
    paths = [out / f"trial_{trial['trial']:03}" / _RESULT for trial in trials]
    results = [row for path, trial in zip(paths, trials, strict=True) if (row := read_result(path, trial))]
    best, mean = best_of(results)
    target = out / MODEL_FILE
    write_atomic(target, (out / f"trial_{best['trial']:03}" / MODEL_FILE).read_bytes())
    write_atomic(out / "sweep.json", json.dumps({"best": best, "mean": mean, "trials": results}, indent=1))
    return SweepResult(results, best, mean, str(target), failures)


def _trainable() -> Any:
    """Define and return the Ray class that runs trials one after the other, each on one thread.

    Ray reuses a worker for many trials, so PyTorch is imported once per worker.
    """
    from ray import tune

    class TrialWorker(tune.Trainable):  # type: ignore[misc]
        """Ray Tune worker that runs trials."""

        def setup(self, config: Mapping[str, Any], sweep: Sweep, trials: Sequence[Mapping[str, Any]]) -> None:
            """Store the sweep and the number of the first trial to run."""
            import torch

            torch.set_num_threads(1)
            self.sweep, self.trials, self.number = sweep, trials, int(config["number"])

        def step(self) -> dict[str, Any]:
            return {**run_trial(self.sweep, self.trials[self.number], lambda row: None), "done": True}

        def reset_config(self, new_config: Mapping[str, Any]) -> bool:
            self.number = int(new_config["number"])
            return True

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Do nothing: a trial writes its checkpoints to its own folder."""

        def load_checkpoint(self, checkpoint: Any) -> None:
            """Do nothing: a trial resumes from its own folder."""

    return TrialWorker


def _trial_callback(report: Callable[[dict[str, Any]], None]) -> Any:
    """Return a Ray callback that passes each finished trial's result to `report`."""
    from ray.tune import Callback

    class TrialCallback(Callback):  # type: ignore[misc]
        """Passes the printed fields of a result on."""

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            report({name: result[name] for name in _FIELDS if name in result})

    return TrialCallback()
