"""Converts measurements of an autotuner to the files of TpuGraphs' collections.

Each module of a tile autotuner's ``TuningData`` is one kernel. A run is used if it has no error and took more than one
nanosecond. The run marked as the default provides the normalizer, so that a target below one means "faster than the
compiler's choice". A layout autotuner's ``ModuleTuningData`` is one graph with the layouts of a whole program.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise._atomic import write_atomic
from tilewise._files import read_input
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.data.writing import kernel_npz
from tilewise.costmodel.hlo.featurize import featurize_module, parse_message, protobuf_classes
from tilewise.costmodel.hlo.graph import KernelGraph, sequence_features
from tilewise.errors import FileFormatError

if TYPE_CHECKING:
    from tilewise.costmodel.layout.graph import LayoutGraph

MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class TuningConversion:
    """Result of `convert_tuning_data`: the files, the runs in the tuning file, and the runs that were used."""

    files: list[Path]
    runs: int
    valid_runs: int
    skipped: list[str]
    unit: str = "kernel"  # content of a file: a kernel, or the graph of a whole program


@dataclass(frozen=True)
class TuningData:
    """The kernels of a tuning file, its number of runs, and a sentence for each module without a usable run."""

    kernels: list[Kernel]
    runs: int
    skipped: list[str]


def read_tuning_data(path: Path) -> TuningData:
    """Read the measured kernels of an autotuner's file; they are named ``<file>_<hash>``."""
    modules = _parse_file(path, "TuningData").modules
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
    """Convert an autotuner's file to npz files in `out_dir`, one per kernel, or to one layout graph."""
    file = _parse_file(path, "TuningFile")
    if file.runs:
        from tilewise.costmodel.layout.graph import write_graph

        graph = _build_layout_graph(file, path)
        target = out_dir / f"{path.stem}.npz"
        write_graph(target, graph)
        return TuningConversion([target], len(file.runs), graph.n_configs, [], "graph")
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


def _parse_file(path: Path, message: str) -> Any:
    content = read_input(path, MAX_FILE_BYTES)
    return parse_message(getattr(protobuf_classes("tuning_pb2"), message)(), content, str(path))


def _build_layout_graph(file: Any, path: Path) -> LayoutGraph:
    """Build the graph of a layout autotuner's file; its runs without errors are the configurations."""
    from tilewise.costmodel.layout.graph import WIDTH, make_graph

    runs = [run for run in file.runs if not run.has_error and run.execution_profile.compute_time_ns > 0]
    nodes = list(file.config_index_to_node)
    if len(file.modules) != 1 or not runs or not nodes:
        raise FileFormatError(f"{path} needs one module, a valid run and the nodes that have layouts.")
    if any(len(run.module_config.layout_config.nodes) != len(nodes) for run in runs):
        raise FileFormatError(f"A run of {path} has no layout for some of its {len(nodes)} configurable nodes.")
    if len(runs) * len(nodes) * WIDTH > MAX_FILE_BYTES or max(nodes) >= 1 << 31:
        raise FileFormatError(f"{path} has {len(runs)} layouts of {len(nodes)} nodes, which is too large to be read.")
    # Output, input and filter of each node; -1 is beyond the rank.
    layouts = np.full((len(runs), len(nodes), WIDTH // DIMENSIONS, DIMENSIONS), -1, np.int32)
    for configuration, run in zip(layouts, runs, strict=True):
        for tensors, node in zip(configuration, run.module_config.layout_config.nodes, strict=True):
            for dimensions, tensor in zip(tensors, node.tensors, strict=False):
                order = tensor.dims[:DIMENSIONS]
                dimensions[: len(order)] = order
    module = parse_message(protobuf_classes("hlo_pb2").HloModuleProto(), file.modules[0], str(path))
    return make_graph(
        path.stem,
        *featurize_module(module),
        node_config_ids=np.array(nodes, np.int64),
        config_runtime=np.array([run.execution_profile.compute_time_ns for run in runs], np.int64),
        node_config_feat=layouts.reshape(len(runs), len(nodes), -1),
        where=str(path),
    )


def _usable_runs(module: Any) -> tuple[list[Any], str]:
    """Return (runs with a valid result, ""), or ([], reason) if a module has none."""
    runs = [run for run in module.runs if not run.has_error and run.execution_profile.compute_time_ns > 1]
    if not runs:
        return runs, "it has no valid run"
    return runs, "" if any(run.is_default for run in runs) else "none of its valid runs is the default"


def _kernel(name: str, graph: KernelGraph, runs: list[Any]) -> Kernel:
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
