"""Features of the CPU cost model: how a tile fits kernel *and machine*, as machine-independent ratios.

A model with raw lane counts and cache sizes as inputs would memorize the few machines in its training data, so none of
them is an input. The inputs are ratios: register use, the share of a cache that each block takes, the time to move each
loop's bytes over the time to multiply, the cost of packing, and how evenly threads share the work. A convolution is
described as the matrix product it computes: pixels by filters by (channels x window). The default configuration is
marked, because it may run other code than its tile suggests.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Split
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN, OPCODE_NUMBER, TILE_FEATURES
from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.features.ranker import kernel_sizes
from tilewise.errors import ConfigurationError, FileFormatError

Floats = npt.NDArray[np.float32]
Column = npt.NDArray[np.float64]

# Columns that are read besides TpuGraphs' bounds; a column that a collection lacks counts as 0.
INPUT_COLUMNS = (
    "register_m", "register_n", "pack_a", "pack_b", "threads_m", "threads_n", "winograd", "threads", "default",
    "machine_lanes", "machine_registers", "machine_l1_kib", "machine_l2_kib", "machine_l3_share_kib", "machine_mflops",
    "machine_l1_mbs", "machine_l2_mbs", "machine_l3_mbs", "machine_memory_mbs",
)  # fmt: skip
_N_CONFIG_COLUMNS = INPUT_COLUMNS.index(
    "machine_lanes"
)  # the first columns describe the configuration, the others the machine
N_FEATURES = 85
_KERNEL, _OUTPUT = TILE_FEATURES.index("kernel_bounds_0"), TILE_FEATURES.index("output_bounds_0")
_CONVOLUTION, _PARAMETER = OPCODE_NUMBER["convolution"], OPCODE_NUMBER["parameter"]
_U8 = NODE_COLUMN["shape_element_type_is_u8"]
_ERF = OPCODE_NUMBER["custom-call"]
_MINOR = NODE_COLUMN["layout_minor_to_major_0"]
# Estimates for machines that were never benchmarked: MFLOP/s of a core per vector lane, and bytes read per FLOP from
# the three caches and from memory. On the two CPUs measured so far these differ by less than a factor of two.
_MFLOPS_PER_LANE = 7000.0
_BYTES_PER_FLOP = (1.0, 0.7, 0.5, 0.15)
_MAX_DEVIATIONS = 6.0  # inputs are clipped to this many standard deviations of the train split
N_GROUPS = 3  # kinds of kernels: float products, integer products, convolutions
_IS_CONVOLUTION, _IS_INT8 = 12, 13  # indices of two flags in `_kernel_features`
_PAGE_BYTES = 4096
_CONSTANT_DEVIATION = 1e-9  # a feature that varies less is constant


@dataclass(frozen=True)
class MatrixProduct:
    """A kernel as `batch` matrix products of (m, k) by (k, n). The compiled features read the fields in this order."""

    batch: float
    m: float
    n: float
    k: float
    window: float  # window elements of a convolution, 1 otherwise
    row: float  # pixels in a row of a convolution's result, 1 otherwise
    convolution: bool
    element_bytes: float  # of the operands
    a_transposed: bool
    b_transposed: bool
    epilogue_reads: float  # tensors of the result's size that the epilogue reads
    slow_epilogue: bool  # whether the epilogue computes an expensive function (erf)


def as_product(kernel: Kernel) -> MatrixProduct:
    """Convert a kernel's graph to the matrix product it computes; a convolution as an implicit GEMM."""
    sizes = kernel_sizes(kernel).tolist()
    # Shapes of the heaviest operation and of its operands.
    heavy, first, second = (sizes[i * DIMENSIONS : (i + 1) * DIMENSIONS] for i in (1, 2, 3))
    opcode, feat = kernel.node_opcode, kernel.node_feat
    convolution = bool((opcode == _CONVOLUTION).any())
    parameters = (opcode == _PARAMETER).nonzero()[0]
    int8 = bool(feat[parameters[:1], _U8].any()) if len(parameters) else False
    epilogue_reads = (
        float((feat[parameters[2:], NODE_COLUMN["shape_dimensions_1"]] > 1).any()) if len(parameters) > 2 else 0.0
    )
    slow = bool((opcode == _ERF).any())
    epilogue: dict[str, Any] = {"epilogue_reads": epilogue_reads, "slow_epilogue": slow}
    if convolution:
        pixels, window = max(heavy[2], 1) * max(heavy[3], 1), max(second[2], 1) * max(second[3], 1)
        return MatrixProduct(
            batch=max(heavy[0], 1), m=pixels, n=max(heavy[1], 1), k=max(first[1], 1) * window, window=window,
            row=max(heavy[3], 1), convolution=True, element_bytes=4.0, a_transposed=False, b_transposed=False,
            **epilogue,
        )  # fmt: skip
    # A product with three dimensions is a batch; the first is its length.
    lead = 1 if heavy[2] > 0 else 0
    # An operand is transposed if its last dimension is not the contiguous one.
    transposed = [*(bool(feat[p, _MINOR] != lead + 1) for p in parameters[:2]), False, False]
    return MatrixProduct(
        batch=max(heavy[0], 1) if lead else 1.0, m=max(heavy[lead], 1), n=max(heavy[lead + 1], 1),
        k=max(first[lead + 1], 1), window=1.0, row=1.0, convolution=False, element_bytes=1.0 if int8 else 4.0,
        a_transposed=transposed[0], b_transposed=transposed[1], **epilogue,
    )  # fmt: skip


