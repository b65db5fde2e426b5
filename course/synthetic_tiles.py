"""Synthetic TPU kernels with XLA's semantics: for tests, toy runs and comparisons of models, never a statement on TPUs.

A kernel is a fusion around a convolution, a product, a reduction or an elementwise operation, with the layouts, element
types and register units of `tpu_tiles`. Only the meaning of a bound is shared with the models' features; the cost is
computed here by a loop nest with transfers, reuse and arithmetic of its own, so that no feature states the answer:

- tensors are moved by descriptors of contiguous registers, edge tiles are moved and computed without their padding, and
  the loop order decides which operand stays in the scratchpad;
- transfers overlap arithmetic only if two tiles fit the scratchpad;
- vector work depends on the fused operations, on spilled registers and on bank conflicts, edge tiles are masked;
- bandwidth, overheads, banks and the usable scratchpad are hidden properties of the program, so that held-out programs
  have values that no model was trained on; which innermost bounds a loop prefers is a hidden property of the kernel.

Repeated runs differ by 0.4 %, as in TpuGraphs. Kernels of one program share batch size, element type and layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data import tpu_tiles
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import ELEMENT_TYPES, NODE_FEATURES, OPCODE_NUMBER, TILE_FEATURES, Schema
from tilewise.costmodel.data.tpu_tiles import BOUNDS, TiledTensor, TileReading, read_tiles, tile_quantities

Rng = np.random.Generator
SCHEMA = Schema(TILE_FEATURES, {"hardware": "synthetic TPU", "name": "synthetic-tpu"})
_KINDS = ("convolution", "product", "reduce", "elementwise", "copy")
_ELEMENTWISE = ("add", "multiply", "maximum", "tanh", "exponential", "subtract", "rsqrt", "select")
_SCRATCHPAD_BYTES = 8 << 20  # a tile's share of the 16 MiB of a TPU v3 core: half, for double buffering
# Rates of the imaginary device at a program's average: those of `tpu_tiles.estimate_runtime` are others.
_BYTES_PER_NS, _MXU_ROWS_PER_NS, _VECTOR_REGISTERS_PER_NS, _TILE_NS, _DESCRIPTOR_NS = 550.0, 1.4, 1.1, 220.0, 6.0
_FLOAT32_PASSES = 3.0  # a float32 product takes three bf16 passes of the matrix unit
_VECTOR_REGISTERS = 64
_SLOW_OPERATIONS = {OPCODE_NUMBER[name]: 6.0 for name in ("tanh", "exponential", "rsqrt")}
_FREE_OPERATIONS = tuple(OPCODE_NUMBER[name] for name in ("parameter", "fusion", "convolution"))
_NOISE = 0.004


@dataclass(frozen=True)
class Program:
    """Properties that the kernels of one program share."""

    batch: int
    kind: str  # element type of most tensors
    transposed: bool  # whether the batch is stored beside the features, as XLA does with large batches
    channels: int  # the features of a layer are multiples of it
    # Hidden from the models: the collection does not state them.
    bandwidth: float = 1.0  # relative to the average, as the overheads
    tile_overhead: float = 1.0
    descriptor_overhead: float = 1.0
    banks: int = 8  # of the scratchpad, one register wide
    scratchpad: float = 1.0  # share of the scratchpad that two tiles may use

    @classmethod
    def draw(cls, rng: Rng) -> Program:
        return cls(
            batch=int(rng.choice((8, 16, 32, 64, 128))),
            kind=str(rng.choice(("f32", "f32", "bf16"))),
            transposed=bool(rng.random() < 0.6),
            channels=int(rng.choice((16, 24, 32, 48, 64))),
            bandwidth=float(np.exp(0.25 * rng.standard_normal())),
            tile_overhead=float(np.exp(0.4 * rng.standard_normal())),
            descriptor_overhead=float(np.exp(0.5 * rng.standard_normal())),
            banks=int(rng.choice((4, 8, 16))),
            scratchpad=float(rng.uniform(0.5, 1.0)),
        )


@dataclass
class FusionBuilder:
    """Rows of a kernel's graph."""

    nodes: list[npt.NDArray[np.float32]] = field(default_factory=list)
    opcodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, opcode: str, shape: Sequence[int], order: Sequence[int], kind: str, operands: Sequence[int] = ()
    ) -> int:
        """Add a node with a logical shape and its layout from major to minor; return its row."""
        row = np.zeros(len(NODE_FEATURES), np.float32)
        row[tpu_tiles.TYPES.start + ELEMENT_TYPES.index(kind)] = 1
        begin = tpu_tiles.SHAPE.start
        row[begin : begin + len(shape)] = shape
        row[begin + 6], row[begin + 7] = sum(shape), np.prod(shape)
        row[tpu_tiles.LAYOUT.start : tpu_tiles.LAYOUT.start + len(order)] = list(order)[::-1]
        self.nodes.append(row)
        self.opcodes.append(OPCODE_NUMBER[opcode])
        number = len(self.nodes) - 1
        self.edges += [(number, operand) for operand in operands]
        return number

    def mark_root(self, node: int) -> None:
        self.nodes[node][tpu_tiles.ROOT] = 1


