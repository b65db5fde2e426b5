"""Order of the kernels, selection of their configurations, and the tallies of a run."""

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
    """Counts of one family in a run."""

    kernels: int = 0
    pairs: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    scatter: list[float] = field(default_factory=list)
    batches: int = 0
    disturbed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def balanced(kernels: Sequence[Kernel], seed: int) -> list[Kernel]:
    """Order kernels so that every prefix contains each family in proportion."""
    rng = random.Random(seed)
    families: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        families[kernel.problem.family].append(kernel)
    keyed = []
    for members in families.values():
        rng.shuffle(members)
        keyed += [((index + rng.random()) / len(members), kernel) for index, kernel in enumerate(members)]
    return [kernel for _, kernel in sorted(keyed, key=lambda pair: pair[0])]


def unfinished(kernels: Iterable[Kernel], store: Store, finals: bool) -> list[Kernel]:
    """Kernels that are not yet measured; with `finals`, measured kernels without finals."""
    done = store.finished()
    if not finals:
        return [kernel for kernel in kernels if kernel.problem.key not in done]
    done -= store.finished_from(FIRST_FINAL_ROUND)
    return [kernel for kernel in kernels if kernel.problem.key in done]


def pick_configs(
    configs: Sequence[Config], count: int, seed: int, scores: Sequence[float] | None = None, near: float = 0.0
) -> list[Config]:
    """Select the default and `count - 1` others at random; all of them if `count` is 0.

    With `scores` (lower is better), half of them are the best-ranked ones instead. A share `near` of them are neighbors
    of the default, which differ from it in the fewest settings; most improvements are found there.
    """
    if not count or len(configs) <= count:
        return list(configs)
    rng, indices = random.Random(seed), range(1, len(configs))
    preferred = [] if scores is None else sorted(indices, key=scores.__getitem__)[: count // 2]
    if near:
        differences = {index: _count_differences(configs[0], configs[index]) for index in indices}
        preferred = sorted(indices, key=lambda index: (differences[index], rng.random()))[: round(near * count)]
    others = sorted(set(indices) - set(preferred))
    random_picks = rng.sample(others, count - 1 - len(preferred))
    return [configs[index] for index in (0, *preferred, *random_picks)]


def _count_differences(one: Config, other: Config) -> int:
    """Number of settings in which two configurations differ."""
    return sum(value != other[name] for name, value in one.items())


def summary(tallies: dict[str, Tally]) -> str:
    """Summarize the tallies for a progress line."""
    kernels = sum(t.kernels for t in tallies.values())
    pairs = sum(t.pairs for t in tallies.values())
    scatter = [s for t in tallies.values() for s in t.scatter]
    noise = f"{statistics.median(scatter):.2%}" if scatter else "-"
    return f"{pluralize(kernels, 'kernel')}, {pluralize(pairs, 'pair')}, scatter {noise}"