def compute_features(p: MatrixProduct, bounds: Column, columns: Mapping[str, Column]) -> list[Any]:
    """Compute one number or column (C,) per feature of the CPU model.

    `bounds` (24, C) has TpuGraphs' tile columns, `columns` the machine and tile settings by name.
    """
    t = _Tile.from_columns(p, bounds, columns)
    threads = np.maximum(columns["threads"], 1)
    return [*_kernel_features(p, t), *_register_features(p, t), *_cache_features(t), *_traffic_features(p, t),
            *_unpacked_features(p, t), *_thread_features(p, t, threads),
            *_default_features(p, columns["default"], threads)]  # fmt: skip


@dataclass(frozen=True)
class _Tile:
    """Tile settings of C configurations, with their kernel and machine; sizes are in elements of the product."""

    machine: _CpuMachine
    winograd: Column
    rows: Any  # rows of the product
    columns: float
    depth: Any
    passes: Any  # products to compute: Winograd has one per transformed number
    mr: Any
    nr: Any
    mc: Any
    nc: Any
    kc: Any
    pack_a: Any
    pack_b: Any
    grid: tuple[Any, Any]  # threads along rows and columns
    size: float  # bytes of an operand's element

    @classmethod
    def from_columns(cls, p: MatrixProduct, bounds: Column, columns: Mapping[str, Column]) -> _Tile:
        """Build from configuration columns; Winograd configurations get the sizes of their own product."""
        winograd, (mc, nc, kc) = columns["winograd"], _block_sizes(p, bounds)
        # Plain numbers unless some configuration uses Winograd; then columns.
        rows: Any = p.m
        depth: Any = p.k
        passes: Any = 1.0
        if winograd.any():
            transformed, kinds = winograd > 0, [winograd == 1, winograd == 2]
            results, passes = np.select(kinds, [16, 4], 1), np.select(kinds, [36.0, 16.0], 1.0)
            rows, depth = (
                np.where(transformed, np.ceil(p.m / results), p.m),
                np.where(transformed, p.k / p.window, p.k),
            )
            mc, kc = np.where(transformed, np.ceil(mc / results), mc), np.where(transformed, depth, kc)
        machine = _CpuMachine.from_columns([float(columns[name][0]) for name in INPUT_COLUMNS[_N_CONFIG_COLUMNS:]])
        grid = np.maximum(columns["threads_m"], 1), np.maximum(columns["threads_n"], 1)
        return cls(
            machine=machine, winograd=np.minimum(winograd, 1), rows=rows, columns=p.n, depth=depth, passes=passes,
            mr=np.maximum(columns["register_m"], 1), nr=np.maximum(columns["register_n"], 1),
            mc=np.minimum(mc, rows), nc=np.minimum(nc, p.n), kc=np.minimum(kc, depth),
            pack_a=columns["pack_a"], pack_b=columns["pack_b"], grid=grid, size=p.element_bytes,
        )  # fmt: skip

    @functools.cached_property
    def fill(self) -> tuple[Any, Any]:
        """Return the shares of register tiles, along rows and along columns, that are not padding."""
        return _fill_ratio(self.rows, self.mr), _fill_ratio(self.columns, self.nr)

    @functools.cached_property
    def blocks(self) -> tuple[Any, Any, Any]:
        """Return the number of blocks along rows, columns and depth."""
        return np.ceil(self.rows / self.mc), np.ceil(self.columns / self.nc), np.ceil(self.depth / self.kc)

    @functools.cached_property
    def total_bytes(self) -> tuple[Any, Any, Any]:
        """Return the bytes of operand A, operand B and the result."""
        a, b = self.rows * self.depth * self.size, self.depth * self.columns * self.size
        return a * self.passes, b * self.passes, self.rows * self.columns * 4.0 * self.passes

    @functools.cached_property
    def seconds(self) -> Any:
        """Estimate the time in seconds of the multiplications on one thread, padding included."""
        products = self.passes * self.rows * self.columns * self.depth / (self.fill[0] * self.fill[1])
        return 2 * products / (self.machine.flops * (1.0 if self.size == 4 else 4.0))

    def relative_time(self, bytes_moved: Any, working_set: Any) -> Any:
        """Return the time to move `bytes_moved` from a working set (bytes), over the multiplication time."""
        return bytes_moved / (self.machine.bandwidth(working_set) * self.seconds)

    @functools.cached_property
    def packing(self) -> tuple[Any, Any]:
        """Return the times to pack A and to pack B, over the multiplication time."""
        a, b, _ = self.total_bytes
        return self.pack_a * self.relative_time(2 * a * self.blocks[1], a), self.pack_b * self.relative_time(2 * b, b)