def synthetic_kernel(rng: Rng, name: str, n_configs: int = 60, program: Program | None = None) -> Kernel:
    """Draw a kernel with at most `n_configs` different configurations.

    >>> synthetic_kernel(np.random.default_rng(0), "resnet_0").config_feat.shape[1]
    24
    """
    program = program or Program.draw(rng)
    kind = str(rng.choice(_KINDS, p=(0.35, 0.2, 0.2, 0.15, 0.1)))
    graph = FusionBuilder()
    filter_rank = _add_nodes(graph, kind, program, rng)
    node, opcode = np.stack(graph.nodes), np.array(graph.opcodes, np.uint8)
    edges = np.array(sorted(graph.edges), np.int64).reshape(-1, 2)
    # Bounds are only counted here; their values follow from the tensors that this finds.
    ranks = np.zeros((1, len(TILE_FEATURES)), np.float32)
    ranks[0, :filter_rank] = 1
    ranks[0, BOUNDS["output"]][: _output_rank(node, kind)] = 1
    reading = read_tiles(node, opcode, edges, ranks)
    config = _configurations(reading, n_configs, rng)
    runtime = _runtime(reading, config, opcode, program, rng)
    # The compiler's default follows a rough estimate, which is good but seldom the best.
    default = runtime[int(np.argmin(tile_quantities(reading, config)["estimate"]))]
    runtime_ns = np.maximum(runtime * np.exp(_NOISE * rng.standard_normal(len(runtime))), 2).astype(np.int64)
    normalizer = np.full(len(config), max(2, int(default)), np.int64)
    return make_kernel(
        name, node, opcode, edges, config_feat=config, config_runtime=runtime_ns, config_runtime_normalizers=normalizer
    )


def _output_rank(node: npt.NDArray[Any], kind: str) -> int:
    """Return the rank of the tensor that the output bounds refer to."""
    ranks = np.count_nonzero(node[:, tpu_tiles.SHAPE], axis=1)
    return int(ranks.max() if kind == "reduce" else ranks[-1])


