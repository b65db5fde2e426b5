"""Collections that stand in for tuning logs nobody has sent yet: other columns, other names, few kernels.

Three come from the embedded measurements, cut to few kernels, with columns renamed and shuffled. Three are *simulated*:
their runtimes come from a formula for a GPU that does not exist (waves, occupancy, bank conflicts, padding, caches,
noise), over the tuning spaces people really use. They say whether a model's machinery copes with an unknown space; they
say nothing about any hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels, load_dataset
from tilewise.costmodel.data.kernel import Kernel, make_kernel
from tilewise.costmodel.data.schema import NODE_COLUMN, NODE_FEATURES, OPCODE_NUMBER, Schema

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator
Make = Callable[[Rng, str, "Gpu", int], Kernel]


@dataclass(frozen=True)
class Gpu:
    """A made-up GPU."""

    cores: int
    flops: float  # per core and nanosecond
    bandwidth: float  # bytes per nanosecond
    shared: int  # bytes per core
    registers: int = 65536
    threads: int = 2048


GPUS = (
    Gpu(80, 110.0, 900.0, 96 << 10),
    Gpu(40, 110.0, 320.0, 64 << 10, threads=1024),
    Gpu(108, 180.0, 1500.0, 160 << 10),
    Gpu(30, 90.0, 200.0, 48 << 10, threads=1536),
)


def gpu_runtime(
    gpu: Gpu, blocks: Floats, threads: Floats, shared: Floats, registers: Floats,
    flops: Floats, traffic: Floats, steps: Floats, efficiency: Floats,
) -> Floats:  # fmt: skip
    """Nanoseconds of a grid of equal blocks; arguments after `threads` are per block (registers per thread)."""
    spill = np.maximum(1.0, registers / 200) ** 2
    registers = np.minimum(np.maximum(registers, 24), 255)
    warps = np.ceil(threads / 32)
    fits = np.minimum(gpu.shared // np.maximum(shared, 1), gpu.registers // (registers * warps * 32))
    resident = np.clip(np.minimum(fits, gpu.threads // (warps * 32)), 1, 16)
    occupancy = np.minimum(1.0, resident * warps * 32 / gpu.threads)
    hidden = 0.25 + 0.75 * np.minimum(1.0, occupancy / 0.4)
    waves = np.ceil(blocks / (gpu.cores * resident))
    active = np.minimum(resident, np.maximum(1.0, blocks / gpu.cores))
    compute = active * flops / (gpu.flops * efficiency * hidden) * spill
    memory = (
        np.minimum(blocks, gpu.cores * resident)
        * traffic
        / (gpu.bandwidth * np.minimum(1.0, 0.4 + 0.6 * occupancy / 0.25))
    )
    latency = steps * 350.0 / np.minimum(active * warps / 4, 8)
    oversized = np.where((shared > gpu.shared) | (warps > 32), 20.0, 1.0)
    return (waves * (np.maximum(compute, memory) + 0.3 * np.minimum(compute, memory) + latency) + 2500.0) * oversized


def _graph(opcode: str, operands: tuple[tuple[int, ...], ...], result: tuple[int, ...], window: int, stride: int):
    shapes = [*operands, result]
    feat = np.zeros((len(shapes), len(NODE_FEATURES)), np.float32)
    for row, shape in enumerate(shapes):
        feat[row, NODE_COLUMN["shape_element_type_is_f32"]] = 1
        feat[row, NODE_COLUMN["shape_dimensions_0"] : NODE_COLUMN["shape_dimensions_0"] + len(shape)] = shape
        feat[row, NODE_COLUMN["shape_dimensions_sum"]] = sum(shape)
        feat[row, NODE_COLUMN["shape_dimensions_product"]] = np.prod(shape)
    feat[-1, NODE_COLUMN["is_root"]] = 1
    if window:
        for axis in (0, 1):
            feat[-1, NODE_COLUMN[f"window_size_{axis}"]] = window
            feat[-1, NODE_COLUMN[f"window_stride_{axis}"]] = stride
    numbers = [OPCODE_NUMBER["parameter"]] * len(operands) + [OPCODE_NUMBER[opcode]]
    last = len(operands)
    return feat, np.array(numbers, np.uint8), np.array([[last, row] for row in range(last)], np.int64)


def factors(rng: Rng, size: int, parts: int, count: int) -> Floats:
    """Random ordered factorisations of `size`, as AutoTVM's `define_split` lists them."""
    out = np.ones((count, parts))
    remaining = size
    for prime in (2, 3, 5, 7, 11, 13):
        while remaining % prime == 0:
            remaining //= prime
            out[np.arange(count), rng.integers(parts, size=count)] *= prime
    out[:, 0] *= remaining
    return out


