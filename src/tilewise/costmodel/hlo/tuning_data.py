"""Converts measurements of a tile autotuner (a serialized ``TuningData``) to kernel files.

Each module of the message is one kernel. A run is used if it has no error and took more than one nanosecond. The run
marked as the default provides the normalizer, so that a target below one means "faster than the compiler's choice".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import read_input, write_atomic
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.data.writing import kernel_npz
from tilewise.costmodel.hlo.featurize import HloGraph, featurize_module, parse_message, protobuf_classes
from tilewise.costmodel.hlo.graph import sequence_features
from tilewise.errors import FileFormatError

MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class TuningConversion:
    """Result of `convert_tuning_data`: the kernel files, the runs in the tuning file, and the runs that were used."""

    files: list[Path]
    runs: int
    valid_runs: int
    skipped: list[str]


@dataclass(frozen=True)
class TuningData:
    """The kernels of a tuning file, its number of runs, and a sentence for each module without a usable run."""

    kernels: list[Kernel]
    runs: int
    skipped: list[str]


def read_tuning_data(path: Path) -> TuningData:
    """Read the kernels measured in the file `path`; they are named ``<file>_<hash>``, repeats with a number."""
    modules = _parse(path).modules
    kernels: list[Kernel] = []
    skipped: list[str] = []
    occurrences: dict[str, int] = {}
    for position, module in enumerate(modules):
        runs, problem = _usable_runs(module)
        if problem:
            skipped.append(f"Module {position} of {path.name} is skipped: {problem}.")
            continue
        graph = featurize_module(module.module)
        # Names depend on the graph alone, so that the same kernel has the same name in every tuning file.
        digest = hashlib.sha256(b"".join(array.tobytes() for array in graph)).hexdigest()[:16]
        occurrences[digest] = occurrences.get(digest, 0) + 1
        suffix = f"-{occurrences[digest]}" if occurrences[digest] > 1 else ""
        kernels.append(_kernel(f"{path.stem}_{digest}{suffix}", graph, runs))
    if not kernels:
        raise FileFormatError(f"{path} contains no kernel with a valid run and a default to compare it with.")
    return TuningData(kernels, sum(len(module.runs) for module in modules), skipped)


def convert_tuning_data(path: Path, out_dir: Path) -> TuningConversion:
    """Write every kernel of the tuning file `path` as ``<program>_<hash>.npz`` into `out_dir`."""
    data = read_tuning_data(path)
    files = [out_dir / f"{kernel.name}.npz" for kernel in data.kernels]
    for target, kernel in zip(files, data.kernels, strict=True):
        write_atomic(target, kernel_npz(kernel))
    return TuningConversion(files, data.runs, sum(kernel.n_configs for kernel in data.kernels), data.skipped)


def tile_features(tile: Any) -> list[int]:
    """Return the 24 features of a tile: its kernel, output and input bounds, each with their sum and product."""
    bounds = (tile.kernel_bounds, tile.output_bounds, tile.input_bounds)
    # Unlike in node features, the product of empty bounds is 0 in TpuGraphs' files.
    return [number for values in bounds for number in sequence_features(values, DIMENSIONS, empty_product=0)]


def _parse(path: Path) -> Any:
    content = read_input(path, MAX_FILE_BYTES)
    return parse_message(protobuf_classes("tuning_pb2").TuningData(), content, str(path))


def _usable_runs(module: Any) -> tuple[list[Any], str]:
    """Return the valid runs of a module, and a reason if they cannot be used."""
    runs = [run for run in module.runs if not run.has_error and run.execution_profile.compute_time_ns > 1]
    if not runs:
        return runs, "it has no valid run"
    return runs, "" if any(run.is_default for run in runs) else "none of its valid runs is the default"


def _kernel(name: str, graph: HloGraph, runs: list[Any]) -> Kernel:
    """Build a kernel with a configuration for each run; the first default run is the normalizer of all."""
    runtime = np.array([run.execution_profile.compute_time_ns for run in runs], np.int64)
    default = next(run for run in runs if run.is_default)
    # int64 first: products wrap as in C++, and each number is rounded to float32 once.
    features = np.array([tile_features(run.op_config.tile_size_config) for run in runs], np.int64).astype(np.float32)
    return make_kernel(
        name,
        node_feat=graph.node_feat,
        node_opcode=graph.node_opcode,
        edge_index=graph.edge_index,
        config_feat=features,
        config_runtime=runtime,
        config_runtime_normalizers=np.full_like(runtime, default.execution_profile.compute_time_ns),
        where=name,
    )
