"""From a store to files of TpuGraphs' format: a folder of npz files with a schema.json, or one file for the package.

Columns of a configuration: the 24 of TpuGraphs first (bounds of the second operand's tile, of the result's, of the
first operand's, in the order of the tensors' dimensions), then the hardware's own by name, which are whatever a
configuration says beside its block sizes. Numbers that follow from these are left to the model. On a CPU the threads
that share the kernel, whether a configuration is the default, and the machine's own numbers come last, so that kernels
of several machines can stand in one collection.
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

from tilewise._files import write_atomic
from tilewise.costmodel.data.collection import Collection, MeasuredKernel, write_collection
from tilewise.costmodel.data.dataset import with_noise
from tilewise.costmodel.data.kernel import make_kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.costmodel.hlo.tuning_data import kernel_npz
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError
from tilewise.store.aggregate import MeasuredProblem, read_measured
from tilewise.store.problem import Problem
from tilewise.store.store import Store
from tilewise.tune.families.columns import DEFAULT, THREADS, config_row, own_columns, with_machine
from tilewise.tune.families.registry import Family, find_family
from tilewise.tune.workloads.programs import splits_of

SPLITS = ("train", "valid", "test")
_OF_A_MACHINE = ("hardware", "machine", "measured", "settings", "verdicts")  # what a schema says of where it came from
_MIDDLE = {"cpu": "faster two of three"}


def make_collection(store: Store, name: str, telling: float = 0.0, split: str = "auto") -> Collection:
    """The finished kernels of `store`, split as `splits_of` says, ready to be written.

    Kernels whose configurations differ by less than `telling` times the scatter of their repeats are left out: their
    order is chance, and a model that learned it would have learned nothing.
    """
    machines = store.machines()
    measured = [problem for problem in read_measured(store) if _tells(problem) >= telling]
    if not measured or not machines:
        raise ConfigurationError(f"{store.path} holds no finished kernel; run `tilewise collect` on it first.")
    kind, features = machines[0].kind, _features(store, machines[-1].details)
    own = own_columns([t.config for m in measured for t in m.timings])
    own = (*own, *((THREADS, DEFAULT, *features) if features else ()))
    splits: dict[str, list[MeasuredKernel]] = {split: [] for split in SPLITS}
    chosen = splits_of([problem.kernel for problem in measured], split, kind)
    for problem in sorted(measured, key=lambda m: m.kernel.name):
        family = find_family(kind, problem.kernel.problem.family)
        splits[chosen[problem.kernel.name]].append(_described(store, problem, family, own, features))
    _keep_apart(splits)
    return with_noise(Collection(Schema((*TILE_FEATURES, *own), _about(store, name)), splits))


def _described(
    store: Store, measured: MeasuredProblem, family: Family, own: Sequence[str], features: Mapping[str, int]
) -> MeasuredKernel:
    """The kernel as its family describes it; a store may hold problems and tiles that the family cannot have."""
    try:
        return _kernel(measured, family, own, features)
    except (KeyError, ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, TilewiseError):
            raise
        name, kind = measured.kernel.name, measured.kernel.problem.family
        raise FileFormatError(f"{store.path} is damaged: {name} has sizes or a tile that no {kind} has.") from None


def _features(store: Store, details: Mapping[str, Any]) -> dict[str, int]:
    """What a machine says of itself in numbers, for a model's columns."""
    found = details.get("features") or {}
    if not isinstance(found, dict) or not all(type(v) in (int, float) and abs(v) < 1e30 for v in found.values()):
        raise FileFormatError(f"{store.path} is damaged: its machine's features are not numbers.")
    return found


def merged(parts: Sequence[Collection], name: str) -> Collection:
    """Collections of several machines as one: all their columns (0 where one has it not), kernels named by machine."""
    columns = tuple(dict.fromkeys(column for part in parts for column in part.schema.config_features))
    splits: dict[str, list[MeasuredKernel]] = {split: [] for split in SPLITS}
    for part in parts:
        tag = slug(str(part.schema.extra.get("hardware", "")))
        for split, kernels in part.splits.items():
            splits[split] += [_moved(each, part.schema.config_features, columns, tag) for each in kernels]
    _keep_apart(splits)
    about = [{key: part.schema.extra.get(key) for key in _OF_A_MACHINE} for part in parts]
    extra = {key: value for key, value in parts[0].schema.extra.items() if key not in (*_OF_A_MACHINE, "noise")}
    hardware = ", ".join(dict.fromkeys(str(machine["hardware"]) for machine in about))
    return with_noise(
        Collection(Schema(columns, {**extra, "name": name, "hardware": hardware, "machines": about}), splits)
    )


