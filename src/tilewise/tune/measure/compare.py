"""Whether two measurements of the same kernels agree: the order of the runtimes, and the choice that follows from them.

For each kernel in both: the rank correlation of the runtimes over the configurations both measured, and how much slower
than the second's best the first's best choice is in the second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection, read_folder
from tilewise.costmodel.data.dataset import embedded_collections, find_collection
from tilewise.costmodel.data.kernel import Kernel
from tilewise.errors import ConfigurationError
from tilewise.profile.timing.statistics import rank_correlation
from tilewise.store.aggregate import open_measurements
from tilewise.tune.measure.export import in_columns, make_collection

Runtimes = npt.NDArray[np.int64]


def open_collection(source: str | os.PathLike[str]) -> Collection:
    """A collection by name, file or folder; or the finished kernels of a store or of a visit's folder."""
    path = Path(source).expanduser()
    if path.suffix == ".npz" or (os.fspath(source) in embedded_collections() and not path.is_dir()):
        return read_collection(find_collection(source))
    if path.is_dir() and any((path / split).is_dir() for split in ("train", "valid", "test")):
        return read_folder(path)
    if not path.exists():
        names = ", ".join(embedded_collections()) or "none"
        raise ConfigurationError(f"There is nothing at {source}; give a store, a folder or a collection ({names}).")
    with open_measurements(path) as store:
        return make_collection(store, path.stem)


def compare(first: Collection, second: Collection) -> dict[str, Any]:
    """How far two measurements of the same kernels agree; one sentence where they have none in common. Of each of the
    `kernels`: how many configurations both measured, Spearman's correlation of the runtimes, what the first's best
    loses in the second (over the second's best, less one), and the median of second over first; then the same over all,
    and how far the two runtimes of a pair deviate, each relative to its kernel's default."""
    _check_alike(first, second)
    ours, theirs = first.schema.config_features, second.schema.config_features
    columns = list(dict.fromkeys((*ours, *theirs)))
    others = {_identity(m): m for members in second.splits.values() for m in members}
    found, deviations = [], []
    for members in first.splits.values():
        for measured in members:
            other = others.get(_identity(measured))
            if other is None:
                continue
            pair = _paired(_by_config(measured.kernel, ours, columns), _by_config(other.kernel, theirs, columns))
            if pair is not None:
                found.append(_agreement(measured.kernel.name, *pair))
                slower = other.kernel.normalizer[0] / measured.kernel.normalizer[0]
                deviations.append(np.abs(pair[1] / pair[0] / slower - 1))
    if not found:
        raise ConfigurationError("The two have no kernel in common, so there is nothing to compare.")
    correlations = [kernel["rank_correlation"] for kernel in found]
    losses = [kernel["choice_loss"] for kernel in found]
    return {
        "kernels": found,
        "configs": sum(kernel["configs"] for kernel in found),
        "median_correlation": float(np.median(correlations)),
        "least_correlation": min(correlations),
        "mean_choice_loss": float(np.mean(losses)),
        "largest_choice_loss": max(losses),
        "median_deviation": float(np.median(np.concatenate(deviations))),
    }


def _identity(measured: MeasuredKernel) -> str:
    """The hash in a kernel's name, which is the problem's alone: the program does not matter here."""
    return measured.kernel.name.rpartition("_")[2]


def _check_alike(first: Collection, second: Collection) -> None:
    kinds = {str(collection.schema.extra.get("kind", "")) for collection in (first, second)} - {""}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"One was measured by the {' and one by the '.join(sorted(kinds))} collector; "
            "compare measurements of one kind of machine."
        )


def _paired(here: Mapping[bytes, int], there: Mapping[bytes, int]) -> tuple[Runtimes, Runtimes] | None:
    """Runtimes of the configurations both have, in one order; None with fewer than two."""
    pairs = [(runtime, there[key]) for key, runtime in here.items() if key in there]
    if len(pairs) < 2:
        return None
    both = np.array(pairs, np.int64)
    return both[:, 0], both[:, 1]


def _by_config(kernel: Kernel, names: Sequence[str], columns: Sequence[str]) -> Mapping[bytes, int]:
    """Runtimes by configuration, in the columns of both; a store without convolutions lacks theirs, for one."""
    rows = in_columns(kernel.config_feat, names, columns)
    return {row.tobytes(): int(runtime) for row, runtime in zip(rows, kernel.runtime, strict=True)}


def _agreement(name: str, first: Runtimes, second: Runtimes) -> dict[str, Any]:
    correlation = rank_correlation(first.astype(np.float64), second.astype(np.float64))
    loss, ratio = float(second[int(np.argmin(first))] / second.min() - 1), float(np.median(second / first))
    return {"kernel": name, "configs": len(first), "rank_correlation": correlation, "choice_loss": loss,
            "speed_ratio": ratio}  # fmt: skip
