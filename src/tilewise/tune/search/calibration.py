"""Fitting the tuner's prior and its stopping rule to a trained model, and keeping them beside the model's file.

Both are fitted on the validation programs, which the model was not trained on. The prior is the likeliest one given
how the model's leading configurations really ran. The rule's threshold for stopping is the one that keeps the average
number of measurements within what is asked; the one for "sure" is the largest at which the claim, made the first time
it could be, was right so often that, with nine chances in ten, it is right for 95 % of all kernels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tilewise
from tilewise._files import read_input, read_json_input, write_whole
from tilewise._system import cache_folder
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES
from tilewise.costmodel.rank import Model
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.tune.search.gaussian_process import Belief, Numbers, Prior
from tilewise.tune.search.loop import Found, Rule, search

WITHIN = 0.01
_MOST_MODEL_BYTES = 1 << 30
_PACKAGE = Path(tilewise.__file__).resolve().parent
_FITTED_ON = 40  # leaders of a kernel that the prior is fitted on: those that matter, and few enough to be quick
_MEASUREMENTS = 2.95  # on average
_FIRMNESS = 3.0
# Likelihood speaks for all of the leading configurations, and a few hopeless ones make it wide; where the best few are
# concerned errors are smaller. How much smaller is decided by what the search then finds; claims stay with the likely.
_SCALES = ((1.0, 1.0, 1.0), (0.5, 0.7, 1.0), (0.3, 1.0, 1.0), (0.3, 0.5, 0.3), (1.0, 0.1, 0.3), (0.3, 0.1, 0.3))
_MISSES, _DOUBT = 0.05, 0.1  # a claim is wrong less often, says what held, with so much doubt about that
_LIKELY = 0.5  # what is believed to be more likely wrong than right is not claimed, whatever held on a few kernels
_LOOK = 8  # measurements within which a claim is tried when its threshold is set
_DERIVED = ("_sum", "_product")
_LEAST_WEIGHT = 0.05  # of a setting that hardly matters; its inverse is the most


@dataclass(frozen=True)
class Calibration:
    """A prior, a rule, and the model file they belong to (by digest); `kernels` is how many they were fitted on, and
    `regret` how much slower than the best the tuner's choices were on those, in the mean."""

    prior: Prior
    rule: Rule
    model: str = ""
    kernels: int = 0
    regret: float = 0.0


def config_logs(config_feat: npt.NDArray[Any], names: Sequence[str]) -> tuple[Numbers, tuple[str, ...]]:
    """The configurations as the belief compares them, each setting once, in doublings; and the settings' names.

    A block size is a bound of several tensors, and kept as one of them; the hardware's settings come last.
    """
    kept: dict[bytes, int] = {}
    for column in reversed(range(len(names))):
        values = np.ascontiguousarray(config_feat[:, column])
        if len(values) and not names[column].endswith(_DERIVED) and np.ptp(values) > 0:
            kept.setdefault(values.tobytes(), column)
    columns = list(kept.values())
    logs = np.log2(1.0 + np.abs(config_feat[:, columns].astype(np.float64)))
    return logs, tuple(names[column] for column in columns)


@dataclass(frozen=True, eq=False)
class Case:
    """A measured kernel as the tuner would meet it."""

    name: str
    scores: Numbers
    features: Numbers
    runtime: Numbers  # nanoseconds, over the default's in the same batches
    names: tuple[str, ...] = ()  # of the features

    @property
    def best(self) -> float:
        return float(self.runtime.min())

    def belief(self, prior: Prior) -> Belief:
        return Belief(self.scores, prior.scaled(self.features, self.names), prior)


def make_case(model: Model, kernel: Kernel, names: Sequence[str]) -> Case:
    """A kernel with its scores and what it really took."""
    scores = np.asarray(model.score(kernel), dtype=np.float64)
    features, settings = config_logs(kernel.config_feat, names)
    return Case(kernel.name, scores, features, kernel.target, settings)


def play(case: Case, prior: Prior, rule: Rule, patience: int = 1) -> Found:
    """The search on recorded runtimes."""
    return search(case.belief(prior), lambda index: float(case.runtime[index]), rule, patience=patience)


