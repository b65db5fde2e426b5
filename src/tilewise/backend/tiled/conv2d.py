"""Tiles of the native convolution: which algorithm runs, and its block sizes.

A `ConvTile` is a parameter of `conv2d`: every field changes a loop bound or the algorithm. Candidates are close to the
sizes that the caches suggest; the analytical default (see docs/tiles.md) is always among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiled.op import Key, Shape, TiledOp, TileRows
from tilewise.errors import ConfigurationError

Array = npt.NDArray[Any]

# Candidate block sizes: geometric series from a few register tiles up to about the L2 cache.
_PIXEL_BLOCKS = (32, 80, 160, 320, 640, 1280)  # output pixels, direct algorithm
_TILE_BLOCKS = (8, 16, 32, 64, 96, 160)  # Winograd tiles
ALGORITHMS = ("direct", "winograd", "winograd2")
_TILE_OUTPUTS = {"winograd": 4, "winograd2": 2}  # output pixels per side of a Winograd tile
_SIZES = ("batch", "channels", "height", "width", "filters")


@dataclass(frozen=True, slots=True)
class ConvTile:
    """Algorithm and block sizes of one convolution. A field of 0 takes the analytical default.

    algorithm   "direct" (implicit matrix product, any shape; narrow groups and depthwise use a separate loop),
                "winograd" (F(4x4, 3x3)) or "winograd2" (F(2x2, 3x3)), both for 3x3 filters with stride 1
    mr x nr     register tile: output pixels (Winograd: tiles) by output channels (one or two vectors)
    block       output pixels (Winograd: tiles) that a task takes through all stages, in whole rows
    channels    output channels computed before they are written back to NCHW
    split       tasks that share the output channels of a block; each packs the input for itself
    """

    algorithm: str
    mr: int = 0
    nr: int = 0
    block: int = 0
    channels: int = 0
    split: int = 0

    def as_dict(self) -> dict[str, int | str]:
        """Convert to plain values, for files and features."""
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
    """Return a convolution's shape: (n, c, h, w, o, kh, kw, stride, stride, padding, padding, groups)."""
    return (*x.shape, w.shape[0], *w.shape[2:], *stride, *padding[:2], groups)


