"""Calibrated confidence: when to claim that a choice is within 5 % of the fastest configuration.

After each measurement, and before the first, the Gaussian process estimates the probability of that
(`GaussianProcess.chance_within`). The estimates are not calibrated, but their order is informative: the claim is made
above a bound that was fitted by replaying the tuning of held-out kernels. A claim about one configuration also holds
for every faster one, so it stays valid until a measurement contradicts it by being more than 5 % faster.

A bound is the lowest probability above which claims pass a binomial test of "at most 5 % are wrong" at significance
`level` (learn then test: Angelopoulos et al., 2021). The errors of kernels of one program, or of one shape on several
machines, are correlated. Each such group is therefore judged by the bound of the other groups (leave-one-group-out),
and among the levels at which at most 5 % of these claims are wrong, the one with the most claims is used. If no level
qualifies, the claim is never made.
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

WITHIN, WRONG = 0.05, 0.05  # the claimed distance to the fastest, and the allowed share of wrong claims
STAGES = (0, 1, 3, 5, 8)  # numbers of measurements with a separate bound
NEVER = 2.0  # a bound above every probability
_MIN_CLAIMS = 20  # kernels a bound must be tested on; arbitrary
_LEVELS = (0.5, 0.3, 0.1)  # significance levels to try; arbitrary
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Claim:
    """The claim about one problem, updated after each measurement."""

    def __init__(self, process: GaussianProcess) -> None:
        self._process = process
        self._index: int | None = None  # the configuration the claim was made for

    def after(self, measurements: int) -> bool | None:
        """Return whether the best configuration so far (or the first choice) is claimed; None without fitted bounds."""
        process, bounds = self._process, self._process.hyper.confidence_bounds
        stages = [count for count in bounds if count <= measurements]
        if not stages:
            return None
        # A measurement that is more than 5 % faster contradicts an earlier claim.
        if self._index is not None and process.best is not None and self._index != process.best:
            slowest_valid = process.log_runtimes[process.best] + math.log1p(WITHIN)
            if process.log_runtimes.get(self._index, math.inf) > slowest_valid:  # or it could not be measured
                self._index = None
        if self._index is None and process.chance_within(WITHIN) >= bounds[max(stages)]:
            self._index = process.first() if process.best is None else process.best
        return self._index is not None


def replay_stages(case: Case, hyper: Hyperparameters) -> tuple[list[float], list[float]]:
    """Replay the tuning of a kernel: per stage, the estimated probability and the relative slowdown of the choice."""
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
    """Fit the bound of each stage. `groups` names the group of each case, within which errors are correlated."""
    chances, slower = (np.array(rows) for rows in zip(*(replay_stages(case, hyper) for case in cases), strict=True))
    claimed, bounds = np.full(len(cases), np.nan), dict[int, float]()
    for stage, count in enumerate(STAGES):
        valid = _still_valid(claimed, slower[:, stage])
        close = slower[:, stage] <= WITHIN
        bounds[count], is_claimed = _fit_bound(chances[:, stage], close, valid, np.array(groups))
        claimed = np.where(valid, claimed, np.where(is_claimed, slower[:, stage], np.nan))
    return bounds


def evaluate_claims(cases: Sequence[Case], hyper: Hyperparameters) -> dict[int, dict[str, float]]:
    """Evaluate the claims of each stage on measured kernels.

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
    """True for kernels whose earlier claim is still valid. Slowdowns are relative to the fastest; NaN: no claim."""
    return np.asarray(1.0 + claimed <= (1.0 + WITHIN) * (1.0 + slower))


def error_groups(names: Sequence[str], training_names: Sequence[str]) -> list[str]:
    """Group of each kernel for leave-one-group-out: its program, if the model was trained on none of these programs;
    otherwise its shape, which has the same hash on every machine."""
    programs = [program_of(name) for name in names]
    training_programs = {program_of(name) for name in training_names}
    return [name.rpartition("_")[2] for name in names] if training_programs & set(programs) else programs


def claims_text(results: Mapping[int, Mapping[str, float]]) -> str:
    """Describe the result of `evaluate_claims` in a sentence."""
    clauses = [
        ("unmeasured" if not count else f"after {count}")
        + (f" claimed for {row['said']:.0%}, right in {row['right']:.1%}" if "right" in row else " never claimed")
        for count, row in results.items()
    ]
    return "within 5 % (calibrated): " + "; ".join(clauses)


def _fit_bound(chance: Numbers, close: Flags, valid: Flags, groups: npt.NDArray[Any]) -> tuple[float, Flags]:
    """Fit the bound of one stage; also return the leave-one-group-out claims."""
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
    """Lowest probability above which few enough claims, including those still valid, were wrong."""
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
    """Allowed number of wrong claims among 0, 1, ... `max_claims` claims.

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