def _kernel_features(p: MatrixProduct, t: _Tile) -> list[Any]:
    """Return features of the kernel: log sizes, smallness of each dimension, and flags."""
    return [
        *(np.log2(x) for x in (p.m, p.n, p.k, p.m * p.n * p.k, p.batch)), *_smallness(p),
        p.a_transposed, p.b_transposed, p.epilogue_reads, p.slow_epilogue,
        p.convolution, p.element_bytes == 1, p.window > 1, t.winograd,
    ]  # fmt: skip


def kernel_group(config: Floats) -> int:
    """Return the group of a kernel, from its scaled features: 0 float product, 1 int8 product, 2 convolution."""
    return 2 if config[0, _IS_CONVOLUTION] > 0 else 1 if config[0, _IS_INT8] > 0 else 0


def _smallness(p: MatrixProduct) -> list[float]:
    """Return log2(1 + 32 / size) of m, n and k: near 0 for large dimensions, where overheads vanish."""
    return [float(np.log2(1 + 32 / x)) for x in (p.m, p.n, p.k)]


def _register_features(p: MatrixProduct, t: _Tile) -> list[Any]:
    """Return features of the register tile: shape in vectors, registers used, padding per axis."""
    lanes = t.machine.lanes if t.size == 4 else 16.0
    vectors = t.nr / lanes
    accumulators = t.mr * vectors
    return [
        t.mr / 8, vectors / 2, accumulators / t.machine.registers, accumulators >= 8, np.log2(1 / t.mr + 1 / vectors),
        np.log2(accumulators),
        *(np.log2(x) for x in t.fill), np.log2(_fill_ratio(p.n, lanes)), t.rows < t.mr, p.n < t.nr,
    ]  # fmt: skip


