"""Collections of other people's shapes, on which `benchmarks.tile_peers` compares models.

Every function draws another collection for another seed. Runtimes of `h200`, `cpu` and of imported folders were
measured; the others come from the formulas of `standins` and `autotvm_logs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.autotvm_logs import FAMILIES, logs
from benchmarks.standins import GPUS, OPENCL_NAMES, STANDINS, embedded, opencl_gemm
from course.synthetic_tiles import synthetic_dataset
from tilewise.costmodel import load_dataset
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.importers.description import plain_graph
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.ranker import kernel_sizes

_FOLDER_KERNELS = 1200  # of a folder, at most, so that a few minutes are enough for all models


def no_graph(seed: int) -> Dataset:
    """Simulated products of which only three sizes are known, as a log without a description gives them."""
    data = STANDINS["simulated-opencl-gemm"](seed)
    return _changed(data, lambda kernel: dataclasses.replace(kernel, **_plain(kernel)))


def _plain(kernel: Kernel) -> dict[str, Any]:
    sizes = [float(size) for size in kernel_sizes(kernel)[6:9] if size]
    feat, opcode, edges = plain_graph({str(i): size for i, size in enumerate(sizes)})
    return {"node_feat": feat, "node_opcode": opcode, "edge_index": edges}


def ties(seed: int) -> Dataset:
    """Simulated convolutions timed by a coarse clock, one in fifty disturbed, a fifth of the configurations failed."""
    rng = np.random.default_rng(seed)

    def spoiled(kernel: Kernel) -> Kernel:
        rows = np.flatnonzero(rng.random(kernel.n_configs) < 0.8)
        step = max(1, int(kernel.runtime.min()) // 20)
        disturbed = np.where(rng.random(len(rows)) < 0.02, rng.uniform(5, 60, len(rows)), 1.0)
        runtime = np.maximum(1, np.rint(kernel.runtime[rows] * disturbed / step)).astype(np.int64) * step
        cut = {"config_feat": kernel.config_feat[rows], "normalizer": kernel.normalizer[rows]}
        return dataclasses.replace(kernel, runtime=runtime, **cut)

    data = STANDINS["simulated-implicit-conv"](seed)
    # Training sees what the clock saw; what was chosen is judged by undisturbed times.
    return dataclasses.replace(_changed(data, spoiled), test=data.test)


def one_kernel(seed: int) -> Dataset:
    """One simulated product: half of its configurations to learn from, a quarter each for validation and test."""
    rng = np.random.default_rng(seed)
    whole = opencl_gemm(rng, "only_0", GPUS[2], 3000)
    order = rng.permutation(whole.n_configs)
    parts = [
        make_kernel(f"only_{number}", whole.node_feat, whole.node_opcode, whole.edge_index, whole.config_feat[rows],
                    whole.runtime[rows], whole.normalizer[rows])
        for number, rows in enumerate(np.array_split(order, 4))
    ]  # fmt: skip
    return dataset_from_kernels(parts[:2], parts[2:3], parts[3:], Schema(OPENCL_NAMES))


def forty(seed: int) -> Dataset:
    """Forty kernels of the GPU's own collection with shuffled columns of other names."""
    return embedded("h200", (), 40, seed, rename=True)


def _changed(data: Dataset, change: Callable[[Kernel], Kernel]) -> Dataset:
    parts = [[change(kernel) for kernel in split] for split in (data.train, data.valid, data.test)]
    return dataset_from_kernels(*parts, data.schema)


def folder(path: Path, seed: int) -> Dataset:
    """Split the kernels of a folder: each is a test kernel for one of three consecutive seeds."""
    data = load_dataset(path, progress=False)
    every = [k for split in (data.train, data.valid, data.test) for k in split if k.labelled and k.n_configs > 1]
    order = np.random.default_rng(0).permutation(len(every))[:_FOLDER_KERNELS]
    test, valid, train = np.split(np.roll(order, seed * len(order) // 3), [len(order) // 3, len(order) // 2])
    return dataset_from_kernels(*([every[i] for i in rows] for rows in (train, valid, test)), data.schema)


COLLECTIONS: dict[str, Callable[[int], Dataset]] = {
    # TPU kernels: the same for every seed. Kernels of other seeds were looked at before.
    "synthetic": lambda _: synthetic_dataset(5000, 250, 1000, seed=10, n_configs=120),
    "no-graph": no_graph,
    "ties": ties,
    "one-kernel": one_kernel,
    "forty": forty,
    "h200-dots-renamed": STANDINS["h200-dots-renamed"],
    "cpu-renamed": STANDINS["cpu-renamed"],
    "template-conv": STANDINS["simulated-template-conv"],
    "autotvm-no-conv2d": lambda seed: logs(seed, FAMILIES[0]),
    "autotvm-no-dense": lambda seed: logs(seed, FAMILIES[1]),
    "autotvm-no-batch_matmul": lambda seed: logs(seed, FAMILIES[2]),
}
