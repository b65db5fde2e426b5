"""Statistics of a collection: its size, the ratio of worst to best, the loss of a fixed choice, and the timing noise.

The fixed choice of a family is the one configuration with the smallest loss over its train kernels. It stands for a
library that never tunes; a kernel that lacks this configuration uses the default instead. The noise is the deviation of
repeated timings if the files contain it, and otherwise the deviation between equal configurations of a kernel.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.collection import MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import SPLITS, find_collection, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import OPCODES, TILE_FEATURES, Schema
from tilewise.costmodel.data.shards import read_folder
from tilewise.costmodel.data.tpu_tiles import read_tiles

Floats = npt.NDArray[np.float64]
_FAMILY_OPCODES = ("convolution", "dot", "reduce-window", "reduce")  # by decreasing cost
_MAX_REPEATED_CONFIGS = 20  # groups of equal configurations that are compared in one kernel; more cost time only


@dataclass(frozen=True)
class SplitCount:
    """Number of kernels, configurations and programs of a split."""

    kernels: int
    configs: int
    programs: int
    labelled: bool


@dataclass(frozen=True)
class GroupFigures:
    """Statistics of the measured kernels of one family or program.

    Losses are relative to the best configuration: 0.1 is 10 % slower.
    """

    kernels: int
    configs: int
    best_us: tuple[float, float]  # best runtime of the fastest kernel and of the slowest kernel
    spread: float  # worst configuration over best, median over kernels
    median_config: float  # median configuration over best, median over kernels
    fifth_best_loss: float  # mean over kernels with at least five configurations
    default_loss: float  # mean over kernels
    fixed_loss: float  # mean over kernels
    noise: float | None  # median relative deviation of repeats


@dataclass(frozen=True, eq=False)
class CollectionSummary:
    """Result of `describe`; its field names are the JSON keys of `tilewise tiles describe --json`."""

    name: str
    hardware: str | None
    measured: list[str] | None  # first and last day of the measurements
    columns: tuple[str, ...]
    splits: dict[str, SplitCount]
    families: dict[str, GroupFigures]
    programs: dict[str, GroupFigures]
    total: GroupFigures | None
    slowdowns: dict[str, Floats]  # per family: runtime over best of every configuration of every kernel, for plots
    deviations: dict[str, Floats]  # per family: relative deviation of repeats, for plots


@dataclass(frozen=True, eq=False)
class _KernelFigures:
    """Statistics of one labelled kernel with c configurations."""

    split: str
    kernel: Kernel
    family: str
    slowdown: Floats  # (c,) runtime over best
    deviation: Floats  # relative deviations that are known

    @cached_property  # read once per configuration
    def default_loss(self) -> float:
        """Slowdown of the default configuration against the fastest, minus 1."""
        return float(np.mean(self.kernel.normalizer) / self.kernel.runtime.min() - 1)


def describe(root: str | os.PathLike[str], *, progress: bool = True) -> CollectionSummary:
    """Summarize the collection at `root`: a folder, a file, or the name of an embedded collection.

    >>> describe("h200").splits["train"].kernels  # doctest: +SKIP
    321
    """
    schema, members = _read_members(root, progress)
    counts: dict[str, list[Any]] = {split: [0, 0, set(), False] for split in SPLITS}
    kernels = []
    for split, member in members:
        kernel = member.kernel
        count = counts[split]
        # Kernels, configurations, programs, labelled: in the order of the fields of SplitCount.
        count[0] += 1
        count[1] += kernel.n_configs
        count[2].add(kernel.program)
        count[3] |= kernel.labelled
        if kernel.labelled:
            kernels.append(_kernel_figures(split, member, schema))
    splits = {split: SplitCount(count[0], count[1], len(count[2]), count[3]) for split, count in counts.items()}
    return _summarize(os.fspath(root), schema, splits, kernels)


def _read_members(root: str | os.PathLike[str], progress: bool) -> tuple[Schema, Iterator[tuple[str, MeasuredKernel]]]:
    """Open a collection; return its schema and an iterator over (split name, kernel with noise)."""
    path = find_collection(root)
    # Files and folders with a schema fit into memory and may record the noise of their measurements.
    if not path.is_dir():
        collection = read_collection(path)
    elif (path / "schema.json").is_file():
        collection = read_folder(path)
    else:  # a folder without a schema is TpuGraphs itself: too large for memory, so read the converted shards
        dataset = load_dataset(path, progress=progress)
        return dataset.schema, ((s, _without_noise(k)) for s in SPLITS for k in dataset.split(s))
    return collection.schema, ((s, m) for s, members in collection.splits.items() if s in SPLITS for m in members)


def _without_noise(kernel: Kernel) -> MeasuredKernel:
    unknown = np.full(kernel.n_configs, np.nan, np.float32)
    return MeasuredKernel(kernel, unknown, np.ones(kernel.n_configs, np.uint16), {})


def _kernel_figures(split: str, member: MeasuredKernel, schema: Schema) -> _KernelFigures:
    """Compute a kernel's slowdowns against its fastest configuration, deviations of repeats, and family."""
    kernel = member.kernel
    target = kernel.runtime / kernel.normalizer
    # Recorded deviations are preferred to those between equal configurations.
    deviation = member.deviation[np.isfinite(member.deviation)].astype(np.float64)
    if not len(deviation):
        deviation = _repeat_deviation(kernel, target)
    family = str(member.problem.get("family") or _guess_family(kernel, schema))
    return _KernelFigures(split, kernel, family, target / target.min(), deviation)


