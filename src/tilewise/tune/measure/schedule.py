"""In which order kernels are measured, which of their configurations, and what has been counted so far."""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilewise._wording import pluralize
from tilewise.store.aggregate import FIRST_FINAL_ROUND
from tilewise.store.problem import Config, Kernel
from tilewise.store.store import Store


@dataclass
class Tally:
    """What happened to one family."""

    kernels: int = 0
    pairs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    scatter: list[float] = field(default_factory=list)
    batches: int = 0
    disturbed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def balanced(kernels: Sequence[Kernel], seed: int) -> list[Kernel]:
    """The kernels in an order whose every prefix holds each family in proportion."""
    chance = random.Random(seed)
    families: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        families[kernel.problem.family].append(kernel)
    placed = []
    for members in families.values():
        chance.shuffle(members)
        placed += [((index + chance.random()) / len(members), kernel) for index, kernel in enumerate(members)]
    return [kernel for _, kernel in sorted(placed, key=lambda pair: pair[0])]


def unfinished(kernels: Iterable[Kernel], store: Store, finals: bool) -> list[Kernel]:
    """Those that wait to be measured; or, of the measured ones, those that wait for their finals."""
    done = store.finished()
    if not finals:
        return [kernel for kernel in kernels if kernel.problem.key not in done]
    done -= store.finished_from(FIRST_FINAL_ROUND)
    return [kernel for kernel in kernels if kernel.problem.key in done]


def pick_configs(
    configs: Sequence[Config], count: int, seed: int, scores: Sequence[float] | None = None, near: float = 0.0
) -> list[Config]:
    """The default and `count - 1` others drawn at random; all of them when `count` is 0.

    With scores, lower is better, half of them are the most promising instead. A share of `near` are the default's
    neighbours: those that differ from it in the fewest settings, which hold most of what is left to gain.
    """
    if not count or len(configs) <= count:
        return list(configs)
    chance, every = random.Random(seed), range(1, len(configs))
    liked = [] if scores is None else sorted(every, key=scores.__getitem__)[: count // 2]
    if near:
        differing = {index: _differing(configs[0], configs[index]) for index in every}
        liked = sorted(every, key=lambda index: (differing[index], chance.random()))[: round(near * count)]
    others = sorted(set(every) - set(liked))
    drawn = chance.sample(others, count - 1 - len(liked))
    return [configs[index] for index in (0, *liked, *drawn)]


def _differing(one: Config, other: Config) -> int:
    return sum(value != other[name] for name, value in one.items())


def summary(tallies: dict[str, Tally]) -> str:
    """Counts of everything so far, in half a line."""
    kernels = sum(t.kernels for t in tallies.values())
    pairs = sum(t.pairs for t in tallies.values())
    scatter = [s for t in tallies.values() for s in t.scatter]
    noise = f"{statistics.median(scatter):.2%}" if scatter else "-"
    return f"{pluralize(kernels, 'kernel')}, {pluralize(pairs, 'pair')}, scatter {noise}"
