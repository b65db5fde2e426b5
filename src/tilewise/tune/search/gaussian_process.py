"""What the tuner believes about runtimes it has not measured: a Gaussian process in logarithms, around a model's guess.

The model's score says roughly how long each configuration takes; how it errs is not random: configurations that are
alike are misjudged alike, and a model that is too optimistic about one shape is so about similar ones. So a single
measurement corrects the guess for the whole neighbourhood. The belief's numbers answer the tuner's two questions: what
to measure next, and whether anything unmeasured could still pay.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

# Configurations that are followed one by one; those behind them in a model's guess are given up. Without a model there
# is no telling who is behind.
LEADERS, LEADERS_BLIND = 64, 400
_SAMPLES = 256
_LEVEL = 1.0  # deviation of a shape's unknown runtime from anything: enough that one measurement settles it
_WORST = 0.7  # regret counts up to a factor of two: how bad a bad choice is does not matter


_MOST = 1e9  # of any number of a prior
_DIVIDED_BY = ("length", "shape_length", "wider_own", "wider_spread", "wider_slope")


@dataclass(frozen=True)
class Prior:
    """How far a model's scores are to be trusted, in logarithms of runtime; fitted on validation kernels.

    A runtime is `slope` times the score, give or take: `slope_error` of the slope itself, `spread` that neighbours
    share within about `length` (in doublings of block sizes, warps, ...), `own` that they do not, `noise` of measuring.
    `weights` tells of settings that count for more or less than a doubling: two configurations that differ in nothing
    else but one of little weight are one and the same, and measuring the second teaches nothing.
    `shared` is how much of the spread and of the slope's error one shape has in common with every other of the same
    kernel, `kin` with one of nearly the same sizes (it falls off within about `shape_length`, in doublings); `quirk`
    how much of `own` with all: a configuration that is oddly fast for one shape is often so for others. Of a model that
    was taught on thousands of shapes, the errors on one tell little about another, and nothing about a distant one.

    How wide these are is itself a guess for the shape at hand: readings that surprise make them wider where it is asked
    whether to go on, readings as expected narrower. `firmness` is how many readings the guess counts for; 0 is fixed.

    What finds the best few is narrower than what may be vouched for: chances are told with `own`, `spread` and
    `slope_error` larger by the factors `wider_...`.
    """

    slope: float = 1.0
    slope_error: float = 0.3
    spread: float = 0.15
    length: float = 2.0
    own: float = 0.05
    noise: float = 0.01
    shared: float = 0.0
    kin: float = 0.25
    shape_length: float = 1.0
    quirk: float = 0.0
    firmness: float = 0.0
    wider_own: float = 1.0
    wider_spread: float = 1.0
    wider_slope: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)

    def scaled(self, fields: Numbers, names: Sequence[str]) -> Numbers:
        """Settings in doublings, a column for each name, as `length` measures them."""
        if not self.weights or not names:
            return fields
        weights: Numbers = np.array([self.weights.get(name, 1.0) for name in names])
        return fields * weights

    def in_common(self, these: Numbers, those: Numbers) -> Numbers:
        """How much of what is misjudged shapes have in common: one row each of these, a column of those."""
        return self.shared + max(self.kin - self.shared, 0.0) * _alike(these, those, self.shape_length)

    def tightened(self, own: float, spread: float, slope_error: float) -> Prior:
        """Narrower by these factors, all but the chances that are told."""
        return dataclasses.replace(
            self,
            own=self.own * own,
            spread=self.spread * spread,
            slope_error=self.slope_error * slope_error,
            wider_own=self.wider_own / own,
            wider_spread=self.wider_spread / spread,
            wider_slope=self.wider_slope / slope_error,
        )

    def wide(self) -> Prior:
        """What chances are told with."""
        wide = self.tightened(self.wider_own, self.wider_spread, self.wider_slope)
        return dataclasses.replace(wide, wider_own=1.0, wider_spread=1.0, wider_slope=1.0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prior:
        """From what `dataclasses.asdict` gave; a name that is not known is left out, a bad number refused."""
        names = {known.name for known in dataclasses.fields(cls)}
        known = {name: float(value) for name, value in values.items() if name in names and name != "weights"}
        weights = {str(name): float(value) for name, value in dict(values.get("weights", {})).items()}
        if not all(0 <= value <= _MOST for value in (*known.values(), *weights.values())):
            raise ValueError("a prior's numbers must be finite and not negative")
        if not all(known.get(name, 1.0) > 1 / _MOST for name in _DIVIDED_BY):
            raise ValueError("a prior's lengths and what it is widened by must be positive")
        return cls(**known, weights=weights)


# Without a model the score is a crude guess or nothing, so everything must come from neighbours.
BLIND = Prior(
    slope=1.0, slope_error=0.5, spread=0.6, length=1.5, own=0.12, noise=0.02,
    shared=0.45, kin=1.0, shape_length=4.0, quirk=0.9,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Memory:
    """Measurements of other shapes of the same kernel: one row each."""

    shape: npt.NDArray[np.int64]  # which shape, by number
    shape_features: Numbers  # (rows, sizes in logarithms)
    features: Numbers  # (rows, configuration in logarithms)
    guess: Numbers  # the score each had
    log_runtime: Numbers

    def __len__(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Doubt:
    """What the belief says of everything unmeasured, against the best measured so far."""

    gain: float  # expected saving, as a share of the runtime, if the fastest of the rest were known and taken
    chance: float  # probability that something unmeasured is more than one per cent faster


class Belief:
    """Runtimes of the configurations of one shape, updated by every measurement.

    `scores` are the model's, lower is faster; `features` one row a configuration, in logarithms (so that a distance of
    one is a doubling). Indices are those of the rows given.
    """

    def __init__(
        self,
        scores: npt.ArrayLike,
        features: Numbers,
        prior: Prior,
        memory: Memory | None = None,
        shape_features: Numbers | None = None,
    ) -> None:
        every = np.asarray(scores, dtype=np.float64)
        most = LEADERS if (every[1:] != every[-1:]).any() else LEADERS_BLIND  # but for the default, which may lead
        self.leaders = np.argsort(every, kind="stable")[:most]
        self._place = {int(index): place for place, index in enumerate(self.leaders)}
        self.prior = prior
        self._x = np.asarray(features, dtype=np.float64)[self.leaders]
        self._guess = every[self.leaders] - every[self.leaders[0]]
        self.mean, self.covariance = self._start()
        self._tried: npt.NDArray[np.bool_] = np.zeros(len(self._x), dtype=np.bool_)
        if memory is not None and len(memory):
            self._tried = np.asarray(_equal(self._x, memory.features).any(axis=1))
            self._recall(memory, np.zeros(0) if shape_features is None else shape_features)
        self.measured: dict[int, float] = {}  # configuration: log runtime
        self._told: list[tuple[int, float]] = []  # every reading
        self._surprise, self._compared = 0.0, 0  # squares of how far readings were from the mean, in deviations
        self.failed: set[int] = set()
        self._wide = None if prior.wide() == prior else (scores, features, prior.wide(), memory, shape_features)
        self._judging: Belief | None = None
        self.start_with: int | None = None  # what to measure first, whatever is believed
        self.explores = False  # whether every other measurement goes to what was tried for no shape yet

    def _judge(self) -> Belief | None:
        """Who tells chances; made when first asked for, and told each time what was measured since."""
        if self._wide is None:
            return None
        judge = self._judging = self._judging or Belief(*self._wide)
        for index, log_runtime in self._told[len(judge._told) :]:
            judge.learn(index, log_runtime)
        judge.failed |= self.failed
        return judge

    def _start(self) -> tuple[Numbers, Numbers]:
        p = self.prior
        covariance = p.spread**2 * _alike(self._x, self._x, p.length)
        covariance += (p.slope_error**2) * np.outer(self._guess, self._guess) + _LEVEL**2
        covariance[np.diag_indices(len(self._x))] += p.own**2
        return p.slope * self._guess, covariance

    def _recall(self, memory: Memory, shape_features: Numbers) -> None:
        """Condition on other shapes. Their levels are their own; what transfers is how configurations compare."""
        p = self.prior
        same = memory.shape[:, None] == memory.shape[None, :]
        between = np.where(same, 1.0, p.in_common(memory.shape_features, memory.shape_features))
        own = p.spread**2 * _alike(memory.features, memory.features, p.length) * between
        own += p.slope_error**2 * np.outer(memory.guess, memory.guess) * between + _LEVEL**2 * 25 * same
        own += p.quirk * p.own**2 * np.where(same, 0.0, _equal(memory.features, memory.features))
        own[np.diag_indices(len(memory))] += p.own**2 + p.noise**2
        near = p.in_common(shape_features[None, :], memory.shape_features)
        across = p.spread**2 * _alike(self._x, memory.features, p.length) * near
        across += p.slope_error**2 * np.outer(self._guess, memory.guess) * near
        across += p.quirk * p.own**2 * _equal(self._x, memory.features)
        residual = memory.log_runtime - p.slope * memory.guess
        solved = np.linalg.solve(own, np.column_stack([residual, across.T]))
        self.mean = self.mean + across @ solved[:, 0]
        self.covariance = self.covariance - across @ solved[:, 1:]

    def learn(self, index: int, log_runtime: float) -> None:
        """One configuration was measured."""
        self._told.append((index, log_runtime))
        if not self.measured:  # until now the level was unknown, and the mean's zero stood for it
            place = self._place.get(index)
            shift = log_runtime - (self.mean[place] if place is not None else self.mean.mean())
            self.mean = self.mean + shift
        self.measured[index] = min(log_runtime, self.measured.get(index, math.inf))
        place = self._place.get(index)
        if place is None:
            return
        column = self.covariance[:, place].copy()
        if len(self._told) > 1:
            self._compared += 1
            self._surprise += (log_runtime - self.mean[place]) ** 2 / (column[place] + self.prior.noise**2)
        gain = column / (column[place] + self.prior.noise**2)
        self.mean = self.mean + gain * (log_runtime - self.mean[place])
        self.covariance = self.covariance - np.outer(gain, column)

    def refuse(self, index: int) -> None:
        """A configuration failed; it is not asked for again."""
        self.failed.add(index)

    @property
    def best(self) -> int | None:
        """The fastest measured configuration."""
        return min(self.measured, key=lambda index: (self.measured[index], index)) if self.measured else None

    def likeliest(self) -> int | None:
        """Of the measured ones, that with the shortest time as believed: a lucky reading alone does not win."""

        def believed(index: int) -> tuple[float, int]:
            place = self._place.get(index)
            return self.measured[index] if place is None else float(self.mean[place]), index

        return min(self.measured, key=believed) if self.measured else None

    def open(self) -> npt.NDArray[np.int64]:
        """Places of the leaders that are neither measured nor failed."""
        gone = [self._place[index] for index in (*self.measured, *self.failed) if index in self._place]
        return np.setdiff1d(np.arange(len(self.leaders)), gone)

    def next(self) -> int | None:
        """The configuration to measure now: the first choice, then where the expected saving is largest."""
        places = self.open()
        if not len(places):
            return None
        if self.best is None:
            untried = self.start_with is not None and self.start_with not in self.failed
            return self.start_with if untried else self.portfolio(1)[0]
        fresh = places[~self._tried[places]]
        if self.explores and len(self.measured) % 2 and len(fresh):
            # The one believed fastest: where the expected saving is largest is far from all that is known to be good.
            return int(self.leaders[fresh[int(np.argmin(self.mean[fresh]))]])
        return int(self.leaders[places[int(np.argmax(self._expected_saving(places)))]])

    def _expected_saving(self, places: npt.NDArray[np.int64]) -> Numbers:
        assert self.best is not None
        deviation = np.sqrt(np.maximum(self.covariance[places, places], 1e-12))
        ahead = self.measured[self.best] - self.mean[places]
        z = ahead / deviation
        saving: Numbers = ahead * _normal(z) + deviation * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return saving

    def portfolio(self, count: int) -> list[int]:
        """The set to measure if all must be named in advance: greedily the least expected regret of its best."""
        places = self.open()
        regret = np.minimum(self._samples(places), _WORST)
        regret -= regret.min(axis=0)
        reached = np.full(regret.shape[1], _WORST)
        chosen: list[int] = []
        for _ in range(min(count, len(places))):
            expected = np.minimum(regret, reached).mean(axis=1)
            expected[chosen] = np.inf
            pick = int(np.argmin(expected))
            chosen.append(pick)
            reached = np.minimum(reached, regret[pick])
        return [int(self.leaders[places[pick]]) for pick in chosen]

    def first_loss(self) -> tuple[float, int]:
        """What the first choice is expected to lose against the best, before anything is measured; and the choice."""
        places = self.open()
        regret = np.minimum(self._samples(places), _WORST).mean(axis=1)
        pick = int(np.argmin(regret))
        return float(regret[pick]), int(self.leaders[places[pick]])

    def doubt(self) -> Doubt:
        """Whether measuring on could pay."""
        places = self.open()
        if self.best is None:
            return Doubt(1.0, 1.0)
        if not len(places):
            return Doubt(0.0, 0.0)
        saving = self.measured[self.best] - self._samples(places, relative=False, width=self._width()).min(axis=0)
        judge = self._judge()
        chance = float((saving > 0.01).mean()) if judge is None else judge.doubt().chance
        return Doubt(float(np.maximum(saving, 0.0).mean()), chance)

    def _width(self) -> float:
        """How much wider the doubt is than the prior's, by what the readings so far were against it."""
        firmness = self.prior.firmness
        return math.sqrt((firmness + self._surprise) / (firmness + self._compared)) if firmness else 1.0

    def _samples(self, places: npt.NDArray[np.int64], *, relative: bool = True, width: float = 1.0) -> Numbers:
        """Joint draws of the runtimes at `places`, the same every time; relative to the fastest of each draw."""
        root = width * _root(self.covariance[np.ix_(places, places)])
        values = self.mean[places][:, None] + root @ _draws(len(places))
        return values - values.min(axis=0) if relative else values


