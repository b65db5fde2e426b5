"""Tiles of the native convolution: which algorithm runs, and how its loops are cut.

A `ConvTile` is a real parameter of `conv2d`: every field moves a loop bound or changes what is computed. Candidates are
proposed around the sizes the caches suggest; the analytical default (docs/tiles.md says how it is found) is always
among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiled.op import Key, Rows, Shape, TiledOp
from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]

_PIXEL_BLOCKS = (32, 80, 160, 320, 640, 1280)
_TILE_BLOCKS = (8, 16, 32, 64, 96, 160)
ALGORITHMS = ("direct", "winograd", "winograd2")
_OUTPUTS = {"direct": 1, "winograd": 4, "winograd2": 2}  # of a unit of work, a side
_SIZES = ("batch", "channels", "height", "width", "filters")


@dataclass(frozen=True, slots=True)
class ConvTile:
    """How one convolution is computed. A field left 0 takes the analytical default.

    algorithm   "direct" (implicit matrix product, any shape; narrow groups and depthwise in a loop of their own),
                "winograd" (F(4x4, 3x3)) or "winograd2" (F(2x2, 3x3)), both for 3x3 kernels with stride 1
    mr x nr     the register tile: output pixels (winograd: tiles of them) by output channels (one or two vectors)
    block       output pixels (winograd: tiles) that a task takes through all stages, in whole rows
    channels    output channels multiplied before they are written back to NCHW
    split       tasks that share the output channels of a block, each preparing the input for itself
    """

    algorithm: str
    mr: int = 0
    nr: int = 0
    block: int = 0
    channels: int = 0
    split: int = 0

    def as_dict(self) -> dict[str, int | str]:
        """Plain values, for files and features."""
        return {name: getattr(self, name) for name in self.__slots__}


def conv2d_shape(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
    **_options: Any,
) -> tuple[int, ...]:
    """A convolution as tiles see it: (n, c, h, w, o, kh, kw, stride, stride, padding, padding, groups)."""
    return (*x.shape, w.shape[0], *w.shape[2:], *stride, *padding[:2], groups)


class Conv2d(TiledOp[ConvTile]):
    """y = conv2d(x, w): the shape is what `conv2d_shape` gives, the layout always "nchw"."""

    name = "conv2d"
    tile_type = ConvTile
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "block", "block_n": "channels", "threads_n": "split",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        if layout not in (None, "nchw"):
            raise ConfigurationError(f"the layout of a convolution is 'nchw', not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None = None, threads: int = 1) -> ConvTile:
        return ConvTile(*module.conv_default_tile(shape))

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[ConvTile]:
        yield self.default(module, shape)
        for winograd, *rest in _rows(module, shape, threads, ALGORITHMS).tolist():
            yield ConvTile(ALGORITHMS[winograd], *rest)

    @property
    def names(self) -> tuple[str, ...]:
        return ("winograd", *self.columns)

    def in_passing(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Rows:
        """Every candidate of the algorithms that a shape takes."""
        default = np.array([tuple(self.values(self.default(module, shape)).values())], np.int64)
        smallest = [ConvTile(name, block=1) for name in ALGORITHMS]
        taken = [tile.algorithm for tile in smallest if self.problem(module, tile, shape, layout) is None]
        rows = _rows(module, shape, threads, taken)
        return np.concatenate([default, rows[(rows != default).any(axis=1)]])

    def problem(self, module: ModuleType, tile: ConvTile, shape: Shape, layout: str | None) -> str | None:
        found: str | None = module.conv_tile_problem(tile, shape)
        return found

    def keep(self, table: Any, shape: Shape, layout: str, threads: int, tile: ConvTile | None) -> None:
        table.keep_conv2d(shape, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        *sizes, kh, kw, sh, sw, ph, pw, groups = shape
        if kh != kw or sh != sw or ph != pw or groups != 1:
            return None
        return {**dict(zip(_SIZES, sizes, strict=True)), "kernel": kh, "stride": sh, "padding": ph}

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        if spec.get("dtype") != "fp32":
            return None
        kernel, stride, padding = (int(spec[name]) for name in ("kernel", "stride", "padding"))
        sizes = (int(spec[name]) for name in _SIZES)
        return (*sizes, kernel, kernel, stride, stride, padding, padding, 1), "float32", "nchw"

    def values(self, tile: ConvTile) -> dict[str, int]:
        return {"winograd": ALGORITHMS.index(tile.algorithm), **super().values(tile)}

    def tile(self, values: Mapping[str, Any]) -> ConvTile:
        numbers = {field: int(values[name]) for name, field in self.columns.items()}
        return ConvTile(ALGORITHMS[int(values["winograd"])], **numbers)


def _rows(module: ModuleType, shape: Shape, threads: int, algorithms: Sequence[str]) -> Rows:
    """(algorithm's number, mr, nr, block, channels, split)"""
    lanes, rows, vectors = module.conv_tile_limits()
    panel = lanes * vectors
    group_outputs = shape[4] // shape[11]
    whole = -(-group_outputs // panel) * panel
    splits = sorted({1, min(threads, whole // panel)})
    channel_blocks = sorted({min(whole, size * panel) for size in (1, 2, 4, 8)})
    widths = (lanes, panel) if group_outputs > lanes else (panel,)
    over_pixels: list[tuple[int, int, int]] = []
    for algorithm in algorithms:
        number = ALGORITHMS.index(algorithm)
        blocks = _PIXEL_BLOCKS if algorithm == "direct" else _TILE_BLOCKS
        for row, block in _whole_rows(shape, algorithm, blocks):
            heights = _balanced(row if algorithm == "direct" else block, rows)
            over_pixels += [(number, height, block) for height in heights]
    over_channels = list(product(widths, channel_blocks, splits))
    found = np.empty((len(over_pixels), len(over_channels), 6), np.int64)
    found[:, :, [0, 1, 3]] = np.array(over_pixels, np.int64).reshape(-1, 1, 3)
    found[:, :, [2, 4, 5]] = over_channels
    return found.reshape(-1, 6)


def _balanced(extent: int, most: int) -> list[int]:
    """Heights of register tiles as the loops will cut them: as equal as they can be over `extent` units."""
    sizes = (most, most * 2 // 3, most // 2, most // 3)
    return sorted({-(-extent // -(-extent // size)) for size in sizes})


def _whole_rows(shape: tuple[int, ...], algorithm: str, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(a row's units, a block's) as the loops will cut them, so that no two candidates run the same code: whole rows
    of one image (winograd: of the batch), at least one."""
    n, _, h, w, _, kh, kw, sh, sw, ph, pw, _ = shape
    rows, row = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
    if algorithm != "direct":
        outputs = _OUTPUTS[algorithm]
        rows, row = n * -(-rows // outputs), -(-row // outputs)
    return [(row, block) for block in sorted({min(rows, max(1, size // row)) * row for size in sizes})]
