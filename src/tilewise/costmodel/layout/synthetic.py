"""Synthetic layout graphs with runtimes from a formula; they test the code and say nothing about any hardware.

A program is a chain of blocks. A block is a convolution, a matrix product or a reshape, whose layouts are configurable,
followed by elementwise operations, which keep the layout of their input. Some blocks add the output of an earlier one.
The runtime has three terms: the operation itself, slower if the minor dimensions do not fill tiles of 128 x 8;
elementwise passes over padded tensors; and a transpose on every edge whose two ends have different layouts. The cost of
a configuration therefore depends on neighbours, some of them several edges away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER
from tilewise.costmodel.layout.graph import WIDTH, LayoutGraph, make_graph, write_graph

_ELEMENTWISE = ("tanh", "multiply", "exponential", "negate", "maximum")
# The constants of the formula have the magnitude of a TPU; the tests do not depend on their values.
_LAYOUTS_PER_TENSOR = 4  # layouts that a search tries for a tensor, including the default
_MUTATION_RATE = 0.15  # probability that a search from the default changes a tensor
_NOISE = 0.003  # relative deviation of a runtime
_TILE = (128.0, 8.0)  # elements of the minor and the second-minor dimension in a vector register
_MAX_PADDING = 16.0  # upper limit of padded over real size
_BYTES_PER_NS, _FLOPS_PER_NS, _START_NS = 400.0, 100_000.0, 2000.0
_COPY_COST, _TRANSPOSE_COST = 2.0, 3.0  # passes over a tensor to change its layout, and to change its minor dimension
LayoutArray = npt.NDArray[np.int64]  # (c, rank): dimensions from minor to major, for each configuration


@dataclass
class _SyntheticNode:
    """One operation of a synthetic program."""

    opcode: str
    shape: tuple[int, ...]
    operands: tuple[int, ...] = ()
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return 4.0 * float(np.prod(self.shape))


@dataclass
class _Program:
    """A list of operations in topological order."""

    nodes: list[_SyntheticNode] = field(default_factory=list)

    def add(self, opcode: str, shape: Sequence[int], operands: Sequence[int] = (), flops: float = 0.0) -> int:
        """Append an operation and return its index."""
        self.nodes.append(_SyntheticNode(opcode, tuple(int(size) for size in shape), tuple(operands), flops))
        return len(self.nodes) - 1


def synthetic_graph(name: str, seed: int, *, source: str, search: str, nodes: int, configs: int) -> LayoutGraph:
    """Generate a graph of about `nodes` nodes.

    `source` is ``xla`` (convolutions) or ``nlp`` (matrix products); `search` is ``random`` or ``default``.

    >>> synthetic_graph("toy", 0, source="xla", search="random", nodes=30, configs=8).config_feat.shape[::2]
    (8, 18)
    """
    rng = np.random.default_rng([seed, source == "nlp", search == "default"])
    program = _random_program(rng, source, nodes)
    config_nodes = [i for i, node in enumerate(program.nodes) if node.opcode in ("convolution", "dot", "reshape")]
    config_feat = np.full((configs, len(config_nodes), WIDTH), -1, np.int8)
    layouts = {node: _sample_layouts(rng, program, node, search, configs) for node in config_nodes}
    # Six numbers each for the output and up to two inputs; unused ones stay -1.
    for column, node in enumerate(config_nodes):
        for slot, layout in enumerate(layouts[node]):
            config_feat[:, column, DIMENSIONS * slot : DIMENSIONS * slot + layout.shape[1]] = layout
    runtime = _runtime(program, layouts, configs) * np.exp(_NOISE * rng.standard_normal(configs))
    edges = [[u, v] for u, node in enumerate(program.nodes) for v in node.operands]
    return make_graph(
        name,
        node_feat=_node_feat(program),
        node_opcode=np.array([OPCODE_NUMBER[node.opcode] for node in program.nodes], np.uint8),
        edge_index=np.array(edges),
        node_config_ids=np.array(config_nodes),
        config_runtime=np.ceil(runtime).astype(np.int64),
        node_config_feat=config_feat,
    )


def write_synthetic(
    root: Path, collection: str, counts: dict[str, int], *, seed: int, nodes: int, configs: int
) -> list[Path]:
    """Write a synthetic collection such as ``xla:random`` under ``root/npz/layout``; no graph is in two splits."""
    source, search = collection.split(":")
    paths = []
    for number, (split, count) in enumerate(counts.items()):
        for i in range(count):
            path = root / "npz" / "layout" / source / search / split / f"toy{seed}_{split}_{i:03d}.npz"
            graph_seed = (seed * 3 + number) * 1_000_003 + i
            graph = synthetic_graph(path.stem, graph_seed, source=source, search=search, nodes=nodes, configs=configs)
            write_graph(path, graph)
            paths.append(path)
    return paths


def _random_program(rng: np.random.Generator, source: str, nodes: int) -> _Program:
    """Generate a chain of blocks with residual connections."""
    program = _Program()
    a, b, c, d = (_random_size(rng) for _ in range(4))
    shape = (a, b // 2 + 1, c // 2 + 1, d) if source == "xla" else (a, b, c)
    last, block_outputs = program.add("parameter", shape), []
    while len(program.nodes) < nodes - 4:
        last = _add_block(rng, program, last, source, _random_size(rng))
        block_outputs.append(last)
        # With probability 1/2 add the output of an earlier block of the same shape.
        candidates = [k for k in block_outputs[:-1] if program.nodes[k].shape == program.nodes[last].shape]
        if candidates and rng.random() < 0.5:
            last = program.add("add", program.nodes[last].shape, (last, int(rng.choice(candidates))))
    program.add("tanh", program.nodes[last].shape, (last,))
    return program


def _random_size(rng: np.random.Generator) -> int:
    return int(rng.choice([3, 8, 24, 32, 56, 64, 100, 128, 256, 384]))


def _add_block(rng: np.random.Generator, program: _Program, last: int, source: str, channels: int) -> int:
    """Add a block that reads node `last`; return the index of its output."""
    shape = program.nodes[last].shape
    if rng.random() < 0.15:
        last = program.add("reshape", (*shape[:-2], shape[-1], shape[-2]), (last,))
    else:
        out = (*shape[:-1], channels if rng.random() < 0.5 else shape[-1])
        window = (3, 3) if source == "xla" else ()
        weights = program.add("parameter", (*window, shape[-1], out[-1]))
        flops = 2.0 * float(np.prod(out)) * float(np.prod(window)) * shape[-1]
        last = program.add("convolution" if source == "xla" else "dot", out, (last, weights), flops)
    for _ in range(int(rng.integers(0, 4))):
        last = program.add(str(rng.choice(_ELEMENTWISE)), program.nodes[last].shape, (last,))
    return last


def _default_layout(rank: int) -> npt.NDArray[np.int64]:
    return np.arange(rank)[::-1].copy()


def _sample_layouts(
    rng: np.random.Generator, program: _Program, node_index: int, search: str, configs: int
) -> list[LayoutArray]:
    """Sample layouts of a node's output and operands for every configuration, from a few that a search would try."""
    node = program.nodes[node_index]
    samples = []
    for shape in (node.shape, *(program.nodes[v].shape for v in node.operands)):
        default = _default_layout(len(shape))
        permutations = np.array(list(itertools.permutations(range(len(shape)))))
        others = permutations[(permutations != default).any(axis=1)]
        others = others[rng.choice(len(others), min(_LAYOUTS_PER_TENSOR - 1, len(others)), replace=False)]
        candidates = np.concatenate([default[None], others])
        choice = rng.integers(0, len(candidates), configs)
        # A search from the default changes few tensors; candidate 0 is the default.
        if search == "default":
            choice *= rng.random(configs) < _MUTATION_RATE
        samples.append(candidates[choice])
    return samples