def calibrate(model: Model, kernels: Sequence[Kernel], names: Sequence[str], noise: float = 0.01) -> Calibration:
    """Fit prior and rule to the validation kernels."""
    cases = [make_case(model, kernel, names) for kernel in kernels if kernel.labelled and kernel.n_configs > 1]
    if len(cases) < 5:
        raise ConfigurationError(
            f"A prior is fitted on at least 5 labelled validation kernels; there are {len(cases)}."
        )
    likeliest = dataclasses.replace(fit_prior(cases, noise), firmness=_FIRMNESS)
    found: list[tuple[float, Prior, Rule]] = []
    for scales in _SCALES:
        prior = likeliest.tightened(*scales)
        played = _played(cases, prior)
        for least in (1, 2):
            rule = fit_rule(played, least)
            found.append((_regret_at(played, rule), prior, rule))
    regret, prior, rule = min(found, key=lambda one: one[0])
    return Calibration(prior, rule, "", len(cases), regret)


def _played(cases: Sequence[Case], prior: Prior) -> list[tuple[Found, Case]]:
    """Every case played on and on."""
    long = Rule(gain=0.0, sure=1e-12, budget=_LOOK)  # told of every doubt, stopped by none
    return [(play(case, prior, long), case) for case in cases]


def _regret_at(played: Sequence[tuple[Found, Case]], rule: Rule) -> float:
    """Mean slowdown if the search had stopped by this rule."""
    total = 0.0
    for found, case in played:
        fastest = math.inf
        for count, step in enumerate(found.steps, start=1):
            fastest = min(fastest, step.runtime_ns or math.inf)
            if step.gain < rule.gain and count >= rule.least:
                break
        total += fastest / case.best - 1
    return total / len(played)


def fit_prior(cases: Sequence[Case], noise: float) -> Prior:
    """The likeliest prior, found by trying each number larger and smaller until nothing helps."""
    settings = tuple(sorted({name for case in cases for name in case.names} - set(TILE_FEATURES)))
    by_count: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_count[min(len(case.scores), _FITTED_ON)].append(case)
    prepared = [_Leading.of(alike, settings) for alike in by_count.values()]
    best = Prior(noise=noise, weights=dict.fromkeys(settings, 1.0))
    least, step = _surprise(prepared, best), 0.7
    while step > 0.15:
        moved = False
        for name in ("slope", "slope_error", "spread", "length", "own", *settings):
            for factor in (math.exp(step), math.exp(-step)):
                tried = _changed(best, name, factor)
                value = _surprise(prepared, tried)
                if value < least - 1e-6:
                    best, least, moved = tried, value, True
                    break
        if not moved:
            step /= 2
    return best


def _changed(prior: Prior, name: str, factor: float) -> Prior:
    if name in prior.weights:
        weight = min(max(prior.weights[name] * factor, _LEAST_WEIGHT), 1 / _LEAST_WEIGHT)
        return dataclasses.replace(prior, weights={**prior.weights, name: weight})
    return dataclasses.replace(prior, **{name: max(1e-3, getattr(prior, name) * factor)})


@dataclass(frozen=True, eq=False)
class _Leading:
    """The first so many configurations of several cases: scores above the first, log runtimes, and how far apart they
    are, squared: in each of the hardware's settings, and last in all else."""

    guess: Numbers  # (cases, so many)
    logs: Numbers
    squares: Numbers  # (settings + 1, cases, so many, so many)
    settings: tuple[str, ...]

    @classmethod
    def of(cls, cases: Sequence[Case], settings: tuple[str, ...]) -> _Leading:
        orders = [np.argsort(case.scores, kind="stable")[:_FITTED_ON] for case in cases]
        count = len(orders[0])
        squares = np.zeros((len(settings) + 1, len(cases), count, count))
        for number, (case, order) in enumerate(zip(cases, orders, strict=True)):
            names = case.names or ("",) * case.features.shape[1]
            for name, column in zip(names, case.features[order].T, strict=True):
                place = settings.index(name) if name in settings else -1
                squares[place, number] += (column[:, None] - column[None, :]) ** 2
        scores, runtimes = ([getattr(case, name) for case in cases] for name in ("scores", "runtime"))
        guess = np.stack([score[order] - score[order[0]] for score, order in zip(scores, orders, strict=True)])
        logs = np.log([runtime[order] for runtime, order in zip(runtimes, orders, strict=True)])
        return cls(guess, logs, squares, settings)

    def surprise(self, prior: Prior) -> float:
        """Negative log likelihood, with the level of each kernel free."""
        weights = np.array([prior.weights[name] for name in self.settings] + [1.0])
        squared = np.tensordot(weights**2, self.squares, axes=1)
        covariance = prior.spread**2 * np.exp(-0.5 * squared / prior.length**2)
        covariance += prior.slope_error**2 * self.guess[:, :, None] * self.guess[:, None, :] + 25.0
        places = np.arange(self.guess.shape[1])
        covariance[:, places, places] += prior.own**2 + prior.noise**2
        root = np.linalg.cholesky(covariance)
        z = np.linalg.solve(root, (self.logs - prior.slope * self.guess)[:, :, None])
        return float(0.5 * np.square(z).sum() + np.log(root[:, places, places]).sum())


