"""Fit the calibration of a trained cost model: the Gaussian process over its errors, and the bounds of its claims.

The hyperparameters maximize the marginal likelihood (`gaussian_process.py`) of the measured runtimes of each kernel's
leading configurations, on validation programs that the model was not trained on. Each parameter is optimized in turn.

The bound of a claim "within 5 %" (`confidence.py`) is the lowest probability above which claims pass a binomial test of
"at most 5 % are wrong" at significance `level` (learn then test: Angelopoulos et al., 2021). The errors of kernels of
one program, or of one shape on several machines, are correlated. Each such group is therefore judged by the bound of
the other groups (leave-one-group-out), and among the levels at which at most 5 % of these claims are wrong, the one
with the most claims is used. If no level qualifies, the claim is never made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel, program_of
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.ranking import Model
from tilewise.errors import ConfigurationError
from tilewise.tune.search.confidence import START, WITHIN
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters, Numbers, climb

_FIT_CONFIGS = 40  # best-ranked configurations per kernel in the fit; the cost grows with the cube
_DERIVED = ("_sum", "_product")
_MIN_WEIGHT = 0.05  # lower limit of an ARD weight; the upper limit is its inverse

WRONG = 0.05  # allowed share of wrong claims
STAGES = (0, 1, 3, 5, 8)  # numbers of measurements with a separate bound
NEVER = 2.0  # a bound above every probability
_MIN_CLAIMS = 20  # kernels a bound must be tested on; arbitrary
_LEVELS = (0.5, 0.3, 0.1)  # significance levels to try; arbitrary
Flags = npt.NDArray[np.bool_]


def config_logs(config_feat: npt.NDArray[Any], names: Sequence[str]) -> tuple[Numbers, tuple[str, ...]]:
    """Return log2(1 + value) of the settings that vary and differ from each other, and their names.

    A block size occurs as a bound of several tensors; only one of these equal columns remains. Hardware settings come
    last.
    """
    columns_by_values: dict[bytes, int] = {}
    # Equal columns have equal bytes: the last of them remains.
    for column in reversed(range(len(names))):
        values = np.ascontiguousarray(config_feat[:, column])
        if len(values) and not names[column].endswith(_DERIVED) and np.ptp(values) > 0:
            columns_by_values.setdefault(values.tobytes(), column)
    columns = list(columns_by_values.values())
    logs = np.log2(1.0 + np.abs(config_feat[:, columns].astype(np.float64)))
    return logs, tuple(names[column] for column in columns)


@dataclass(frozen=True, eq=False)
class Case:
    """A measured kernel as the tuner would search it: scores, features and recorded runtimes."""

    name: str
    scores: Numbers
    features: Numbers
    runtime: Numbers  # relative to the default's in the same batches
    names: tuple[str, ...] = ()  # names of the features
    default: int | None = None  # index of the default, which a CPU trial times together with the first configuration

    @property
    def best(self) -> float:
        """Runtime of the fastest configuration."""
        return float(self.runtime.min())

    def process(self, hyper: Hyperparameters) -> GaussianProcess:
        """Build the Gaussian process over the kernel's configurations, before any measurement."""
        weights = np.array([hyper.ard.get(name, 1.0) for name in self.names])
        return GaussianProcess(self.scores, self.features * weights if len(weights) else self.features, hyper)


def make_case(model: Model, kernel: Kernel, names: Sequence[str]) -> Case:
    """Score a measured kernel with a model; `names` are the configuration columns."""
    scores = np.asarray(model.score(kernel), dtype=np.float64)
    features, settings = config_logs(kernel.config_feat, names)
    # Collections of CPUs mark the default configuration in a column.
    default_flags = kernel.config_feat[:, list(names).index("default")] if "default" in names else np.zeros(1)
    default = int(np.argmax(default_flags)) if default_flags.any() else None
    return Case(kernel.name, scores, features, kernel.target, names=settings, default=default)


