"""What is in a collection: how much, how far apart best and worst lie, what a fixed choice costs, how noisy it is.

A family's fixed choice is the one configuration that loses least over its train kernels, used everywhere (the default
where a kernel does not have it): what a library does that never tunes. The noise is the scatter of repeated timings
where files tell it, else the difference between exact repeats of a configuration.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.collection import MeasuredKernel, read_collection, read_folder
from tilewise.costmodel.data.dataset import SPLITS, find_collection, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import OPCODES, Schema

Floats = npt.NDArray[np.float64]
_HEAVY = ("convolution", "dot", "reduce-window", "reduce")


@dataclass(frozen=True)
class SplitCount:
    """How much one split holds."""

    kernels: int
    configs: int
    programs: int
    labelled: bool


@dataclass(frozen=True)
class GroupFigures:
    """The measured kernels of one family or program. Losses are relative to the best: 0.1 is 10 % slower."""

    kernels: int
    configs: int
    best_us: tuple[float, float]  # the fastest and the slowest kernel's best
    spread: float  # worst over best, median over kernels
    median_config: float  # median configuration over best, median over kernels
    fifth_best_loss: float  # mean over kernels with five configurations or more
    default_loss: float  # mean over kernels
    fixed_loss: float  # mean over kernels
    noise: float | None  # median relative deviation of repeats


@dataclass(frozen=True, eq=False)
class Description:
    """Everything `tilewise tiles describe` says."""

    name: str
    hardware: str | None
    measured: list[str] | None
    columns: tuple[str, ...]
    splits: dict[str, SplitCount]
    families: dict[str, GroupFigures]
    programs: dict[str, GroupFigures]
    total: GroupFigures | None
    slowdowns: dict[str, Floats]  # by family: runtime over best of every pair, for pictures
    deviations: dict[str, Floats]


@dataclass(frozen=True, eq=False)
class _Entry:
    """One labelled kernel, boiled down."""

    split: str
    kernel: Kernel
    family: str
    slowdown: Floats  # runtime over best, every configuration
    deviation: Floats

    @cached_property  # asked for once a configuration
    def default_loss(self) -> float:
        return float(np.mean(self.kernel.normalizer) / self.kernel.runtime.min() - 1)


def describe(root: str | os.PathLike[str], *, progress: bool = True) -> Description:
    """Count and measure the collection at `root`: a folder, a file, or the name of an embedded one.

    >>> describe("h200").splits["train"].kernels  # doctest: +SKIP
    321
    """
    schema, kernels = _read(root, progress)
    counts: dict[str, list[Any]] = {split: [0, 0, set(), False] for split in SPLITS}
    entries = []
    for split, measured in kernels:
        kernel = measured.kernel
        count = counts[split]
        count[0] += 1
        count[1] += kernel.n_configs
        count[2].add(kernel.program)
        count[3] |= kernel.labelled
        if kernel.labelled:
            entries.append(_entry(split, measured))
    return _description(os.fspath(root), schema, counts, entries)


def _read(root: str | os.PathLike[str], progress: bool) -> tuple[Schema, Iterator[tuple[str, MeasuredKernel]]]:
    path = find_collection(root)
    if not path.is_dir():
        collection = read_collection(path)
    elif (path / "schema.json").is_file():
        collection = read_folder(path)
    else:  # TpuGraphs itself, which is large: through the converted shards
        dataset = load_dataset(path, progress=progress)
        return dataset.schema, ((s, _plain(k)) for s in SPLITS for k in dataset.split(s))
    return collection.schema, ((s, m) for s, members in collection.splits.items() if s in SPLITS for m in members)


def _plain(kernel: Kernel) -> MeasuredKernel:
    nothing = np.full(kernel.n_configs, np.nan, np.float32)
    return MeasuredKernel(kernel, nothing, np.ones(kernel.n_configs, np.uint16), {})


def _entry(split: str, measured: MeasuredKernel) -> _Entry:
    kernel = measured.kernel
    target = kernel.runtime / kernel.normalizer
    deviation = measured.deviation[np.isfinite(measured.deviation)].astype(np.float64)
    if not len(deviation):
        deviation = _between_repeats(kernel, target)
    family = str(measured.problem.get("family") or _heaviest(kernel))
    return _Entry(split, kernel, family, target / target.min(), deviation)


def _heaviest(kernel: Kernel) -> str:
    """A family for kernels that do not name theirs: their weightiest kind of instruction."""
    present = {OPCODES[number] for number in kernel.node_opcode}
    return next((name for name in _HEAVY if name in present), "elementwise")


def _between_repeats(kernel: Kernel, target: Floats) -> Floats:
    """Relative standard deviation within each group of equal configurations."""
    _, inverse, sizes = np.unique(kernel.config_feat, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    repeated = np.flatnonzero(sizes > 1)
    groups = (target[inverse == group] for group in repeated[:20])
    return np.array([group.std(ddof=1) / np.median(group) for group in groups], np.float64)


def _description(name: str, schema: Schema, counts: Mapping[str, list[Any]], entries: list[_Entry]) -> Description:
    families, programs = _by(entries, "family"), _by(entries, "program")
    fixed = {kernel: loss for members in families.values() for kernel, loss in _fixed_losses(members).items()}
    return Description(
        str(schema.extra.get("name") or name),
        schema.extra.get("hardware"),
        schema.extra.get("measured"),
        schema.config_features,
        {split: SplitCount(c[0], c[1], len(c[2]), c[3]) for split, c in counts.items()},
        {key: _figures(members, fixed) for key, members in families.items()},
        {key: _figures(members, fixed) for key, members in programs.items()},
        _figures(entries, fixed) if entries else None,
        {key: np.concatenate([e.slowdown for e in members]) for key, members in families.items()},
        {key: np.concatenate([e.deviation for e in members]) for key, members in families.items()},
    )


def _by(entries: Iterable[_Entry], what: str) -> dict[str, list[_Entry]]:
    groups: dict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.family if what == "family" else entry.kernel.program].append(entry)
    return dict(sorted(groups.items()))


def _fixed_losses(members: list[_Entry]) -> dict[str, float]:
    """By kernel, what the family's one fixed configuration loses."""
    learnt = [entry for entry in members if entry.split == "train"] or members
    gain: dict[bytes, float] = defaultdict(float)
    for entry in learnt:
        for row, slowdown in zip(entry.kernel.config_feat, entry.slowdown, strict=True):
            gain[row.tobytes()] += (slowdown - 1) - entry.default_loss
    chosen = min(gain, key=gain.__getitem__)
    return {entry.kernel.name: _loss_of(entry, chosen) for entry in members}


def _loss_of(entry: _Entry, chosen: bytes) -> float:
    found = [s for row, s in zip(entry.kernel.config_feat, entry.slowdown, strict=True) if row.tobytes() == chosen]
    return float(min(found)) - 1 if found else entry.default_loss


def _figures(members: list[_Entry], fixed: Mapping[str, float]) -> GroupFigures:
    best_us = [float(entry.kernel.runtime.min()) / 1e3 for entry in members]
    fifth = [float(np.sort(e.slowdown)[4]) - 1 for e in members if len(e.slowdown) >= 5]
    deviation = np.concatenate([entry.deviation for entry in members])
    return GroupFigures(
        len(members),
        sum(entry.kernel.n_configs for entry in members),
        (min(best_us), max(best_us)),
        float(np.median([entry.slowdown.max() for entry in members])),
        float(np.median([np.median(entry.slowdown) for entry in members])),
        float(np.mean(fifth)) if fifth else 0.0,
        float(np.mean([entry.default_loss for entry in members])),
        float(np.mean([fixed[entry.kernel.name] for entry in members])),
        float(np.median(deviation)) if len(deviation) else None,
    )
