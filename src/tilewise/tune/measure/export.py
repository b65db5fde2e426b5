"""Export a store to files in TpuGraphs' format (a folder with a schema.json, or one file); compare two measurements.

Columns of a configuration: first the 24 of TpuGraphs (tile bounds of the second operand, of the result and of the first
operand, in the order of the tensors' dimensions), then the hardware settings by name: every setting that is not a block
size. Derived numbers are left to the model. On a CPU, the last columns are the number of threads, whether the
configuration is the default, and the features of the machine, so that one collection can have kernels of several
machines.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._atomic import write_atomic
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, read_collection, with_noise
from tilewise.costmodel.data.dataset import embedded_collections, find_collection
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.costmodel.data.shards import read_folder
from tilewise.costmodel.data.writing import kernel_npz, write_collection
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.profile.timing.statistics import rank_correlation
from tilewise.store.aggregate import MeasuredProblem, open_measurements, read_measured
from tilewise.store.problem import Problem
from tilewise.store.store import Store
from tilewise.tune.families.registry import Family, find_family
from tilewise.tune.families.space import DEFAULT, THREADS, config_row, own_columns, with_machine
from tilewise.tune.workloads import splits_of

SPLITS = ("train", "valid", "test")
_MACHINE_KEYS = ("hardware", "machine", "measured", "settings", "verdicts")  # schema keys of one machine
_AVERAGES = {"cpu": "faster two of three"}


def make_collection(store: Store, name: str, telling: float = 0.0, split: str = "auto") -> Collection:
    """Convert the finished kernels of a store to a collection with train, valid and test splits (`splits_of`).

    Kernels whose configurations differ by less than `telling` times the scatter of their repeats are omitted: the order
    of their runtimes is noise.
    """
    machines = store.machines()
    problems = [problem for problem in read_measured(store) if _signal_to_noise(problem) >= telling]
    if not problems or not machines:
        raise ConfigurationError(f"{store.path} holds no finished kernel; run `tilewise collect` on it first.")
    kind, features = machines[0].kind, _machine_columns(store, machines[-1].details)
    own = own_columns([t.config for m in problems for t in m.timings])
    own = (*own, *((THREADS, DEFAULT, *features) if features else ()))
    splits: dict[str, list[MeasuredKernel]] = {split: [] for split in SPLITS}
    split_by_name = splits_of([problem.kernel for problem in problems], split, kind)
    for problem in sorted(problems, key=lambda m: m.kernel.name):
        family = find_family(kind, problem.kernel.problem.family)
        name, kind_name = problem.kernel.name, problem.kernel.problem.family
        try:
            splits[split_by_name[name]].append(_measured_kernel(problem, family, own, features))
        except (KeyError, ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
            if isinstance(error, TilewiseError):
                raise
            message = f"{store.path} is damaged: {name} has sizes or a tile that no {kind_name} has."
            raise FileFormatError(message) from None
    _check_disjoint(splits)
    return with_noise(Collection(Schema((*TILE_FEATURES, *own), _schema_extra(store, name)), splits))


def _machine_columns(store: Store, details: Mapping[str, Any]) -> dict[str, int]:
    """Return the machine's feature columns by name, from the details that a store records."""
    values = details.get("features") or {}
    if not isinstance(values, dict) or not all(type(v) in (int, float) and abs(v) < 1e30 for v in values.values()):
        raise FileFormatError(f"{store.path} is damaged: its machine's features are not numbers.")
    return values