def slug(hardware: str) -> str:
    """A machine's name as it stands in the names of its kernels."""
    return "-".join(re.findall(r"[a-z0-9]+", hardware.lower()))


def in_columns(feat: npt.NDArray[np.float32], names: Sequence[str], columns: Sequence[str]) -> npt.NDArray[np.float32]:
    """Configurations whose columns are called `names` in other columns, of which they may lack some: those are 0."""
    found = np.zeros((len(feat), len(columns)), np.float32)
    found[:, [columns.index(name) for name in names]] = feat
    return found


def _moved(measured: MeasuredKernel, names: Sequence[str], columns: Sequence[str], tag: str) -> MeasuredKernel:
    """The kernel with its columns in their new places, called by program, machine and digest."""
    kernel = measured.kernel
    feat = in_columns(kernel.config_feat, names, columns)
    program = f"{kernel.program}.{tag}"
    name = f"{program}_{kernel.name.rpartition('_')[2]}"
    moved = dataclasses.replace(kernel, name=name, program=program, config_feat=feat)
    return dataclasses.replace(measured, kernel=moved)


def _tells(measured: MeasuredProblem) -> float:
    """How far configurations lie apart (deviation of the logarithm), in units of a repeat's relative deviation."""
    spread = float(np.std(np.log([timing.runtime_ns for timing in measured.timings])))
    return spread / max(float(np.median([timing.deviation for timing in measured.timings])), 1e-9)


def _kernel(
    measured: MeasuredProblem, family: Family, own: Sequence[str], features: Mapping[str, int]
) -> MeasuredKernel:
    problem = measured.kernel.problem
    rows = np.array([config_row(family, problem, t.config, own) for t in measured.timings], np.float32)
    if features:
        default = next((i for i, timing in enumerate(measured.timings) if timing.config == measured.default), None)
        rows = with_machine(rows, own, problem, features, default)
    order = np.lexsort(rows.T[::-1])  # a fixed order that does not tell where the default is
    timings = [measured.timings[i] for i in order]
    runtime = np.array([max(1, round(t.runtime_ns)) for t in timings], np.int64)
    normalizer = np.full(len(timings), max(1, round(measured.default_ns)), np.int64)
    kernel = make_kernel(measured.kernel.name, *family.graph(problem), rows[order], runtime, normalizer)
    deviation = np.array([t.deviation for t in timings], np.float32)
    repeats = np.array([min(t.repeats, 65_535) for t in timings], np.uint16)
    return MeasuredKernel(kernel, deviation, repeats, dict(problem))


def _keep_apart(splits: Mapping[str, Sequence[MeasuredKernel]]) -> None:
    """No shape may be in two splits; the list of programs sees to that, and this is the proof."""
    owner: dict[str, str] = {}
    for split, kernels in splits.items():
        for measured in kernels:
            key = Problem(measured.problem).shape_key
            if owner.setdefault(key, split) != split:
                raise ConfigurationError(
                    f"The shape {key} is in {owner[key]} and in {split}; give its kernels programs of one split."
                )


def _about(store: Store, name: str) -> dict[str, Any]:
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
        "runtime": f"{_MIDDLE.get(machines[0].kind, 'median')} of the undisturbed repeats, nanoseconds",
        "normalizer": "the default configuration, in the same batches",
    }


def verdict_counts(store: Store) -> dict[str, dict[str, int]]:
    """By family, how many configurations of finished kernels fared how; the last word on each counts."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    done = store.finished()
    for kernel in store.kernels():
        if kernel.problem.key in done:
            last = {config.key: status for config, status, _ in store.verdicts(kernel)}
            for status in last.values():
                counts[kernel.problem.family][status] += 1
    return {family: dict(statuses) for family, statuses in counts.items()}


def export_folder(collection: Collection, out: str | os.PathLike[str]) -> int:
    """Write train, valid and test folders and a schema.json under `out`; gives the number of kernels."""
    root, written = Path(out).expanduser(), 0
    schema = {"config_features": list(collection.schema.config_features), **collection.schema.extra}
    for split, kernels in collection.splits.items():
        for measured in kernels:
            content = kernel_npz(measured.kernel, config_deviation=measured.deviation, config_repeats=measured.repeats)
            write_atomic(root / split / f"{measured.kernel.name}.npz", content)
            written += 1
    write_atomic(root / "schema.json", json.dumps(schema, indent=1))
    return written


def embed(collection: Collection, out: str | os.PathLike[str]) -> int:
    """Write the whole collection into the one file `out`; gives its bytes."""
    return write_collection(Path(out).expanduser(), collection)