def _add_nodes(graph: FusionBuilder, kind: str, program: Program, rng: Rng) -> int:
    """Add the fused computation and its caller; return the rank of the filter, 0 without one."""
    features = program.channels * int(rng.integers(1, 17))
    size = int(rng.choice((5, 7, 12, 14, 26, 28, 56)))
    image: tuple[int, ...] = (program.batch, size, size, features)
    order: tuple[int, ...] = (1, 2, 0, 3) if program.transposed else (0, 1, 2, 3)
    if kind == "product" or (kind == "elementwise" and rng.random() < 0.5):
        image, order = (program.batch * int(rng.integers(1, 33)), features * int(rng.integers(1, 9))), (0, 1)
    filter_rank = 0
    if kind in ("convolution", "product"):
        root, filter_rank = _add_contraction(graph, image, order, program, rng)
    elif kind == "copy":
        source = graph.add("parameter", image, tuple(rng.permutation(len(image))), program.kind)
        root = graph.add("copy", image, order, program.kind, [source])
    else:
        root = graph.add("parameter", image, order, program.kind)
        for _ in range(int(rng.integers(1, 6))):
            other = [graph.add("parameter", image, order, program.kind)] if rng.random() < 0.4 else []
            root = graph.add(str(rng.choice(_ELEMENTWISE)), image, order, program.kind, [root, *other])
        if kind == "reduce":
            root = graph.add("reduce", (image[-1],), (0,), program.kind, [root])
    graph.mark_root(root)
    # The entry computation: parameters and the call of the fusion.
    shape = [int(n) for n in graph.nodes[root][tpu_tiles.SHAPE] if n]
    layout = [int(d) for d in graph.nodes[root][tpu_tiles.LAYOUT][: len(shape)]][::-1]
    caller = graph.add("fusion", shape, layout, program.kind, [root])
    graph.mark_root(caller)
    return filter_rank


def _add_contraction(
    graph: FusionBuilder, image: Sequence[int], order: Sequence[int], program: Program, rng: Rng
) -> tuple[int, int]:
    """Add a convolution, or a product written as one, with its epilogue; return its root and the filter's rank."""
    spatial = len(image) == 4
    contraction = program.channels * int(rng.integers(1, 17))
    window = int(rng.choice((1, 3, 3, 5))) if spatial else 0
    stride = int(rng.choice((1, 1, 2))) if spatial else 1
    filters = (window, window, contraction, image[-1]) if spatial else (contraction, image[-1])
    source_shape = (image[0], *(n * stride for n in image[1:-1]), contraction)
    source = graph.add("parameter", source_shape, order, program.kind)
    # A filter that is stored transposed has its output features in another unit than the output.
    swap = [*range(len(filters) - 2), len(filters) - 1, len(filters) - 2]
    layout = swap if rng.random() < 0.3 else list(range(len(filters)))
    weights = graph.add("parameter", filters, layout, str(rng.choice(("f32", program.kind))))
    root = graph.add("convolution", image, order, "f32", [source, weights])
    fields, last = graph.nodes[root], len(image) - 1
    for column in (tpu_tiles.INPUT_FEATURE, tpu_tiles.OUTPUT_FEATURE, tpu_tiles.FILTER_OUTPUT):
        fields[column] = last
    fields[tpu_tiles.FILTER_INPUT] = last - 1
    for i in range(2 if spatial else 0):
        fields[tpu_tiles.WINDOW.start + i], fields[tpu_tiles.STRIDE.start + i] = window, stride
        fields[tpu_tiles.INPUT_SPATIAL.start + i] = i + 1
        fields[tpu_tiles.FILTER_SPATIAL.start + i] = i
    for _ in range(int(rng.integers(0, 4))):
        root = graph.add(str(rng.choice(_ELEMENTWISE)), image, order, "f32", [root])
    return root, len(filters)