@functools.lru_cache(maxsize=8)
def _draws(count: int) -> Numbers:
    """So many standard normal numbers a sample; each sample's mirror image is among them."""
    draws = np.random.default_rng(count).standard_normal((count, _SAMPLES // 2))
    return np.hstack([draws, -draws])


def _alike(a: Numbers, b: Numbers, length: float) -> Numbers:
    """1 for equal rows, falling with their distance."""
    if not a.shape[1]:
        return np.ones((len(a), len(b)))
    squared = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - 2 * a @ b.T
    alike: Numbers = np.exp(-0.5 * np.maximum(squared, 0.0) / length**2)
    return alike


def _equal(a: Numbers, b: Numbers) -> npt.NDArray[np.bool_]:
    """Which rows are the same."""
    return np.asarray((a[:, None, :] == b[None, :, :]).all(axis=2))


def _root(covariance: Numbers) -> Numbers:
    """A factor of a covariance that rounding may have left slightly indefinite."""
    jitter = 1e-10 + 1e-9 * float(np.trace(covariance)) / len(covariance)
    for _ in range(6):
        try:
            return np.asarray(np.linalg.cholesky(covariance + jitter * np.eye(len(covariance))))
        except np.linalg.LinAlgError:
            jitter *= 100
    return np.diag(np.sqrt(np.maximum(np.diag(covariance), 0.0)))


def _normal(z: Numbers) -> Numbers:
    """The normal distribution function, to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 1 - 0.5 * series * np.exp(-x * x)
    below: Numbers = np.where(z >= 0, upper, 1 - upper)
    return below
