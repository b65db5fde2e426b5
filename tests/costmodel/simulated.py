"""Kernels whose runtimes come from a formula: for tests of the machinery only, never for a statement about quality.

A matmul of M x N x K with an optional element-wise epilogue runs in tiles; its time is the larger of arithmetic and
traffic over all tiles, padding included, plus a cost per tile and a little noise. Good tiles depend on the sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER, TILE_FEATURES


def simulated_kernel(rng: np.random.Generator, name: str, n_configs: int = 60, extra_nodes: int = 0) -> Kernel:
    m, n, k = (int(2 ** rng.uniform(5, 12)) for _ in range(3))
    node_feat, opcode, edges = _graph(m, n, k, extra_nodes)
    tiles = 2 ** rng.integers(3, 9, size=(n_configs, 3))
    tiles = np.minimum(tiles, [m, n, k]).astype(np.float64)
    runtime = _runtime(m, n, k, tiles) * np.exp(0.01 * rng.standard_normal(n_configs))
    default = _runtime(m, n, k, np.array([[64.0, 64.0, 64.0]]))
    return make_kernel(
        name,
        node_feat,
        opcode,
        edges,
        _config_feat(tiles),
        np.maximum(runtime, 1).astype(np.int64),
        np.full(n_configs, max(1, int(default[0])), np.int64),
    )


def _graph(m: int, n: int, k: int, extra: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = [(m, k), (k, n), (m, n)] + [(m, n)] * extra
    names = ["parameter", "parameter", "dot"] + ["tanh"] * extra
    feat = np.zeros((len(shapes), len(NODE_FEATURES)), np.float32)
    for row, shape in enumerate(shapes):
        feat[row, NODE_COLUMN["shape_element_type_is_f32"]] = 1
        feat[row, NODE_COLUMN["shape_dimensions_0"] : NODE_COLUMN["shape_dimensions_0"] + 2] = shape
        feat[row, NODE_COLUMN["shape_dimensions_sum"]] = sum(shape)
        feat[row, NODE_COLUMN["shape_dimensions_product"]] = shape[0] * shape[1]
        feat[row, NODE_COLUMN["layout_minor_to_major_0"]] = 1
    feat[-1, NODE_COLUMN["is_root"]] = 1
    edges = [[2, 0], [2, 1]] + [[row, row - 1] for row in range(3, len(shapes))]
    return feat, np.array([OPCODE_NUMBER[name] for name in names], np.uint8), np.array(edges, np.int64)


def _config_feat(tiles: np.ndarray) -> np.ndarray:
    feat = np.zeros((len(tiles), len(TILE_FEATURES)), np.float32)
    for column, pair in ((8, (0, 1)), (16, (0, 2))):
        values = tiles[:, pair]
        feat[:, column : column + 2] = values
        feat[:, column + 6], feat[:, column + 7] = values.sum(1), values.prod(1)
    return feat


def _runtime(m: int, n: int, k: int, tiles: np.ndarray) -> np.ndarray:
    count = np.ceil(np.array([m, n, k]) / tiles)
    tm, tn, tk = tiles.T
    arithmetic = np.ceil(tm / 8) * 8 * np.ceil(tn / 128) * 128 * tk / 2e4
    traffic = (tm * tk + tk * tn) * 4 / 200 * np.where((tm * tk + tk * tn + tm * tn) * 4 > 2**18, 3, 1)
    return count.prod(1) * (np.maximum(arithmetic, traffic) + 20) + 500


def write_npz(kernel: Kernel, folder: Path, **changes: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kernel.name}.npz"
    arrays = {
        "node_feat": kernel.node_feat,
        "node_opcode": kernel.node_opcode,
        "edge_index": kernel.edge_index.astype(np.int64),
        "config_feat": kernel.config_feat,
        "config_runtime": kernel.runtime,
        "config_runtime_normalizers": kernel.normalizer,
    }
    np.savez_compressed(path, **(arrays | changes))
    return path


def simulated_kernels(count: int, seed: int = 0, prefix: str = "prog", n_configs: int = 60) -> list[Kernel]:
    rng = np.random.default_rng(seed)
    names = [f"{prefix}{i % 4}_{rng.integers(2**60):016x}" for i in range(count)]
    return [simulated_kernel(rng, name, n_configs, extra_nodes=i % 3) for i, name in enumerate(names)]


def write_collection(root: Path, train: int = 24, valid: int = 8, test: int = 8, seed: int = 0) -> Path:
    for split, count, shift in (("train", train, 0), ("valid", valid, 1), ("test", test, 2)):
        for kernel in simulated_kernels(count, seed * 3 + shift, prefix=split):
            write_npz(kernel, root / split)
    (root / "schema.json").write_text(json.dumps({"config_features": list(TILE_FEATURES), "hardware": "simulated"}))
    return root