def _conv_shape(rng: Rng) -> tuple[int, int, int, int, int]:
    channels = (3, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    size = int(rng.choice((7, 14, 28, 35, 56, 112)))
    window, stride = int(rng.choice((1, 1, 3, 3, 5))), int(rng.choice((1, 1, 1, 2)))
    return int(rng.choice(channels)), int(rng.choice(channels[1:])), size, window, stride


def template_conv(rng: Rng, name: str, gpu: Gpu, count: int) -> Kernel:
    """A direct convolution under a schedule template: each loop split in four (two for reductions)."""
    inputs, outputs, size, window, stride = _conv_shape(rng)
    f, y, x = (factors(rng, n, 4, count) for n in (outputs, size, size))
    rc, ry, rx = (factors(rng, n, 2, count) for n in (inputs, window, window))
    unroll, explicit = rng.choice((0.0, 512.0, 1500.0), count), rng.integers(0, 2, count).astype(float)
    threads = f[:, 2] * y[:, 2] * x[:, 2]
    tile_f, tile_y, tile_x = (t[:, 1:].prod(1) for t in (f, y, x))
    own = f[:, 1] * f[:, 3] * y[:, 1] * y[:, 3] * x[:, 1] * x[:, 3]
    halo = ((tile_y - 1) * stride + ry[:, 1]) * ((tile_x - 1) * stride + rx[:, 1])
    shared = 4 * rc[:, 1] * (halo + tile_f * ry[:, 1] * rx[:, 1])
    steps = rc[:, 0] * ry[:, 0] * rx[:, 0]
    coalesced = np.where(x[:, 2] >= 8, 1.0, 0.45)
    bank = np.where((x[:, 3] % 2 == 0) & (x[:, 3] > 1), 0.8, 1.0)
    body = own * rc[:, 1] * ry[:, 1] * rx[:, 1]
    unrolled = np.where(body <= unroll, 1.0, 0.72) * np.where((explicit == 1) & (body > 256), 0.85, 1.0)
    partial = threads / (np.ceil(threads / 32) * 32)
    runtime = gpu_runtime(
        gpu, f[:, 0] * y[:, 0] * x[:, 0], threads, shared, 20 + own * 1.2 + f[:, 1] * f[:, 3],
        2 * tile_f * tile_y * tile_x * inputs * window * window, shared * steps / coalesced, steps,
        bank * unrolled * partial * own / (own + 3),
    )  # fmt: skip
    columns = np.hstack([f, y, x, rc, ry, rx, unroll[:, None], explicit[:, None]])
    graph = _graph(
        "convolution", ((1, inputs, size * stride, size * stride), (outputs, inputs, window, window)),
        (1, outputs, size, size), window, stride,
    )  # fmt: skip
    return _finished(rng, name, graph, columns, runtime)


TEMPLATE_NAMES = (
    *(f"tile_{axis}_{i}" for axis in ("f", "y", "x") for i in range(4)),
    *(f"tile_{axis}_{i}" for axis in ("rc", "ry", "rx") for i in range(2)),
    "auto_unroll_max_step", "unroll_explicit",
)  # fmt: skip


def opencl_gemm(rng: Rng, name: str, gpu: Gpu, count: int) -> Kernel:
    """A matrix product with the fourteen parameters of a tunable OpenCL kernel."""
    m, n, k = (round(2 ** rng.uniform(5, 12.3)) for _ in range(3))
    mwg, nwg = (rng.choice((16.0, 32.0, 64.0, 128.0), count) for _ in range(2))
    kwg, kwi = rng.choice((16.0, 32.0), count), rng.choice((2.0, 8.0), count)
    mdim, ndim, mdima, ndimb = (np.minimum(rng.choice((8.0, 16.0, 32.0), count), w) for w in (mwg, nwg, mwg, nwg))
    vwm, vwn = (np.minimum(rng.choice((1.0, 2.0, 4.0, 8.0), count), w / d) for w, d in ((mwg, mdim), (nwg, ndim)))
    strm, strn, sa, sb = (rng.integers(0, 2, count).astype(float) for _ in range(4))
    own = mwg * nwg / (mdim * ndim)
    threads = mdim * ndim
    shared = 4 * (sa * kwg * mwg + sb * kwg * nwg)
    steps = np.ceil(k / kwg)
    reuse_a, reuse_b = (
        np.where(sa == 1, 1.0, np.minimum(4.0, ndim / 4)),
        np.where(sb == 1, 1.0, np.minimum(4.0, mdim / 4)),
    )
    wide = np.minimum(1.0, 0.5 + 0.5 * vwm * np.minimum(1, mdima / 16) / 4) * np.minimum(1.0, 0.6 + 0.4 * vwn / 2)
    stride = np.where((strm == 1) & (vwm < 4), 1.05, 1.0) * np.where((strn == 1) & (vwn > 2), 0.9, 1.0)
    mismatch = np.where(mdima != mdim, 0.95, 1.0) * np.where(ndimb != ndim, 0.97, 1.0)
    runtime = gpu_runtime(
        gpu, np.ceil(m / mwg) * np.ceil(n / nwg), threads, shared, 25 + own * 1.1 + kwi * (vwm + vwn),
        2 * mwg * nwg * k, 4 * k * (mwg * reuse_a + nwg * reuse_b) / wide / 2, steps,
        stride * mismatch * own / (own + 5) * np.where(kwi == 8, 1.0, 0.93) * np.minimum(1, 0.8 + 0.05 * vwm),
    )  # fmt: skip
    columns = np.stack([mwg, nwg, kwg, mdim, ndim, mdima, ndimb, kwi, vwm, vwn, strm, strn, sa, sb], axis=1)
    return _finished(rng, name, _graph("dot", ((m, k), (k, n)), (m, n), 0, 0), columns, runtime)


OPENCL_NAMES = (
    "MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI", "VWM", "VWN", "STRM", "STRN", "SA", "SB",
)  # fmt: skip


def implicit_conv(rng: Rng, name: str, gpu: Gpu, count: int) -> Kernel:
    """Convolution as a matrix product in blocks, with a split of the reduction and unused columns of zeros."""
    inputs, outputs, size, window, stride = _conv_shape(rng)
    batch = int(rng.choice((1, 4, 8, 32)))
    m, n, k = batch * size * size, outputs, inputs * window * window
    bm, bn = (rng.choice((16.0, 32.0, 64.0, 128.0, 256.0), count) for _ in range(2))
    bk, split = rng.choice((16.0, 32.0, 64.0), count), rng.choice((1.0, 2.0, 4.0, 8.0), count)
    warps, stages = rng.choice((1.0, 2.0, 4.0, 8.0), count), rng.choice((1.0, 2.0, 3.0, 4.0, 5.0), count)
    own = bm * bn / (warps * 32)
    steps = np.ceil(k / (bk * split))
    padded = np.ceil(k / (bk * split)) * bk
    shared = 2 * stages * bk * (bm + bn)
    swizzle = rng.integers(0, 3, count).astype(float)
    mma = (
        np.where(own >= 16, 1.0, 0.5)
        * np.where((bm < 32) | (bn < 32), 0.7, 1.0)
        * np.array([0.9, 1.0, 0.97])[swizzle.astype(int)]
    )
    runtime = gpu_runtime(
        gpu, np.ceil(m / bm) * np.ceil(n / bn) * split, warps * 32, shared, 30 + own * 1.05, 2 * bm * bn * padded,
        2 * padded * (bm + bn) + 4 * bm * bn * np.where(split > 1, 2, 0.5),
        steps / np.minimum(stages, 3), mma * own / (own + 12) * 4,
    ) + np.where(split > 1, 2000 + 8 * m * n / gpu.bandwidth, 0)  # fmt: skip
    columns = np.stack([bm, bn, bk, split, warps, stages, swizzle, np.zeros(count)], axis=1)
    graph = _graph(
        "convolution", ((batch, size * stride, size * stride, inputs), (window, window, inputs, outputs)),
        (batch, size, size, outputs), window, stride,
    )  # fmt: skip
    return _finished(rng, name, graph, columns, runtime)


IMPLICIT_NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "num_warps", "num_stages", "swizzle", "reserved")


