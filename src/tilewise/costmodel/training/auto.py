"""Ensembles (`--model auto`, `--recipe winners`): several networks and a forest whose rankings are fused.

No kind of model wins everywhere, and on a few dozen kernels one network orders the fastest configurations by chance.
So `auto` trains TileRankers with several seeds and a forest, and fuses their rankings (see `blend`). No kind is left
out: where one was significantly better on the valid split, dropping the other lost on most test splits. On two draws of
2,500 synthetic kernels, a network and a forest together had 0.6 to 0.8 of the top-5 error of either; a second forest
that regresses log runtime made it worse. The record of the result holds the errors of every kind, averaged as
logarithms, so that one kernel with configurations a hundred times slower does not decide alone.

A model can be arbitrarily wrong on a kind of kernel that it has never seen. So the result knows its train kernels,
warns about kernels unlike them and gives no confidence for them. It ranks them nevertheless: on 109 unfamiliar kernels
of nine collections its top-5 error was 10.7 %, that of a random order 71 %, and replacing one to three of five choices
by random ones raised it to 12.7 to 19.2 %. A short training without some families of the train split did not foretell
this: in two of three collections it was worse than a random order.

The recipe `winners` is for large collections. The best entries of the Kaggle competition on TpuGraphs trained several
large networks on all configurations and averaged their ranks. Here every member leaves out another fold of the programs
and is stopped early by the scored metric on it; its slates mix the fastest configurations with others. Trees join them.

A collection without a valid split lends a fifth of its kernels or, if it has fewer than five, of their configurations;
trees are finally trained on those too.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.confidence_fit import calibrate
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.blend import Blend, Familiarity, blend
from tilewise.costmodel.models.files import MODEL_FILE
from tilewise.costmodel.models.trained import TrainedModel
from tilewise.costmodel.training.config import WINNERS, budget, default_settings
from tilewise.costmodel.training.loop import nested_kernels, train
from tilewise.errors import ConfigurationError, TilewiseError

if TYPE_CHECKING:
    from tilewise.costmodel.models.gbdt import GBDT

KINDS = ("TileRanker", "GBDT")
_NETWORKS = 3  # of a collection too small for a wide network, where a seed decides much
_MIN_KERNELS = 5  # fewer kernels are too few to compare models on
_SAMPLE = 1000  # train kernels, at most, that describe the familiar ones; bounds memory


Members = Mapping[str, tuple[str, Dataset, dict[str, Any]]]  # by folder: kind, data and settings for `train`


def train_auto(
    dataset: Dataset, *, out_dir: str | Path, seed: int = 0, resume: bool = True, device: str = "auto", **settings: Any
) -> Blend:
    """Train every member in its own folder below `out_dir`, and save the ensemble in `out_dir`.

    A member that cannot be trained (LightGBM is not installed, a loss diverges) is skipped with a message. An
    interrupted run continues with the member that it was training.
    """
    complete, dataset = dataset, _with_valid(dataset)
    networks = 1 if budget("TileRanker", len(dataset.train), has_estimate=False) else _NETWORKS
    # A forest learns more in the same time, so it gets less: 40 % of a time limit.
    limit = settings.pop("max_seconds", None) or 0.0
    options = settings | {"max_seconds": 0.6 * limit / networks}
    members: Members = {
        f"TileRanker_{number + 1}": ("TileRanker", dataset, options | {"seed": seed * _NETWORKS + number})
        for number in range(networks)
    } | {"GBDT": ("GBDT", dataset, {"seed": seed, "max_seconds": 0.4 * limit})}
    models = _train_members(members, out_dir, resume=resume, device=device)
    # The ensemble, and for the record each kind of model alone.
    valid = list(dataset.valid)
    ensemble, kinds = blend(models, valid), list(dict.fromkeys(model.name for model in models))
    candidates = {kind: blend([model for model in models if model.name == kind], valid) for kind in kinds}
    candidates[ensemble.name] = ensemble
    errors = {name: valid_errors(candidate, valid) for name, candidate in candidates.items()}
    # Trees need no valid kernels to stop at, so they may learn from those that were lent.
    if complete is not dataset:
        ensemble = _retrain_trees(ensemble, complete)
    ensemble.record["calibration"] = calibrate(ensemble, nested_kernels(dataset.valid, default_settings(KINDS[0]))[1])
    ensemble.familiarity = Familiarity.fit(dataset.train[:: -(-len(dataset.train) // _SAMPLE)])
    ensemble.record["auto"] = {"kernels": len(valid), "valid": errors}
    ensemble.save(Path(out_dir).expanduser() / MODEL_FILE)
    rows = "; ".join(f"{name} {row['top1']:.2%} and {row['top5']:.2%}" for name, row in errors.items())
    print(f"Top-1 and top-5 error on {len(valid)} valid kernels: {rows}.", file=sys.stderr)
    return ensemble


def _train_members(members: Members, out_dir: str | Path, **options: Any) -> list[TrainedModel | GBDT]:
    """Train models in folders below `out_dir`; one that cannot be trained is skipped with a message."""
    models: list[TrainedModel | GBDT] = []
    problem: TilewiseError | None = None
    started = time.perf_counter()
    for number, (name, (kind, dataset, settings)) in enumerate(members.items(), start=1):
        print(f"training {name}", file=sys.stderr)
        try:
            models.append(train(dataset, kind, out_dir=Path(out_dir).expanduser() / name, **options, **settings))
        except TilewiseError as error:
            # The first error is reported if no member can be trained.
            problem = problem or error
            print(f"{name} is skipped: {error}", file=sys.stderr)
            continue
        seconds = time.perf_counter() - started
        remaining = seconds / number * (len(members) - number)
        print(f"member {number} of {len(members)}: {seconds:.1f} s, about {remaining:.0f} s left", file=sys.stderr)
    if not models:
        raise problem or TilewiseError("No model could be trained.")
    return models


def _with_valid(dataset: Dataset) -> Dataset:
    """Return the dataset with a valid split; if it has none, a fifth of the train split is moved there."""
    if dataset.valid.labelled or not dataset.train.labelled:
        return dataset
    rng, kernels = np.random.default_rng(0), list(dataset.train)
    if len(kernels) >= _MIN_KERNELS:
        # Whole kernels are the better test: a tuner meets new kernels.
        order = rng.permutation(len(kernels))
        valid, train_kernels = ([kernels[i] for i in rows] for rows in np.split(order, [len(kernels) // _MIN_KERNELS]))
    else:
        # Too few kernels to spare one: hold out configurations of every kernel.
        orders = [rng.permutation(kernel.n_configs) for kernel in kernels]
        cuts = [np.split(order, [len(order) // _MIN_KERNELS]) for order in orders]
        valid, train_kernels = (
            [_subset(k, cut[side]) for k, cut in zip(kernels, cuts, strict=True)] for side in (0, 1)
        )
    if any(not kernel.n_configs for kernel in (*valid, *train_kernels)):
        raise ConfigurationError(
            f"There is no valid split and a kernel has fewer than {_MIN_KERNELS} configurations; add a split."
        )
    unit = "kernels" if len(kernels) >= _MIN_KERNELS else "configurations"
    print(f"There is no valid split: a fifth of the {unit} of train is used for it.", file=sys.stderr)
    return dataset_from_kernels(train_kernels, valid, list(dataset.test), dataset.schema)


def _subset(kernel: Kernel, rows: npt.NDArray[np.int64]) -> Kernel:
    """Return a copy of a kernel with only the configurations `rows`."""
    columns = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **columns)


def valid_errors(model: Any, valid: Sequence[Kernel]) -> dict[str, float]:
    """Return the geometric means over the valid kernels of top-1 and top-5 error."""
    scores = [model.score(kernel) for kernel in valid]
    logs = np.log1p([[top_k_error(k.target, s, at) for at in (1, 5)] for k, s in zip(valid, scores, strict=True)])
    one, five = np.expm1(logs.mean(axis=0)).tolist()
    return {"top1": one, "top5": five}


def _retrain_trees(model: Blend, complete: Dataset) -> Blend:
    """Retrain the tree models of a blend on the complete dataset, which may include its valid kernels."""
    from tilewise.costmodel.models.gbdt import GBDT, train_gbdt

    models = [train_gbdt(complete, m.record["seed"]) if isinstance(m, GBDT) else m for m in model.models]
    return dataclasses.replace(model, models=models)


def train_winners(
    dataset: Dataset,
    *,
    out_dir: str | Path,
    members: int = 4,
    seed: int = 0,
    resume: bool = True,
    device: str = "auto",
    **settings: Any,
) -> Blend:
    """Train the members in folders below `out_dir` and save their blend there; the valid split only calibrates it."""
    programs = sorted({kernel.program for kernel in dataset.train})
    if len(programs) < 2 or not dataset.train.labelled:
        raise ConfigurationError("The recipe winners needs a train split with runtimes and at least two programs.")
    networks = min(members, len(programs))
    options = WINNERS | {name: value for name, value in settings.items() if value is not None}
    # A time limit is shared by all members; the trees count as one.
    limit = options.pop("max_seconds", 0.0) / (networks + 1)
    folds = [set(programs[number::networks]) for number in range(networks)]
    plan: Members = {
        f"member_{number}": ("TileRanker", _hold_out_programs(dataset, held_out),
                             options | {"seed": seed + number, "max_seconds": limit})
        for number, held_out in enumerate(folds)
    } | {"trees": ("GBDT", dataset, {"seed": seed, "max_seconds": limit})}  # fmt: skip
    models = _train_members(plan, out_dir, resume=resume, device=device)
    ensemble = blend(models, list(dataset.valid or dataset.train))
    ensemble.record |= {"recipe": "winners", "calibration": calibrate(ensemble, dataset.valid)}
    ensemble.save(Path(out_dir).expanduser() / MODEL_FILE)
    return ensemble


def _hold_out_programs(dataset: Dataset, programs: set[str]) -> Dataset:
    """Return a dataset whose valid split is the train kernels of `programs`, removed from its train split."""
    sides: tuple[list[Kernel], list[Kernel]] = ([], [])
    for kernel in dataset.train:
        sides[kernel.program in programs].append(kernel)
    return dataset_from_kernels(sides[0], sides[1], (), dataset.schema)
