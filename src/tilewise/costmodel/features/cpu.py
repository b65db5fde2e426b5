"""What the CPU's cost model reads: how a tile meets the kernel's sizes *and the machine*, as ratios that mean the same
on every CPU.

A model that saw lanes and cache sizes as they are would learn the few machines it was taught on by heart. So none of
them is an input. What is: how full the registers are, how much of a cache each block takes, how many bytes each loop
moves from the level where they lie, over what the multiplications take, what packing costs, how evenly threads are
served. Convolutions are read as the products they are: pixels by filters by (channels x window). The configuration that
is the default is marked, since it may run other code than its tile says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, OPCODE_NUMBER, TILE_FEATURES
from tilewise.costmodel.data.shards import Split
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.costmodel.features.scaling import Prepared
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
Column = npt.NDArray[np.float64]

# The columns it asks for beside TpuGraphs' bounds; those that a collection lacks count as 0.
OWN = (
    "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd", "threads", "default",
    "machine_lanes", "machine_registers", "machine_l1_kib", "machine_l2_kib", "machine_l3_share_kib", "machine_mflops",
    "machine_l1_mbs", "machine_l2_mbs", "machine_l3_mbs", "machine_memory_mbs",
)  # fmt: skip
_SETTINGS = OWN.index("machine_lanes")  # so many say what a configuration is, the others where it runs
COUNT = 85  # features
_KERNEL, _OUTPUT = TILE_FEATURES.index("kernel_bounds_0"), TILE_FEATURES.index("output_bounds_0")
_CONVOLUTION, _PARAMETER = OPCODE_NUMBER["convolution"], OPCODE_NUMBER["parameter"]
_U8 = NODE_COLUMN["shape_element_type_is_u8"]
_ERF = OPCODE_NUMBER["custom-call"]
_MINOR = NODE_COLUMN["layout_minor_to_major_0"]
# Where a machine's ceilings were never measured: MFLOP/s of a core by its lanes, and bytes read for each of them from
# the three caches and from memory. Between the two CPUs measured so far these differ by less than a factor of two.
_MFLOPS = 7000.0
_BYTES_A_FLOP = (1.0, 0.7, 0.5, 0.15)
_FAR = 6.0
GROUPS = 3  # kinds of kernels: products, integer products, convolutions
_IS_CONVOLUTION, _IS_BYTES = 12, 13  # where `_of_kernel` says so


@dataclass(frozen=True)
class Product:
    """A kernel as a matrix product of (m, k) by (k, n), so many times."""

    batch: float
    m: float
    n: float
    k: float
    window: float  # of a convolution, 1 otherwise
    row: float  # pixels of a row of the result, of a convolution
    convolution: bool
    bytes: float  # of an element of the operands
    a_transposed: bool
    b_transposed: bool
    extra: float  # results' worth of memory that the epilogue reads beside them
    slow_end: bool  # whether the epilogue computes a function that costs more than the sum's last steps


def product_of(kernel: Kernel) -> Product:
    """The product in a kernel's graph."""
    sizes = kernel_sizes(kernel).tolist()
    heavy, first, second = (sizes[i * DIMENSIONS : (i + 1) * DIMENSIONS] for i in (1, 2, 3))
    opcode, feat = kernel.node_opcode, kernel.node_feat
    convolution = bool((opcode == _CONVOLUTION).any())
    parameters = (opcode == _PARAMETER).nonzero()[0]
    small = bool(feat[parameters[:1], _U8].any()) if len(parameters) else False
    whole = float((feat[parameters[2:], NODE_COLUMN["shape_dimensions_1"]] > 1).any()) if len(parameters) > 2 else 0.0
    slow = bool((opcode == _ERF).any())
    if convolution:
        pixels, window = max(heavy[2], 1) * max(heavy[3], 1), max(second[2], 1) * max(second[3], 1)
        depth = max(first[1], 1) * window
        return Product(
            max(heavy[0], 1), pixels, max(heavy[1], 1), depth, window, max(heavy[3], 1), True, 4.0, False, False, whole,
            slow,
        )  # fmt: skip
    batched = heavy[2] > 0
    batch, m, n = (heavy[0], heavy[1], heavy[2]) if batched else (1.0, heavy[0], heavy[1])
    k = first[2] if batched else first[1]
    turned = [bool(feat[p, _MINOR] != (2 if batched else 1)) for p in parameters[:2]]
    return Product(
        max(batch, 1), max(m, 1), max(n, 1), max(k, 1), 1.0, 1.0, False, 1.0 if small else 4.0,
        turned[0] if turned else False, turned[1] if len(turned) > 1 else False, whole, slow,
    )  # fmt: skip