def _cache_features(t: _Tile) -> list[Any]:
    """Return features of the blocks: their number, and the bytes of each strip and block over each cache's."""
    machine, size = t.machine, t.size
    # BLIS's micro-panels: a strip of B and a sliver of A stay in L1 during the inner loop.
    strip, sliver = t.kc * t.nr * size, t.mr * t.kc * size
    block_a, block_b, block_c = t.mc * t.kc * size, t.kc * t.nc * size, t.mc * t.nc * 4.0
    a, b, _ = t.total_bytes
    return [
        *(np.log2(x) for x in t.blocks), t.mc >= t.rows, t.nc >= t.columns, t.kc >= t.depth, np.log2(t.kc),
        *_log_ratios((strip, sliver, strip + sliver), machine.l1),
        *_log_ratios((block_a, block_b, block_c, strip, a, b), machine.l2),
        *_log_ratios((block_a, block_b, a, b), machine.l3),
    ]  # fmt: skip


def _traffic_features(p: MatrixProduct, t: _Tile) -> list[Any]:
    """Return the time of each loop's memory traffic, and of packing, over the multiplication time."""
    # A is read once per column block, B once per row block, C once per depth block.
    (a, b, c), (down, across, deep) = t.total_bytes, t.blocks
    inner = t.passes * t.rows * t.columns * t.depth * t.size * (1 / t.mr + 1 / t.nr)
    times = (
        t.relative_time(a * across, a),
        t.relative_time(b * down, t.kc * t.nc * t.size),
        t.relative_time(2 * c * deep, t.mc * t.nc * across * 4.0),
        t.relative_time(a + b + c * (1 + p.epilogue_reads), a + b + c),
        t.relative_time(inner, t.kc * t.nr * t.size),
        *t.packing,
    )  # fmt: skip
    packed = (t.pack_a, t.pack_b, t.pack_a * p.a_transposed, t.pack_b * p.b_transposed)
    return [*(np.log1p(x) for x in times), *packed]


def _unpacked_features(p: MatrixProduct, t: _Tile) -> list[Any]:
    """Return features of operands that are read in place; rows whole pages apart conflict in caches and the TLB."""
    a, b = 1 - t.pack_a, 1 - t.pack_b
    stride_a, stride_b = (p.m if p.a_transposed else p.k) * t.size, (p.k if p.b_transposed else p.n) * t.size
    # Pages touched by one pass over the depth, relative to L2.
    pages = np.log2(np.maximum(t.kc * _PAGE_BYTES / t.machine.l2, 2**-6))
    return [
        b * (stride_b % _PAGE_BYTES == 0), b * (stride_b % 1024 == 0), b * (stride_b >= _PAGE_BYTES),
        b * (t.nr * t.size < 128), b * (stride_b >= _PAGE_BYTES) * pages,
        a * (stride_a % _PAGE_BYTES == 0), a * (stride_a >= _PAGE_BYTES), b * p.b_transposed, a * p.a_transposed,
    ]  # fmt: skip


def _thread_features(p: MatrixProduct, t: _Tile, threads: Column) -> list[Any]:
    """Return features of the threads: how evenly they share the work, and packing that each task repeats."""
    tm, tn = t.grid
    if p.convolution:
        # A convolution is divided into images, row blocks and column shares; a product into a grid.
        cell_m, cell_n = t.mc, np.ceil(p.n / tn)
        tasks = p.batch * t.blocks[0] * tn
        balance = tasks / (np.ceil(tasks / threads) * threads)
    else:
        cell_m = np.minimum(np.ceil(np.ceil(t.rows / tm) / t.mr) * t.mr, t.rows)
        cell_n = np.minimum(np.ceil(np.ceil(p.n / tn) / t.nr) * t.nr, p.n)
        tasks = tm * tn * p.batch
        balance = p.batch * t.rows * p.n / (np.ceil(tasks / threads) * threads * cell_m * cell_n)
    several = threads > 1
    return [
        np.log2(threads), np.log2(tm), np.log2(tn), np.log2(np.maximum(balance, 2**-8)), np.log2(tasks / threads),
        several * np.log2(cell_m / t.mr), several * np.log2(cell_n / t.nr),
        *(several * np.log1p(packing * count) for packing, count in zip(t.packing, (tn, tm), strict=True)),
    ]  # fmt: skip


