"""Layout graphs whose runtimes come from a formula: they test the machinery and say nothing about any hardware.

A program is a chain of blocks: a convolution, a product or a reshape, whose layouts are configurable, and element-wise
operations behind it, which keep the layout that reaches them; some blocks add what came out of an earlier one. Time
goes into three things: the operation itself, slower where the minor dimensions fill vectors of 128 and rows of 8 badly;
element-wise passes over padded tensors; and a transpose on every edge whose two ends disagree about the layout. So a
configuration's cost hangs on neighbours, some of them several steps away, and not on single nodes alone.
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
_POOL = 4  # layouts that a search tries for a tensor, the default among them
_CHANGED = 0.15  # share of nodes that a search from the default changes
_NOISE = 0.003
_BYTES_PER_NS, _FLOPS_PER_NS, _START_NS = 400.0, 100_000.0, 2000.0
Layouts = npt.NDArray[np.int64]  # (c, rank): dimensions from minor to major, for each configuration


@dataclass
class _Node:
    opcode: str
    shape: tuple[int, ...]
    operands: tuple[int, ...] = ()
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return 4.0 * float(np.prod(self.shape))


@dataclass
class _Program:
    nodes: list[_Node] = field(default_factory=list)

    def add(self, opcode: str, shape: Sequence[int], operands: Sequence[int] = (), flops: float = 0.0) -> int:
        self.nodes.append(_Node(opcode, tuple(int(size) for size in shape), tuple(operands), flops))
        return len(self.nodes) - 1


def synthetic_graph(name: str, seed: int, *, source: str, search: str, nodes: int, configs: int) -> LayoutGraph:
    """A graph of about so many nodes: convolutions for ``xla``, products for ``nlp``; ``random`` or ``default`` search.

    >>> synthetic_graph("toy", 0, source="xla", search="random", nodes=30, configs=8).config_feat.shape[::2]
    (8, 18)
    """
    rng = np.random.default_rng([seed, source == "nlp", search == "default"])
    program = _program(rng, source, nodes)
    places = [i for i, node in enumerate(program.nodes) if node.opcode in ("convolution", "dot", "reshape")]
    feat = np.full((configs, len(places), WIDTH), -1, np.int8)
    chosen = {place: _draw(rng, program, place, search, configs) for place in places}
    for column, place in enumerate(places):
        for slot, layouts in enumerate(chosen[place]):
            feat[:, column, DIMENSIONS * slot : DIMENSIONS * slot + layouts.shape[1]] = layouts
    runtime = _runtime(program, chosen, configs) * np.exp(_NOISE * rng.standard_normal(configs))
    edges = [[u, v] for u, node in enumerate(program.nodes) for v in node.operands]
    opcodes = np.array([OPCODE_NUMBER[node.opcode] for node in program.nodes], np.uint8)
    arrays = (_node_feat(program), opcodes, np.array(edges), np.array(places), np.ceil(runtime).astype(np.int64), feat)
    return make_graph(name, *arrays)


def write_synthetic(
    root: Path, collection: str, counts: dict[str, int], *, seed: int, nodes: int, configs: int
) -> list[Path]:
    """Write a collection such as ``xla:random`` under ``root/npz/layout``; no graph is in two splits."""
    source, search = collection.split(":")
    paths = []
    for number, (split, count) in enumerate(counts.items()):
        for i in range(count):
            path = root / "npz" / "layout" / source / search / split / f"toy{seed}_{split}_{i:03d}.npz"
            own = (seed * 3 + number) * 1_000_003 + i
            write_graph(
                path, synthetic_graph(path.stem, own, source=source, search=search, nodes=nodes, configs=configs)
            )
            paths.append(path)
    return paths


def _program(rng: np.random.Generator, source: str, nodes: int) -> _Program:
    program = _Program()
    a, b, c, d = (_size(rng) for _ in range(4))
    shape = (a, b // 2 + 1, c // 2 + 1, d) if source == "xla" else (a, b, c)
    last, kept = program.add("parameter", shape), []
    while len(program.nodes) < nodes - 4:
        last = _block(rng, program, last, source, _size(rng))
        kept.append(last)
        earlier = [k for k in kept[:-1] if program.nodes[k].shape == program.nodes[last].shape]
        if earlier and rng.random() < 0.5:
            last = program.add("add", program.nodes[last].shape, (last, int(rng.choice(earlier))))
    program.add("tanh", program.nodes[last].shape, (last,))
    return program


def _size(rng: np.random.Generator) -> int:
    return int(rng.choice([3, 8, 24, 32, 56, 64, 100, 128, 256, 384]))


def _block(rng: np.random.Generator, program: _Program, last: int, source: str, channels: int) -> int:
    shape = program.nodes[last].shape
    if rng.random() < 0.15:
        last = program.add("reshape", (*shape[:-2], shape[-1], shape[-2]), (last,))
    else:
        out = (*shape[:-1], channels if rng.random() < 0.5 else shape[-1])
        window = (3, 3) if source == "xla" else ()
        kernel = program.add("parameter", (*window, shape[-1], out[-1]))
        flops = 2.0 * float(np.prod(out)) * float(np.prod(window)) * shape[-1]
        last = program.add("convolution" if source == "xla" else "dot", out, (last, kernel), flops)
    for _ in range(int(rng.integers(0, 4))):
        last = program.add(str(rng.choice(_ELEMENTWISE)), program.nodes[last].shape, (last,))
    return last


def _default(rank: int) -> npt.NDArray[np.int64]:
    return np.arange(rank)[::-1].copy()


def _draw(rng: np.random.Generator, program: _Program, place: int, search: str, configs: int) -> list[Layouts]:
    """Layouts of a node's output and its operands, drawn for every configuration from a few that a search would try."""
    node = program.nodes[place]
    tensors = [node.shape, *(program.nodes[v].shape for v in node.operands)]
    drawn = []
    for shape in tensors:
        every = np.array(list(itertools.permutations(range(len(shape)))))
        others = every[(every != _default(len(shape))).any(axis=1)]
        some = others[rng.choice(len(others), min(_POOL - 1, len(others)), replace=False)]
        pool = np.concatenate([_default(len(shape))[None], some])
        choice = rng.integers(0, len(pool), configs)
        if search == "default":
            choice *= rng.random(configs) < _CHANGED
        drawn.append(pool[choice])
    return drawn