def _configurations(reading: TileReading, count: int, rng: Rng) -> npt.NDArray[np.float32]:
    """Draw different tiles that fit the scratchpad; XLA's candidates cover a dimension in equal parts."""
    draws = 6 * count
    config = np.zeros((draws, len(TILE_FEATURES)), np.float32)
    output, filters = reading.output, reading.filter
    out_bounds = _draw_bounds(output, draws, rng)
    if filters is not None:
        filter_bounds = _draw_bounds(filters, draws, rng)
        # Output features are tiled alike in the filter and in the output, which may count them in other units.
        out, position = reading.features
        elements = np.minimum(filter_bounds[:, position] * filters.units[position], filters.sizes[position])
        out_bounds[:, out] = np.ceil(elements / output.units[out])
        config[:, BOUNDS["kernel"]][:, : len(filters.sizes)] = filter_bounds
    config[:, BOUNDS["output"]][:, : len(output.sizes)] = out_bounds
    config = np.unique(config, axis=0)
    scratchpad = tile_quantities(reading, config)["scratchpad_bytes"]
    # The smallest tiles stay if nothing fits.
    in_scratchpad = np.flatnonzero(scratchpad <= max(_SCRATCHPAD_BYTES, np.sort(scratchpad)[min(4, len(config) - 1)]))
    config = config[np.sort(rng.permutation(in_scratchpad)[:count])]
    for bounds in BOUNDS.values():
        values = config[:, bounds]
        config[:, bounds.stop] = values.sum(axis=1)
        config[:, bounds.stop + 1] = np.where(values > 0, values, 1).prod(axis=1) * values.any(axis=1)
    return np.asarray(config, np.float32)


def _draw_bounds(tensor: TiledTensor, count: int, rng: Rng) -> npt.NDArray[np.float64]:
    """Draw bounds (count, rank): each dimension in one part half of the time, else in a log-uniform number of parts."""
    registers = tensor.registers
    divisions = np.floor(np.exp(rng.random((count, len(registers))) * np.log(registers + 1)))
    divisions[rng.random(divisions.shape) < 0.5] = 1
    return np.asarray(np.ceil(registers / np.clip(divisions, 1, registers)))


def _runtime(
    reading: TileReading, config: npt.NDArray[np.float32], opcode: npt.NDArray[Any], program: Program, rng: Rng
) -> npt.NDArray[np.float64]:
    """Return nanoseconds (C,) before noise."""
    q = tile_quantities(reading, config)
    registers = reading.output.registers
    bounds = np.maximum(config[:, BOUNDS["output"]][:, : len(registers)].astype(np.float64), 1)
    per_dimension = np.ceil(registers / bounds)  # tiles (C, rank)
    tiles, total = per_dimension.prod(axis=1), registers.prod()
    # Edge tiles are masked; the share of masked tiles follows from the dimensions that a bound does not divide.
    masked = 1 - np.where(registers % bounds == 0, 1.0, 1 - 1 / per_dimension).prod(axis=1)
    memory = _transfers(reading, q, bounds, per_dimension, program)
    iterations = tiles * q.get("reduction_tiles", 1.0)
    matrix = np.zeros(len(config))
    if reading.filter is not None:
        passes = _FLOAT32_PASSES if reading.input is not None and reading.input.element_bytes > 2 else 1.0
        # Loading the weights of a pass is hidden only behind three times as many rows as the unit has.
        rows = np.maximum(q["mxu_rows"] + 24, 128) + 64 * np.exp(-q["mxu_rows"] / 384)
        matrix = iterations * (1 - 0.4 * masked) * q["mxu_passes"] * rows * passes / _MXU_ROWS_PER_NS
    cost = sum(_SLOW_OPERATIONS.get(int(o), 1.0) for o in opcode if int(o) not in _FREE_OPERATIONS) + 1
    vector = _vector_cycles(bounds, opcode, program) * total * cost * (1 + 0.3 * masked) / _VECTOR_REGISTERS_PER_NS
    arithmetic = matrix + vector
    # Without room for a second tile nothing is prefetched.
    overlaps = 2 * q["scratchpad_bytes"] <= program.scratchpad * 2 * _SCRATCHPAD_BYTES
    shorter = np.minimum(memory, arithmetic)
    busy = np.maximum(memory, arithmetic) + np.where(overlaps, 0.1, 1.0) * shorter
    first_load = (memory + arithmetic) / iterations * np.where(overlaps, 0.7, 0.0)
    # Compiled loops prefer certain innermost bounds; which ones depends on the kernel.
    preference = 0.025 * rng.standard_normal((7, 7))
    effect = preference[tuple((bounds[:, ::-1][:, [0, min(1, bounds.shape[1] - 1)]] % 7).astype(int).T)]
    overhead = iterations * _TILE_NS * program.tile_overhead
    return np.asarray((busy + overhead + first_load + 700) * np.exp(effect))