def features(p: Product, bounds: Column, own: Mapping[str, Column]) -> list[Any]:
    """A list of numbers or columns, one a feature; `bounds` holds TpuGraphs' columns, configurations along the rows.
    The compiled kernels have the same (native/common/cpu_features.cpp), for choosing a tile in passing."""
    t = _Tile.of(p, bounds, own)
    threads = np.maximum(own["threads"], 1)
    return [*_of_kernel(p, t), *_registers(p, t), *_in_caches(t), *_moved(p, t), *_loose(p, t),
            *_shared(p, t, threads), *_default(p, own["default"], threads)]  # fmt: skip


@dataclass(frozen=True)
class _Tile:
    """Configurations beside their kernel and machine; sizes in elements of the product that the tile cuts.

    Winograd multiplies 36 transformed numbers for a tile of 16 results, or 16 for 4: a product of its own, over
    channels alone.
    """

    machine: _Machine
    winograd: Column
    units: Any  # rows of the product
    columns: float
    depth: Any
    passes: Any
    mr: Any
    nr: Any
    mc: Any
    nc: Any
    kc: Any
    pack_a: Any
    pack_b: Any
    grid: tuple[Any, Any]
    size: float  # bytes of an operand's element

    @classmethod
    def of(cls, p: Product, bounds: Column, own: Mapping[str, Column]) -> _Tile:
        winograd, (mc, nc, kc) = own["winograd"], _blocks(p, bounds)
        units: Any = p.m  # numbers where no configuration transforms, as in a product; columns where some do
        depth: Any = p.k
        passes: Any = 1.0
        if winograd.any():
            transformed, kinds = winograd > 0, [winograd == 1, winograd == 2]
            results, passes = np.select(kinds, [16, 4], 1), np.select(kinds, [36.0, 16.0], 1.0)
            units, depth = (
                np.where(transformed, np.ceil(p.m / results), p.m),
                np.where(transformed, p.k / p.window, p.k),
            )
            mc, kc = np.where(transformed, np.ceil(mc / results), mc), np.where(transformed, depth, kc)
        machine = _Machine.of([float(own[name][0]) for name in OWN[_SETTINGS:]])
        grid = np.maximum(own["threads_m"], 1), np.maximum(own["threads_n"], 1)
        return cls(
            machine, np.minimum(winograd, 1), units, p.n, depth, passes,
            np.maximum(own["register_m"], 1), np.maximum(own["register_n"], 1), np.minimum(mc, units),
            np.minimum(nc, p.n), np.minimum(kc, depth), own["pack_a"], own["pack_b"], grid, p.bytes,
        )  # fmt: skip

    @functools.cached_property
    def fill(self) -> tuple[Any, Any]:
        return _fill(self.units, self.mr), _fill(self.columns, self.nr)

    @functools.cached_property
    def blocks(self) -> tuple[Any, Any, Any]:
        """How many there are: of rows, of columns, of depth."""
        return np.ceil(self.units / self.mc), np.ceil(self.columns / self.nc), np.ceil(self.depth / self.kc)

    @functools.cached_property
    def whole(self) -> tuple[Any, Any, Any]:
        """Bytes of both operands and of the result."""
        a, b = self.units * self.depth * self.size, self.depth * self.columns * self.size
        return a * self.passes, b * self.passes, self.units * self.columns * 4.0 * self.passes

    @functools.cached_property
    def seconds(self) -> Any:
        """Of multiplying, padding included, on one thread; an integer product does four times as many a second."""
        multiplied = self.passes * self.units * self.columns * self.depth / (self.fill[0] * self.fill[1])
        return 2 * multiplied / (self.machine.flops * (1.0 if self.size == 4 else 4.0))

    def over(self, moved: Any, working_set: Any) -> Any:
        """Seconds of moving so many bytes of a working set of so many, over those of multiplying."""
        return moved / (self.machine.rate(working_set) * self.seconds)

    @functools.cached_property
    def copies(self) -> tuple[Any, Any]:
        """What packing A and B costs, over multiplying."""
        a, b, _ = self.whole
        return self.pack_a * self.over(2 * a * self.blocks[1], a), self.pack_b * self.over(2 * b, b)


