"""`replay`: how fast each way of tuning gets to a good configuration, told from recorded runtimes alone.

Every held-out kernel is tuned again by each strategy; a measurement is a look into the collection, so the whole
comparison takes seconds, needs no hardware and comes out the same every time. Regret is how much slower the best
configuration measured so far is than the best in the collection.

Every mechanism of the search stands beside the simpler one that it must beat: the paired difference of their regrets,
and its 95 % interval over kernels drawn with replacement (bootstrap). `without_model.py` does the same for kernels that
no model knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._wording import pluralize
from tilewise.costmodel.baselines import Analytical
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import Dataset, find_collection, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.metrics import bootstrap
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.shipped import shipped_file
from tilewise.costmodel.models.trained import model_path
from tilewise.costmodel.rank import Model
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError
from tilewise.tune.search.calibration import Case, calibrate, load_calibration, make_case, save_calibration
from tilewise.tune.search.gaussian_process import Hyperparameters
from tilewise.tune.search.loop import search
from tilewise.tune.search.surety import claims, fit_sure, groups_of

MOST = 20
SIMPLE, OURS = "the model's order, first k", "ours, by expected improvement"
Curves = npt.NDArray[np.float64]  # (kernels, measurements)
_ORDERS = 20  # random orders a kernel
_MOST_NOISE = 0.01  # of a reading
COMPARED = (1, 2, 3, 5, 10, 20)  # measurements
_RESAMPLES = 4000


@dataclass(frozen=True)
class Strategy:
    """One way of tuning: mean regret after 1, 2, ... measurements."""

    name: str
    regret: list[float]
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """What a mechanism saves over the simpler one after so many measurements, with its 95 % interval."""

    mechanism: str
    simpler: str
    measurements: int
    saving: float
    low: float
    high: float


@dataclass(frozen=True)
class Replay:
    """The whole comparison."""

    collection: str
    split: str
    kernels: int
    configs: int
    strategies: list[Strategy]
    comparisons: list[Comparison]
    first_choice: float  # geometric mean of best / chosen, without any measurement
    default: float  # mean regret of the default configuration, which needs no measurement
    notes: list[str] = field(default_factory=list)
    sure: dict[int, dict[str, float]] = field(default_factory=dict)  # the tuner's claims, see `surety.claims`

    def strategy(self, name: str) -> Strategy:
        return next(strategy for strategy in self.strategies if strategy.name == name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    collection: str | Path | Dataset = "h200",
    *,
    split: str = "test",
    model: str | Path | Model | None = None,
    calibration: Hyperparameters | None = None,
    most: int = MOST,
    trees: bool = True,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> Replay:
    """Replay tuning on the kernels of a split that the model has not seen.

    `model` is a model or its file; by default the one shipped for the collection. Where it comes without a calibration
    one is fitted on the validation kernels. `trees` trains gradient-boosted trees for comparison, where LightGBM is
    installed.

    >>> replay("h200").strategy("the model's order, first k").regret[4]  # doctest: +SKIP
    0.002
    """
    if most < 1:
        raise ConfigurationError(f"most must be at least 1 measurement, not {most}.")
    data = collection if isinstance(collection, Dataset) else load_dataset(collection)
    kernels = [kernel for kernel in data.split(split) if kernel.labelled]
    if not kernels:
        raise ConfigurationError(f"The {split} split has no runtimes to replay.")
    name = "own" if isinstance(collection, Dataset) else str(collection)
    notes: list[str] = []
    scorer, found = _model(name, model)
    calibration = calibration or found
    names = data.schema.config_features
    if calibration is None:
        notes.append("the model comes without a calibration of its own; one was fitted on the validation kernels")
        say(notes[-1])
        calibration = calibrate(scorer, list(data.valid), names)
    cases = [make_case(scorer, kernel, names) for kernel in track(kernels, "ranking", len(kernels), progress)]
    say(f"{pluralize(len(cases), 'kernel')}; replaying the tuner")
    curves: dict[str, Curves] = {
        "random": _random(cases, most, seed),
        "exhaustive": np.array([regrets(case.runtime, range(len(case.runtime)), most) for case in cases]),
        "analytical": _ranked(cases, _analytical(data, kernels), most),
    }
    curves |= _trees(data, kernels, cases, most, seed, trees, notes, say)
    curves[SIMPLE] = _ranked(cases, [case.scores for case in cases], most)
    curves[OURS] = _improving(cases, calibration, most, progress)
    best = [case.best / float(case.runtime[int(np.argmin(case.scores))]) for case in cases]
    return Replay(
        name,
        split,
        len(cases),
        sum(len(case.runtime) for case in cases),
        [Strategy(each, [float(value) for value in found.mean(axis=0)]) for each, found in curves.items()],
        compared(curves, OURS, SIMPLE),
        float(np.exp(np.mean(np.log(best)))),
        float(np.mean([max(0.0, 1.0 / case.best - 1.0) for case in cases])),
        notes,
        claims(cases, calibration) if calibration.sure else {},
    )


def compared(curves: Mapping[str, Curves], mechanism: str, simpler: str) -> list[Comparison]:
    """The paired savings of a mechanism, each with a bootstrap interval."""
    found = []
    for count in COMPARED:
        if count <= curves[mechanism].shape[1]:
            saved = curves[simpler][:, count - 1] - curves[mechanism][:, count - 1]
            gain = bootstrap(saved, draws=_RESAMPLES)
            found.append(Comparison(mechanism, simpler, count, gain.mean, gain.low, gain.high))
    return found


def _model(name: str, model: str | Path | Model | None) -> tuple[Model, Hyperparameters | None]:
    if model is None:
        path = shipped_file(Path(name).stem if name.endswith(".npz") else name)
        return load_scorer(path), load_calibration(path)
    if isinstance(model, str | Path):
        path = model_path(model)
        return load_scorer(path), load_calibration(path)
    return model, None


def recalibrate(
    collection: str,
    model: Path | None = None,
    out: Path | None = None,
    *,
    kept: Callable[[Kernel], bool] = lambda kernel: True,
) -> Path:
    """Fit a model's calibration anew, on its collection's validation kernels (those that are `kept`), and store it:
    beside a file of one's own, in the cache folder for a shipped model, or in `out`."""
    path = shipped_file(collection) if model is None else model_path(model)
    data = load_dataset(collection)
    valid = [kernel for kernel in data.valid if kept(kernel)]
    scorer, names = load_scorer(path), data.schema.config_features
    fitted = calibrate(scorer, valid, names, _noise(collection))
    cases = [make_case(scorer, kernel, names) for kernel in valid if kernel.labelled]
    sure = fit_sure(cases, fitted, groups_of([case.name for case in cases], data.train.names))
    return save_calibration(path, dataclasses.replace(fitted, sure=sure), out)


