"""Model selection (`--model auto`): train several kinds of models and choose or blend them on the valid split.

No kind wins everywhere: trees are best with few or unusual kernels, TileRanker with hundreds of kernels whose sizes it
can relate to tiles. A valid split of a few dozen kernels is too small to decide, so TileRanker and trees are blended
unless one is significantly better; the third candidate is selected only if it is significantly better than that.
Selected trees are trained with several seeds, because a single forest orders the fastest few by chance. Errors are
averaged as logarithms, so that one kernel with configurations a hundred times slower does not decide alone. The
selected model's record holds the errors of every candidate.

A network can be arbitrarily wrong on a kind of kernel that it has never seen. So the result knows its train kernels
(see `blend`), and kernels unlike them get a fallback. It is judged on families that are left out: TileRanker and
trees are trained briefly without some families of the train split, and whichever is best on those (one of them, their
ranks together, or a random order where that is significantly better) ranks unfamiliar kernels.

The recipe `winners` trains an ensemble instead. The best entries of the Kaggle competition on TpuGraphs trained several
large networks on all configurations and averaged their ranks. Here every member leaves out another fold of the programs
and is stopped early by the scored metric on it; its slates mix the fastest configurations with others. Trees trained
with LambdaRank join them, and the ranks of all are averaged.

A collection without a valid split lends a fifth of its kernels or, if it has fewer than five, of their configurations;
selected trees are finally trained on those too.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.confidence_fit import calibrate
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.features.ranker import heaviest_node, kernel_sizes
from tilewise.costmodel.metrics import over_seeds, top_k_error
from tilewise.costmodel.models.blend import RANDOM_ORDER, Blend, Familiarity, blend, rank_scores
from tilewise.costmodel.models.files import BLEND, MODEL_FILE
from tilewise.costmodel.models.trained import TrainedModel
from tilewise.costmodel.training.config import WINNERS
from tilewise.costmodel.training.loop import train
from tilewise.errors import ConfigurationError, TilewiseError

if TYPE_CHECKING:
    from tilewise.costmodel.models.gbdt import GBDT

CANDIDATES = ("TileRanker", "GBDT", "EarlyJoinSAGE")
_BLEND_CANDIDATES = CANDIDATES[:2]
_MIN_KERNELS = 5  # fewer kernels are too few to compare models on
_WEIGHTS = np.array([1.0, 2.0])  # of the logs of top-1 and top-5 error, as in TileRanker's own selection
_LEFT_OUT_SHARE = 0.4  # of the train kernels, at most, that the families left out for the fallback have
_FORESTS, _SEED_STEP = 4, 1000  # trainings of selected trees, and the difference of their seeds

_TREE_WEIGHT = 0.5  # relative to all networks together; arbitrary, trees are the weaker part on large collections


def train_auto(
    dataset: Dataset, *, out_dir: str | Path, seed: int = 0, resume: bool = True, device: str = "auto", **settings: Any
) -> Blend:
    """Train every candidate in its own folder below `out_dir`, and save the best one or a blend in `out_dir`.

    A candidate that cannot be trained (LightGBM is not installed, a loss diverges) is skipped with a message. An
    interrupted run continues with the candidate that it was training.
    """
    folder = Path(out_dir).expanduser()
    complete, dataset = dataset, _with_valid(dataset)
    errors: dict[str, dict[str, Any]] = {}
    models: dict[str, TrainedModel | GBDT] = {}
    problem: TilewiseError | None = None
    for name in CANDIDATES:
        started = time.perf_counter()
        print(f"training {name}", file=sys.stderr)
        try:
            options: dict[str, Any] = {"seed": seed, "resume": resume, "device": device}
            models[name] = train(dataset, name, out_dir=folder / name, **options, **settings)
        except TilewiseError as error:
            # The first error is reported if no candidate can be trained.
            problem = problem or error
            print(f"{name} is skipped: {error}", file=sys.stderr)
            continue
        errors[name] = valid_errors(models[name], dataset)
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if not models:
        raise problem or TilewiseError("No model could be trained.")
    max_seconds = float(settings.get("max_seconds") or 0)
    best = _select(models, errors, dataset, complete, seed, max_seconds=max_seconds)
    selected = _guarded(best, models, dataset, seed=seed, max_seconds=max_seconds)
    summary = {name: {at: row[at] for at in ("top1", "top5")} for name, row in errors.items()}
    selected.record["auto"] = {"chosen": selected.name, "kernels": len(dataset.valid), "valid": summary}
    selected.save(folder / MODEL_FILE)
    print(verdict(selected.record["auto"]), file=sys.stderr)
    return selected


def _with_valid(dataset: Dataset) -> Dataset:
    """Return the dataset with a valid split, taken from the train split if it has none."""
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
    """Return the kernel with some of its configurations."""
    columns = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **columns)


def valid_errors(model: Any, dataset: Dataset) -> dict[str, Any]:
    """Return the geometric mean top-1 and top-5 errors on the valid split, and their weighted logs per kernel."""
    logs = np.log1p([[top_k_error(k.target, model.score(k), at) for at in (1, 5)] for k in dataset.valid])
    one, five = np.expm1(logs.mean(axis=0)).tolist()
    return {"top1": one, "top5": five, "each": (logs @ _WEIGHTS).tolist()}


def _select(
    models: dict[str, TrainedModel | GBDT],
    errors: dict[str, dict[str, Any]],
    dataset: Dataset,
    complete: Dataset,
    seed: int,
    *,
    max_seconds: float = 0.0,
) -> TrainedModel | GBDT | Blend:
    """Select a model, or build a blend, by the validation errors; a blend's errors are added to `errors`."""
    names = _blend_names(errors)
    selected: TrainedModel | GBDT | Blend = models[names[0]]
    if "GBDT" in names:
        from tilewise.costmodel.models.gbdt import train_gbdt

        # A single forest orders the fastest few by chance; several seeds average that out.
        share = max_seconds / (_FORESTS - 1)
        seeds = [seed + _SEED_STEP * number for number in range(1, _FORESTS)]
        more_trees = [train_gbdt(dataset, s, max_seconds=share) for s in seeds]
        selected = blend([*(models[name] for name in names), *more_trees], list(dataset.valid))
        selected.record["calibration"] = calibrate(selected, dataset.valid)
        errors[selected.name] = valid_errors(selected, dataset)
    others = [
        name
        for name in models
        if name not in _BLEND_CANDIDATES and _significantly_better(errors[name], errors[selected.name])
    ]
    if others:
        return models[others[0]]
    return _retrain_trees(selected, complete) if isinstance(selected, Blend) and complete is not dataset else selected


