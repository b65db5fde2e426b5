"""AutoTVM-like logs of a simulated GPU: convolutions, dense layers and batched products, read by the real importer.

The schedules and their knobs are those of TVM's CUDA templates (conv2d_direct, dense_large_batch, batch_matmul), the
runtimes come from `standins.gpu_runtime`. A log does not say what its kernels compute, so the models see only the
arguments' sizes and the knobs. Each task has knobs of its own; those of the other tasks are zero. One family may be
absent from training, as when a new network has an operator that was never tuned.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.standins import GPUS, Floats, Rng, factors, gpu_runtime
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels, load_dataset
from tilewise.costmodel.data.importers.build import import_logs

FAMILIES = ("conv2d_nchw.cuda", "dense_large_batch.cuda", "batch_matmul.cuda")
_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_GPU = GPUS[2]
_NOISE = 0.02
_DRAWN = 6
_MAX_VIRTUAL_THREADS = 8  # TVM's default

Record = tuple[list[Any], list[list[Any]], float]  # arguments, knobs as AutoTVM writes them, nanoseconds


def _product(rng: Rng, count: int, batch: int, m: int, n: int, k: int, prefix: str) -> tuple[Floats, list[Any]]:
    """Time `count` schedules of a (batched) product: both outputs split in four, the reduction in two."""
    y, x, reduction = (factors(rng, size, parts, count) for size, parts in ((m, 4), (n, 4), (k, 2)))
    unroll, explicit = rng.choice((0.0, 512.0, 1500.0), count), rng.integers(0, 2, count).astype(float)
    tile_y, tile_x = y[:, 1:].prod(axis=1), x[:, 1:].prod(axis=1)
    threads, own = y[:, 2] * x[:, 2], y[:, 1] * y[:, 3] * x[:, 1] * x[:, 3]
    shared = 4 * reduction[:, 1] * (tile_y + tile_x)
    coalesced = np.where(x[:, 2] >= 8, 1.0, 0.45)
    body = own * reduction[:, 1]
    unrolled = np.where(body <= unroll, 1.0, 0.72) * np.where((explicit == 1) & (body > 256), 0.85, 1.0)
    partial = threads / (np.ceil(threads / 32) * 32)
    runtime = gpu_runtime(
        _GPU, batch * y[:, 0] * x[:, 0], threads, shared, 20 + own * 1.2 + y[:, 1] * y[:, 3],
        2 * tile_y * tile_x * k, shared * reduction[:, 0] / coalesced, reduction[:, 0],
        unrolled * partial * own / (own + 3),
    )  # fmt: skip
    runs = _accepted(y[:, 1] * x[:, 1], threads, shared)
    knobs = [
        [["tile_y", "sp", a.tolist()], ["tile_x", "sp", b.tolist()], [f"tile_{prefix}", "sp", c.tolist()],
         ["auto_unroll_max_step", "ot", u], ["unroll_explicit", "ot", e]]
        for a, b, c, u, e in zip(y[runs], x[runs], reduction[runs], unroll[runs], explicit[runs], strict=True)
    ]  # fmt: skip
    return runtime[runs], knobs


def _accepted(virtual_threads: Floats, threads: Floats, shared: Floats) -> npt.NDArray[np.bool_]:
    """Return which schedules pass the limits that AutoTVM verifies before it runs one."""
    return np.asarray((virtual_threads <= _MAX_VIRTUAL_THREADS) & (threads <= 1024) & (shared <= _GPU.shared))


def _conv(rng: Rng, count: int) -> tuple[list[Any], Floats, list[Any]]:
    """Draw a convolution and time `count` of its schedules."""
    from benchmarks.standins import template_conv

    kernel = template_conv(rng, "conv", _GPU, count)
    columns, runtime = kernel.config_feat.astype(float), kernel.runtime.astype(float)
    f, y, x, rc, ry, rx = np.split(columns[:, :-2], (4, 8, 12, 14, 16), axis=1)
    halo = [(t[:, 1:].prod(axis=1) - 1) + r[:, 1] for t, r in ((y, ry), (x, rx))]
    shared = 4 * rc[:, 1] * (halo[0] * halo[1] + f[:, 1:].prod(axis=1) * ry[:, 1] * rx[:, 1])
    runs = _accepted(f[:, 1] * y[:, 1] * x[:, 1], f[:, 2] * y[:, 2] * x[:, 2], shared)
    columns, runtime = columns[runs], runtime[runs]
    cuts = np.cumsum((4, 4, 4, 2, 2, 2))
    names = ("tile_f", "tile_y", "tile_x", "tile_rc", "tile_ry", "tile_rx")
    knobs = [
        [[name, "sp", part.tolist()] for name, part in zip(names, np.split(row, cuts)[:-1], strict=True)]
        + [["auto_unroll_max_step", "ot", row[-2]], ["unroll_explicit", "ot", row[-1]]]
        for row in columns
    ]
    shapes = [[int(size) for size in kernel.node_feat[row, 21:27] if size] for row in range(2)]
    stride = round(shapes[0][2] / int(columns[0, 4:8].prod()))
    arguments = [*(["TENSOR", shape, "float32"] for shape in shapes), [stride, stride]]
    return arguments, runtime, knobs


def _schedules(rng: Rng, family: str, count: int) -> tuple[list[Any], Floats, list[Any]]:
    """Draw a kernel of a family: its arguments, and runtimes and knobs of its schedules."""
    if family == FAMILIES[0]:
        return _conv(rng, count)
    m, n, k = (int(rng.choice(_SIZES)) for _ in range(3))
    batch = int(rng.choice((1, 4, 8, 12, 16, 32))) if family == FAMILIES[2] else 1
    runtime, knobs = _product(rng, count, batch, m, n, k, "k")
    leading = [batch] if family == FAMILIES[2] else []
    return [["TENSOR", [*leading, m, k], "float32"], ["TENSOR", [*leading, n, k], "float32"]], runtime, knobs


def write_log(path: Path, rng: Rng, family: str, kernels: int, count: int) -> None:
    """Write an AutoTVM log of one task."""
    lines = []
    for _ in range(kernels):
        # Most drawn schedules are rejected.
        arguments, runtime, knobs = _schedules(rng, family, _DRAWN * count)
        runtime, knobs = runtime[:count], knobs[:count]
        noisy = runtime * np.exp(_NOISE * rng.standard_normal(len(runtime)))
        lines += [
            json.dumps({"input": ["cuda", family, arguments, {}], "config": {"entity": entity},
                        "result": [[nanoseconds / 1e9], 0, 0.1, 0.0], "version": 0.2})
            for entity, nanoseconds in zip(knobs, np.clip(noisy, 1, 1e18), strict=True)
        ]  # fmt: skip
    path.write_text("\n".join(lines))


def logs(seed: int, absent: str = FAMILIES[2], kernels: int = 70, configs: int = 300) -> Dataset:
    """Import logs of all families; the test split has a sixth of the others and as many of the absent family."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in FAMILIES:
            write_log(folder / f"{family}.log", rng, family, kernels, configs)
        import_logs("autotvm", sorted(folder.glob("*.log")), folder / "collection", split="train")
        data = load_dataset(folder / "collection", progress=False)
        every = list(data.train)
    parts: tuple[list[Any], ...] = ([], [], [])
    for family in FAMILIES:
        members = [kernel for kernel in every if kernel.program.startswith(family.replace("_", "-"))]
        members = [members[i] for i in rng.permutation(len(members))]
        sixth = len(members) // 6
        parts[2].extend(members[:sixth])
        if family != absent:
            parts[1].extend(members[sixth : 2 * sixth])
            parts[0].extend(members[2 * sixth :])
    return dataset_from_kernels(*parts, data.schema)
