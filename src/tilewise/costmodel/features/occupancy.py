"""Occupancy features: how the configurations of a kernel fill a GPU (programs, waves, the waste of the last wave).

A GPU runs thread blocks in waves: a fixed number fits on its multiprocessors at once, and a last wave that is almost
empty costs as much as a full one. That is a quotient of products rounded up, which a network cannot learn from the
logarithms of its parts, so it is computed here. So are:

- how wide loads may be, which depends on the powers of two in row lengths, and from that the number of loads and
  whether they can be asynchronous copies (`cp.async`) that run ahead of the arithmetic;
- how many contiguous bytes a tile reads, which depends on the dimension that is contiguous in an operand;
- how many more cache lines and sectors a tile touches where rows do not start at a line.

Applies to collections whose configurations have the columns `warps` and `stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, NODE_COLUMN, OPCODE_NUMBER
from tilewise.costmodel.devices import SM_90, WARP_THREADS

Numbers = npt.NDArray[np.float64]

FEATURE_COUNT = 23  # features per configuration
# Rows of the feature table that depend on the configuration alone, and those that depend on the sizes.
_RESIDENT, _PER_THREAD, _STAGED, _LOADS_ISSUED = 4, 5, 8, 15
_LOAD_BYTES, _LOADS, _RUN_BYTES, _OVERFETCH = slice(9, 12), slice(12, 15), slice(16, 18), slice(18, 23)
_SIZE_ROWS = (0, 1, 2, 3, 6, 7)
_LOAD_DETAIL = 3.0  # version of the features, in model files
_MAX_LOAD_BYTES, _MIN_ASYNC_COPY_BYTES = 16.0, 4.0  # PTX: vector loads up to 16 bytes, cp.async from 4 bytes on
_LINE_BYTES, _SECTOR_BYTES = 128, 32  # units of GPU memory transactions
_OVERHEAD_REGISTERS = 40.0  # estimate of a thread's registers besides its share of the result
_KERNEL, _OUTPUT, _INPUT = (slice(8 * i, 8 * i + DIMENSIONS) for i in range(3))  # columns of the three tiles
_KERNEL_PRODUCT, _OUTPUT_PRODUCT, _INPUT_PRODUCT = 7, 15, 23
_TYPE = NODE_COLUMN["shape_element_type_is_invalid_type"]
_BYTES = np.array([{"f64": 8, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "pred": 1}.get(name, 4)
                   for name in ELEMENT_TYPES])  # fmt: skip
_SHAPE = slice(NODE_COLUMN["shape_dimensions_0"], NODE_COLUMN["shape_dimensions_0"] + DIMENSIONS)
_MINOR = NODE_COLUMN["layout_minor_to_major_0"]
_PARAMETER = OPCODE_NUMBER["parameter"]
_PRODUCTS = (OPCODE_NUMBER["dot"], OPCODE_NUMBER["convolution"])


@dataclass(frozen=True)
class Gpu:
    """The device limits and configuration columns that occupancy depends on."""

    multiprocessors: float
    shared_bytes: float
    warps: int  # index of the column
    stages: int  # index of the column

    def to_array(self) -> Numbers:
        """Return the fields as a model file stores them, followed by the version of the features."""
        return np.array([self.multiprocessors, self.shared_bytes, self.warps, self.stages, _LOAD_DETAIL])

    @classmethod
    def from_array(cls, numbers: npt.NDArray[Any]) -> Gpu | None:
        """Undo `to_array`; None for an empty array or another version of the features."""
        if len(numbers) != 5 or numbers[4] != _LOAD_DETAIL:
            return None
        return cls(float(numbers[0]), float(numbers[1]), int(numbers[2]), int(numbers[3]))


def is_product(kernel: Kernel) -> bool:
    """Tell whether the kernel multiplies matrices or convolves, rather than reducing."""
    return any((kernel.node_opcode == opcode).any() for opcode in _PRODUCTS)


def element_bytes(kernel: Kernel) -> float:
    """Return the element size of the first node: a product's operand, or a reduction's accumulator type."""
    return float(_BYTES[np.argmax(kernel.node_feat[0, _TYPE : _TYPE + len(ELEMENT_TYPES)])])


def occupancy_features(gpu: Gpu, kernel: Kernel, sizes: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """Compute (C, FEATURE_COUNT) logarithms; `sizes` are the slots of `ranker.kernel_sizes`."""
    return Occupancy(gpu, config.astype(np.float64), MemoryAccess.from_kernel(kernel, sizes)).features(sizes).T


@dataclass(frozen=True)
class MemoryAccess:
    """Memory access pattern of a kernel, independent of its sizes.

    `contiguous` and `load_bytes` have one entry for the root and one for each operand: the dimension that is contiguous
    in memory, and the widest load that is aligned at the start of every row.
    """

    is_product: bool
    element_bytes: float
    contiguous: tuple[int, ...]
    load_bytes: tuple[float, ...]
    reduction_operand: int  # index of the tensor that a reduction reads; its other operand is a scalar

    @classmethod
    def from_kernel(cls, kernel: Kernel, sizes: Numbers) -> MemoryAccess:
        """Derive element size, contiguous dimensions and load widths from a kernel's graph."""
        root, _, first, second = (slot.tolist() for slot in _slots(sizes))
        size, tensors = element_bytes(kernel), (root, first, second)
        contiguous = _contiguous_dimensions(kernel, tensors)
        load_bytes = tuple(_load_width(int(shape[at]), size) for shape, at in zip(tensors, contiguous, strict=True))
        return cls(is_product(kernel), size, tuple(contiguous), load_bytes, 1 if sum(first) >= sum(second) else 2)


