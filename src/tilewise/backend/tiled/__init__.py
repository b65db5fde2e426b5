"""Operations with tiles: list the feasible tiles of a shape, and check whether a tile can be used.

The three most important names: `tile_space`, `check_tile` and `TiledOp` (the interface of an operation with tiles).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, overload

from tilewise._extension import native
from tilewise.backend.tiled.conv2d import ConvTile, TiledConv2d
from tilewise.backend.tiled.int8_matmul import Int8Tile, TiledInt8Matmul
from tilewise.backend.tiled.matmul import TileConfig, TiledMatmul
from tilewise.backend.tiled.op import TiledOp
from tilewise.errors import ConfigurationError, UnavailableError

TILED: dict[str, TiledOp[Any]] = {op.name: op for op in (TiledMatmul(), TiledConv2d(), TiledInt8Matmul())}


def tiled_op(name: str) -> TiledOp[Any]:
    """Return the tiled operation called `name`, such as "matmul"."""
    if name not in TILED:
        *names, last = TILED
        raise ConfigurationError(f"there is no tile space for {name!r}; {', '.join(names)} and {last} have one")
    return TILED[name]


@overload
def tile_space(
    op: Literal["matmul"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[TileConfig]: ...
@overload
def tile_space(
    op: Literal["conv2d"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[ConvTile]: ...
@overload
def tile_space(
    op: Literal["int8_matmul"], shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[Int8Tile]: ...
@overload
def tile_space(
    op: str, shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None
) -> list[Any]: ...
def tile_space(op: str, shape: tuple[int, ...], *, layout: str | None = None, threads: int | None = None) -> list[Any]:
    """List every feasible tile for `op` at `shape` on this machine and instruction set.

    The shape is (m, n, k) for matmul and int8_matmul; for conv2d it is (n, c, h, w, o, kh, kw, stride, stride, padding,
    padding, groups), as returned by `conv2d_shape`. `threads` is the number of tasks that share the work (default: the
    current number of threads).

    >>> len(tile_space("matmul", (512, 512, 512))) >= 200  # doctest: +SKIP
    True
    """
    module, tiled = _require_native(), tiled_op(op)
    tiled.check_shape(shape, layout)
    return tiled.space(module, tuple(shape), layout, module.num_threads() if threads is None else threads)


def check_tile(op: str, shape: tuple[int, ...], tile: Any, layout: str | None = None) -> None:
    """Raise a ConfigurationError with the reason if `tile` cannot be used for `op` at `shape`."""
    module, tiled = _require_native(), tiled_op(op)
    tiled.check_shape(shape, layout)
    reason = tiled.infeasible_reason(module, tile, tuple(shape), layout)
    if reason is not None:
        raise ConfigurationError(f"this tile cannot be used: {reason}")


def _require_native() -> ModuleType:
    """Return the compiled extension; raise `UnavailableError` without one."""
    if native is None:
        raise UnavailableError("tiles need tilewise's compiled kernels; install g++ and reinstall")
    return native
