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

from tilewise.costmodel.architecture import SM_90, WARP_THREADS
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, NODE_COLUMN, OPCODE_NUMBER

Numbers = npt.NDArray[np.float64]

FEATURE_COUNT = 23  # features per configuration
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
        """Return the fields as one array, with the version of the features last, for a model file."""
        return np.array([self.multiprocessors, self.shared_bytes, self.warps, self.stages, _LOAD_DETAIL])

    @classmethod
    def from_array(cls, numbers: npt.NDArray[Any]) -> Gpu | None:
        """Rebuild from the array of `to_array`; None if it is empty or of another version of the features."""
        if len(numbers) != 5 or numbers[4] != _LOAD_DETAIL:
            return None
        return cls(float(numbers[0]), float(numbers[1]), int(numbers[2]), int(numbers[3]))


def is_product(kernel: Kernel) -> bool:
    """Tell whether a kernel is a matrix product or convolution, in contrast to a reduction."""
    return any((kernel.node_opcode == opcode).any() for opcode in _PRODUCTS)


def element_bytes(kernel: Kernel) -> float:
    """Return the bytes per element of the kernel's first node: an operand, or a reduction's accumulator."""
    return float(_BYTES[np.argmax(kernel.node_feat[0, _TYPE : _TYPE + len(ELEMENT_TYPES)])])