def calibrate(model: Model, kernels: Sequence[Kernel], names: Sequence[str], noise: float = 0.01) -> Hyperparameters:
    """Fit the Gaussian process's hyperparameters and confidence bounds for a model on validation kernels."""
    cases = [make_case(model, kernel, names) for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    if len(cases) < 5:
        raise ConfigurationError(
            f"A calibration is fitted on at least 5 labelled validation kernels; there are {len(cases)}."
        )
    return dataclasses.replace(fit(cases, noise), by_score=is_gpu_space(names))


def is_gpu_space(names: Sequence[str]) -> bool:
    """Tell whether configuration columns with these names are those of a GPU.

    There the model's order beats expected improvement (replay of the H200 collection: 0.22 % loss against 0.41 % after
    5 measurements, 0.03 % against 0.22 % after 10), so that measurements follow it.
    """
    return {"warps", "stages"} <= set(names)


def fit(cases: Sequence[Case], noise: float) -> Hyperparameters:
    """Fit hyperparameters by maximizing the marginal likelihood of the cases."""
    settings = tuple(sorted({name for case in cases for name in case.names} - set(TILE_FEATURES)))
    # Cases with equally many leading configurations are stacked into one array.
    by_count: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_count[min(len(case.scores), _FIT_CONFIGS)].append(case)
    prepared = [_LeadingConfigs.of(same_size, settings) for same_size in by_count.values()]
    best = dataclasses.replace(START, noise=noise, ard=dict.fromkeys(settings, 1.0))
    names = ("coefficient", "coefficient_deviation", "signal", "length_scale", "nugget", *settings)

    def loss(hyper: Hyperparameters) -> float:
        """Return the mean negative log likelihood per kernel."""
        return sum(leading.negative_log_likelihood(hyper) for leading in prepared) / len(cases)

    return climb(best, names, _scale_parameter, loss, 0.15)[1]


def _scale_parameter(hyper: Hyperparameters, name: str, factor: float) -> Hyperparameters:
    """Return hyperparameters with one parameter or ARD weight multiplied by a factor, within its limits."""
    if name in hyper.ard:
        weight = min(max(hyper.ard[name] * factor, _MIN_WEIGHT), 1 / _MIN_WEIGHT)
        return dataclasses.replace(hyper, ard={**hyper.ard, name: weight})
    return dataclasses.replace(hyper, **{name: max(1e-3, getattr(hyper, name) * factor)})


@dataclass(frozen=True, eq=False)
class _LeadingConfigs:
    """The n best-ranked configurations of several cases, stacked for batched linear algebra.

    `squares` are squared distances: one matrix per hardware setting, and a last one for all tile settings together.
    """

    guess: Numbers  # (cases, n) scores relative to the best-ranked one
    logs: Numbers  # (cases, n) log runtimes
    squares: Numbers  # (settings + 1, cases, n, n)
    settings: tuple[str, ...]

    @classmethod
    def of(cls, cases: Sequence[Case], settings: tuple[str, ...]) -> _LeadingConfigs:
        """Stack the leading configurations of cases that have equally many."""
        orders = [np.argsort(case.scores, kind="stable")[:_FIT_CONFIGS] for case in cases]
        count = len(orders[0])
        squares = np.zeros((len(settings) + 1, len(cases), count, count))
        # Each hardware setting has a separate weight; the others share the last matrix.
        for number, (case, order) in enumerate(zip(cases, orders, strict=True)):
            names = case.names or ("",) * case.features.shape[1]
            for name, column in zip(names, case.features[order].T, strict=True):
                position = settings.index(name) if name in settings else -1
                squares[position, number] += (column[:, None] - column[None, :]) ** 2
        scores, runtimes = ([getattr(case, name) for case in cases] for name in ("scores", "runtime"))
        guess = np.stack([score[order] - score[order[0]] for score, order in zip(scores, orders, strict=True)])
        logs = np.log([runtime[order] for runtime, order in zip(runtimes, orders, strict=True)])
        return cls(guess, logs, squares, settings)

    def negative_log_likelihood(self, hyper: Hyperparameters) -> float:
        """Return the sum over cases; each kernel's mean log runtime is integrated out."""
        weights = np.array([hyper.ard[name] for name in self.settings] + [1.0])
        squared = np.tensordot(weights**2, self.squares, axes=1)
        # Squared exponential kernel with ARD weights, plus an uncertain slope of the scores.
        covariance = hyper.signal**2 * np.exp(-0.5 * squared / hyper.length_scale**2)
        # The constant is the prior variance of the level: large, so that the level is free.
        covariance += hyper.coefficient_deviation**2 * self.guess[:, :, None] * self.guess[:, None, :] + 25.0
        diagonal = np.arange(self.guess.shape[1])
        covariance[:, diagonal, diagonal] += hyper.nugget**2 + hyper.noise**2
        # -log N(logs | mean, covariance) up to a constant, from the Cholesky factor.
        root = np.linalg.cholesky(covariance)
        z = np.linalg.solve(root, (self.logs - hyper.coefficient * self.guess)[:, :, None])
        return float(0.5 * np.square(z).sum() + np.log(root[:, diagonal, diagonal]).sum())


def replay_stages(case: Case, hyper: Hyperparameters) -> tuple[list[float], list[float]]:
    """Replay the tuning of a kernel by the Gaussian process on recorded runtimes.

    Returns two values for each number of measurements in `STAGES`: the estimated probability that the choice is within
    5 % of the fastest, and its true slowdown.
    """
    process, logs = case.process(hyper), np.log(case.runtime)
    chances, slower = [], []
    for count in range(STAGES[-1] + 1):
        index = process.next() if count else None
        if index is not None:
            process.observe(index, float(logs[index]))
        # A CPU trial times the default together with the first configuration.
        if count == 1 and case.default is not None and case.default not in process.log_runtimes:
            process.observe(case.default, float(logs[case.default]))
        if count in STAGES:
            best = process.first() if process.best is None else process.best
            chances.append(process.chance_within(WITHIN))
            slower.append(float(case.runtime[0 if best is None else best]) / case.best - 1.0)
    return chances, slower


def fit_confidence_bounds(cases: Sequence[Case], hyper: Hyperparameters, groups: Sequence[str]) -> dict[int, float]:
    """Fit the probability above which a claim is made, by measurements; `groups` have correlated errors."""
    chances, slower = (np.array(rows) for rows in zip(*(replay_stages(case, hyper) for case in cases), strict=True))
    claimed, bounds = np.full(len(cases), np.nan), dict[int, float]()
    for stage, count in enumerate(STAGES):
        valid = _still_valid(claimed, slower[:, stage])
        close = slower[:, stage] <= WITHIN
        bounds[count], is_claimed = _fit_bound(chances[:, stage], close, valid, np.array(groups))
        claimed = np.where(valid, claimed, np.where(is_claimed, slower[:, stage], np.nan))
    return bounds


def evaluate_claims(cases: Sequence[Case], hyper: Hyperparameters) -> dict[int, dict[str, float]]:
    """Measure how often claims ("within 5 % of the fastest") are right, for each number of measurements.

    `said` is the share of kernels with a claim, `right` the share of correct claims, and `close` the share of all
    choices within 5 %.
    """
    chances, slower = (np.array(rows) for rows in zip(*(replay_stages(case, hyper) for case in cases), strict=True))
    claimed, results = np.full(len(cases), np.nan), dict[int, dict[str, float]]()
    for stage, count in enumerate(STAGES):
        valid, close = _still_valid(claimed, slower[:, stage]), slower[:, stage] <= WITHIN
        is_claimed = valid | (chances[:, stage] >= hyper.confidence_bounds.get(count, NEVER))
        claimed = np.where(valid, claimed, np.where(is_claimed, slower[:, stage], np.nan))
        results[count] = {"said": float(is_claimed.mean()), "close": float(close.mean())}
        results[count] |= {"right": float(close[is_claimed].mean())} if is_claimed.any() else {}
    return results


def _still_valid(claimed: Numbers, slower: Numbers) -> Flags:
    """Tell, per kernel, whether the choice claimed earlier, now this much `slower`, is still within 5 %."""
    return np.asarray(1.0 + claimed <= (1.0 + WITHIN) * (1.0 + slower))


def error_groups(names: Sequence[str], training_names: Sequence[str]) -> list[str]:
    """Name each kernel's group for cross-validation: its program if new to the model, else its shape."""
    programs = [program_of(name) for name in names]
    training_programs = {program_of(name) for name in training_names}
    return [name.rpartition("_")[2] for name in names] if training_programs & set(programs) else programs


def claims_text(results: Mapping[int, Mapping[str, float]]) -> str:
    """Summarize the result of `evaluate_claims` in a sentence."""
    clauses = [
        ("unmeasured" if not count else f"after {count}")
        + (f" claimed for {row['said']:.0%}, right in {row['right']:.1%}" if "right" in row else " never claimed")
        for count, row in results.items()
    ]
    return "within 5 % (calibrated): " + "; ".join(clauses)


def _fit_bound(chance: Numbers, close: Flags, valid: Flags, groups: npt.NDArray[Any]) -> tuple[float, Flags]:
    """Fit the bound for one number of measurements; also return leave-one-group-out claims."""
    bound, best_claims = NEVER, valid
    for level in _LEVELS:
        is_claimed = valid.copy()
        for group in np.unique(groups):
            in_group = groups == group
            others = ~in_group
            is_claimed[in_group] |= chance[in_group] >= _bound(chance[others], close[others], valid[others], level)
        # Take the level with the most claims among those whose held-out claims pass the test themselves.
        count = is_claimed.sum()
        max_wrong = _max_wrong_claims(len(is_claimed), _LEVELS[0])[count]
        if count > best_claims.sum() and (is_claimed & ~close).sum() <= max_wrong:
            bound, best_claims = _bound(chance, close, valid, level), is_claimed
    return bound, best_claims


def _bound(chance: Numbers, close: Flags, valid: Flags, level: float) -> float:
    """Return the lowest probability above which few enough claims, including those still valid, were wrong."""
    # Admit claims in the order of decreasing probability, and count the wrong ones.
    order = np.argsort(-chance, kind="stable")
    order = order[~valid[order]]
    wrong = (valid & ~close).sum() + np.cumsum(~close[order])
    claims = valid.sum() + np.arange(1, len(order) + 1)
    last = np.append(np.diff(chance[order]) < 0, True)[: len(order)]  # a bound admits all ties
    passes = (wrong <= _max_wrong_claims(len(chance), level)[claims]) & (claims >= _MIN_CLAIMS) & last
    enough = np.flatnonzero(passes)
    return float(chance[order[enough[-1]]]) if len(enough) else NEVER


@functools.lru_cache(64)
def _max_wrong_claims(max_claims: int, level: float) -> npt.NDArray[np.int64]:
    """Return, for n = 0, 1, ... `max_claims` claims, how many may be wrong.

    It is the largest w with P(Binomial(n, WRONG) <= w) <= level, or -1 if not even w = 0 qualifies.
    """
    allowed = []
    for claims in range(max_claims + 1):
        # Sum the binomial probabilities of 0, 1, 2, ... wrong claims; each follows from the one before.
        wrong, chance = -1, (1 - WRONG) ** claims
        total = chance
        while total <= level and wrong < claims:
            wrong += 1
            chance *= (claims - wrong) / (wrong + 1) * WRONG / (1 - WRONG)
            total += chance
        allowed.append(wrong)
    return np.array(allowed)
