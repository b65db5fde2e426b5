"""Synthetic TPU kernels with XLA's semantics: for tests, toy runs and comparisons of models, never a statement on TPUs.

A kernel is a fusion around a convolution, a product, a reduction or an elementwise operation, with the layouts, element
types and register units of `tpu_tiles`. Its runtime comes from a formula: memory traffic whose efficiency depends on
contiguous runs, matrix and vector arithmetic, an overhead per tile, a first load that nothing overlaps, an effect of
the innermost bounds that is particular to the kernel, and 0.4 % of noise, as much as repeated runs of TpuGraphs show.
Kernels of one program share batch size, element type and layouts, so held-out programs differ from the train split.
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
# Rates of the imaginary device, different from those of `tpu_tiles.estimate_runtime`, which must not know the answer.
_BYTES_PER_NS, _MXU_ROWS_PER_NS, _VECTOR_REGISTERS_PER_NS, _TILE_NS = 550.0, 1.4, 1.1, 220.0
_NOISE = 0.004


@dataclass(frozen=True)
class Program:
    """Properties that the kernels of one program share."""

    batch: int
    kind: str  # element type of most tensors
    transposed: bool  # whether the batch is stored beside the features, as XLA does with large batches
    channels: int  # the features of a layer are multiples of it

    @classmethod
    def draw(cls, rng: Rng) -> Program:
        return cls(
            batch=int(rng.choice((8, 16, 32, 64, 128))),
            kind=str(rng.choice(("f32", "f32", "bf16"))),
            transposed=bool(rng.random() < 0.6),
            channels=int(rng.choice((16, 24, 32, 48, 64))),
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
    runtime = _runtime(reading, config, len(node), rng)
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


def _runtime(reading: TileReading, config: npt.NDArray[np.float32], nodes: int, rng: Rng) -> npt.NDArray[np.float64]:
    """Return nanoseconds (C,) before noise."""
    q = tile_quantities(reading, config)
    bounds = np.maximum(config[:, BOUNDS["output"]][:, : len(reading.output.sizes)].astype(np.float64), 1)
    # A transfer is efficient if the tile is contiguous: minor dimensions are coverage until the first partial one.
    coverage = np.cumprod((bounds >= reading.output.registers)[:, ::-1], axis=1)
    inner = np.concatenate([np.ones((len(config), 1)), coverage[:, :-1]], axis=1)
    run = np.where(inner > 0, bounds[:, ::-1], 1).prod(axis=1)
    memory = q["bytes_moved"] / _BYTES_PER_NS * (1 + 2 / run)
    matrix = q["compute"] * tpu_tiles.MXU_ROWS_PER_NS / _MXU_ROWS_PER_NS
    vector = q["output_tiles"] * q["output_registers"] * nodes / _VECTOR_REGISTERS_PER_NS
    first_load = 0.25 * q["scratchpad_bytes"] / _BYTES_PER_NS
    arithmetic = matrix + vector
    busy = np.maximum(memory, arithmetic) + 0.15 * np.minimum(memory, arithmetic)
    # Compiled loops prefer certain innermost bounds; which ones depends on the kernel.
    preference = 0.02 * rng.standard_normal((7, 7))
    effect = preference[tuple((bounds[:, ::-1][:, [0, min(1, bounds.shape[1] - 1)]] % 7).astype(int).T)]
    return np.asarray((busy + q["iterations"] * _TILE_NS + first_load + 700) * np.exp(effect))


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
