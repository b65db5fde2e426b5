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
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS
from tilewise.costmodel.hlo.graph import GraphBuilder, HloNode, Window
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
    layouts = {program.nodes[i]: _sample_layouts(rng, program.nodes[i], search, configs) for i in config_nodes}
    # Six numbers each for the output and up to two inputs; unused ones stay -1.
    for column, tensors in enumerate(layouts.values()):
        for slot, layout in enumerate(tensors):
            config_feat[:, column, DIMENSIONS * slot : DIMENSIONS * slot + layout.shape[1]] = layout
    runtime = _runtime(program.nodes, layouts, configs) * np.exp(_NOISE * rng.standard_normal(configs))
    return make_graph(
        name,
        *program.build(),
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


def _random_program(rng: np.random.Generator, source: str, nodes: int) -> GraphBuilder:
    """Generate a program of about `nodes` nodes: blocks with residual connections, in a chain."""
    program = GraphBuilder()
    a, b, c, d = (_random_size(rng) for _ in range(4))
    shape = (a, b // 2 + 1, c // 2 + 1, d) if source == "xla" else (a, b, c)
    last, block_outputs = program.parameter(shape, "f32"), []
    while len(program.nodes) < nodes - 4:
        last = _add_block(rng, program, last, source, _random_size(rng))
        block_outputs.append(last)
        # With probability 1/2 add the output of an earlier block of the same shape.
        candidates = [output for output in block_outputs[:-1] if output.shape == last.shape]
        if candidates and rng.random() < 0.5:
            last = program.binary("add", last, candidates[int(rng.choice(len(candidates)))])
    program.unary("tanh", last)
    return program


def _random_size(rng: np.random.Generator) -> int:
    return int(rng.choice([3, 8, 24, 32, 56, 64, 100, 128, 256, 384]))


def _add_block(rng: np.random.Generator, program: GraphBuilder, last: HloNode, source: str, channels: int) -> HloNode:
    """Add a convolution or product block after `last` to the program; return its output."""
    shape = last.shape
    if rng.random() < 0.15:
        last = program.add("reshape", (*shape[:-2], shape[-1], shape[-2]), "f32", last)
    else:
        out = (*shape[:-1], channels if rng.random() < 0.5 else shape[-1])
        window = (3, 3) if source == "xla" else ()
        weights = program.parameter((*window, shape[-1], out[-1]), "f32")
        last = program.add("convolution" if source == "xla" else "dot", out, "f32", last, weights)
        last.windows = tuple(Window(size) for size in window)
    for _ in range(int(rng.integers(0, 4))):
        last = program.unary(str(rng.choice(_ELEMENTWISE)), last)
    return last


def _default_layout(rank: int) -> npt.NDArray[np.int64]:
    return np.arange(rank)[::-1].copy()


def _sample_layouts(rng: np.random.Generator, node: HloNode, search: str, configs: int) -> list[LayoutArray]:
    """Sample layouts of a node's output and operands for each configuration: one (configs, 6) array each."""
    samples = []
    for shape in (node.shape, *(operand.shape for operand in node.operands)):
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


def _runtime(
    nodes: Sequence[HloNode], config_layouts: dict[HloNode, list[LayoutArray]], configs: int
) -> npt.NDArray[np.float64]:
    """Compute the runtime of every configuration in nanoseconds: (configs,)."""
    total = np.full(configs, _START_NS)
    layouts: dict[HloNode, LayoutArray] = {}  # of the nodes' outputs
    for node in nodes:
        if node in config_layouts:
            output_layout, *input_layouts = config_layouts[node]
        else:
            # A node that is not configurable keeps the layout of its first input.
            default = np.broadcast_to(_default_layout(len(node.shape)), (configs, len(node.shape)))
            output_layout = layouts[node.operands[0]] if node.operands else default
            input_layouts = [output_layout] * len(node.operands)
        padding = _padding_ratio(node.shape, output_layout)
        if node.operands:
            total += _bytes(node) / _BYTES_PER_NS * padding
        if node in config_layouts and len(node.operands) == 2:
            # The weights are (window, inputs, outputs): a result takes a multiply-add per weight of its output.
            flops = 2.0 * float(np.prod(node.shape)) * float(np.prod(node.operands[1].shape[:-1]))
            total += flops / _FLOPS_PER_NS * padding
        for operand, input_layout in zip(node.operands, input_layouts, strict=True):
            # An input in another layout is copied; another minor dimension makes the copy a transpose.
            differs = (layouts[operand] != input_layout).any(axis=1)
            transposes = layouts[operand][:, 0] != input_layout[:, 0]
            total += _bytes(operand) / _BYTES_PER_NS * (_COPY_COST * differs + _TRANSPOSE_COST * transposes)
        layouts[node] = output_layout
    return total


def _bytes(node: HloNode) -> float:
    return 4.0 * float(np.prod(node.shape))


def _padding_ratio(shape: tuple[int, ...], layout: LayoutArray) -> npt.NDArray[np.float64]:
    """Return padded size / real size for each layout (c,), if the two minor dimensions are padded to tiles."""
    sizes = np.array(shape, np.float64)
    ratio = np.ones(len(layout))
    for minor, unit in zip(range(min(2, len(shape))), _TILE, strict=False):
        size = sizes[layout[:, minor]]
        ratio *= np.ceil(size / unit) * unit / size
    return np.minimum(ratio, _MAX_PADDING)
