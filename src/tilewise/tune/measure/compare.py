"""Compare two measurements of the same kernels: the order of the runtimes, and the resulting choices.

For each common kernel: the rank correlation of the runtimes over the common configurations, and the slowdown of the
first's best configuration against the second's best, in the second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection
from tilewise.costmodel.data.dataset import embedded_collections, find_collection
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.shards import read_folder
from tilewise.errors import ConfigurationError
from tilewise.profile.timing.statistics import rank_correlation
from tilewise.store.aggregate import open_measurements
from tilewise.tune.measure.export import make_collection, reorder_columns

Runtimes = npt.NDArray[np.int64]


def open_collection(source: str | os.PathLike[str]) -> Collection:
    """Open a collection by name, file or folder; or the finished kernels of a store or of a folder of stores."""
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
    """Compare two measurements of the same kernels.

    `kernels` has for each common kernel the number of common configurations, Spearman's rank correlation of the
    runtimes, the loss of the first's best configuration in the second (relative to the second's best), and the median
    ratio of second to first. The other keys summarize all kernels; `median_deviation` compares runtimes relative to the
    default.
    """
    _check_same_kind(first, second)
    ours, theirs = first.schema.config_features, second.schema.config_features
    columns = list(dict.fromkeys((*ours, *theirs)))
    others = {_identity(m): m for members in second.splits.values() for m in members}
    rows, deviations = [], []
    for members in first.splits.values():
        for item in members:
            other = others.get(_identity(item))
            if other is None:
                continue
            pair = _common_runtimes(_by_config(item.kernel, ours, columns), _by_config(other.kernel, theirs, columns))
            if pair is not None:
                rows.append(_agreement(item.kernel.name, *pair))
                slower = other.kernel.normalizer[0] / item.kernel.normalizer[0]
                deviations.append(np.abs(pair[1] / pair[0] / slower - 1))
    if not rows:
        raise ConfigurationError("The two have no kernel in common, so there is nothing to compare.")
    correlations = [kernel["rank_correlation"] for kernel in rows]
    losses = [kernel["choice_loss"] for kernel in rows]
    return {
        "kernels": rows,
        "configs": sum(kernel["configs"] for kernel in rows),
        "median_correlation": float(np.median(correlations)),
        "least_correlation": min(correlations),
        "mean_choice_loss": float(np.mean(losses)),
        "largest_choice_loss": max(losses),
        "median_deviation": float(np.median(np.concatenate(deviations))),
    }


def _identity(item: MeasuredKernel) -> str:
    """Hash in a kernel's name, which depends on the problem but not on the program."""
    return item.kernel.name.rpartition("_")[2]


def _check_same_kind(first: Collection, second: Collection) -> None:
    """Raise an error if the collections come from different kinds of devices."""
    kinds = {str(collection.schema.extra.get("kind", "")) for collection in (first, second)} - {""}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"One was measured by the {' and one by the '.join(sorted(kinds))} collector; "
            "compare measurements of one kind of machine."
        )


def _common_runtimes(first: Mapping[bytes, int], second: Mapping[bytes, int]) -> tuple[Runtimes, Runtimes] | None:
    """Runtimes of the common configurations in the same order; None if there are fewer than two."""
    pairs = [(runtime, second[key]) for key, runtime in first.items() if key in second]
    if len(pairs) < 2:
        return None
    runtimes = np.array(pairs, np.int64)
    return runtimes[:, 0], runtimes[:, 1]


def _by_config(kernel: Kernel, names: Sequence[str], columns: Sequence[str]) -> Mapping[bytes, int]:
    """Runtimes by configuration, in the union of both sets of columns."""
    rows = reorder_columns(kernel.config_feat, names, columns)
    return {row.tobytes(): int(runtime) for row, runtime in zip(rows, kernel.runtime, strict=True)}


def _agreement(name: str, first: Runtimes, second: Runtimes) -> dict[str, Any]:
    """Row of the report for one kernel."""
    correlation = rank_correlation(first.astype(np.float64), second.astype(np.float64))
    loss, ratio = float(second[int(np.argmin(first))] / second.min() - 1), float(np.median(second / first))
    return {"kernel": name, "configs": len(first), "rank_correlation": correlation, "choice_loss": loss,
            "speed_ratio": ratio}  # fmt: skip
