"""How a GPU would be filled by each configuration of a kernel: programs, waves, what the last wave wastes.

A GPU runs blocks in waves: so many fit on its multiprocessors at once, and a last wave that is almost empty costs as
much as a full one. That is a rounding up of a quotient of products, which a network does not find from logarithms of
the parts; so it is worked out here, as is how wide the loads may be, which hangs on powers of two in row lengths, and
what follows from that: how many loads there are, and whether they can be copies that run ahead of the arithmetic. How
much of a tile lies together in memory depends on which dimension of an operand does; and where rows do not begin with a
line of memory, every stretch of a tile touches a part of a line more.
Applies to collections whose configurations have `warps` and `stages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import DIMENSIONS, ELEMENT_TYPES, NODE_COLUMN, OPCODE_NUMBER, TILE_FEATURES, Schema

Numbers = npt.NDArray[np.float64]

_WIDTHS = (9, 12, 18, 23)  # numbers a configuration, by `Gpu.loads`
_RESIDENT, _A_THREAD, _STAGED, _ISSUED = 4, 5, 8, 15  # places among them
_OF_SIZES = [0, 1, 2, 3, 6, 7]
_WIDEST_LOAD, _NARROWEST_COPY = 16.0, 4.0  # bytes
_LINE, _SECTOR = 128, 32  # bytes in which memory is handed out
_REGISTERS, _MAX_WARPS, _MAX_BLOCKS, _SHARED_BYTES = 65_536, 64, 32, 232_448
_OWN_REGISTERS = 40.0  # of a thread, beside its share of the result
_KERNEL, _OUTPUT, _INPUT = (slice(8 * i, 8 * i + DIMENSIONS) for i in range(3))
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
    """What of the machine and the columns is needed; `read` gives None for a collection of another kind."""

    multiprocessors: float
    shared_bytes: float
    warps: int  # the column
    stages: int
    # What is told of loads, 0: nothing, 1: widths, as if all rows lay as written, 2: also their number, 3: also what
    # they touch beside.
    loads: int = 3

    @property
    def width(self) -> int:
        """Of what `occupancy` gives."""
        return _WIDTHS[self.loads]

    @classmethod
    def read(cls, schema: Schema) -> Gpu | None:
        names = schema.config_features
        if names[: len(TILE_FEATURES)] != TILE_FEATURES or not {"warps", "stages"} <= set(names):
            return None
        machine = schema.extra.get("machine")
        known: Mapping[str, Any] = machine if isinstance(machine, Mapping) else {}
        processors, shared = known.get("multiprocessors", 132), known.get("shared_bytes", _SHARED_BYTES)
        if not all(isinstance(value, int | float) and value > 0 for value in (processors, shared)):
            return None
        return cls(float(processors), float(shared), names.index("warps"), names.index("stages"))

    def numbers(self) -> Numbers:
        known = [self.multiprocessors, self.shared_bytes, self.warps, self.stages]
        return np.array([*known, float(self.loads)] if self.loads else known)

    @classmethod
    def restore(cls, numbers: npt.NDArray[Any]) -> Gpu | None:
        """From `numbers`; None from an empty array, or where they are of a kind not known here."""
        if len(numbers) not in (4, 5) or (len(numbers) == 5 and numbers[4] not in (1, 2, 3)):
            return None
        loads = int(numbers[4]) if len(numbers) == 5 else 0
        return cls(float(numbers[0]), float(numbers[1]), int(numbers[2]), int(numbers[3]), loads)


def is_product(kernel: Kernel) -> bool:
    """Whether it multiplies matrices or convolves, rather than reducing."""
    return any((kernel.node_opcode == opcode).any() for opcode in _PRODUCTS)


def element_bytes(kernel: Kernel) -> float:
    """Of the first node: a product's operand, or what a reduction is worked out in."""
    return float(_BYTES[np.argmax(kernel.node_feat[0, _TYPE : _TYPE + len(ELEMENT_TYPES)])])