def occupancy_features(gpu: Gpu, kernel: Kernel, sizes: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """Compute logarithms of occupancy, waves and traffic, (FEATURE_COUNT, C); `sizes` are `ranker.kernel_sizes`."""
    config = config.astype(np.float64)
    root, heavy, first, second = sizes[: 4 * DIMENSIONS].reshape(4, DIMENSIONS)
    tensors = root, first, second
    product, element = is_product(kernel), element_bytes(kernel)
    # A product reads both operands, a reduction only the larger one.
    operand = 1 if product or first.sum() >= second.sum() else 2
    # Of the root and of either operand: the dimension that is contiguous in memory, and the widest aligned load.
    contiguous = _contiguous_dimensions(kernel, [tensor.tolist() for tensor in tensors])
    load_bytes = [_load_width(int(shape[at]), element) for shape, at in zip(tensors, contiguous, strict=True)]
    ones = np.ones(len(config))
    # Elements that one program holds in registers: its part of the result, or of a reduction's input.
    elements = config[:, _OUTPUT_PRODUCT if product else _INPUT_PRODUCT]
    warps = np.maximum(config[:, gpu.warps], 1.0)
    per_thread = np.maximum(elements / (WARP_THREADS * warps), 1e-3)
    # A library call has no tile, so the bytes that it stages are unknown: at least 1.
    staged = np.maximum(_staged_bytes(gpu, config, load_bytes, element), 1) if product else ones
    resident = _resident_blocks(gpu, staged, warps, per_thread)
    programs = _tile_count(root if product else heavy, config[:, _OUTPUT])
    steps = _loop_steps(second, config) if product else _tile_count(tensors[operand], config[:, _INPUT]) / programs
    # Waves, if several blocks share a multiprocessor and if each has one to itself.
    waves_alone = programs / gpu.multiprocessors
    waves = waves_alone / resident
    whole_waves = np.ceil(waves)
    rounds = steps * whole_waves * resident  # loop steps of the busiest multiprocessor
    # Loads of either operand per loop step and stores of one thread.
    tiles = [(_INPUT_PRODUCT, load_bytes[operand])]
    tiles += [(_KERNEL_PRODUCT, load_bytes[2]), (_OUTPUT_PRODUCT, load_bytes[0])] if product else []
    loads = [np.maximum(config[:, tile] / warps * element / WARP_THREADS / width, 1.0) for tile, width in tiles]
    loads_per_step = (loads[0] + loads[1] if product else loads[0]) * warps
    loads += [ones] * (3 - len(loads))
    # Contiguous bytes of a tile of each tensor; a scalar operand counts as one byte.
    result_run = np.maximum(config[:, _OUTPUT][:, contiguous[0]] * element, 1.0)
    first_run = np.maximum(config[:, _INPUT][:, contiguous[operand]] * element, 1.0)
    second_run = np.maximum(config[:, _KERNEL][:, contiguous[2]] * element, 1.0) if product else ones
    features = [
        programs,
        whole_waves,
        np.minimum(whole_waves / waves, 16.0),
        np.minimum(np.ceil(waves_alone) / waves_alone, 16.0),
        resident,
        per_thread,
        np.maximum(steps, 1e-3),
        np.maximum(elements * rounds, 1.0),
        staged,
        *(width * ones for width in load_bytes),
        *loads,
        np.maximum(loads_per_step * rounds, 1.0),
        first_run,
        second_run,
    ]
    # Bytes touched over bytes used: lines of all tensors, sectors of the operands.
    runs = [(root, contiguous[0], result_run), (tensors[operand], contiguous[operand], first_run)]
    runs += [(second, contiguous[2], second_run)] if product else []
    alignments = [_row_alignment(float(size[at]) * element) for size, at, _ in runs]
    for unit, start in ((_LINE_BYTES, 0), (_SECTOR_BYTES, 1)):
        # On average an unaligned run touches one more unit, less its alignment.
        pairs = list(zip(runs, alignments, strict=True))[start:]
        features += [1.0 + max(unit - alignment, 0) / run_bytes for (_, _, run_bytes), alignment in pairs]
        features += [ones] * (3 - len(runs))
    table: Numbers = np.log2(np.stack(features))
    return table


def _resident_blocks(gpu: Gpu, staged: Numbers, warps: Numbers, per_thread: Numbers) -> Numbers:
    """Return how many blocks, of `staged` bytes and `per_thread` registers, fit on a multiprocessor at once."""
    by_memory, by_warps = np.floor(gpu.shared_bytes / staged), np.floor(SM_90.max_warps / warps)
    block_registers = (per_thread + _OVERHEAD_REGISTERS) * WARP_THREADS * warps
    by_registers = np.floor(SM_90.registers_per_multiprocessor / block_registers)
    resident: Numbers = np.clip(np.minimum(np.minimum(by_memory, by_warps), by_registers), 1, SM_90.max_blocks)
    return resident


def _staged_bytes(gpu: Gpu, config: npt.NDArray[Any], load_bytes: list[float], element: float) -> Numbers:
    """Return a product's shared memory per block in bytes: a tile of each operand for every pipeline stage."""
    first, second = config[:, _INPUT_PRODUCT], config[:, _KERNEL_PRODUCT]
    stages = np.maximum(config[:, gpu.stages], 1)
    if min(load_bytes[1:]) >= _MIN_ASYNC_COPY_BYTES:
        staged: Numbers = (first + second) * element * stages
        return staged
    buffers = [stages if width >= _MIN_ASYNC_COPY_BYTES else 1.0 for width in load_bytes[1:]]
    return np.asarray((first * buffers[0] + second * buffers[1]) * element)


def _contiguous_dimensions(kernel: Kernel, tensors: list[list[float]]) -> list[int]:
    """Return which dimension of the root and of each operand is contiguous in memory."""
    contiguous = [max(len([length for length in size if length > 0]) - 1, 0) for size in tensors]
    # An operand that is a parameter, or has a parameter's shape, also has that parameter's layout.
    for operand, node in enumerate((kernel.node_opcode == _PARAMETER).nonzero()[0][:2], 1):
        parameter = kernel.node_feat[node]
        if any(tensors[operand]) and parameter[_SHAPE].tolist() == tensors[operand]:
            contiguous[operand] = int(parameter[_MINOR])
    return contiguous


def _row_alignment(row_bytes: float) -> int:
    """Return the alignment in bytes, at most a cache line, of all rows of a matrix with this row length."""
    whole = int(row_bytes)
    return min(whole & -whole, _LINE_BYTES) if whole else _LINE_BYTES


def _load_width(row_elements: int, element: float) -> float:
    """Return the widest vector load in bytes that is aligned at every row of this many elements."""
    return float(min((row_elements & -row_elements) * element, _MAX_LOAD_BYTES)) if row_elements else _MAX_LOAD_BYTES


def _tile_count(size: Numbers, tile: npt.NDArray[Any]) -> Numbers:
    """Count the tiles that cover a tensor; a missing dimension counts as one tile."""
    count: Numbers = np.ones(len(tile), tile.dtype)
    for dimension, length in enumerate(size.tolist()):
        if length > 0:
            extent = tile[:, dimension]
            along = np.ceil(length / np.maximum(extent, 1))
            count *= along if extent.all() else np.where(extent > 0, along, 1)
    return count


def _loop_steps(second: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """Count the iterations of a program's main loop, over tiles of the contraction dimension."""
    dimension = max(int((second > 0).sum()) - 2, 0)
    extent = np.maximum(config[:, _KERNEL][:, dimension], 1.0)
    steps: Numbers = np.ceil(max(float(second[dimension]), 1.0) / extent)
    return steps