class TiledConv2d(TiledOp[ConvTile]):
    """Tiles of y = conv2d(x, w). The shape comes from `conv2d_shape`; the layout is always "nchw"."""

    name = "conv2d"
    tile_type = ConvTile
    columns: ClassVar[Mapping[str, str]] = {
        "register_m": "mr", "register_n": "nr", "block_m": "block", "block_n": "channels", "threads_n": "split",
    }  # fmt: skip

    def check_shape(self, shape: Shape, layout: str | None) -> None:
        if layout not in (None, "nchw"):
            raise ConfigurationError(f"the layout of a convolution must be 'nchw', not {layout!r}")

    def default(self, module: ModuleType, shape: Shape, layout: str | None = None, threads: int = 1) -> ConvTile:
        return ConvTile(*module.conv_default_tile(shape))

    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterator[ConvTile]:
        """Yield the default tile of a convolution, then every other tile worth measuring."""
        yield self.default(module, shape)
        for algorithm, *sizes in _tile_rows(module, shape, threads, ALGORITHMS).tolist():
            yield ConvTile(ALGORITHMS[algorithm], *sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return ("winograd", *self.columns)

    def quick_candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> TileRows:
        """Return every tile of the algorithms that support the shape, as rows, the default first."""
        default = np.array([tuple(self.values(self.default(module, shape)).values())], np.int64)
        smallest = [ConvTile(name, block=1) for name in ALGORITHMS]
        algorithms = [t.algorithm for t in smallest if self.infeasible_reason(module, t, shape, layout) is None]
        rows = _tile_rows(module, shape, threads, algorithms)
        return np.concatenate([default, rows[(rows != default).any(axis=1)]])

    def infeasible_reason(self, module: ModuleType, tile: ConvTile, shape: Shape, layout: str | None) -> str | None:
        reason: str | None = module.conv_tile_problem(tile, shape)
        return reason

    def add_to_table(self, table: Any, shape: Shape, layout: str, threads: int, tile: ConvTile | None) -> None:
        table.keep_conv2d(shape, threads, tile)

    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        """Return a square, ungrouped convolution's problem by parameter name; None for any other."""
        *sizes, kh, kw, sh, sw, ph, pw, groups = shape
        if kh != kw or sh != sw or ph != pw or groups != 1:
            return None
        return {**dict(zip(_SIZES, sizes, strict=True)), "kernel": kh, "stride": sh, "padding": ph}

    def key(self, spec: Mapping[str, Any]) -> Key | None:
        """Convert a float32 problem to (shape, dtype, layout), the tile chooser's key; None for other dtypes."""
        if spec.get("dtype") != "fp32":
            return None
        filter_size, stride, padding = (int(spec[name]) for name in ("kernel", "stride", "padding"))
        sizes = (int(spec[name]) for name in _SIZES)
        return (*sizes, filter_size, filter_size, stride, stride, padding, padding, 1), "float32", "nchw"

    def values(self, tile: ConvTile) -> dict[str, int]:
        return {"winograd": ALGORITHMS.index(tile.algorithm), **super().values(tile)}

    def tile(self, values: Mapping[str, Any]) -> ConvTile:
        numbers = {field: int(values[name]) for name, field in self.columns.items()}
        return ConvTile(ALGORITHMS[int(values["winograd"])], **numbers)


def _tile_rows(module: ModuleType, shape: Shape, threads: int, algorithms: Sequence[str]) -> TileRows:
    """Return all combinations of sizes as rows (algorithm's index, mr, nr, block, channels, split)."""
    lanes, max_height, vectors = module.conv_tile_limits()
    panel = lanes * vectors
    group_outputs = shape[4] // shape[11]
    padded_outputs = -(-group_outputs // panel) * panel
    splits = sorted({1, min(threads, padded_outputs // panel)})
    channel_blocks = sorted({min(padded_outputs, size * panel) for size in (1, 2, 4, 8)})
    widths = (lanes, panel) if group_outputs > lanes else (panel,)
    # Sizes over pixels (algorithm, mr, block) and over channels (nr, channels, split) are independent.
    pixel_sizes: list[tuple[int, int, int]] = []
    for algorithm in algorithms:
        index = ALGORITHMS.index(algorithm)
        blocks = _PIXEL_BLOCKS if algorithm == "direct" else _TILE_BLOCKS
        for row, block in _row_aligned_blocks(shape, algorithm, blocks):
            heights = _balanced_heights(row if algorithm == "direct" else block, max_height)
            pixel_sizes += [(index, height, block) for height in heights]
    channel_sizes = list(product(widths, channel_blocks, splits))
    tiles = np.empty((len(pixel_sizes), len(channel_sizes), 6), np.int64)
    tiles[:, :, [0, 1, 3]] = np.array(pixel_sizes, np.int64).reshape(-1, 1, 3)
    tiles[:, :, [2, 4, 5]] = channel_sizes
    return tiles.reshape(-1, 6)


def _balanced_heights(extent: int, max_height: int) -> list[int]:
    """Return heights of register tiles that divide `extent` most evenly, as the kernel's loops do."""
    sizes = (max_height, max_height * 2 // 3, max_height // 2, max_height // 3)
    return sorted({-(-extent // -(-extent // size)) for size in sizes})


def _row_aligned_blocks(shape: tuple[int, ...], algorithm: str, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Round block sizes up to whole image rows, as the kernel does, so that no two candidates run the same loops.

    Returns (pixels or Winograd tiles per row, per block). A block is within one image (Winograd: within the batch).
    """
    n, _, h, w, _, kh, kw, sh, sw, ph, pw, _ = shape
    rows, row = (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1
    if algorithm != "direct":
        outputs = _TILE_OUTPUTS[algorithm]
        rows, row = n * -(-rows // outputs), -(-row // outputs)
    return [(row, block) for block in sorted({min(rows, max(1, size // row)) * row for size in sizes})]