def _default_features(p: MatrixProduct, default: Column, threads: Column) -> list[Any]:
    """Return the default's flag, alone and times properties of the kernel, as it may run an untiled kernel."""
    product = 0.0 if p.convolution or p.element_bytes == 1 else 1.0
    kinds = (p.a_transposed, p.b_transposed)
    return [
        default, *(default * x * product for x in (*_smallness(p), *kinds)),
        *(default * x for x in (p.convolution, p.element_bytes == 1, threads > 1)),
    ]  # fmt: skip


@dataclass(frozen=True)
class _CpuMachine:
    """Speeds and sizes of a CPU core in SI units; caches in bytes."""

    lanes: float
    registers: float
    l1: float
    l2: float
    l3: float
    flops: float
    rates: tuple[float, ...]  # bytes per second from each level, memory last

    @classmethod
    def from_columns(cls, values: Sequence[float]) -> _CpuMachine:
        """Build from the machine columns of one configuration; they are equal in all of a kernel's."""
        return _cpu_machine(*(max(0.0, x) for x in values))

    @functools.cached_property
    def _bandwidth_curve(self) -> tuple[Column, Column]:
        """Return log2 of working-set sizes and log2 of the bandwidth at each, for interpolation."""
        return np.log2([self.l1, self.l2, 2 * self.l3, 16 * self.l3]), np.log2(self.rates)

    def bandwidth(self, working_set: Any) -> Any:
        """Return the bytes per second at which a working set of this many bytes is read, interpolated."""
        return np.exp2(np.interp(np.log2(np.maximum(working_set, 1.0)), *self._bandwidth_curve))


@functools.lru_cache(maxsize=16)
def _cpu_machine(
    lanes: float, registers: float, l1: float, l2: float, l3: float, mflops: float, *mbs: float
) -> _CpuMachine:
    """Build a machine from columns in the order and units of `INPUT_COLUMNS`; 0 (unknown) becomes an estimate."""
    lanes = lanes or 8.0
    flops = (mflops or _MFLOPS_PER_LANE * min(lanes, 16.0)) * 1e6
    rates = tuple((mb or share * flops / 1e6) * 1e6 for mb, share in zip(mbs, _BYTES_PER_FLOP, strict=True))
    l1, l2, l3 = (l1 or 32.0) * 1024, (l2 or 1024.0) * 1024, (l3 or 2048.0) * 1024
    return _CpuMachine(lanes=lanes, registers=registers or 16.0, l1=l1, l2=l2, l3=max(l3, l2), flops=flops, rates=rates)


def _block_sizes(p: MatrixProduct, bounds: Column) -> tuple[Any, Any, Any]:
    """Return the size of a block in rows, columns and depth, each (C,), from the tile columns (24, C)."""
    if p.convolution:
        rows = np.maximum(bounds[_OUTPUT + 2] * np.maximum(bounds[_OUTPUT + 3], 1), 1)
        return rows, np.maximum(bounds[_OUTPUT + 1], 1), p.k
    lead = 1 if p.batch > 1 or bounds[_OUTPUT + 2].any() else 0
    return (
        np.maximum(bounds[_OUTPUT + lead], 1),
        np.maximum(bounds[_OUTPUT + lead + 1], 1),
        np.maximum(bounds[_KERNEL + lead], 1),
    )


def _fill_ratio(size: Any, step: Any) -> Any:
    """Return size / (size rounded up to a multiple of step), the share that is not padding."""
    return size / (np.ceil(size / step) * step)


def _log_ratios(sizes: Sequence[Any], capacity: Any) -> list[Any]:
    return [np.log2(size / capacity) for size in sizes]