class Occupancy:
    """Occupancy of a list of configurations, for all kernels that access memory in the same way.

    Everything that does not depend on the kernel's sizes is computed once, in the constructor.
    """

    def __init__(self, gpu: Gpu, config: npt.NDArray[Any], access: MemoryAccess) -> None:
        """Compute resident blocks, registers, staged bytes and loads of every configuration (C, columns)."""
        self.gpu, self.config, self.access = gpu, config, access
        product = access.is_product
        # Elements that one program holds in registers: its part of the result, or of a reduction's input.
        self._register_elements = config[:, _OUTPUT_PRODUCT if product else _INPUT_PRODUCT]
        warps = np.maximum(config[:, gpu.warps], 1.0)
        ones = np.ones(len(config), config.dtype)
        staged = _staged_bytes(gpu, config, access.load_bytes, access.element_bytes) if product else ones
        per_thread = np.maximum(self._register_elements / (WARP_THREADS * warps), 1e-3)
        # Resident blocks of a multiprocessor: the smallest of the limits by shared memory, warps and registers.
        resident = np.minimum(np.floor(gpu.shared_bytes / np.maximum(staged, 1)), np.floor(SM_90.max_warps / warps))
        by_registers = np.floor(
            SM_90.registers_per_multiprocessor / ((per_thread + _OVERHEAD_REGISTERS) * WARP_THREADS * warps)
        )
        self._resident = np.clip(np.minimum(resident, by_registers), 1, SM_90.max_blocks)
        # The table is (features, C), so that one feature is contiguous in memory.
        fixed = np.ones((FEATURE_COUNT, len(config)), config.dtype)
        # A library call has no tile, so the bytes that it stages are unknown: at least 1.
        fixed[[_RESIDENT, _PER_THREAD, _STAGED]] = self._resident, per_thread, np.maximum(staged, 1)
        fixed[_LOAD_BYTES] = np.array(access.load_bytes)[:, None]
        self._add_loads(fixed, warps)
        self._fixed = np.log2(fixed)

    def _add_loads(self, fixed: npt.NDArray[Any], warps: npt.NDArray[Any]) -> None:
        """Fill the rows about loads, and keep what the size-dependent features need of them."""
        config, access, product = self.config, self.access, self.access.is_product
        issued = self._loads_per_thread(warps)
        fixed[_LOADS] = issued
        self._loads_per_step = (issued[0] + issued[1] if product else issued[0]) * warps
        # Contiguous bytes of a tile of each operand; a scalar operand counts as one byte.
        first = config[:, _INPUT][:, access.contiguous[1 if product else access.reduction_operand]]
        second = config[:, _KERNEL][:, access.contiguous[2]] if product else 0.0
        run_bytes = np.maximum(np.stack([first, second + 0 * first]) * access.element_bytes, 1.0)
        fixed[_RUN_BYTES] = run_bytes
        stored = np.maximum(config[:, _OUTPUT][:, access.contiguous[0]] * access.element_bytes, 1.0)
        operands = [run_bytes[0], run_bytes[1] if product else np.inf * np.ones(len(config), config.dtype)]
        self._run_bytes = np.stack([stored, *operands, *operands])  # lines of three tensors, sectors of two

    def _loads_per_thread(self, warps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Count the loads of either operand per loop step and the stores of one thread, (3, C)."""
        product, load_bytes = self.access.is_product, self.access.load_bytes
        tiles = [(_INPUT_PRODUCT, load_bytes[1 if product else self.access.reduction_operand])]
        tiles += [(_KERNEL_PRODUCT, load_bytes[2]), (_OUTPUT_PRODUCT, load_bytes[0])] if product else []
        issued = np.ones((3, len(warps)), warps.dtype)
        for row, (tile, width) in zip(issued, tiles, strict=False):
            per_element = self.access.element_bytes / WARP_THREADS / width
            np.maximum(self.config[:, tile] / warps * per_element, 1.0, out=row)
        return issued

    def features(self, sizes: Numbers) -> Numbers:
        """Compute (FEATURE_COUNT, C) logarithms for a kernel with these sizes."""
        root, heavy, first, second = _slots(sizes)
        product, config = self.access.is_product, self.config
        programs = _tile_count(root if product else heavy, config[:, _OUTPUT])
        operand = first if self.access.reduction_operand == 1 else second
        steps = _loop_steps(second, config) if product else _tile_count(operand, config[:, _INPUT]) / programs
        # Waves, if several blocks share a multiprocessor and if each has one to itself.
        waves_alone = programs / self.gpu.multiprocessors
        waves = waves_alone / self._resident
        whole_waves = np.ceil(waves)
        rounds = steps * whole_waves * self._resident  # loop steps of the busiest multiprocessor
        table: Numbers = self._fixed.copy()
        size_features = (
            programs,
            whole_waves,
            np.minimum(whole_waves / waves, 16.0),
            np.minimum(np.ceil(waves_alone) / waves_alone, 16.0),
            np.maximum(steps, 1e-3),
            np.maximum(self._register_elements * rounds, 1.0),
        )
        for row, values in zip(_SIZE_ROWS, size_features, strict=True):
            np.log2(values, out=table[row])
        np.log2(np.maximum(self._loads_per_step * rounds, 1.0), out=table[_LOADS_ISSUED])
        self._add_overfetch(table[_OVERFETCH], root, first if product else operand, second)
        return table

    def _add_overfetch(self, out: Numbers, *tensors: Numbers) -> None:
        """Compute bytes touched over bytes used: lines of root and both operands, sectors of the operands."""
        root, first, second = self.access.contiguous
        if not self.access.is_product:
            first = self.access.contiguous[self.access.reduction_operand]
        dimensions = root, first, second
        row_bytes = [float(size[at]) * self.access.element_bytes for size, at in zip(tensors, dimensions, strict=True)]
        aligned = [_row_alignment(row) for row in row_bytes]
        # On average an unaligned run touches one more unit, less its alignment.
        extra = [_LINE_BYTES - at for at in aligned] + [max(_SECTOR_BYTES - at, 0) for at in aligned[1:]]
        np.divide(np.array(extra, self._run_bytes.dtype)[:, None], self._run_bytes, out=out)
        out += 1.0
        np.log2(out, out=out)


def _slots(sizes: Numbers) -> list[Numbers]:
    """Split sizes into those of the root, of the heaviest operation and of its two operands."""
    return [sizes[i * DIMENSIONS : (i + 1) * DIMENSIONS] for i in range(4)]


def _staged_bytes(gpu: Gpu, config: npt.NDArray[Any], load_bytes: tuple[float, ...], element: float) -> Numbers:
    """Shared memory of a product: a tile of each operand per stage, or one tile where it cannot be copied ahead."""
    first, second = config[:, _INPUT_PRODUCT], config[:, _KERNEL_PRODUCT]
    stages = np.maximum(config[:, gpu.stages], 1)
    if min(load_bytes[1:]) >= _MIN_ASYNC_COPY_BYTES:
        staged: Numbers = (first + second) * element * stages
        return staged
    buffers = [stages if width >= _MIN_ASYNC_COPY_BYTES else 1.0 for width in load_bytes[1:]]
    return np.asarray((first * buffers[0] + second * buffers[1]) * element)


def _contiguous_dimensions(kernel: Kernel, tensors: tuple[list[float], ...]) -> list[int]:
    """Return the contiguous dimension of the root and of both operands."""
    contiguous = [max(len([length for length in size if length > 0]) - 1, 0) for size in tensors]
    # An operand that is a parameter, or has a parameter's shape, also has that parameter's layout.
    for operand, node in enumerate((kernel.node_opcode == _PARAMETER).nonzero()[0][:2], 1):
        parameter = kernel.node_feat[node]
        if any(tensors[operand]) and parameter[_SHAPE].tolist() == tensors[operand]:
            contiguous[operand] = int(parameter[_MINOR])
    return contiguous


def _row_alignment(row_bytes: float) -> int:
    """Largest power of two, up to a cache line, that divides the start of every row of this length."""
    whole = int(row_bytes)
    return min(whole & -whole, _LINE_BYTES) if whole else _LINE_BYTES


def _load_width(row_elements: int, element: float) -> float:
    """Widest load in bytes that is aligned at the start of every row of this length."""
    return float(min((row_elements & -row_elements) * element, _MAX_LOAD_BYTES)) if row_elements else _MAX_LOAD_BYTES


def _tile_count(size: Numbers, tile: npt.NDArray[Any]) -> Numbers:
    """Count the tiles that cover a tensor; a dimension missing in either counts as one tile."""
    count: Numbers = np.ones(len(tile), tile.dtype)
    for dimension, length in enumerate(size.tolist()):
        if length > 0:
            extent = tile[:, dimension]
            along = np.ceil(length / np.maximum(extent, 1))
            count *= along if extent.all() else np.where(extent > 0, along, 1)
    return count


def _loop_steps(second: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """Count the steps of a program's loop: tiles along the second operand's last but one dimension."""
    dimension = max(int((second > 0).sum()) - 2, 0)
    extent = np.maximum(config[:, _KERNEL][:, dimension], 1.0)
    steps: Numbers = np.ceil(max(float(second[dimension]), 1.0) / extent)
    return steps
