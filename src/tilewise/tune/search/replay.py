"""`replay`: compare how fast search strategies reach a good configuration, using recorded runtimes only.

Each strategy tunes every held-out kernel again; a measurement is a lookup in the collection. The comparison takes
seconds, needs no hardware and is deterministic. Regret is the relative slowdown of the best configuration measured so
far against the best in the collection.

Every mechanism of the search is compared with the simpler one it must beat: the paired difference of their regrets,
with a 95 % bootstrap interval over kernels.

`replay_without_model` does the same for kernels without a cost model: the situation of `autotune` with a user's own
kernel, and of the tuner on a machine without a model. The problems of a family come one after the other in random
order. The first three get a large budget, since nothing is known yet; each later one gets a few measurements and may
use the earlier ones. Four orders of measurement are compared: random, by the mean runtime over earlier problems, and by
a Gaussian process over one problem or over several problems.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._wording import pluralize
from tilewise.costmodel.baselines import Analytical
from tilewise.costmodel.data.collection import MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import Dataset, find_collection, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.shards import track
from tilewise.costmodel.metrics import bootstrap
from tilewise.costmodel.models.files import model_path, shipped_file
from tilewise.costmodel.models.scorer import load_scorer
from tilewise.costmodel.ranking import Model
from tilewise.errors import ConfigurationError, TilewiseError, UnavailableError
from tilewise.tune.choose.decide import search
from tilewise.tune.search.calibration import (
    Case,
    calibrate,
    config_logs,
    error_groups,
    evaluate_claims,
    fit_confidence_bounds,
    make_case,
)
from tilewise.tune.search.confidence import load_calibration, save_calibration
from tilewise.tune.search.gaussian_process import Earlier, GaussianProcess, Hyperparameters, Numbers

MOST = 20  # measurements per kernel
SIMPLE, OURS = "the model's order, first k", "ours, by expected improvement"
Curves = npt.NDArray[np.float64]  # (kernels, measurements)
_RANDOM_ORDERS = 20  # per kernel, averaged; arbitrary
_MAX_NOISE = 0.01  # relative, of a reading; more is the noise of a shared machine
COMPARED = (1, 2, 3, 5, 10, 20)  # numbers of measurements in the comparison tables
_RESAMPLES = 4000  # of the bootstrap; arbitrary

FIRST, FIRST_BUDGET, BUDGET = 3, 20, 5  # first problems, their measurements, and those of later problems
RANDOM, MEAN, ALONE, OVER = (
    "random", "the mean over earlier problems", "a process of one problem", "a process over problems",
)  # fmt: skip
_HYPER = Hyperparameters()
_NEAREST = 12  # earlier problems that the process is conditioned on; as in choose/memory.py


@dataclass(frozen=True)
class Strategy:
    """A search strategy and its mean regret after 1, 2, ... measurements."""

    name: str
    regret: list[float]
    note: str = ""


@dataclass(frozen=True)
class StrategyComparison:
    """Mean regret that a mechanism saves over a simpler one after some measurements, with its 95 % interval."""

    mechanism: str
    simpler: str
    measurements: int
    saving: float
    low: float
    high: float


@dataclass(frozen=True)
class Replay:
    """Results of replaying several search strategies on recorded runtimes."""

    collection: str
    split: str
    kernels: int
    configs: int
    strategies: list[Strategy]
    comparisons: list[StrategyComparison]
    first_choice: float  # geometric mean of best / chosen, without any measurement
    default: float  # mean regret of the default configuration, which needs no measurement
    notes: list[str] = field(default_factory=list)
    sure: dict[int, dict[str, float]] = field(default_factory=dict)  # the tuner's claims by stage

    def strategy(self, name: str) -> Strategy:
        """Return the strategy of that name."""
        return next(strategy for strategy in self.strategies if strategy.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Convert to the JSON of `tilewise tiles replay --json`."""
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
    """Simulate tuning on the recorded kernels of a split by several strategies, and compare their regret.

    `model` is a model or its file; by default the one shipped for the collection. If it has no calibration, one is
    fitted on the validation kernels. `trees` trains gradient-boosted trees for comparison, if LightGBM is installed.

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
    scorer, stored_calibration = _model(name, model)
    calibration = calibration or stored_calibration
    names = data.schema.config_features
    if calibration is None:
        notes.append("the model comes without a calibration; one was fitted on the validation kernels")
        say(notes[-1])
        calibration = calibrate(scorer, list(data.valid), names)
    # Score every kernel once; all strategies share the scores.
    cases = [make_case(scorer, kernel, names) for kernel in track(kernels, "ranking", len(kernels), progress)]
    say(f"{pluralize(len(cases), 'kernel')}; replaying the tuner")
    # Baselines without the model.
    formula = Analytical(data.train if len(data.train) else data.valid)
    curves: dict[str, Curves] = {
        "random": _random(cases, most, seed),
        "exhaustive": np.array([regrets(case.runtime, range(len(case.runtime)), most) for case in cases]),
        "analytical": _ranked(cases, [formula.score(kernel) for kernel in kernels], most),
    }
    if trees:
        from tilewise.costmodel.models.gbdt import train_gbdt

        say("training the trees")
        try:
            ensemble = train_gbdt(data, seed)
            curves["GBDT, first k"] = _ranked(cases, [ensemble.score(kernel) for kernel in kernels], most)
        except UnavailableError:
            notes.append("LightGBM is not installed, so there are no trees to compare with")
    # The model's ranking alone, then with the Gaussian process.
    curves[SIMPLE] = _ranked(cases, [case.scores for case in cases], most)
    curves[OURS] = _by_expected_improvement(cases, calibration, most, progress)
    # Quality of the first choice: fastest / chosen.
    best = [case.best / float(case.runtime[int(np.argmin(case.scores))]) for case in cases]
    return Replay(
        collection=name,
        split=split,
        kernels=len(cases),
        configs=sum(len(case.runtime) for case in cases),
        strategies=[Strategy(label, [float(value) for value in rows.mean(axis=0)]) for label, rows in curves.items()],
        comparisons=compare_curves(curves, OURS, SIMPLE),
        first_choice=float(np.exp(np.mean(np.log(best)))),
        default=float(np.mean([max(0.0, 1.0 / case.best - 1.0) for case in cases])),
        notes=notes,
        sure=evaluate_claims(cases, calibration) if calibration.confidence_bounds else {},
    )


def compare_curves(curves: Mapping[str, Curves], mechanism: str, simpler: str) -> list[StrategyComparison]:
    """Compute the regret that strategy `mechanism` saves over `simpler`, paired by kernel, with bootstrap intervals."""
    comparisons = []
    # Paired by kernel, so that differences between kernels cancel.
    saved = curves[simpler] - curves[mechanism]
    for count in COMPARED:
        if count <= saved.shape[1]:
            gain = bootstrap(saved[:, count - 1], draws=_RESAMPLES)
            comparisons.append(StrategyComparison(mechanism, simpler, count, gain.mean, gain.low, gain.high))
    return comparisons


def _model(name: str, model: str | Path | Model | None) -> tuple[Model, Hyperparameters | None]:
    """Load a model by file or the shipped one of collection `name`, with its calibration if it has one."""
    if model is not None and not isinstance(model, str | Path):
        return model, None  # an object without a file has no stored calibration
    path = shipped_file(Path(name).stem if name.endswith(".npz") else name) if model is None else model_path(model)
    return load_scorer(path), load_calibration(path)


def recalibrate(
    collection: str,
    model: Path | None = None,
    out: Path | None = None,
    *,
    keep: Callable[[Kernel], bool] = lambda kernel: True,
) -> Path:
    """Fit the calibration of a model to its collection's validation kernels and save it.

    Only kernels for which `keep` returns True are used. The file is saved next to a user's model, in the cache folder
    for a shipped model, or as `out`.
    """
    path = shipped_file(collection) if model is None else model_path(model)
    data = load_dataset(collection)
    valid = [kernel for kernel in data.valid if keep(kernel)]
    scorer, names = load_scorer(path), data.schema.config_features
    hyper = calibrate(scorer, valid, names, _noise(collection))
    cases = [make_case(scorer, kernel, names) for kernel in valid if kernel.labelled]
    # The bounds of "within 5 %" depend on the fitted process, so they come second.
    bounds = fit_confidence_bounds(cases, hyper, error_groups([case.name for case in cases], data.train.names))
    return save_calibration(path, dataclasses.replace(hyper, confidence_bounds=bounds), out)


def _noise(collection: str) -> float:
    """Return the relative noise of one measurement: a collection's median deviation, within plausible limits."""
    try:
        measured_collection = read_collection(find_collection(collection))
    except (TilewiseError, OSError):  # a user's folder has no deviations
        return _MAX_NOISE
    deviations = np.concatenate(
        [kernel.deviation for kernels in measured_collection.splits.values() for kernel in kernels]
    )
    return float(np.clip(np.nanmedian(deviations), 0.001, _MAX_NOISE)) if np.isfinite(deviations).any() else _MAX_NOISE


