"""`replay`: how fast each way of tuning gets to a good configuration, told from recorded runtimes alone.

Every held-out kernel is tuned again by each strategy; a measurement is a look into the collection, so the whole
comparison takes seconds, needs no hardware and comes out the same every time. Regret is how much slower the best
configuration measured so far is than the best in the collection.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.baselines import Analytical
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import Dataset, find_collection, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.models.shipped import shipped_file
from tilewise.costmodel.models.trained import model_path
from tilewise.costmodel.rank import Model
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError
from tilewise.tune.search.calibration import (
    WITHIN,
    Calibration,
    Case,
    calibrate,
    load_calibration,
    make_case,
    play,
    save_calibration,
)

MOST = 20
Curve = npt.NDArray[np.float64]
_ORDERS = 20  # random orders a kernel
_MOST_NOISE = 0.01  # of a reading


@dataclass(frozen=True)
class Strategy:
    """One way of tuning: mean regret after 1, 2, ... measurements; nan where it makes no more."""

    name: str
    regret: list[float]
    note: str = ""


@dataclass(frozen=True)
class Adaptive:
    """The tuner left to itself: it decides when to stop."""

    regret: float
    measurements: float
    largest_regret: float
    sure: float  # share of the kernels that it called sure
    right_when_sure: float | None  # share of those that were within one per cent
    within: float  # share of all kernels within one per cent
    counts: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """The whole comparison."""

    collection: str
    split: str
    kernels: int
    configs: int
    strategies: list[Strategy]
    adaptive: Adaptive
    first_choice: float  # geometric mean of best / chosen, without any measurement
    default: float  # mean regret of the default configuration, which needs no measurement
    notes: list[str] = field(default_factory=list)

    def strategy(self, name: str) -> Strategy:
        return next(strategy for strategy in self.strategies if strategy.name == name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    collection: str | Path | Dataset = "h200",
    *,
    split: str = "test",
    model: str | Path | Model | None = None,
    calibration: Calibration | None = None,
    most: int = MOST,
    trees: bool = True,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
    progress: bool = False,
) -> Replay:
    """Replay tuning on the kernels of a split that the model has not seen.

    `model` is a model or its file; by default the one shipped for the collection. Where it comes without a fitted prior
    one is fitted on the validation kernels. `trees` trains gradient-boosted trees for comparison, where LightGBM is
    installed.

    >>> replay("h200").adaptive.measurements  # doctest: +SKIP
    2.8
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
        notes.append("the model comes without a prior of its own; one was fitted on the validation kernels")
        say(notes[-1])
        calibration = calibrate(scorer, list(data.valid), names)
    cases = [make_case(scorer, kernel, names) for kernel in track(kernels, "ranking", len(kernels), progress)]
    say(f"{len(cases)} kernels; replaying the tuner")
    strategies = [
        Strategy("random", _random(cases, most, seed)),
        Strategy("exhaustive", _exhaustive(cases, most), "in the order of the list"),
        Strategy("analytical", _ranked(cases, _analytical(data, kernels), most)),
    ]
    strategies += _trees(data, kernels, cases, most, seed, trees, notes, say)
    strategies += [
        Strategy("model, fixed top k", _ranked(cases, [case.scores for case in cases], most)),
        Strategy("ours, fixed top k", _portfolios(cases, calibration, most)),
        Strategy("ours, updated", _updated(cases, calibration, most, progress), "the same budget for every kernel"),
    ]
    first = [_ratio(case, case.belief(calibration.prior).portfolio(1)[0]) for case in cases]
    return Replay(
        name,
        split,
        len(cases),
        sum(len(case.runtime) for case in cases),
        strategies,
        _adaptive(cases, calibration),
        float(np.exp(np.mean(np.log(first)))),
        float(np.mean([max(0.0, 1.0 / case.best - 1.0) for case in cases])),
        notes,
    )


def _model(name: str, model: str | Path | Model | None) -> tuple[Model, Calibration | None]:
    if model is None:
        path = shipped_file(Path(name).stem if name.endswith(".npz") else name)
        return load_scorer(path), load_calibration(path)
    if isinstance(model, str | Path):
        path = model_path(model)
        return load_scorer(path), load_calibration(path)
    return model, None


def recalibrate(collection: str, model: Path | None = None, out: Path | None = None) -> Path:
    """Fit a model's prior and rule anew, on its collection's validation kernels, and keep them: beside a file of one's
    own, in the cache folder for a shipped model, or in `out`."""
    path = shipped_file(collection) if model is None else model_path(model)
    data = load_dataset(collection)
    fitted = calibrate(load_scorer(path), list(data.valid), data.schema.config_features, _noise(collection))
    return save_calibration(path, fitted, out)


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


def _ratio(case: Case, index: int) -> float:
    return case.best / float(case.runtime[index])


def _curve(case: Case, order: Sequence[int] | npt.NDArray[Any], most: int) -> Curve:
    """Regret after each measurement of an order; the last value stays when the order ends."""
    reached = np.minimum.accumulate(case.runtime[np.asarray(order[:most], dtype=np.int64)]) / case.best - 1
    return np.pad(reached, (0, max(0, most - len(reached))), mode="edge")


