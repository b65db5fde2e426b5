"""Kernels of `synthetic_tiles` for tests of the machinery, never for a statement about quality."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from course.synthetic_tiles import synthetic_kernel
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES


def simulated_kernel(rng: np.random.Generator, name: str, n_configs: int = 60) -> Kernel:
    """A kernel with exactly so many configurations; small kernels are drawn again, many configurations repeat."""
    while (kernel := synthetic_kernel(rng, name, min(n_configs, 200))).n_configs < min(n_configs, 200):
        pass
    rows = np.resize(np.arange(kernel.n_configs), n_configs)
    columns = {field: getattr(kernel, field)[rows] for field in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **columns)


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
    return [simulated_kernel(rng, name, n_configs) for name in names]


def write_collection(root: Path, train: int = 24, valid: int = 8, test: int = 8, seed: int = 0) -> Path:
    for split, count, shift in (("train", train, 0), ("valid", valid, 1), ("test", test, 2)):
        for kernel in simulated_kernels(count, seed * 3 + shift, prefix=split):
            write_npz(kernel, root / split)
    (root / "schema.json").write_text(json.dumps({"config_features": list(TILE_FEATURES), "hardware": "simulated"}))
    return root