def _guarded(
    selected: TrainedModel | GBDT | Blend,
    models: dict[str, TrainedModel | GBDT],
    dataset: Dataset,
    *,
    seed: int,
    max_seconds: float,
) -> Blend:
    """Wrap the selected model so that kernels unlike the train split get the fallback that left-out families choose."""
    kinds = [name for name in _BLEND_CANDIDATES if name in models]
    fallback = _choose_fallback(dataset, kinds, seed, max_seconds) if kinds else RANDOM_ORDER
    members = selected if isinstance(selected, Blend) else Blend([selected], [1.0], dict(selected.record))
    # A member without weight serves the fallback alone.
    extra = [models[n] for n in kinds if n in fallback and all(model.name != n for model in members.models)]
    record = members.record | {"model": BLEND, "fallback": fallback}
    weights = [*members.weights, *[0.0] * len(extra)]
    return Blend([*members.models, *extra], weights, record, Familiarity.fit(list(dataset.train)))


def _choose_fallback(dataset: Dataset, kinds: list[str], seed: int, max_seconds: float) -> str:
    """Train the kinds of models without some families, and return the fallback that is best on those families."""
    together = " + ".join(kinds)
    left_out = _left_out_kernels(dataset)
    if len(left_out) < _MIN_KERNELS:
        return together
    names = {kernel.name for kernel in left_out}
    others = dataset_from_kernels([k for k in dataset.train if k.name not in names], left_out, schema=dataset.schema)
    settings: dict[str, Any] = {"seed": seed, "progress": False, "device": "cpu", "max_seconds": max_seconds / 2}
    trials = [train(others, name, epochs=8, **settings) for name in kinds]
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {name: [] for name in (*kinds, together, RANDOM_ORDER)}
    for kernel in left_out:
        scores: dict[str, Any] = {name: trial.score(kernel) for name, trial in zip(kinds, trials, strict=True)}
        scores[together] = rank_scores([(trial, 1.0) for trial in trials], kernel)
        for name, score in scores.items():
            errors[name].append(top_k_error(kernel.target, score, 5))
        draws = [top_k_error(kernel.target, rng.random(kernel.n_configs), 5) for _ in range(20)]
        errors[RANDOM_ORDER].append(float(np.mean(draws)))
    # Plain means, so that a single kernel with a choice that is a hundred times too slow counts.
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    # A random order wins only if it is significantly better than the best model (paired differences).
    fallback = min((*kinds, together), key=lambda name: means[name])
    if over_seeds(np.subtract(errors[fallback], errors[RANDOM_ORDER])).low > 0:
        fallback = RANDOM_ORDER
    listing = ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in means.items())
    message = f"Kernels unlike the train split are ranked by: {fallback}"
    print(f"{message} (top-5 error on {len(left_out)} kernels of left-out families: {listing}).", file=sys.stderr)
    return fallback


