"""`--model auto`: several kinds of model are trained on a collection, and its valid split says which to believe.

No kind wins everywhere: where kernels are few or strange, trees are hard to beat; with hundreds of kernels and sizes to
compare tiles with, TileRanker is. A valid split of a few dozen kernels cannot tell which it is, so TileRanker and the
trees are blended unless one of them is clearly better there, by more than the kernels differ; the third candidate is
taken where it is clearly better than that. Trees that are kept are several, trained from different seeds: alone, one
of them orders the fastest few by chance. Errors are averaged as logarithms, so that one kernel with a tail of
configurations a hundred times slower does not decide alone. What every candidate reached goes into the kept model's
record. A collection without a valid split gives a fifth of its kernels for one or, where it has fewer than five, of
their configurations; trees that are kept learn from those too in the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._files import read_input, write_atomic
from tilewise.costmodel.confidence import calibrate
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import top_k_error
from tilewise.costmodel.models.blend import Blend, blend
from tilewise.costmodel.models.trained import MODEL_FILE, TrainedModel, load_model
from tilewise.costmodel.train.loop import train
from tilewise.errors import ConfigurationError, TilewiseError

if TYPE_CHECKING:
    from tilewise.costmodel.models.gbdt import GBDT

CANDIDATES = ("TileRanker", "GBDT", "EarlyJoinSAGE")
_BLENDED = CANDIDATES[:2]
DONE_FILE = "candidates.json"
_ENOUGH = 5  # kernels: with fewer, whole ones are too few to judge by
_WEIGHTS = np.array([1.0, 2.0])  # of the logs of top-1 and top-5
_CLEARLY = 2.0  # standard errors
_FORESTS, _APART = 4, 1000  # trainings of the trees that are kept, and how far their seeds are apart


def train_auto(
    dataset: Dataset, *, out_dir: str | Path, seed: int = 0, resume: bool = True, device: str = "auto", **settings: Any
) -> TrainedModel | GBDT | Blend:
    """Train every candidate, each in a folder of its own below `out_dir`, and save the best or a blend there.

    A candidate that cannot be trained (LightGBM is not installed, a loss diverges) is left out with a sentence. A run
    that was cut off goes on with the candidate it was at.
    """
    folder = Path(out_dir).expanduser()
    whole, dataset = dataset, _with_valid(dataset)
    key = _key(dataset, seed, settings)
    found = _finished(folder, key, len(dataset.valid)) if resume else {}
    models: dict[str, TrainedModel | GBDT] = {}
    problem: TilewiseError | None = None
    for name in CANDIDATES:
        try:
            models[name] = _one(dataset, name, folder / name, name in found, seed, resume, device, settings)
        except TilewiseError as error:
            problem = problem or error
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found[name] = found.get(name) or valid_errors(models[name], dataset)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / DONE_FILE, json.dumps({"key": key, "candidates": found}, indent=1))
    if not models:
        raise problem or TilewiseError("No model could be trained.")
    found = {name: found[name] for name in models}
    kept = _kept(models, found, dataset, whole, seed)
    reached = {name: {at: errors[at] for at in ("top1", "top5")} for name, errors in found.items()}
    kept.record["auto"] = {"chosen": kept.name, "kernels": len(dataset.valid), "valid": reached}
    kept.save(folder / MODEL_FILE)
    print(verdict(kept.record["auto"]), file=sys.stderr)
    return kept


def _with_valid(dataset: Dataset) -> Dataset:
    if dataset.valid.labelled or not dataset.train.labelled:
        return dataset
    rng, kernels = np.random.default_rng(0), list(dataset.train)
    if len(kernels) >= _ENOUGH:
        order = rng.permutation(len(kernels))
        parts = [[kernels[i] for i in rows] for rows in np.split(order, [len(kernels) // _ENOUGH])]
    else:
        orders = [rng.permutation(kernel.n_configs) for kernel in kernels]
        cuts = [np.split(order, [len(order) // _ENOUGH]) for order in orders]
        parts = [[_some(k, cut[side]) for k, cut in zip(kernels, cuts, strict=True)] for side in (0, 1)]
    if any(not kernel.n_configs for part in parts for kernel in part):
        raise ConfigurationError(f"A kernel has fewer than {_ENOUGH} configurations, and there is no valid split.")
    what = "kernels" if len(kernels) >= _ENOUGH else "configurations"
    print(f"There is no valid split: a fifth of the {what} of train is taken for it.", file=sys.stderr)
    return dataset_from_kernels(parts[1], parts[0], list(dataset.test), dataset.schema)


def _some(kernel: Kernel, rows: npt.NDArray[np.int64]) -> Kernel:
    cut = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **cut)


def valid_errors(model: Any, dataset: Dataset) -> dict[str, Any]:
    """Geometric mean top-1 and top-5 errors on the valid split, and what they weigh together for each kernel."""
    logs = np.log1p([[top_k_error(k.target, model.score(k), at) for at in (1, 5)] for k in dataset.valid])
    one, five = np.expm1(logs.mean(axis=0)).tolist()
    return {"top1": one, "top5": five, "each": (logs @ _WEIGHTS).tolist()}


def _kept(
    models: dict[str, TrainedModel | GBDT],
    found: dict[str, dict[str, Any]],
    dataset: Dataset,
    whole: Dataset,
    seed: int,
) -> TrainedModel | GBDT | Blend:
    """What the valid split says; what a blend reached there is added to `found`."""
    names = _believed(found)
    kept: TrainedModel | GBDT | Blend = models[names[0]]
    if "GBDT" in names:
        from tilewise.costmodel.models.gbdt import train_gbdt

        more = [train_gbdt(dataset, seed + _APART * number) for number in range(1, _FORESTS)]
        kept = blend([*(models[name] for name in names), *more], list(dataset.valid))
        kept.record["calibration"] = calibrate(kept, dataset.valid)
        found[kept.name] = valid_errors(kept, dataset)
    others = [name for name in models if name not in _BLENDED and _clearly_better(found[name], found[kept.name])]
    if others:
        return models[others[0]]
    return _taught_all(kept, whole) if isinstance(kept, Blend) and whole is not dataset else kept


def _taught_all(model: Blend, whole: Dataset) -> Blend:
    """The blend with trees that learned from the kernels it was judged by as well; what was judged stays said."""
    from tilewise.costmodel.models.gbdt import GBDT, train_gbdt

    parts = [train_gbdt(whole, p.record["seed"]) if isinstance(p, GBDT) else p for p in model.models]
    return dataclasses.replace(model, models=parts)


def _believed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Those to blend: one of them alone where it is clearly better, or where there is no other."""
    names = [name for name in _BLENDED if name in found] or list(found)[:1]
    better = [name for name in names if any(_clearly_better(found[name], found[other]) for other in names)]
    return better or names