def merge_collections(collections: Sequence[Collection], name: str) -> Collection:
    """Merge collections of several machines: all columns (0 where missing), machine names in the kernel names."""
    columns = tuple(dict.fromkeys(column for collection in collections for column in collection.schema.config_features))
    splits: dict[str, list[MeasuredKernel]] = {split: [] for split in SPLITS}
    for collection in collections:
        tag = slug(str(collection.schema.extra.get("hardware", "")))
        for split, items in collection.splits.items():
            for item in items:
                kernel, program = item.kernel, f"{item.kernel.program}.{tag}"
                feat = reorder_columns(kernel.config_feat, collection.schema.config_features, columns)
                name = f"{program}_{_identity(item)}"
                renamed = dataclasses.replace(kernel, name=name, program=program, config_feat=feat)
                splits[split].append(dataclasses.replace(item, kernel=renamed))
    _check_disjoint(splits)
    about = [{key: collection.schema.extra.get(key) for key in _MACHINE_KEYS} for collection in collections]
    extra = {key: value for key, value in collections[0].schema.extra.items() if key not in (*_MACHINE_KEYS, "noise")}
    hardware = ", ".join(dict.fromkeys(str(machine["hardware"]) for machine in about))
    return with_noise(
        Collection(Schema(columns, {**extra, "name": name, "hardware": hardware, "machines": about}), splits)
    )


def slug(hardware: str) -> str:
    """Return a machine's name in a form that fits into kernel names."""
    return "-".join(re.findall(r"[a-z0-9]+", hardware.lower()))


