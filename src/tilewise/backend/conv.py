"""Convolution and pooling by the compiled kernels: float32, NCHW input and output, channels-last inside.

The registered functions are the compiled ones themselves; a Python wrapper would cost as much as a small pooling. A
convolution uses Winograd's F(4x4, 3x3) if that needs fewer instructions than the direct kernel (3x3, stride 1, enough
channels) and every value is small enough for its transforms. The direct kernel computes everything else, including NaN
and infinity.

Packed weights are cached: the extension stores a copy of the raw weights with the packed ones, compares it at every
call and packs again if it differs, so weights may be changed in place at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend.registry import implements
from tilewise.errors import UnavailableError

if TYPE_CHECKING:
    from tilewise.backend.tiled.conv2d import ConvTile

Array = npt.NDArray[Any]


def conv2d_tile_key(x: Array, w: Array, *args: Any, **options: Any) -> tuple[tuple[int, ...], str, str]:
    """Return the tile chooser's key of a convolution: (shape as in `conv2d_shape`, dtype, layout)."""
    from tilewise.backend.tiled.conv2d import conv2d_shape

    return conv2d_shape(x, w, *args, **options), x.dtype.name, "nchw"


def default_conv2d_tile(x: Array, w: Array, **geometry: Any) -> ConvTile:
    """Return the tile that `conv2d(x, w, ...)` uses by default (see docs/tiles.md)."""
    if native is None:
        raise UnavailableError("tiles need tilewise's compiled kernels; install g++ and reinstall")
    return _default_tile(x, w, **geometry)


def _default_tile(x: Array, w: Array, *args: Any, **options: Any) -> ConvTile:
    """Return the tile that the analytical formula chooses; `options` are stride, padding and so on."""
    from tilewise.backend.tiled.conv2d import TiledConv2d, conv2d_shape

    assert native is not None
    return TiledConv2d().default(native, conv2d_shape(x, w, *args, **options))


def _describe_native(x: Array, w: Array, *args: Any, **options: Any) -> tuple[str, ConvTile | None]:
    """Describe in a sentence which native algorithm runs this convolution; also return its default tile, or None."""
    assert native is not None
    if x.size == 0 or w.size == 0:
        return "it is float32 and empty", None
    tile = _default_tile(x, w, *args, **options)
    image = "x".join(map(str, x.shape))
    o, _, kh, kw = w.shape
    return f"float32 {image} by {o} {kh}x{kw} filters on {native.isa()} runs the {tile.algorithm} kernel", tile


if native is not None:
    implements("conv2d", "native", native.conv_suits, conv2d_tile_key, _describe_native)(native.conv2d)
    for _op in ("conv2d_grad_input", "conv2d_grad_weight"):
        implements(_op, "native", native.conv_suits)(getattr(native, _op))
    for _op in ("max_pool2d", "max_pool2d_grad", "avg_pool2d", "avg_pool2d_grad"):
        implements(_op, "native", native.pool_suits)(getattr(native, _op))