def _noise(collection: str) -> float:
    """What a reading is off by: the collection's own scatter, as far as it is not the noise of a shared machine."""
    try:
        found = read_collection(find_collection(collection))
    except (TilewiseError, OSError):  # a folder of somebody's own has no scatter
        return _MOST_NOISE
    deviations = np.concatenate([kernel.deviation for kernels in found.splits.values() for kernel in kernels])
    return (
        float(np.clip(np.nanmedian(deviations), 0.001, _MOST_NOISE)) if np.isfinite(deviations).any() else _MOST_NOISE
    )


def regrets(runtime: npt.NDArray[Any], order: Sequence[int] | npt.NDArray[Any], most: int) -> npt.NDArray[np.float64]:
    """After each measurement of an order; the last value stays when the order ends."""
    reached = np.minimum.accumulate(runtime[np.asarray(order[:most], dtype=np.int64)]) / runtime.min() - 1
    return np.pad(reached, (0, max(0, most - len(reached))), mode="edge")


def _random(cases: Sequence[Case], most: int, seed: int) -> Curves:
    chance = np.random.default_rng(seed)

    def mean_curve(runtime: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        curves = [regrets(runtime, chance.permutation(len(runtime)), most) for _ in range(_ORDERS)]
        return np.asarray(np.mean(curves, axis=0))

    return np.array([mean_curve(case.runtime) for case in cases])


def _ranked(cases: Sequence[Case], scores: Sequence[npt.NDArray[Any]], most: int) -> Curves:
    orders = [np.argsort(score, kind="stable") for score in scores]
    return np.array([regrets(case.runtime, order, most) for case, order in zip(cases, orders, strict=True)])


def _improving(cases: Sequence[Case], hyper: Hyperparameters, most: int, progress: bool) -> Curves:
    def order(case: Case) -> list[int]:
        process = case.process(dataclasses.replace(hyper, by_score=False))
        return [step.index for step in search(process, lambda i: float(case.runtime[i]), most)[0]]

    orders = [order(case) for case in track(cases, "replaying", len(cases), progress)]
    return np.array([regrets(case.runtime, order, most) for case, order in zip(cases, orders, strict=True)])


def _analytical(data: Dataset, kernels: Sequence[Kernel]) -> list[npt.NDArray[Any]]:
    formula = Analytical(data.train if len(data.train) else data.valid)
    return [formula.score(kernel) for kernel in kernels]


def _trees(
    data: Dataset,
    kernels: Sequence[Kernel],
    cases: Sequence[Case],
    most: int,
    seed: int,
    wanted: bool,
    notes: list[str],
    say: Callable[[str], None],
) -> dict[str, Curves]:
    if not wanted:
        return {}
    from tilewise.costmodel.models.gbdt import train_gbdt

    say("training the trees")
    try:
        trees = train_gbdt(data, seed)
    except UnavailableError:
        notes.append("LightGBM is not installed, so there are no trees to compare with")
        return {}
    return {"GBDT, first k": _ranked(cases, [trees.score(kernel) for kernel in kernels], most)}