def _left_out_kernels(dataset: Dataset) -> list[Kernel]:
    """Return the kernels of the smallest families of the train split, as many as leave most kernels to train on.

    A family has one opcode and rank of the heaviest operation.
    """
    families: dict[tuple[int, int], list[Kernel]] = {}
    for kernel in dataset.train:
        rank = int(np.count_nonzero(kernel_sizes(kernel)[DIMENSIONS : 2 * DIMENSIONS]))
        families.setdefault((int(kernel.node_opcode[heaviest_node(kernel)]), rank), []).append(kernel)
    # The largest family always stays in the train split.
    left_out: list[Kernel] = []
    for members in sorted(families.values(), key=len)[:-1]:
        if len(left_out) + len(members) <= _LEFT_OUT_SHARE * len(dataset.train):
            left_out += members
    return left_out


def _retrain_trees(model: Blend, complete: Dataset) -> Blend:
    """Retrain the trees of a blend on all data, including the kernels lent to the valid split; keep the record."""
    from tilewise.costmodel.models.gbdt import GBDT, train_gbdt

    models = [train_gbdt(complete, m.record["seed"]) if isinstance(m, GBDT) else m for m in model.models]
    return dataclasses.replace(model, models=models)


def _blend_names(errors: dict[str, dict[str, Any]]) -> list[str]:
    """Return the models to blend: one if it is significantly better or the only one."""
    names = [name for name in _BLEND_CANDIDATES if name in errors] or list(errors)[:1]
    better = [name for name in names if any(_significantly_better(errors[name], errors[other]) for other in names)]
    return better or names


def _significantly_better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether the 95 % interval of the paired difference excludes 0; never with few kernels."""
    # Paired differences per kernel: kernels differ much more than models. Student's t, because there may be only five.
    gain = np.subtract(other["each"], one["each"])
    return len(gain) >= _MIN_KERNELS and over_seeds(gain).low > 0


def verdict(auto: dict[str, Any]) -> str:
    """Describe in a few words which candidate was selected, and the errors of all."""
    candidate_errors = "; ".join(
        f"{name} {errors['top1']:.2%} and {errors['top5']:.2%}"
        for name, errors in sorted(auto["valid"].items(), key=lambda item: _weighted_error(item[1]))
    )
    count = auto["kernels"]
    lowest = min(auto["valid"], key=lambda name: _weighted_error(auto["valid"][name]))
    caveat = "" if lowest == auto["chosen"] else f" {lowest} may be lower by chance."
    caveat += " Few kernels: another split may choose another." if count < 20 else ""
    heading = f"Top-1 and top-5 error on {count} valid kernel{'s' * (count != 1)}"
    return f"{auto['chosen']} is kept. {heading}: {candidate_errors}.{caveat}"


def _weighted_error(errors: dict[str, float]) -> float:
    """Combine top-1 and top-5 error with the weights of TileRanker's own selection."""
    return float(np.log1p([errors["top1"], errors["top5"]]) @ _WEIGHTS)


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
    folder = Path(out_dir).expanduser()
    programs = sorted({kernel.program for kernel in dataset.train})
    if len(programs) < 2 or not dataset.train.labelled:
        raise ConfigurationError("The recipe winners needs a train split with runtimes and at least two programs.")
    members = min(members, len(programs))
    member_settings = WINNERS | {name: value for name, value in settings.items() if value is not None}
    # A time limit is shared by all members; the trees count as one.
    if member_settings.get("max_seconds"):
        member_settings["max_seconds"] = member_settings["max_seconds"] / (members + 1)
    models: list[Any] = []
    started = time.perf_counter()
    for number in range(members):
        held_out = set(programs[number::members])
        part = _without(dataset, held_out)
        options: dict[str, Any] = {"seed": seed + number, "resume": resume, "device": device}
        models.append(train(part, "TileRanker", out_dir=folder / f"member_{number}", **options, **member_settings))
        seconds_left = (time.perf_counter() - started) / (number + 1) * (members - number - 1)
        print(f"member {number + 1} of {members} is finished, about {seconds_left:.0f} s left", file=sys.stderr)
    weights = [1.0 / members] * members
    try:
        limit = {"max_seconds": member_settings.get("max_seconds", 0.0)}
        models.append(train(dataset, "GBDT", out_dir=folder / "trees", seed=seed, **limit))
        weights.append(_TREE_WEIGHT)
    except TilewiseError as error:
        print(f"The ensemble has no trees: {error}", file=sys.stderr)
    blend = Blend(models, weights, {"model": BLEND, "by_rank": True, "recipe": "winners"})
    blend.record["calibration"] = calibrate(blend, dataset.valid)
    blend.save(folder / MODEL_FILE)
    return blend


def _without(dataset: Dataset, programs: set[str]) -> Dataset:
    """Return a dataset whose valid split is the train kernels of `programs`, and whose train split is the others."""
    sides: tuple[list[Kernel], list[Kernel]] = ([], [])
    for kernel in dataset.train:
        sides[kernel.program in programs].append(kernel)
    return dataset_from_kernels(sides[0], sides[1], (), dataset.schema)