def _of_kernel(p: Product, t: _Tile) -> list[Any]:
    return [
        *(np.log2(x) for x in (p.m, p.n, p.k, p.m * p.n * p.k, p.batch)), *_small(p),
        p.a_transposed, p.b_transposed, p.extra, p.slow_end, p.convolution, p.bytes == 1, p.window > 1, t.winograd,
    ]  # fmt: skip


def group_of(config: Floats) -> int:
    """Of which kind a kernel is, from its scaled features: those are above zero where a flag is set."""
    return 2 if config[0, _IS_CONVOLUTION] > 0 else 1 if config[0, _IS_BYTES] > 0 else 0


def _small(p: Product) -> list[float]:
    return [float(np.log2(1 + 32 / x)) for x in (p.m, p.n, p.k)]


def _registers(p: Product, t: _Tile) -> list[Any]:
    lanes = t.machine.lanes if t.size == 4 else 16.0
    vectors = t.nr / lanes
    held = t.mr * vectors
    return [
        t.mr / 8, vectors / 2, held / t.machine.registers, held >= 8, np.log2(1 / t.mr + 1 / vectors), np.log2(held),
        *(np.log2(x) for x in t.fill), np.log2(_fill(p.n, lanes)), t.units < t.mr, p.n < t.nr,
    ]  # fmt: skip


def _in_caches(t: _Tile) -> list[Any]:
    machine, size = t.machine, t.size
    strip, sliver = t.kc * t.nr * size, t.mr * t.kc * size
    block_a, block_b, block_c = t.mc * t.kc * size, t.kc * t.nc * size, t.mc * t.nc * 4.0
    a, b, _ = t.whole
    return [
        *(np.log2(x) for x in t.blocks), t.mc >= t.units, t.nc >= t.columns, t.kc >= t.depth, np.log2(t.kc),
        *_against((strip, sliver, strip + sliver), machine.l1),
        *_against((block_a, block_b, block_c, strip, a, b), machine.l2),
        *_against((block_a, block_b, a, b), machine.l3),
    ]  # fmt: skip


def _moved(p: Product, t: _Tile) -> list[Any]:
    """What each loop reads and writes, over what is multiplied."""
    (a, b, c), (down, across, deep) = t.whole, t.blocks
    inner = t.passes * t.units * t.columns * t.depth * t.size * (1 / t.mr + 1 / t.nr)
    moved = (
        t.over(a * across, a), t.over(b * down, t.kc * t.nc * t.size), t.over(2 * c * deep, t.mc * t.nc * across * 4.0),
        t.over(a + b + c * (1 + p.extra), a + b + c), t.over(inner, t.kc * t.nr * t.size), *t.copies,
    )  # fmt: skip
    packed = (t.pack_a, t.pack_b, t.pack_a * p.a_transposed, t.pack_b * p.b_transposed)
    return [*(np.log1p(x) for x in moved), *packed]


def _loose(p: Product, t: _Tile) -> list[Any]:
    """Rows that are read where they lie: those whole pages apart share cache sets and TLB entries."""
    a, b = 1 - t.pack_a, 1 - t.pack_b
    stride_a, stride_b = (p.m if p.a_transposed else p.k) * t.size, (p.k if p.b_transposed else p.n) * t.size
    pages = np.log2(np.maximum(t.kc * 4096 / t.machine.l2, 2**-6))
    return [
        b * (stride_b % 4096 == 0), b * (stride_b % 1024 == 0), b * (stride_b >= 4096), b * (t.nr * t.size < 128),
        b * (stride_b >= 4096) * pages, a * (stride_a % 4096 == 0), a * (stride_a >= 4096), b * p.b_transposed,
        a * p.a_transposed,
    ]  # fmt: skip


