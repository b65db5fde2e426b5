"""Replay for kernels that no model knows: the embedded collections with their model withheld.

That is what `autotune` meets with a kernel of a user's own, and the tuner on a machine without a model. The problems of
a family come one after the other in a random order. The first three may be measured often, as nothing is known yet;
each later one a few times, and what was measured before is remembered. Compared are orders drawn at random, the mean
of what configurations took for earlier problems, and the Gaussian process: of one problem alone, and over problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.collection import MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.tune.search.gaussian_process import Earlier, GaussianProcess, Hyperparameters, Numbers
from tilewise.tune.search.loop import search
from tilewise.tune.search.replay import Strategy, compared, regrets

FIRST, FIRST_BUDGET, BUDGET = 3, 20, 5
RANDOM, MEAN, ALONE, OVER = (
    "random", "the mean over earlier problems", "a process of one problem", "a process over problems",
)  # fmt: skip
_HYPER = Hyperparameters()
_NEAREST = 12
_DERIVED = ("_sum", "_product")


@dataclass(frozen=True, eq=False)
class _Problem:
    """A recorded problem, and what has been measured of it."""

    sizes: Numbers
    features: Numbers  # (configurations, settings in doublings)
    runtime: Numbers
    measured: list[int]


def replay_without_model(collection: str = "h200", most_problems: int = 24, seed: int = 0) -> dict[str, Any]:
    """Every family of a collection with enough problems, its validation and test kernels mixed: its `strategies`, with
    mean regrets over the problems after the first three of each family, and their `comparisons`.

    >>> replay_without_model("cpu")["problems"]  # doctest: +SKIP
    70
    """
    families = _families(collection, most_problems, seed)
    curves = {
        name: np.array([row for family in families for row in _play(family, order, seed)])
        for name, order in _ORDERS.items()
    }
    pairs = ((MEAN, RANDOM), (OVER, MEAN), (OVER, ALONE))
    return {
        "collection": collection,
        "problems": len(curves[RANDOM]),
        "strategies": [Strategy(name, [float(v) for v in rows.mean(axis=0)]) for name, rows in curves.items()],
        "comparisons": [comparison for pair in pairs for comparison in compared(curves, *pair)],
    }


def _families(collection: str, most: int, seed: int) -> list[list[_Problem]]:
    found = read_collection(find_collection(collection))
    by_family: dict[str, list[MeasuredKernel]] = {}
    for split in ("valid", "test"):
        for measured in found.splits[split]:
            by_family.setdefault(str(measured.problem["family"]), []).append(measured)
    chance = np.random.default_rng(seed)
    chosen = []
    for members in by_family.values():
        some = [members[i] for i in chance.permutation(len(members))[:most]]
        if len(some) >= 2 * FIRST:
            chosen.append(_problems(some, found.schema.config_features))
    return chosen


def _problems(members: Sequence[MeasuredKernel], names: Sequence[str]) -> list[_Problem]:
    """Settings in doublings: the columns that tell configurations of one problem apart, each once."""
    every = np.concatenate([m.kernel.config_feat for m in members])
    kept: dict[bytes, int] = {}
    for column, name in reversed(list(enumerate(names))):
        varies = any(np.ptp(m.kernel.config_feat[:, column]) > 0 for m in members)
        if varies and not name.endswith(_DERIVED) and name != "default":
            kept.setdefault(every[:, column].tobytes(), column)
    columns = list(kept.values())
    return [
        _Problem(
            np.array([np.log2(1 + v) for n, v in sorted(m.problem.items()) if isinstance(v, int)], np.float64),
            np.log2(1.0 + np.abs(m.kernel.config_feat[:, columns].astype(np.float64))),
            m.kernel.runtime.astype(np.float64),
            [],
        )
        for m in members
    ]


Order = Callable[[_Problem, Sequence[_Problem], int, np.random.Generator], Sequence[int]]


def _play(family: Sequence[_Problem], order: Order, seed: int) -> list[npt.NDArray[np.float64]]:
    """One family from its first problem to its last; the regrets of those after the first three."""
    chance, rows = np.random.default_rng(seed), []
    seen: list[_Problem] = []
    for number, problem in enumerate(family):
        budget = FIRST_BUDGET if number < FIRST else BUDGET
        measured = list(order(problem, seen, budget, chance))
        seen.append(_Problem(problem.sizes, problem.features, problem.runtime, measured))
        if number >= FIRST:
            rows.append(regrets(problem.runtime, measured, BUDGET))
    return rows


def _at_random(problem: _Problem, seen: Sequence[_Problem], budget: int, chance: np.random.Generator) -> Sequence[int]:
    return [int(index) for index in chance.permutation(len(problem.runtime))[:budget]]


def _by_mean(problem: _Problem, seen: Sequence[_Problem], budget: int, chance: np.random.Generator) -> Sequence[int]:
    """By the mean log runtime over each earlier problem's fastest; what none has tried counts as the median."""
    if len(seen) < FIRST:
        return _at_random(problem, seen, budget, chance)
    total, count = np.zeros(len(problem.runtime)), np.zeros(len(problem.runtime))
    for other in seen:
        logs = np.log(other.runtime[other.measured])
        for index, over in zip(other.measured, logs - logs.min(), strict=True):
            same = (problem.features == other.features[index]).all(axis=1)
            total[same] += over
            count[same] += 1
    mean = total / np.maximum(count, 1)
    mean[count == 0] = np.median(mean[count > 0]) if count.any() else 0.0
    return [int(index) for index in np.argsort(mean, kind="stable")[:budget]]


def _by_process(over_problems: bool) -> Order:
    def order(problem: _Problem, seen: Sequence[_Problem], budget: int, chance: np.random.Generator) -> Sequence[int]:
        earlier = _earlier(problem, seen) if over_problems and seen else None
        process = GaussianProcess(
            np.zeros(len(problem.runtime)), problem.features, _HYPER, earlier, problem.sizes if earlier else None
        )
        return [step.index for step in search(process, lambda index: float(problem.runtime[index]), budget)[0]]

    return order


def _earlier(problem: _Problem, seen: Sequence[_Problem]) -> Earlier:
    near = sorted(seen, key=lambda other: float(np.square(other.sizes - problem.sizes).sum()))[:_NEAREST]
    counts = [len(other.measured) for other in near]
    return Earlier(
        np.repeat(np.arange(len(near)), counts),
        np.repeat([other.sizes for other in near], counts, axis=0),
        np.concatenate([other.features[other.measured] for other in near]),
        np.zeros(sum(counts)),
        np.log(np.concatenate([other.runtime[other.measured] for other in near])),
    )


_ORDERS: dict[str, Order] = {
    RANDOM: _at_random,
    MEAN: _by_mean,
    ALONE: _by_process(over_problems=False),
    OVER: _by_process(over_problems=True),
}