_LONGEST_NS = float(1 << 60)  # the formula has no end where registers spill by the million; a runtime's 64 bits have


def _finished(rng: Rng, name: str, graph: tuple, columns: Floats, runtime: Floats) -> Kernel:
    columns, first = np.unique(columns, axis=0, return_index=True)
    noisy = runtime[first] * np.exp(0.02 * rng.standard_normal(len(first)))
    order = rng.permutation(len(first))
    whole = np.clip(noisy[order], 1, _LONGEST_NS).astype(np.int64)
    return make_kernel(
        name, *graph, columns[order].astype(np.float32), whole, np.full(len(whole), int(np.median(whole)))
    )


def simulated(
    make: Callable[[Rng, str, Gpu, int], Kernel],
    names: tuple[str, ...],
    gpu: int,
    kernels: int,
    configs: int,
    seed: int,
) -> Dataset:
    rng = np.random.default_rng([seed, gpu])
    every = [make(rng, f"net{i % 9}_{i:04d}", GPUS[gpu], int(configs * rng.uniform(0.4, 1.6))) for i in range(kernels)]
    return split_up(every, Schema(names), seed)


def split_up(kernels: list[Kernel], schema: Schema, seed: int, shares: tuple[float, float] = (0.65, 0.15)) -> Dataset:
    order = np.random.default_rng(seed).permutation(len(kernels))
    first, second = round(shares[0] * len(order)), round(sum(shares) * len(order))
    parts = [[kernels[i] for i in order[a:b]] for a, b in ((0, first), (first, second), (second, None))]
    return dataset_from_kernels(*parts, schema)


