"""When to say "sure within five per cent": that the choice takes at most so much longer than the fastest there is.

After some measurements, or before any, the process gives that a chance (`GaussianProcess.chance_within`). Its scale is
not to be believed, its order is: the claim is made from a chance on that was enough on held-out kernels, tuned again
from what was recorded of them. A bound that is fitted to kernels flatters itself on them, so how often it must have
been right is chosen by judging each fifth of the kernels by the bound of the others: of those that are right 95 times
in 100 there, the one that is said most often. Where there is none, it is never said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.tune.search.calibration import Case
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters

WITHIN, RIGHT = 0.05, 0.95
STAGES = (0, 1, 3, 5, 8)  # measurements after which there is a bound of its own
NEVER = 2.0  # no chance is as high
_LEAST_SAID = 20  # kernels that the claim must have been tried on
_SHARES, _FOLDS, _REPEATS = (0.95, 0.96, 0.97, 0.98, 0.99), 5, 20
Numbers = npt.NDArray[np.float64]


def is_sure(process: GaussianProcess, measurements: int) -> bool | None:
    """Whether to make the claim of the best so far; None where nothing was fitted."""
    known = [count for count in process.hyper.sure if count <= measurements]
    return process.chance_within(WITHIN) >= process.hyper.sure[max(known)] if known else None


def played(case: Case, hyper: Hyperparameters) -> tuple[list[float], list[float]]:
    """A kernel tuned again: at each stage the chance, and by how much the choice is slower than the fastest."""
    process, logs = case.process(hyper), np.log(case.runtime)
    chances, slower = [], []
    for count in range(STAGES[-1] + 1):
        index = process.next() if count else None
        if index is not None:
            process.observe(index, float(logs[index]))
        if count == 1 and case.default is not None and case.default not in process.measured:
            process.observe(case.default, float(logs[case.default]))
        if count in STAGES:
            best = process.first() if process.best is None else process.best
            chances.append(process.chance_within(WITHIN))
            slower.append(float(case.runtime[0 if best is None else best]) / case.best - 1.0)
    return chances, slower


def fit_sure(cases: Sequence[Case], hyper: Hyperparameters) -> dict[int, float]:
    """For each stage the chance from which on the claim is made."""
    chances, slower = (np.array(part) for part in zip(*(played(case, hyper) for case in cases), strict=True))
    return {count: _least(chances[:, i], slower[:, i] <= WITHIN) for i, count in enumerate(STAGES)}


def claims(cases: Sequence[Case], hyper: Hyperparameters) -> dict[int, dict[str, float]]:
    """For each stage: of what share of the kernels the claim is made, and how often it is right; and what share of all
    choices is that close."""
    chances, slower = (np.array(part) for part in zip(*(played(case, hyper) for case in cases), strict=True))
    found = {}
    for place, count in enumerate(STAGES):
        said, close = chances[:, place] >= hyper.sure.get(count, NEVER), slower[:, place] <= WITHIN
        found[count] = {"said": float(said.mean()), "close": float(close.mean())}
        found[count] |= {"right": float(close[said].mean())} if said.any() else {}
    return found


def told(found: Mapping[int, Mapping[str, float]]) -> str:
    """The claims in a sentence."""
    parts = [
        ("unmeasured" if not count else f"after {count}")
        + (f" said of {row['said']:.0%}, right in {row['right']:.1%}" if "right" in row else " never said")
        for count, row in found.items()
    ]
    return "sure within 5 %: " + "; ".join(parts)


def _least(chance: Numbers, close: npt.NDArray[np.bool_]) -> float:
    most, least = 0, NEVER
    for share in _SHARES:
        said, right = _apart(chance, close, share)
        if said > most and right >= RIGHT * said:
            most, least = said, _bound(chance, close, share)
    return least


def _apart(chance: Numbers, close: npt.NDArray[np.bool_], share: float) -> tuple[int, int]:
    """How often the claim is made, and rightly, by bounds that were fitted to other kernels."""
    rng, said, right = np.random.default_rng(0), 0, 0
    for _ in range(_REPEATS):
        fold = rng.permutation(len(close)) % _FOLDS
        for part in range(_FOLDS):
            claimed = (fold == part) & (chance >= _bound(chance[fold != part], close[fold != part], share))
            said, right = said + int(claimed.sum()), right + int((claimed & close).sum())
    return said, right


def _bound(chance: Numbers, close: npt.NDArray[Any], share: float) -> float:
    """The lowest chance from which on that share of the claims was right."""
    order = np.argsort(-chance, kind="stable")
    held = np.arange(1, len(order) + 1)
    right = np.cumsum(close[order]) / held
    last = np.append(np.diff(chance[order]) < 0, True)  # a bound lets in all of those that tie
    enough = np.flatnonzero((right >= share) & (held >= _LEAST_SAID) & last)
    return float(chance[order[enough[-1]]]) if len(enough) else NEVER