def _clearly_better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether errors are lower by more than kernels that differ by chance would have it; a few tell nothing."""
    gain = np.array(other["each"]) - np.array(one["each"])
    return len(gain) >= _ENOUGH and bool(gain.mean() > _CLEARLY * gain.std(ddof=1) / len(gain) ** 0.5)


def verdict(auto: dict[str, Any]) -> str:
    """Which candidate was kept and by how much, in one sentence."""
    reached = "; ".join(
        f"{name} {errors['top1']:.2%} and {errors['top5']:.2%}"
        for name, errors in sorted(auto["valid"].items(), key=lambda item: _weighed(item[1]))
    )
    count = auto["kernels"]
    lowest = min(auto["valid"], key=lambda name: _weighed(auto["valid"][name]))
    doubt = "" if lowest == auto["chosen"] else f" {lowest} may be lower by chance."
    doubt += " Few kernels: another split may choose another." if count < 20 else ""
    judged = f"Top-1 and top-5 error on {count} valid kernel{'s' * (count != 1)}"
    return f"{auto['chosen']} is kept. {judged}: {reached}.{doubt}"


def _weighed(errors: dict[str, float]) -> float:
    """Top-1 and top-5 together, as TileRanker's own training weighs them."""
    return float(np.log1p([errors["top1"], errors["top5"]]) @ _WEIGHTS)


def _one(
    dataset: Dataset,
    name: str,
    folder: Path,
    done: bool,
    seed: int,
    resume: bool,
    device: str,
    settings: dict[str, Any],
) -> TrainedModel | GBDT:
    if done:
        kept: Any = load_model(folder)
        return kept  # type: ignore[no-any-return]
    print(f"training {name}", file=sys.stderr)
    return train(dataset, name, out_dir=folder, seed=seed, resume=resume, device=device, **settings)


def _key(dataset: Dataset, seed: int, settings: dict[str, Any]) -> str:
    """What a finished candidate must share with a run for it to be taken as it is."""
    splits = [[split.names, split.offsets("configs").tolist()] for split in (dataset.train, dataset.valid)]
    text = json.dumps([seed, settings, dataset.schema.config_features, splits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _finished(folder: Path, key: str, kernels: int) -> dict[str, dict[str, Any]]:
    """The errors of candidates that an earlier run with the same key has trained."""
    try:
        record = json.loads(read_input(folder / DONE_FILE, 1 << 20))
        found = record["candidates"] if record["key"] == key else {}
        return {
            name: {at: float(errors[at]) for at in ("top1", "top5")} | {"each": [float(e) for e in errors["each"]]}
            for name, errors in found.items()
            if name in CANDIDATES and (folder / name / MODEL_FILE).is_file() and len(errors["each"]) == kernels
        }
    except (TilewiseError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