def embedded(name: str, opcodes: tuple[str, ...], kernels: int, seed: int, *, rename: bool) -> Dataset:
    """Kernels of an embedded collection that contain one of the opcodes, whatever its split was."""
    data = load_dataset(name)
    numbers = [OPCODE_NUMBER[opcode] for opcode in opcodes]
    every = [k for split in (data.train, data.valid, data.test) for k in split]
    matching = [k for k in every if not numbers or np.isin(k.node_opcode, numbers).any()]
    rng = np.random.default_rng(seed)
    sample = [matching[i] for i in np.sort(rng.permutation(len(matching))[:kernels])]
    if not rename:
        return split_up(sample, data.schema, seed)
    columns = rng.permutation(data.schema.width)
    renamed = [dataclasses.replace(k, config_feat=np.ascontiguousarray(k.config_feat[:, columns])) for k in sample]
    return split_up(renamed, Schema(tuple(f"p{i}" for i in range(len(columns)))), seed)


STANDINS: dict[str, Callable[[int], Dataset]] = {
    "h200-dots-renamed": lambda seed: embedded("h200", ("dot",), 150, seed, rename=True),
    "h200-few": lambda seed: embedded("h200", (), 100, seed, rename=False),
    "cpu-renamed": lambda seed: embedded("cpu", (), 160, seed, rename=True),
    "simulated-template-conv": lambda seed: simulated(template_conv, TEMPLATE_NAMES, 0, 150, 800, seed),
    "simulated-opencl-gemm": lambda seed: simulated(opencl_gemm, OPENCL_NAMES, 1, 120, 600, seed),
    "simulated-implicit-conv": lambda seed: simulated(implicit_conv, IMPLICIT_NAMES, 2, 200, 300, seed),
}