def _runtime(program: _Program, chosen: dict[int, list[Layouts]], configs: int) -> npt.NDArray[np.float64]:
    total = np.full(configs, _START_NS)
    layouts: list[Layouts] = []
    for place, node in enumerate(program.nodes):
        fixed = np.broadcast_to(_default(len(node.shape)), (configs, len(node.shape)))
        if place in chosen:
            own, *wanted = chosen[place]
        else:  # what is not configurable keeps what it gets
            own = layouts[node.operands[0]] if node.operands else fixed
            wanted = [own] * len(node.operands)
        waste = _waste(node.shape, own)
        total += node.flops / _FLOPS_PER_NS * waste + (node.bytes / _BYTES_PER_NS * waste if node.operands else 0.0)
        for v, want in zip(node.operands, wanted, strict=True):
            differs = (layouts[v] != want).any(axis=1)
            turned = layouts[v][:, 0] != want[:, 0]  # another minor dimension: no line of memory is read as it lies
            total += program.nodes[v].bytes / _BYTES_PER_NS * (2.0 * differs + 3.0 * turned)
        layouts.append(own)
    return total


def _waste(shape: tuple[int, ...], layout: Layouts) -> npt.NDArray[np.float64]:
    """Padded over real size, the minor dimension in vectors of 128 and the next in rows of 8; never above 16."""
    sizes = np.array(shape, np.float64)
    waste = np.ones(len(layout))
    for minor, unit in zip(range(min(2, len(shape))), (128.0, 8.0), strict=False):
        size = sizes[layout[:, minor]]
        waste *= np.ceil(size / unit) * unit / size
    return np.minimum(waste, 16.0)


def _node_feat(program: _Program) -> npt.NDArray[np.float32]:
    feat = np.zeros((len(program.nodes), len(NODE_FEATURES)), np.float32)
    column: dict[str, Any] = NODE_COLUMN
    for row, node in enumerate(program.nodes):
        first, layout = column["shape_dimensions_0"], column["layout_minor_to_major_0"]
        feat[row, first : first + len(node.shape)] = node.shape
        feat[row, layout : layout + len(node.shape)] = _default(len(node.shape))
        feat[row, column["shape_dimensions_sum"]] = sum(node.shape)
        feat[row, column["shape_dimensions_product"]] = np.prod(node.shape)
        feat[row, column["shape_element_type_is_f32"]] = 1
        feat[row, column["window_size_0"] : column["window_size_0"] + 2] = 3 * (node.opcode == "convolution")
    feat[-1, column["is_root"]] = 1
    return feat