def _shared(p: Product, t: _Tile, threads: Column) -> list[Any]:
    """How evenly the work is cut, and what every task does for itself."""
    tm, tn = t.grid
    if p.convolution:
        cell_m, cell_n = t.mc, np.ceil(p.n / tn)
        tasks = p.batch * t.blocks[0] * tn
        even = tasks / (np.ceil(tasks / threads) * threads)
    else:
        cell_m = np.minimum(np.ceil(np.ceil(t.units / tm) / t.mr) * t.mr, t.units)
        cell_n = np.minimum(np.ceil(np.ceil(p.n / tn) / t.nr) * t.nr, p.n)
        tasks = tm * tn * p.batch
        even = p.batch * t.units * p.n / (np.ceil(tasks / threads) * threads * cell_m * cell_n)
    several = threads > 1
    return [
        np.log2(threads), np.log2(tm), np.log2(tn), np.log2(np.maximum(even, 2**-8)), np.log2(tasks / threads),
        several * np.log2(cell_m / t.mr), several * np.log2(cell_n / t.nr),
        *(several * np.log1p(copies * count) for copies, count in zip(t.copies, (tn, tm), strict=True)),
    ]  # fmt: skip


def _default(p: Product, default: Column, threads: Column) -> list[Any]:
    """The default may leave the tiled loops, which depends on the shape."""
    product = 0.0 if p.convolution or p.bytes == 1 else 1.0
    kinds = (p.a_transposed, p.b_transposed)
    return [
        default, *(default * x * product for x in (*_small(p), *kinds)),
        *(default * x for x in (p.convolution, p.bytes == 1, threads > 1)),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Machine:
    lanes: float
    registers: float
    l1: float
    l2: float
    l3: float
    flops: float
    rates: tuple[float, ...]  # bytes a second from each level, memory last

    @classmethod
    def of(cls, told: Sequence[float]) -> _Machine:
        """From the machine's columns of one configuration: all of a kernel ran on one machine."""
        return _machine(*(max(0.0, x) for x in told))

    @functools.cached_property
    def _passage(self) -> tuple[Column, Column]:
        return np.log2([self.l1, self.l2, 2 * self.l3, 16 * self.l3]), np.log2(self.rates)

    @functools.cached_property
    def numbers(self) -> Column:
        """As the compiled kernels take them."""
        plain = np.array([self.lanes, self.registers, self.l1, self.l2, self.l3, self.flops])
        return np.concatenate([plain, *self._passage])

    def rate(self, working_set: Any) -> Any:
        """Bytes a second from where a working set of so many bytes lies, with a soft passage between levels."""
        return np.exp2(np.interp(np.log2(np.maximum(working_set, 1.0)), *self._passage))


@functools.lru_cache(maxsize=16)
def _machine(lanes: float, registers: float, l1: float, l2: float, l3: float, mflops: float, *mbs: float) -> _Machine:
    """In `OWN`'s order and units; what is 0 is not known."""
    lanes = lanes or 8.0
    flops = (mflops or _MFLOPS * min(lanes, 16.0)) * 1e6
    rates = tuple((mb or share * flops / 1e6) * 1e6 for mb, share in zip(mbs, _BYTES_A_FLOP, strict=True))
    l1, l2, l3 = (l1 or 32.0) * 1024, (l2 or 1024.0) * 1024, (l3 or 2048.0) * 1024
    return _Machine(lanes, registers or 16.0, l1, l2, max(l3, l2), flops, rates)


def _blocks(p: Product, bounds: Column) -> tuple[Any, Any, Any]:
    """Rows, columns and depth of a block."""
    if p.convolution:
        rows = np.maximum(bounds[_OUTPUT + 2] * np.maximum(bounds[_OUTPUT + 3], 1), 1)
        return rows, np.maximum(bounds[_OUTPUT + 1], 1), p.k
    lead = 1 if p.batch > 1 or bounds[_OUTPUT + 2].any() else 0
    return (
        np.maximum(bounds[_OUTPUT + lead], 1),
        np.maximum(bounds[_OUTPUT + lead + 1], 1),
        np.maximum(bounds[_KERNEL + lead], 1),
    )


def _fill(size: Any, step: Any) -> Any:
    """The share of whole steps that a size fills."""
    return size / (np.ceil(size / step) * step)


def _against(sizes: Sequence[Any], capacity: Any) -> list[Any]:
    return [np.log2(size / capacity) for size in sizes]


@dataclass(frozen=True, eq=False)
class CpuFeatures:
    """The fitted scaling, and where a collection keeps the columns that are asked for (-1: nowhere)."""

    kind: ClassVar[str] = "cpu"
    columns: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]  # of a configuration, (1,)
    centre: Floats
    scale: Floats

    @classmethod
    def fit(cls, split: Split) -> CpuFeatures:
        if not len(split):
            raise ConfigurationError("The train split is empty, so features cannot be fitted to it.")
        names = list(split.schema.config_features)
        columns = np.array([names.index(name) if name in names else -1 for name in OWN], np.int64)
        draft = cls(columns, np.array([len(names)]), np.zeros(0, np.float32), np.zeros(0, np.float32))
        raw = np.concatenate([draft.raw(split[i]) for i in range(len(split))], axis=1).astype(np.float64)
        deviation = raw.std(axis=1)
        scale = np.where(deviation > 1e-9, 1 / np.maximum(deviation, 1e-9), 0.0)
        return cls(columns, draft.width, raw.mean(axis=1).astype(np.float32), scale.astype(np.float32))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> CpuFeatures:
        try:
            found = cls(*(tensors[name] for name in ("columns", "width", "centre", "scale")))
            columns, width = found.columns.astype(np.int64), int(found.width[0])
            if columns.shape != (len(OWN),) or columns.max() >= width or columns.min() < -1:
                raise ValueError("columns")
            if found.centre.ndim != 1 or found.centre.shape != found.scale.shape or width <= len(TILE_FEATURES):
                raise ValueError("scales")
        except (KeyError, ValueError, IndexError, TypeError):
            raise FileFormatError("The model file lacks the feature tables of a CPU's model.") from None
        return found

    @property
    def node_width(self) -> int:
        return 1

    @property
    def config_width(self) -> int:
        return len(self.centre)

    def raw(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Floats:
        """(features, configurations), not scaled."""
        return self._scaled(kernel, rows, np.zeros(COUNT, np.float32), np.ones(COUNT, np.float32), np.inf)

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Prepared:
        scaled = self._scaled(kernel, rows, self.centre, self.scale, _FAR)
        node = np.zeros((kernel.n_nodes, 1), np.float32)
        return Prepared(node, kernel.node_opcode.astype(np.int64), np.asarray(kernel.edge_index), scaled.T)

    def _scaled(
        self, kernel: Kernel, rows: npt.NDArray[np.int64] | None, centre: Floats, scale: Floats, bound: float
    ) -> Floats:
        config = np.asarray(kernel.config_feat if rows is None else kernel.config_feat[rows])
        if config.shape[1] != int(self.width[0]):
            raise FileFormatError(f"Kernel {kernel.name} has other columns than the model was trained on.")
        if len(centre) != COUNT:
            raise FileFormatError("The model file's feature tables are those of another version; fit it again.")
        product = product_of(kernel)
        if native is not None and config.dtype == np.float32 and len(config):
            machine = _Machine.of(np.where(self.columns < 0, 0.0, config[0, self.columns])[_SETTINGS:].tolist())
            told = np.array([*vars(product).values()], np.float64)
            found: Floats = native.cpu_features(config, self._settings, told, machine.numbers, centre, scale, bound)
            return found
        own = [np.zeros(len(config)) if at < 0 else config[:, at].astype(np.float64) for at in self.columns.tolist()]
        columns = features(product, config.T.astype(np.float64), dict(zip(OWN, own, strict=True)))
        scaled = np.stack([np.broadcast_to(x, len(config)).astype(np.float32) for x in columns])
        return np.asarray(np.clip((scaled - centre[:, None]) * scale[:, None], -bound, bound))

    @functools.cached_property
    def _settings(self) -> npt.NDArray[np.int64]:
        return self.columns[:_SETTINGS].astype(np.int64)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {"columns": self.columns, "width": self.width, "centre": self.centre, "scale": self.scale}

    def settings(self) -> dict[str, Any]:
        return {}