@dataclass(frozen=True, eq=False)
class CpuFeatures:
    """Fitted preparation of the CPU model: scaling, and the index of each input column (-1 if absent)."""

    kind: ClassVar[str] = "cpu"
    columns: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]  # (1,): columns of a configuration
    centre: Floats
    scale: Floats

    @classmethod
    def fit(cls, split: Split) -> CpuFeatures:
        """Locate the input columns in a split's schema by name, and fit mean and scale of every feature."""
        if not len(split):
            raise ConfigurationError("The train split is empty, so features cannot be fitted to it.")
        names = list(split.schema.config_features)
        columns = np.array([names.index(name) if name in names else -1 for name in INPUT_COLUMNS], np.int64)
        # The draft has no scaling yet; it computes the raw features that the scaling is fitted to.
        draft = cls(columns, np.array([len(names)]), np.zeros(0, np.float32), np.zeros(0, np.float32))
        raw = np.concatenate([draft.raw(split[i]) for i in range(len(split))], axis=1).astype(np.float64)
        deviation = raw.std(axis=1)
        scale = np.where(deviation > _CONSTANT_DEVIATION, 1 / np.maximum(deviation, _CONSTANT_DEVIATION), 0.0)
        return cls(columns, draft.width, raw.mean(axis=1).astype(np.float32), scale.astype(np.float32))

    @classmethod
    def restore(cls, tensors: Mapping[str, npt.NDArray[Any]]) -> CpuFeatures:
        """Rebuild the preparation from a model file's arrays, each of which is checked."""
        try:
            restored = cls(*(tensors[name] for name in ("columns", "width", "centre", "scale")))
            columns, width = restored.columns.astype(np.int64), int(restored.width[0])
            if columns.shape != (len(INPUT_COLUMNS),) or columns.max() >= width or columns.min() < -1:
                raise ValueError("columns")
            if (
                restored.centre.ndim != 1
                or restored.centre.shape != restored.scale.shape
                or width <= len(TILE_FEATURES)
            ):
                raise ValueError("scales")
        except (KeyError, ValueError, IndexError, TypeError):
            raise FileFormatError(
                "The model file lacks the feature tables of a CPU model; train or export it again."
            ) from None
        return restored

    @property
    def node_width(self) -> int:
        return 1

    @property
    def config_width(self) -> int:
        return len(self.centre)

    def raw(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> Floats:
        """Compute the unscaled features, (N_FEATURES, C)."""
        return self._scaled(kernel, rows, np.zeros(N_FEATURES, np.float32), np.ones(N_FEATURES, np.float32), np.inf)

    def apply(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> ModelInputs:
        """Compute a kernel's model inputs for all configurations or `rows`; there are no node features."""
        scaled = self._scaled(kernel, rows, self.centre, self.scale, _MAX_DEVIATIONS)
        node = np.zeros((kernel.n_nodes, 1), np.float32)
        return ModelInputs(node, kernel.node_opcode.astype(np.int64), np.asarray(kernel.edge_index), scaled.T)

    def _scaled(
        self, kernel: Kernel, rows: npt.NDArray[np.int64] | None, centre: Floats, scale: Floats, bound: float
    ) -> Floats:
        """Compute clip((feature - centre) * scale, -bound, bound)."""
        config = np.asarray(kernel.config_feat if rows is None else kernel.config_feat[rows])
        if config.shape[1] != int(self.width[0]):
            raise FileFormatError(f"Kernel {kernel.name} has other columns than the model was trained on.")
        if len(centre) != N_FEATURES:
            raise FileFormatError("The model file's feature tables belong to another version; fit it again.")
        product = as_product(kernel)
        values = [np.zeros(len(config)) if at < 0 else config[:, at].astype(np.float64) for at in self.columns.tolist()]
        columns = dict(zip(INPUT_COLUMNS, values, strict=True))
        features = compute_features(product, config.T.astype(np.float64), columns)
        scaled = np.stack([np.broadcast_to(x, len(config)).astype(np.float32) for x in features])
        return np.asarray(np.clip((scaled - centre[:, None]) * scale[:, None], -bound, bound))

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {"columns": self.columns, "width": self.width, "centre": self.centre, "scale": self.scale}