def _runtime(program: _Program, config_layouts: dict[int, list[LayoutArray]], configs: int) -> npt.NDArray[np.float64]:
    """Compute the runtime of every configuration in nanoseconds: (configs,)."""
    total = np.full(configs, _START_NS)
    layouts: list[LayoutArray] = []  # of the nodes' outputs
    for index, node in enumerate(program.nodes):
        if index in config_layouts:
            output_layout, *input_layouts = config_layouts[index]
        else:
            # A node that is not configurable keeps the layout of its first input.
            default = np.broadcast_to(_default_layout(len(node.shape)), (configs, len(node.shape)))
            output_layout = layouts[node.operands[0]] if node.operands else default
            input_layouts = [output_layout] * len(node.operands)
        padding = _padding_ratio(node.shape, output_layout)
        pass_ns = node.bytes / _BYTES_PER_NS * padding if node.operands else 0.0
        total += node.flops / _FLOPS_PER_NS * padding + pass_ns
        for v, input_layout in zip(node.operands, input_layouts, strict=True):
            # An input in another layout is copied; another minor dimension makes the copy a transpose.
            differs = (layouts[v] != input_layout).any(axis=1)
            transposes = layouts[v][:, 0] != input_layout[:, 0]
            total += program.nodes[v].bytes / _BYTES_PER_NS * (_COPY_COST * differs + _TRANSPOSE_COST * transposes)
        layouts.append(output_layout)
    return total


def _padding_ratio(shape: tuple[int, ...], layout: LayoutArray) -> npt.NDArray[np.float64]:
    """Return padded over real size (c,) if the two minor dimensions are padded to whole tiles."""
    sizes = np.array(shape, np.float64)
    ratio = np.ones(len(layout))
    for minor, unit in zip(range(min(2, len(shape))), _TILE, strict=False):
        size = sizes[layout[:, minor]]
        ratio *= np.ceil(size / unit) * unit / size
    return np.minimum(ratio, _MAX_PADDING)


def _node_feat(program: _Program) -> npt.NDArray[np.float32]:
    """Fill the node features that the formula depends on: shape, layout, dtype and window."""
    feat = np.zeros((len(program.nodes), len(NODE_FEATURES)), np.float32)
    column: dict[str, Any] = NODE_COLUMN
    for row, node in enumerate(program.nodes):
        first, layout = column["shape_dimensions_0"], column["layout_minor_to_major_0"]
        feat[row, first : first + len(node.shape)] = node.shape
        feat[row, layout : layout + len(node.shape)] = _default_layout(len(node.shape))
        feat[row, column["shape_dimensions_sum"]] = sum(node.shape)
        feat[row, column["shape_dimensions_product"]] = np.prod(node.shape)
        feat[row, column["shape_element_type_is_f32"]] = 1
        feat[row, column["window_size_0"] : column["window_size_0"] + 2] = 3 * (node.opcode == "convolution")
    feat[-1, column["is_root"]] = 1
    return feat