def reorder_columns(
    feat: npt.NDArray[np.float32], names: Sequence[str], columns: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Return the columns `names` of `feat` in the order of `columns`; missing ones are 0."""
    values = np.zeros((len(feat), len(columns)), np.float32)
    values[:, [columns.index(name) for name in names]] = feat
    return values


def _signal_to_noise(item: MeasuredProblem) -> float:
    """Return the deviation of a kernel's log runtimes divided by the scatter of their repeats."""
    deviation_of_logs = float(np.std(np.log([timing.runtime_ns for timing in item.timings])))
    return deviation_of_logs / max(float(np.median([timing.deviation for timing in item.timings])), 1e-9)


def _measured_kernel(
    item: MeasuredProblem, family: Family, own: Sequence[str], features: Mapping[str, int]
) -> MeasuredKernel:
    """Convert a kernel's timings to features, runtimes and normalizers; `own` are the settings besides block sizes."""
    problem = item.kernel.problem
    rows = np.array([config_row(family, problem, t.config, own) for t in item.timings], np.float32)
    if features:
        default = next((i for i, timing in enumerate(item.timings) if timing.config == item.default), None)
        rows = with_machine(rows, own, problem, features, default)
    order = np.lexsort(rows.T[::-1])  # a fixed order that does not reveal the default
    timings = [item.timings[i] for i in order]
    runtime = np.array([max(1, round(t.runtime_ns)) for t in timings], np.int64)
    normalizer = np.full(len(timings), max(1, round(item.default_ns)), np.int64)
    kernel = make_kernel(item.kernel.name, *family.graph(problem), rows[order], runtime, normalizer)
    deviation = np.array([t.deviation for t in timings], np.float32)
    repeats = np.array([min(t.repeats, 65_535) for t in timings], np.uint16)
    return MeasuredKernel(kernel, deviation, repeats, dict(problem))


def _check_disjoint(splits: Mapping[str, Sequence[MeasuredKernel]]) -> None:
    """Raise an error if one shape is in two splits."""
    owner: dict[str, str] = {}
    for split, kernels in splits.items():
        for item in kernels:
            key = Problem(item.problem).shape_key
            if owner.setdefault(key, split) != split:
                raise ConfigurationError(
                    f"The shape {key} is in {owner[key]} and in {split}; give its kernels programs of one split."
                )


def _schema_extra(store: Store, name: str) -> dict[str, Any]:
    """Return a collection's provenance for its schema: machine, dates, settings and verdicts."""
    machines, runs = store.machines(), store.runs()
    if not runs:
        raise store.damage_error("timings without a run")
    days = sorted({datetime.datetime.fromtimestamp(run[0], datetime.UTC).date().isoformat() for run in runs})
    return {
        "name": name,
        "kind": machines[0].kind,
        "hardware": machines[0].identity,
        "machine": dict(machines[-1].details),
        "measured": [days[0], days[-1]],
        "settings": runs[-1][2],
        "verdicts": verdict_counts(store),
        "runtime": f"{_AVERAGES.get(machines[0].kind, 'median')} of the undisturbed repeats, nanoseconds",
        "normalizer": "the default configuration, in the same batches",
    }


def verdict_counts(store: Store) -> dict[str, dict[str, int]]:
    """Count configurations of finished kernels by family and verdict; each one's last verdict counts."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    done = store.finished()
    for kernel in store.kernels():
        if kernel.problem.key in done:
            last = {config.key: status for config, status, _ in store.verdicts(kernel)}
            for status in last.values():
                counts[kernel.problem.family][status] += 1
    return {family: dict(statuses) for family, statuses in counts.items()}


def export_folder(collection: Collection, out: str | os.PathLike[str]) -> int:
    """Write train, valid and test folders and a schema.json under `out`; return the number of kernels."""
    root, written = Path(out).expanduser(), 0
    schema = {"config_features": list(collection.schema.config_features), **collection.schema.extra}
    for split, kernels in collection.splits.items():
        for item in kernels:
            content = kernel_npz(item.kernel, config_deviation=item.deviation, config_repeats=item.repeats)
            write_atomic(root / split / f"{item.kernel.name}.npz", content)
            written += 1
    write_atomic(root / "schema.json", json.dumps(schema, indent=1))
    return written


def embed(collection: Collection, out: str | os.PathLike[str]) -> int:
    """Write a whole collection to the single file `out`; return its size in bytes."""
    return write_collection(Path(out).expanduser(), collection)


def open_collection(source: str | os.PathLike[str]) -> Collection:
    """Open a collection by name, file or folder, or make one of the finished kernels in a store."""
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
    """Compare two collections of measurements of the same kernels.

    `kernels` has for each common kernel the number of common configurations, Spearman's rank correlation of the
    runtimes, the loss of the first's best configuration in the second (relative to the second's best), and the median
    ratio of second to first. The other keys summarize all kernels; `median_deviation` compares runtimes relative to the
    default.
    """
    kinds = {str(collection.schema.extra.get("kind", "")) for collection in (first, second)} - {""}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"One was measured by the {' and one by the '.join(sorted(kinds))} collector; "
            "compare measurements of one kind of machine."
        )
    ours, theirs = first.schema.config_features, second.schema.config_features
    columns = list(dict.fromkeys((*ours, *theirs)))
    others = {_identity(m): m for members in second.splits.values() for m in members}
    rows: list[dict[str, Any]] = []
    deviations = []
    for members in first.splits.values():
        for item in members:
            other = others.get(_identity(item))
            if other is None:
                continue
            our_runtimes = _by_config(item.kernel, ours, columns)
            their_runtimes = _by_config(other.kernel, theirs, columns)
            common = [(ns, their_runtimes[key]) for key, ns in our_runtimes.items() if key in their_runtimes]
            if len(common) > 1:
                pair = np.array(common, np.int64).T
                correlation = rank_correlation(pair[0].astype(np.float64), pair[1].astype(np.float64))
                loss = float(pair[1][int(np.argmin(pair[0]))] / pair[1].min() - 1)
                rows.append({
                    "kernel": item.kernel.name, "configs": len(pair[0]), "rank_correlation": correlation,
                    "choice_loss": loss, "speed_ratio": float(np.median(pair[1] / pair[0])),
                })  # fmt: skip
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
    """Return the hash at the end of a kernel's name, which depends on its problem only."""
    return item.kernel.name.rpartition("_")[2]


def _by_config(kernel: Kernel, names: Sequence[str], columns: Sequence[str]) -> Mapping[bytes, int]:
    """Return each configuration's index in the kernel by its settings, as bytes over the given columns."""
    rows = reorder_columns(kernel.config_feat, names, columns)
    return {row.tobytes(): int(runtime) for row, runtime in zip(rows, kernel.runtime, strict=True)}
