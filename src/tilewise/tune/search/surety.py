"""When to say "sure within five per cent": that the choice takes at most so much longer than the fastest there is.

After some measurements, or before any, the process gives that a chance (`GaussianProcess.chance_within`). Its scale is
not to be believed, its order is: the claim is made from a chance on that was enough on held-out kernels, tuned again
from what was recorded of them. What was claimed of a configuration holds of every faster one, so a claim stands until a
measurement contradicts it: until something more than five per cent faster is found.

A bound is the lowest chance at which so few claims were wrong that a rate of wrong ones of five in a hundred would
show so few with a probability of `level` at most (learn then test: Angelopoulos and others, 2021). Kernels of one
program, or one shape on several machines, err together. So each such group is judged by the bound of the others, and of
the levels after which no more than five in a hundred of those claims are wrong, the one is taken by which it is said
most often. Where there is none, it is never said.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import program_of
from tilewise.tune.search.calibration import Case
from tilewise.tune.search.gaussian_process import GaussianProcess, Hyperparameters

WITHIN, WRONG = 0.05, 0.05
STAGES = (0, 1, 3, 5, 8)  # measurements after which there is a bound of its own
NEVER = 2.0  # no chance is as high
_LEAST_SAID = 20  # kernels that the claim must have been tried on
_LEVELS = (0.5, 0.3, 0.1)
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Claim:
    """The claim about one problem, followed from measurement to measurement."""

    def __init__(self, process: GaussianProcess) -> None:
        self._process = process
        self._of: int | None = None  # the configuration that it was made of

    def after(self, measurements: int) -> bool | None:
        """Whether it is made of the best so far, or of the first choice; None where nothing was fitted."""
        process, bounds = self._process, self._process.hyper.sure
        known = [count for count in bounds if count <= measurements]
        if not known:
            return None
        if self._of is not None and process.best is not None and self._of != process.best:
            found = process.measured[process.best] + math.log1p(WITHIN)
            if process.measured.get(self._of, math.inf) > found:  # or it could not be measured
                self._of = None
        if self._of is None and process.chance_within(WITHIN) >= bounds[max(known)]:
            self._of = process.first() if process.best is None else process.best
        return self._of is not None


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


def fit_sure(cases: Sequence[Case], hyper: Hyperparameters, groups: Sequence[str]) -> dict[int, float]:
    """For each stage the chance from which on the claim is made; `groups` says what each case belongs to."""
    chances, slower = (np.array(part) for part in zip(*(played(case, hyper) for case in cases), strict=True))
    claimed, found = np.full(len(cases), np.nan), {}
    for place, count in enumerate(STAGES):
        stands = _stands(claimed, slower[:, place])
        close = slower[:, place] <= WITHIN
        found[count], said = _least(chances[:, place], close, stands, np.array(groups))
        claimed = np.where(stands, claimed, np.where(said, slower[:, place], np.nan))
    return found


def claims(cases: Sequence[Case], hyper: Hyperparameters) -> dict[int, dict[str, float]]:
    """For each stage: of what share of the kernels the claim is made, and how often it is right; and what share of all
    choices is that close."""
    chances, slower = (np.array(part) for part in zip(*(played(case, hyper) for case in cases), strict=True))
    claimed, found = np.full(len(cases), np.nan), dict[int, dict[str, float]]()
    for place, count in enumerate(STAGES):
        stands, close = _stands(claimed, slower[:, place]), slower[:, place] <= WITHIN
        said = stands | (chances[:, place] >= hyper.sure.get(count, NEVER))
        claimed = np.where(stands, claimed, np.where(said, slower[:, place], np.nan))
        found[count] = {"said": float(said.mean()), "close": float(close.mean())}
        found[count] |= {"right": float(close[said].mean())} if said.any() else {}
    return found


def _stands(claimed: Numbers, slower: Numbers) -> Flags:
    """Whether an earlier claim, of what was so much slower than the fastest, is not contradicted; NaN: none."""
    return np.asarray(1.0 + claimed <= (1.0 + WITHIN) * (1.0 + slower))


def groups_of(names: Sequence[str], taught: Sequence[str]) -> list[str]:
    """What errs together among kernels with these names: programs, if the model was taught on none of them; else
    shapes, which have the same hash on every machine."""
    programs, known = [program_of(name) for name in names], {program_of(name) for name in taught}
    return [name.rpartition("_")[2] for name in names] if known & set(programs) else programs


def told(found: Mapping[int, Mapping[str, float]]) -> str:
    """The claims in a sentence."""
    parts = [
        ("unmeasured" if not count else f"after {count}")
        + (f" said of {row['said']:.0%}, right in {row['right']:.1%}" if "right" in row else " never said")
        for count, row in found.items()
    ]
    return "sure within 5 %: " + "; ".join(parts)


def _least(chance: Numbers, close: Flags, stands: Flags, groups: npt.NDArray[Any]) -> tuple[float, Flags]:
    """The bound, and whom the claim is made of where each group is judged by the bound of the others."""
    least, made = NEVER, stands
    for level in _LEVELS:
        said = stands.copy()
        for group in np.unique(groups):
            out = groups == group
            said[out] |= chance[out] >= _bound(chance[~out], close[~out], stands[~out], level)
        if said.sum() > made.sum() and (said & ~close).sum() <= _most_wrong(len(said), _LEVELS[0])[said.sum()]:
            least, made = _bound(chance, close, stands, level), said
    return least, made


def _bound(chance: Numbers, close: Flags, stands: Flags, level: float) -> float:
    """The lowest chance from which on few enough claims, with those that stand, were wrong."""
    order = np.argsort(-chance, kind="stable")
    order = order[~stands[order]]
    wrong = (stands & ~close).sum() + np.cumsum(~close[order])
    said = stands.sum() + np.arange(1, len(order) + 1)
    last = np.append(np.diff(chance[order]) < 0, True)[: len(order)]  # a bound lets in all of those that tie
    enough = np.flatnonzero((wrong <= _most_wrong(len(chance), level)[said]) & (said >= _LEAST_SAID) & last)
    return float(chance[order[enough[-1]]]) if len(enough) else NEVER


@functools.lru_cache(64)
def _most_wrong(most: int, level: float) -> npt.NDArray[np.int64]:
    """For 0, 1, ... `most` claims: how many may be wrong so that no more would be, at a rate of `WRONG`, with a
    probability of at most `level`; -1 where even none says nothing."""
    allowed = []
    for said in range(most + 1):
        wrong, chance = -1, (1 - WRONG) ** said
        total = chance
        while total <= level and wrong < said:
            wrong += 1
            chance *= (said - wrong) / (wrong + 1) * WRONG / (1 - WRONG)
            total += chance
        allowed.append(wrong)
    return np.array(allowed)