def occupancy(gpu: Gpu, kernel: Kernel, sizes: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """(c, gpu.width) numbers, in logarithms; `sizes` are the slots of `ranker.kernel_sizes`."""
    return Filling(gpu, config.astype(np.float64), Access.of(gpu, kernel, sizes)).told(sizes).T


@dataclass(frozen=True)
class Access:
    """How a kernel reads memory, as far as its sizes do not matter. `along` and `widths` are of the root and of both
    operands: the dimension that lies together in memory, and the widest load that starts at every row."""

    multiplies: bool
    element: float  # bytes
    along: tuple[int, ...]
    widths: tuple[float, ...]
    read: int  # of a reduction, which operand; the other one is a number

    @classmethod
    def of(cls, gpu: Gpu, kernel: Kernel, sizes: Numbers) -> Access:
        root, _, first, second = (slot.tolist() for slot in _slots(sizes))
        element, tensors = element_bytes(kernel), (root, first, second)
        along = _along(gpu, kernel, tensors)
        read = 1 if sum(first) >= sum(second) else 2
        return cls(is_product(kernel), element, tuple(along), _widths(gpu, tensors, along, element), read)


class Filling:
    """A list of configurations of kernels that read memory alike: what they do whatever the sizes."""

    def __init__(self, gpu: Gpu, config: npt.NDArray[Any], access: Access) -> None:
        self.gpu, self.config, self.access = gpu, config, access
        multiplies = access.multiplies
        self._held = config[:, _OUTPUT_PRODUCT if multiplies else _INPUT_PRODUCT]
        warps = np.maximum(config[:, gpu.warps], 1.0)
        ones = np.ones(len(config), config.dtype)
        staged = _staged(gpu, config, access.widths, access.element) if multiplies else ones
        a_thread = np.maximum(self._held / (32 * warps), 1e-3)
        resident = np.minimum(np.floor(gpu.shared_bytes / np.maximum(staged, 1)), np.floor(_MAX_WARPS / warps))
        resident = np.minimum(resident, np.floor(_REGISTERS / ((a_thread + _OWN_REGISTERS) * 32 * warps)))
        self._resident = np.clip(resident, 1, _MAX_BLOCKS)
        fixed = np.ones((gpu.width, len(config)), config.dtype)  # a number is one run of memory
        # A library's call has no tile, and stages nothing that is known.
        fixed[[_RESIDENT, _A_THREAD, _STAGED]] = self._resident, a_thread, np.maximum(staged, 1)
        if gpu.loads:
            fixed[_WIDTHS[0] : _WIDTHS[1]] = np.array(access.widths)[:, None]
        self._loads = ones
        if gpu.loads > 1:
            issued = self._issued(warps)  # by a thread: loads of either operand a step, stores
            fixed[_WIDTHS[1] : _ISSUED] = issued
            self._loads = (issued[0] + issued[1] if multiplies else issued[0]) * warps
            entry = config[:, _INPUT][:, access.along[1 if multiplies else access.read]]
            other = config[:, _KERNEL][:, access.along[2]] if multiplies else 0.0
            together = np.maximum(np.stack([entry, other + 0 * entry]) * access.element, 1.0)
            fixed[_ISSUED + 1 : _WIDTHS[2]] = together
            stored = np.maximum(config[:, _OUTPUT][:, access.along[0]] * access.element, 1.0)
            runs = [together[0], together[1] if multiplies else np.inf * ones]
            self._runs = np.stack([stored, *runs, *runs])
        self._fixed = np.log2(fixed)

    def _issued(self, warps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        multiplies, widths = self.access.multiplies, self.access.widths
        tiles = [(_INPUT_PRODUCT, widths[1 if multiplies else self.access.read])]
        tiles += [(_KERNEL_PRODUCT, widths[2]), (_OUTPUT_PRODUCT, widths[0])] if multiplies else []
        issued = np.ones((3, len(warps)), warps.dtype)
        for row, (tile, width) in zip(issued, tiles, strict=False):
            np.maximum(self.config[:, tile] / warps * (self.access.element / 32 / width), 1.0, out=row)
        return issued

    def told(self, sizes: Numbers) -> Numbers:
        """(gpu.width, c) numbers, in logarithms."""
        root, heavy, first, second = _slots(sizes)
        multiplies, config = self.access.multiplies, self.config
        programs = _tiles(root if multiplies else heavy, config[:, _OUTPUT])
        read = first if self.access.read == 1 else second
        steps = _steps(second, config) if multiplies else _tiles(read, config[:, _INPUT]) / programs
        alone = programs / self.gpu.multiprocessors
        waves = alone / self._resident
        whole = np.ceil(waves)
        rounds = steps * whole * self._resident  # that one multiprocessor goes through
        told: Numbers = self._fixed.copy()
        of_sizes = (
            programs,
            whole,
            np.minimum(whole / waves, 16.0),
            np.minimum(np.ceil(alone) / alone, 16.0),
            np.maximum(steps, 1e-3),
            np.maximum(self._held * rounds, 1.0),
        )
        for place, values in zip(_OF_SIZES, of_sizes, strict=True):
            np.log2(values, out=told[place])
        if self.gpu.loads > 1:
            np.log2(np.maximum(self._loads * rounds, 1.0), out=told[_ISSUED])
        if self.gpu.loads > 2:
            self._beside(told[_WIDTHS[2] :], root, first if multiplies else read, second)
        return told

    def _beside(self, out: Numbers, *tensors: Numbers) -> None:
        """How much more is touched than is wanted: lines of the root and both operands, sectors of the operands."""
        root, first, second = self.access.along
        along = root, first if self.access.multiplies else self.access.along[self.access.read], second
        rows = [float(size[place]) * self.access.element for size, place in zip(tensors, along, strict=True)]
        begin = [_boundary(row) for row in rows]
        over = [_LINE - place for place in begin] + [max(_SECTOR - place, 0) for place in begin[1:]]
        np.divide(np.array(over, self._runs.dtype)[:, None], self._runs, out=out)
        out += 1.0
        np.log2(out, out=out)


def _slots(sizes: Numbers) -> list[Numbers]:
    """Of the root, the heaviest operation and its two operands."""
    return [sizes[i * DIMENSIONS : (i + 1) * DIMENSIONS] for i in range(4)]


def _staged(gpu: Gpu, config: npt.NDArray[Any], widths: tuple[float, ...], element: float) -> Numbers:
    """Bytes of shared memory of a product: a tile of each operand a stage, or one where it cannot be copied ahead."""
    entry, other = config[:, _INPUT_PRODUCT], config[:, _KERNEL_PRODUCT]
    stages = np.maximum(config[:, gpu.stages], 1)
    if gpu.loads < 2 or min(widths[1:]) >= _NARROWEST_COPY:
        staged: Numbers = (entry + other) * element * stages
        return staged
    ahead = [stages if width >= _NARROWEST_COPY else 1.0 for width in widths[1:]]
    return np.asarray((entry * ahead[0] + other * ahead[1]) * element)


def _along(gpu: Gpu, kernel: Kernel, tensors: tuple[list[float], ...]) -> list[int]:
    """The dimension of the root and of both operands that lies together in memory."""
    along = [max(len([length for length in size if length > 0]) - 1, 0) for size in tensors]
    if gpu.loads > 1:
        for place, node in enumerate((kernel.node_opcode == _PARAMETER).nonzero()[0][:2], 1):
            argument = kernel.node_feat[node]  # that the operand is, or is made of
            if any(tensors[place]) and argument[_SHAPE].tolist() == tensors[place]:
                along[place] = int(argument[_MINOR])
    return along


def _widths(gpu: Gpu, tensors: tuple[list[float], ...], along: list[int], element: float) -> tuple[float, ...]:
    """The widest loads of the root and both operands."""
    if not gpu.loads:
        return (_WIDEST_LOAD,) * len(tensors)
    return tuple(_load_bytes(int(size[place]), element) for size, place in zip(tensors, along, strict=True))


def _boundary(row: float) -> int:
    """The largest power of two, up to a line, at whose multiples all rows of so many bytes begin."""
    whole = int(row)
    return min(whole & -whole, _LINE) if whole else _LINE


def _load_bytes(row: int, element: float) -> float:
    """The widest load that starts at every row of such a length."""
    return float(min((row & -row) * element, _WIDEST_LOAD)) if row else _WIDEST_LOAD


def _tiles(size: Numbers, tile: npt.NDArray[Any]) -> Numbers:
    """How many tiles cover a tensor; dimensions that either does not have count once."""
    tiles: Numbers = np.ones(len(tile), tile.dtype)
    for place, length in enumerate(size.tolist()):
        if length > 0:
            cut = tile[:, place]
            counts = np.ceil(length / np.maximum(cut, 1))
            tiles *= counts if cut.all() else np.where(cut > 0, counts, 1)
    return tiles


def _steps(second: Numbers, config: npt.NDArray[Any]) -> Numbers:
    """Rounds of a program's loop: tiles along the second operand's last but one dimension."""
    place = max(int((second > 0).sum()) - 2, 0)
    steps: Numbers = np.ceil(max(float(second[place]), 1.0) / np.maximum(config[:, _KERNEL][:, place], 1.0))
    return steps