def _surprise(prepared: Sequence[_Leading], prior: Prior) -> float:
    return sum(leading.surprise(prior) for leading in prepared) / sum(len(leading.guess) for leading in prepared)


def fit_rule(played: Sequence[tuple[Found, Case]], least: int = 1) -> Rule:
    """The stopping threshold for the wanted number of measurements, and the threshold for a claim."""
    return Rule(gain=_stop_at(played, least), sure=_sure_below(played), least=least)


def _stop_at(played: Sequence[tuple[Found, Case]], least: int) -> float:
    """The smallest expected saving to go on for, within the measurements wanted."""
    for gain in np.geomspace(1e-4, 1.0, 81):
        counts = [
            next((n for n, s in enumerate(found.steps, start=1) if s.gain < gain and n >= least), len(found.steps))
            for found, _ in played
        ]
        if np.mean(counts) <= _MEASUREMENTS:
            return float(gain)
    return 10.0  # never go on


def _sure_below(played: Sequence[tuple[Found, Case]]) -> float:
    """The largest chance of a miss at which claims held; 0 where there are too few kernels to say so."""
    chosen = 0.0
    for chance in np.geomspace(1e-3, _LIKELY, 61):
        claims = [_claim(found, case, float(chance)) for found, case in played]
        made = [right for right in claims if right is not None]
        if _chance_of_so_few(sum(not right for right in made), len(made)) <= _DOUBT:
            chosen = float(chance)
    return chosen


def _chance_of_so_few(misses: int, claims: int) -> float:
    """How likely at most so many misses are where the share of misses is just too large."""
    return sum(
        math.comb(claims, missed) * _MISSES**missed * (1 - _MISSES) ** (claims - missed) for missed in range(misses + 1)
    )


def _claim(found: Found, case: Case, chance: float) -> bool | None:
    """Whether the first claim under this threshold would have been right; None if none would have been made."""
    fastest = math.inf
    for step in found.steps:
        fastest = min(fastest, step.runtime_ns or math.inf)
        if step.chance <= chance:
            return fastest <= case.best * (1 + WITHIN)
    return None


def digest_of(path: Path) -> str:
    """Sixteen digits that stand for a model file."""
    return hashlib.sha256(read_input(path, _MOST_MODEL_BYTES)).hexdigest()[:16]


def calibration_path(model_file: Path) -> Path:
    return model_file.with_suffix(".tuning.json")


def own_calibration_path(model_file: Path) -> Path:
    """Where a calibration goes that was made here: beside a model of one's own; in the cache folder for one that came
    with the package, in which nothing is ever written."""
    if model_file.resolve().is_relative_to(_PACKAGE):
        return cache_folder() / "tune" / calibration_path(model_file).name
    return calibration_path(model_file)


def save_calibration(model_file: Path, calibration: Calibration, path: Path | None = None) -> Path:
    """Write a calibration of a model where it belongs, or to `path`."""
    kept = dataclasses.replace(calibration, model=digest_of(model_file))
    path = own_calibration_path(model_file) if path is None else path
    write_whole(path, json.dumps(dataclasses.asdict(kept), indent=1) + "\n")
    return path


def load_calibration(model_file: Path) -> Calibration | None:
    """The calibration of a model file, one's own first; None where there is none, it cannot be read, or it is another
    model's."""
    paths = dict.fromkeys((own_calibration_path(model_file), calibration_path(model_file)))
    return next((found for path in paths if (found := _calibration_in(path, model_file)) is not None), None)


def _calibration_in(path: Path, model_file: Path) -> Calibration | None:
    try:
        content = read_json_input(path)
        found = Calibration(
            Prior.from_dict(content["prior"]),
            Rule.from_dict(content["rule"]),
            str(content["model"]),
            int(content["kernels"]),
            float(content.get("regret", 0.0)),
        )
    except (TilewiseError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return found if found.model == digest_of(model_file) else None
