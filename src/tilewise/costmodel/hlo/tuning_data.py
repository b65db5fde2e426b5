"""Measurements of a tile autotuner (a serialized ``TuningData``) to kernel files.

Each module of the message is one kernel. A run counts when it has no error and took more than one nanosecond; the run
marked as the default gives the normalizer, so that a target below one means "faster than the compiler's own choice".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._files import read_input, write_whole
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.npz import Array, npz_bytes
from tilewise.costmodel.hlo.featurize import (
    HloGraph,
    featurize_module,
    parse_message,
    protobuf_classes,
    sequence_features,
)
from tilewise.errors import FileFormatError

MAX_FILE_BYTES = 256 << 20
_KEPT = 6


@dataclass(frozen=True)
class Converted:
    """What became of a tuning file: the kernel files written, and how many of its runs are in them."""

    files: list[Path]
    runs: int
    valid_runs: int
    skipped: list[str]


@dataclass(frozen=True)
class Measured:
    """The kernels of a tuning file, how many runs it holds, and one sentence for each module without a usable run."""

    kernels: list[Kernel]
    runs: int
    skipped: list[str]


def read_tuning_data(path: Path) -> Measured:
    """The kernels measured in the file `path`, named ``<file>_<hash>``; a repeated module gets a number."""
    modules = _parse(path).modules
    kernels: list[Kernel] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}
    for position, module in enumerate(modules):
        runs, problem = _usable_runs(module)
        if problem:
            skipped.append(f"Module {position} of {path.name} is left out: {problem}.")
            continue
        graph = featurize_module(module.module)
        digest = hashlib.sha256(b"".join(array.tobytes() for array in graph)).hexdigest()[:16]
        seen[digest] = seen.get(digest, 0) + 1
        suffix = f"-{seen[digest]}" if seen[digest] > 1 else ""
        kernels.append(_kernel(f"{path.stem}_{digest}{suffix}", graph, runs))
    if not kernels:
        raise FileFormatError(f"{path} holds no kernel with a valid run and a default to compare it with.")
    return Measured(kernels, sum(len(module.runs) for module in modules), skipped)


def convert_tuning_data(path: Path, out_dir: Path) -> Converted:
    """Write every kernel of the tuning file `path` as ``<program>_<hash>.npz`` into `out_dir`."""
    measured = read_tuning_data(path)
    files = [out_dir / f"{kernel.name}.npz" for kernel in measured.kernels]
    for target, kernel in zip(files, measured.kernels, strict=True):
        write_whole(target, kernel_npz(kernel))
    return Converted(files, measured.runs, sum(kernel.n_configs for kernel in measured.kernels), measured.skipped)


def kernel_npz(kernel: Kernel, **beside: Array) -> bytes:
    """A kernel in the six arrays and number types of the dataset's files, and what else is to travel `beside` them."""
    arrays: dict[str, Array] = {
        "node_feat": kernel.node_feat,
        "node_opcode": kernel.node_opcode,
        "edge_index": kernel.edge_index.astype(np.int64),
        "config_feat": kernel.config_feat,
        "config_runtime": kernel.runtime,
        "config_runtime_normalizers": kernel.normalizer,
    }
    return npz_bytes(arrays | beside)


def tile_features(tile: Any) -> list[int]:
    """The 24 numbers of a tile configuration: kernel, output and input bounds, each with its sum and product."""
    bounds = (tile.kernel_bounds, tile.output_bounds, tile.input_bounds)
    return [number for values in bounds for number in sequence_features(values, _KEPT, empty_product=0)]


def _parse(path: Path) -> Any:
    content = read_input(path, MAX_FILE_BYTES)
    return parse_message(protobuf_classes("tuning_pb2").TuningData(), content, str(path))


def _usable_runs(module: Any) -> tuple[list[Any], str]:
    runs = [run for run in module.runs if not run.has_error and run.execution_profile.compute_time_ns > 1]
    if not runs:
        return runs, "it has no valid run"
    return runs, "" if any(run.is_default for run in runs) else "none of its valid runs is the default"


def _kernel(name: str, graph: HloGraph, runs: list[Any]) -> Kernel:
    runtime = np.array([run.execution_profile.compute_time_ns for run in runs], np.int64)
    default = next(run for run in runs if run.is_default)
    return make_kernel(
        name,
        graph.node_feat,
        graph.node_opcode,
        graph.edge_index,
        np.array([tile_features(run.op_config.tile_size_config) for run in runs], np.int64).astype(np.float32),
        runtime,
        np.full_like(runtime, default.execution_profile.compute_time_ns),
        where=name,
    )