def _mean(curves: Sequence[Curve]) -> list[float]:
    return [float(value) for value in np.mean(curves, axis=0)]


def _random(cases: Sequence[Case], most: int, seed: int) -> list[float]:
    chance = np.random.default_rng(seed)
    curves = [_curve(case, chance.permutation(len(case.runtime)), most) for case in cases for _ in range(_ORDERS)]
    return _mean(curves)


def _exhaustive(cases: Sequence[Case], most: int) -> list[float]:
    return _mean([_curve(case, np.arange(len(case.runtime)), most) for case in cases])


def _ranked(cases: Sequence[Case], scores: Sequence[npt.NDArray[Any]], most: int) -> list[float]:
    orders = [np.argsort(score, kind="stable") for score in scores]
    return _mean([_curve(case, order, most) for case, order in zip(cases, orders, strict=True)])


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
) -> list[Strategy]:
    if not wanted:
        return []
    from tilewise.costmodel.models.gbdt import train_gbdt

    say("training the trees")
    try:
        trees = train_gbdt(data, seed)
    except UnavailableError:
        notes.append("LightGBM is not installed, so there are no trees to compare with")
        return []
    return [Strategy("GBDT, fixed top k", _ranked(cases, [trees.score(kernel) for kernel in kernels], most))]


def _portfolios(cases: Sequence[Case], calibration: Calibration, most: int) -> list[float]:
    return _mean([_curve(c, c.belief(calibration.prior).portfolio(most), most) for c in cases])


def _updated(cases: Sequence[Case], calibration: Calibration, most: int, progress: bool) -> list[float]:
    from tilewise.tune.search.loop import Rule

    shown = track(cases, "replaying", len(cases), progress)
    orders = [[s.index for s in play(case, calibration.prior, Rule(0.0, 0.0, most)).steps] for case in shown]
    return _mean([_curve(case, order, most) for case, order in zip(cases, orders, strict=True)])


def _adaptive(cases: Sequence[Case], calibration: Calibration) -> Adaptive:
    found = [play(case, calibration.prior, calibration.rule) for case in cases]
    regret = np.array([(f.runtime_ns or math.inf) / case.best - 1 for f, case in zip(found, cases, strict=True)])
    sure, right = np.array([f.sure for f in found]), regret <= WITHIN
    return Adaptive(
        float(regret.mean()),
        float(np.mean([f.measurements for f in found])),
        float(regret.max()),
        float(sure.mean()),
        float(right[sure].mean()) if sure.any() else None,
        float(right.mean()),
        [f.measurements for f in found],
    )


def table(result: Replay, columns: Sequence[int] = (1, 2, 3, 5, 10, 20)) -> list[str]:
    """The comparison as lines of text."""
    shown = [k for k in columns if k <= len(result.strategies[0].regret)]
    width = max(len(s.name) for s in result.strategies) + 2
    lines = [
        f"{result.kernels} {result.split} kernels of {result.collection}, {result.configs} configurations: "
        "mean % slower than the best, after so many measurements",
        f"{'':{width}}" + "".join(f"{k:>9d}" for k in shown),
    ]
    for strategy in result.strategies:
        lines.append(f"{strategy.name:{width}}" + "".join(f"{100 * strategy.regret[k - 1]:9.2f}" for k in shown))
    own = result.adaptive
    lines.append(f"{'default':{width}}{100 * result.default:9.2f}   without measuring")
    lines.append(f"{'ours, adaptive':{width}}{100 * own.regret:9.2f}   after {own.measurements:.2f} on average")
    lines.append(f"first choice without measuring: {result.first_choice:.3f} of the best (geometric mean)")
    claim = "none" if own.right_when_sure is None else f"{own.right_when_sure:.1%} of them were"
    lines.append(f"called sure within 1 %: {own.sure:.0%} of the kernels; {claim} right")
    return [*lines, *result.notes]


_STYLES: Mapping[str, tuple[str, str]] = {
    "random": ("#999999", ":"), "exhaustive": ("#cccccc", "-"), "analytical": ("#8172b3", "--"),
    "GBDT, fixed top k": ("#dd8452", "-"), "model, fixed top k": ("#4c72b0", ":"),
    "ours, fixed top k": ("#4c72b0", "--"), "ours, updated": ("#4c72b0", "-"),
}  # fmt: skip


def plot(result: Replay, path: str | Path) -> None:
    """Regret against measurements, one line a strategy, and the adaptive tuner as a point."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from tilewise._files import write_whole

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for strategy in result.strategies:
        colour, line = _STYLES.get(strategy.name, ("#333333", "-"))
        steps = np.arange(1, len(strategy.regret) + 1)
        axes.plot(steps, 100 * np.array(strategy.regret), color=colour, linestyle=line, label=strategy.name)
    own = result.adaptive
    axes.plot([own.measurements], [100 * own.regret], "o", color="#c44e52", label="ours, adaptive")
    axes.axhline(1.0, color="#333333", linewidth=0.6)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("measurements a kernel")
    axes.set_ylabel("mean % slower than the best")
    axes.set_title(f"{result.collection}: {result.kernels} held-out kernels")
    axes.legend(fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_whole(Path(path), content.getvalue())
