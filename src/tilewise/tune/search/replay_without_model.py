"""Replay of tuning without a cost model, on the embedded collections.

This is the situation of `autotune` with a user's own kernel, and of the tuner on a machine without a model. The
problems of a family come one after the other in random order. The first three get a large budget, since nothing is
known yet; each later one gets a few measurements and may use the earlier ones. Four orders of measurement are compared:
random, by the mean runtime over earlier problems, and by a Gaussian process over one problem or over several problems.
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
from tilewise.tune.search.replay import Strategy, compare_curves, regrets

FIRST, FIRST_BUDGET, BUDGET = 3, 20, 5  # first problems, their measurements, and those of later problems
RANDOM, MEAN, ALONE, OVER = (
    "random", "the mean over earlier problems", "a process of one problem", "a process over problems",
)  # fmt: skip
_HYPER = Hyperparameters()
_NEAREST = 12  # earlier problems that the process is conditioned on; as in choose/memory.py
_DERIVED = ("_sum", "_product")


@dataclass(frozen=True, eq=False)
class _Problem:
    """A recorded problem, and the indices of the configurations that were measured so far."""

    sizes: Numbers
    features: Numbers  # (configurations, settings in doublings)
    runtime: Numbers
    order: list[int]


def replay_without_model(collection: str = "h200", most_problems: int = 24, seed: int = 0) -> dict[str, Any]:
    """Replay every family of a collection that has enough validation and test kernels.

    The result has `strategies` with mean regrets over the problems after the first three of each family, and their
    paired `comparisons`.

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
        "comparisons": [comparison for pair in pairs for comparison in compare_curves(curves, *pair)],
    }


def _families(collection: str, max_problems: int, seed: int) -> list[list[_Problem]]:
    """Sample up to `max_problems` problems of each family that has at least twice the number of first problems."""
    data = read_collection(find_collection(collection))
    by_family: dict[str, list[MeasuredKernel]] = {}
    # Validation and test kernels are mixed; the train split is not used.
    for split in ("valid", "test"):
        for kernel in data.splits[split]:
            by_family.setdefault(str(kernel.problem["family"]), []).append(kernel)
    rng = np.random.default_rng(seed)
    families = []
    for members in by_family.values():
        sample = [members[i] for i in rng.permutation(len(members))[:max_problems]]
        if len(sample) >= 2 * FIRST:
            families.append(_problems(sample, data.schema.config_features))
    return families


def _problems(members: Sequence[MeasuredKernel], names: Sequence[str]) -> list[_Problem]:
    """Convert measured kernels to problems whose features are the distinct, varying settings in doublings."""
    all_features = np.concatenate([m.kernel.config_feat for m in members])
    columns_by_values: dict[bytes, int] = {}
    # Equal columns have equal bytes: the last of them remains.
    for column, name in reversed(list(enumerate(names))):
        varies = any(np.ptp(m.kernel.config_feat[:, column]) > 0 for m in members)
        if varies and not name.endswith(_DERIVED) and name != "default":
            columns_by_values.setdefault(all_features[:, column].tobytes(), column)
    columns = list(columns_by_values.values())
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
    """Replay one family from its first problem to its last; return the regrets after the first three."""
    rng, rows = np.random.default_rng(seed), []
    past: list[_Problem] = []
    for number, problem in enumerate(family):
        # Each problem sees the readings of the problems before it.
        budget = FIRST_BUDGET if number < FIRST else BUDGET
        indices = list(order(problem, past, budget, rng))
        past.append(_Problem(problem.sizes, problem.features, problem.runtime, indices))
        if number >= FIRST:
            rows.append(regrets(problem.runtime, indices, BUDGET))
    return rows


def _at_random(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
    """Order the configurations at random."""
    return [int(index) for index in rng.permutation(len(problem.runtime))[:budget]]


def _by_mean(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
    """Order by the mean log slowdown over earlier problems' fastest; untried configurations count as the median."""
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
    """Order by expected improvement of a Gaussian process, over this problem alone or over several."""

    def order(problem: _Problem, past: Sequence[_Problem], budget: int, rng: np.random.Generator) -> Sequence[int]:
        earlier = _earlier_readings(problem, past) if over_problems and past else None
        process = GaussianProcess(
            np.zeros(len(problem.runtime)), problem.features, _HYPER, earlier, problem.sizes if earlier else None
        )
        return [step.index for step in search(process, lambda index: float(problem.runtime[index]), budget)[0]]

    return order


def _earlier_readings(problem: _Problem, past: Sequence[_Problem]) -> Earlier:
    """Collect the readings of the nearest earlier problems."""
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