def _guess_family(kernel: Kernel, schema: Schema) -> str:
    """Name the family of a kernel that does not state one, after the heaviest operation of its graph."""
    if schema.config_features == TILE_FEATURES:
        reading = read_tiles(kernel.node_feat, kernel.node_opcode, kernel.edge_index, kernel.config_feat)
        return "elementwise" if reading.operation == "loop" else OPCODES[kernel.node_opcode[reading.node]]
    # A fusion with a convolution and a reduction is dominated by the convolution.
    present = {OPCODES[number] for number in kernel.node_opcode}
    return next((name for name in _FAMILY_OPCODES if name in present), "elementwise")


def _repeat_deviation(kernel: Kernel, target: Floats) -> Floats:
    """Return, for each configuration that was timed several times, the relative standard deviation of its timings."""
    _, inverse, sizes = np.unique(kernel.config_feat, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    repeated = np.flatnonzero(sizes > 1)
    groups = (target[inverse == group] for group in repeated[:_MAX_REPEATED_CONFIGS])
    return np.array([group.std(ddof=1) / np.median(group) for group in groups], np.float64)


def _summarize(
    name: str, schema: Schema, splits: dict[str, SplitCount], kernels: list[_KernelFigures]
) -> CollectionSummary:
    """Compute the figures of a collection: per split, per family and per program."""
    by_family = _group_by(kernels, lambda figures: figures.family)
    by_program = _group_by(kernels, lambda figures: figures.kernel.program)
    fixed_loss = {kernel: loss for members in by_family.values() for kernel, loss in _fixed_losses(members).items()}
    return CollectionSummary(
        name=str(schema.extra.get("name") or name),
        hardware=schema.extra.get("hardware"),
        measured=schema.extra.get("measured"),
        columns=schema.config_features,
        splits=splits,
        families={key: _group_figures(members, fixed_loss) for key, members in by_family.items()},
        programs={key: _group_figures(members, fixed_loss) for key, members in by_program.items()},
        total=_group_figures(kernels, fixed_loss) if kernels else None,
        slowdowns={key: np.concatenate([m.slowdown for m in members]) for key, members in by_family.items()},
        deviations={key: np.concatenate([m.deviation for m in members]) for key, members in by_family.items()},
    )


def _group_by(
    kernels: Iterable[_KernelFigures], key: Callable[[_KernelFigures], str]
) -> dict[str, list[_KernelFigures]]:
    """Group kernels by `key(kernel)`, with the keys sorted."""
    groups: dict[str, list[_KernelFigures]] = defaultdict(list)
    for figures in kernels:
        groups[key(figures)].append(figures)
    return dict(sorted(groups.items()))


def _fixed_losses(members: list[_KernelFigures]) -> dict[str, float]:
    """Return each kernel's loss (slowdown - 1) with the one configuration that is best for its whole family, by name.

    That configuration is chosen on the family's train kernels.
    """
    train = [figures for figures in members if figures.split == "train"] or members
    # Kernels have different sets of configurations. A kernel without a configuration runs its default, so a
    # configuration is compared by the sum, over the kernels that have it, of its loss minus the default's loss.
    excess_loss: dict[bytes, float] = defaultdict(float)
    for figures in train:
        for row, slowdown in zip(figures.kernel.config_feat, figures.slowdown, strict=True):
            excess_loss[row.tobytes()] += (slowdown - 1) - figures.default_loss
    best_config = min(excess_loss, key=excess_loss.__getitem__)
    return {figures.kernel.name: _loss_of(figures, best_config) for figures in members}


def _loss_of(figures: _KernelFigures, config: bytes) -> float:
    """Return a kernel's slowdown - 1 with `config` (its row's bytes), or with the default if it lacks it."""
    rows = zip(figures.kernel.config_feat, figures.slowdown, strict=True)
    slowdowns = [slowdown for row, slowdown in rows if row.tobytes() == config]
    return float(min(slowdowns)) - 1 if slowdowns else figures.default_loss


def _group_figures(members: list[_KernelFigures], fixed_loss: Mapping[str, float]) -> GroupFigures:
    """Compute the statistics of a non-empty group of kernels."""
    # Medians over kernels for ratios, which have long tails; means for losses, which are costs.
    best_us = [float(figures.kernel.runtime.min()) / 1e3 for figures in members]
    fifth_best = [float(np.sort(m.slowdown)[4]) - 1 for m in members if len(m.slowdown) >= 5]
    deviation = np.concatenate([figures.deviation for figures in members])
    return GroupFigures(
        kernels=len(members),
        configs=sum(figures.kernel.n_configs for figures in members),
        best_us=(min(best_us), max(best_us)),
        spread=float(np.median([figures.slowdown.max() for figures in members])),
        median_config=float(np.median([np.median(figures.slowdown) for figures in members])),
        fifth_best_loss=float(np.mean(fifth_best)) if fifth_best else 0.0,
        default_loss=float(np.mean([figures.default_loss for figures in members])),
        fixed_loss=float(np.mean([fixed_loss[figures.kernel.name] for figures in members])),
        noise=float(np.median(deviation)) if len(deviation) else None,
    )