def regrets(runtime: npt.NDArray[Any], order: Sequence[int] | npt.NDArray[Any], most: int) -> npt.NDArray[np.float64]:
    """Return the best choice's slowdown against the fastest after 1 to `most` measurements in this order."""
    # Best runtime so far, relative to the best of all.
    reached = np.minimum.accumulate(runtime[np.asarray(order[:most], dtype=np.int64)]) / runtime.min() - 1
    return np.pad(reached, (0, max(0, most - len(reached))), mode="edge")


def _random(cases: Sequence[Case], most: int, seed: int) -> Curves:
    """Return each kernel's regrets for random orders, averaged over several orders: (kernels, most)."""
    rng = np.random.default_rng(seed)

    def mean_curve(runtime: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Average the regrets of one kernel over several random orders."""
        curves = [regrets(runtime, rng.permutation(len(runtime)), most) for _ in range(_RANDOM_ORDERS)]
        return np.asarray(np.mean(curves, axis=0))

    return np.array([mean_curve(case.runtime) for case in cases])


def _ranked(cases: Sequence[Case], scores: Sequence[npt.NDArray[Any]], most: int) -> Curves:
    """Return each kernel's regrets if its configurations are measured in the order of their scores."""
    orders = [np.argsort(score, kind="stable") for score in scores]
    return np.array([regrets(case.runtime, order, most) for case, order in zip(cases, orders, strict=True)])


def _by_expected_improvement(cases: Sequence[Case], hyper: Hyperparameters, most: int, progress: bool) -> Curves:
    """Return each kernel's regrets if a Gaussian process proposes by expected improvement."""

    def order(case: Case) -> list[int]:
        """Return the order in which the process measures one kernel's configurations."""
        # Expected improvement also for GPU models, whose calibration measures in the order of scores.
        process = case.process(dataclasses.replace(hyper, by_score=False))
        return [step.index for step in search(process, lambda i: float(case.runtime[i]), most)[0]]

    orders = [order(case) for case in track(cases, "replaying", len(cases), progress)]
    return np.array([regrets(case.runtime, order, most) for case, order in zip(cases, orders, strict=True)])


@dataclass(frozen=True, eq=False)
class _Problem:
    """A recorded problem, and the indices of the configurations that were "measured" so far."""

    sizes: Numbers
    features: Numbers  # (configurations, settings in doublings)
    runtime: Numbers
    order: list[int]


Order = Callable[[_Problem, Sequence[_Problem], int, np.random.Generator], Sequence[int]]


def replay_without_model(collection: str = "h200", most_problems: int = 24, seed: int = 0) -> dict[str, Any]:
    """Replay tuning without a cost model on every family of a collection with enough kernels.

    The result has `strategies` with mean regrets over the problems after the first three of each family, and their
    paired `comparisons`.

    >>> replay_without_model("cpu")["problems"]  # doctest: +SKIP
    70
    """
    families = _families(collection, most_problems, seed)
    curves = {
        name: np.array([row for family in families for row in _replay_family(family, order, seed)])
        for name, order in _ORDERS.items()
    }
    pairs = ((MEAN, RANDOM), (OVER, MEAN), (OVER, ALONE))
    return {
        "collection": collection,
        "problems": len(curves[RANDOM]),
        "strategies": [Strategy(name, [float(v) for v in rows.mean(axis=0)]) for name, rows in curves.items()],
        "comparisons": [comparison for pair in pairs for comparison in compare_curves(curves, *pair)],
    }


def _families(collection: str, max_problems: int, seed: int) -> list[list[_Problem]]:
    """Sample up to `max_problems` problems of each family; families with too few problems are left out."""
    data = read_collection(find_collection(collection))
    by_family: dict[str, list[MeasuredKernel]] = defaultdict(list)
    # Validation and test kernels are mixed; the train split is not used.
    for split in ("valid", "test"):
        for kernel in data.splits[split]:
            by_family[str(kernel.problem["family"])].append(kernel)
    rng = np.random.default_rng(seed)
    families = []
    for members in by_family.values():
        sample = [members[i] for i in rng.permutation(len(members))[:max_problems]]
        if len(sample) >= 2 * FIRST:
            families.append(_problems(sample, data.schema.config_features))
    return families


def _problems(members: Sequence[MeasuredKernel], names: Sequence[str]) -> list[_Problem]:
    """Convert measured kernels to problems, whose features are the log2 settings that vary."""
    tables = [m.kernel.config_feat for m in members]
    varying = [c for c, name in enumerate(names) if name != "default" and any(np.ptp(t[:, c]) > 0 for t in tables)]
    logs, _ = config_logs(np.concatenate(tables)[:, varying], [names[column] for column in varying])
    features = np.split(logs, np.cumsum([len(table) for table in tables])[:-1])
    sizes = [[np.log2(1 + v) for _, v in sorted(m.problem.items()) if isinstance(v, int)] for m in members]
    return [
        _Problem(np.array(problem_sizes), problem_features, m.kernel.runtime.astype(np.float64), [])
        for m, problem_sizes, problem_features in zip(members, sizes, features, strict=True)
    ]


def _replay_family(family: Sequence[_Problem], order: Order, seed: int) -> list[npt.NDArray[np.float64]]:
    """Tune a family's problems one after the other with a strategy; return the regrets after the first three."""
    rng, rows = np.random.default_rng(seed), []
    past: list[_Problem] = []
    for number, problem in enumerate(family):
        # Each problem sees the readings of the problems before it.
        budget = FIRST_BUDGET if number < FIRST else BUDGET
        indices = list(order(problem, past, budget, rng))
        past.append(dataclasses.replace(problem, order=indices))
        if number >= FIRST:
            rows.append(regrets(problem.runtime, indices, BUDGET))
    return rows


def _at_random(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
    """Order a problem's configurations at random."""
    return [int(index) for index in rng.permutation(len(problem.runtime))[:budget]]


def _by_mean(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
    """Order by mean log slowdown in earlier problems; configurations not tried there count as the median."""
    if len(past) < FIRST:
        return _at_random(problem, past, budget, rng)
    total, count = np.zeros(len(problem.runtime)), np.zeros(len(problem.runtime))
    for other in past:
        logs = np.log(other.runtime[other.order])
        for index, excess in zip(other.order, logs - logs.min(), strict=True):
            matches = (problem.features == other.features[index]).all(axis=1)
            total[matches] += excess
            count[matches] += 1
    # Untried configurations rank in the middle.
    mean = total / np.maximum(count, 1)
    mean[count == 0] = np.median(mean[count > 0]) if count.any() else 0.0
    return [int(index) for index in np.argsort(mean, kind="stable")[:budget]]


def _by_process(over_problems: bool) -> Order:
    """Return a strategy by expected improvement; `over_problems` uses the measurements of earlier problems."""

    def order(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
        """Return at most `budget` configurations of a problem in the order in which the process measures them."""
        earlier = _earlier_readings(problem, past) if over_problems and past else None
        process = GaussianProcess(
            np.zeros(len(problem.runtime)), problem.features, _HYPER, earlier, problem.sizes if earlier else None
        )
        return [step.index for step in search(process, lambda index: float(problem.runtime[index]), budget)[0]]

    return order


def _earlier_readings(problem: _Problem, past: Sequence[_Problem]) -> Earlier:
    """Return the measurements of the most similar earlier problems."""
    nearest = sorted(past, key=lambda other: float(np.square(other.sizes - problem.sizes).sum()))[:_NEAREST]
    # One row per reading: the problem, its sizes, the configuration, no score, and the log runtime.
    counts = [len(other.order) for other in nearest]
    return Earlier(
        np.repeat(np.arange(len(nearest)), counts),
        np.repeat([other.sizes for other in nearest], counts, axis=0),
        np.concatenate([other.features[other.order] for other in nearest]),
        np.zeros(sum(counts)),
        np.log(np.concatenate([other.runtime[other.order] for other in nearest])),
    )


_ORDERS: dict[str, Order] = {
    RANDOM: _at_random,
    MEAN: _by_mean,
    ALONE: _by_process(over_problems=False),
    OVER: _by_process(over_problems=True),
}