def _transfers(
    reading: TileReading, q: dict[str, Any], bounds: Any, per_dimension: Any, program: Program
) -> npt.NDArray[np.float64]:
    """Return the nanoseconds (C,) of all transfers: bytes, and descriptors of contiguous registers."""
    output, tiles = reading.output, per_dimension.prod(axis=1)
    # Minor dimensions are contiguous up to and including the first one that is split.
    whole = np.cumprod((bounds >= output.registers)[:, ::-1], axis=1)
    inner = np.concatenate([np.ones((len(bounds), 1)), whole[:, :-1]], axis=1)
    run = np.where(inner > 0, bounds[:, ::-1], 1).prod(axis=1)
    out_bytes = output.registers.prod() * output.register_bytes
    bytes_moved, descriptors = (1.0 if reading.filter is not None else 2.0) * out_bytes, output.registers.prod() / run
    if reading.filter is not None and reading.input is not None:
        reductions = q["reduction_tiles"]
        feature_tiles = per_dimension[:, reading.features[0]]
        # Output features are the innermost loop: with one reduction step the input tile stays while they pass.
        input_loads = np.where(reductions > 1, tiles * reductions, tiles / feature_tiles)
        filter_loads = np.where(reductions * feature_tiles > 1, tiles * reductions, 1.0)
        bytes_moved = bytes_moved + input_loads * q["input_bytes"] + filter_loads * q["filter_bytes"]
        descriptors = descriptors + input_loads * np.sqrt(q["input_bytes"] / reading.input.register_bytes)
        descriptors = descriptors + filter_loads
    return np.asarray(
        bytes_moved / (_BYTES_PER_NS * program.bandwidth) + descriptors * _DESCRIPTOR_NS * program.descriptor_overhead
    )


def _vector_cycles(bounds: Any, opcode: npt.NDArray[Any], program: Program) -> npt.NDArray[np.float64]:
    """Return the relative cost (C,) of a vector operation: bank conflicts between rows, and spilled registers."""
    minor, rows = bounds[:, -1], bounds[:, -2] if bounds.shape[1] > 1 else np.ones(len(bounds))
    conflict = np.where((minor % program.banks == 0) & (rows > 1), 0.35, 0.0)
    conflict += np.where((minor % program.banks == program.banks // 2) & (rows > 1), 0.12, 0.0)
    live = np.minimum(minor, 4) * np.minimum(rows, 8) * min(np.count_nonzero(opcode == tpu_tiles.PARAMETER) + 1, 6)
    spill = 0.5 * np.maximum(0.0, 1 - _VECTOR_REGISTERS / np.maximum(live, 1))
    # Short inner loops do not fill the pipeline.
    return np.asarray(1 + conflict + spill + 0.8 / np.minimum(minor * rows, 64))


def synthetic_dataset(train: int, valid: int, test: int = 0, seed: int = 0, n_configs: int = 60) -> Dataset:
    """Draw a collection whose splits have different programs of about ten kernels."""
    rng = np.random.default_rng(seed)
    splits: list[list[Kernel]] = []
    for split, count in (("train", train), ("valid", valid), ("test", test)):
        programs = [Program.draw(rng) for _ in range(-(-count // 10))]
        splits.append(
            [synthetic_kernel(rng, f"{split}{i // 10}_{i:016x}", n_configs, programs[i // 10]) for i in range(count)]
        )
    return dataset_from_kernels(splits[0], splits[1], splits[2], SCHEMA)
