"""The operations with tiles, and what can be asked of any of them: its feasible tiles, and whether one may be used."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, overload

from tilewise._extension import native
from tilewise.backend.tiled.conv2d import Conv2d, ConvTile
from tilewise.backend.tiled.int8_matmul import Int8Matmul, Int8Tile
from tilewise.backend.tiled.matmul import Matmul, TileConfig
from tilewise.backend.tiled.op import TiledOp
from tilewise.errors import ConfigurationError, UnavailableError

TILED: dict[str, TiledOp[Any]] = {op.name: op for op in (Matmul(), Conv2d(), Int8Matmul())}


def tiled_op(name: str) -> TiledOp[Any]:
    """The tiled operation of that name."""
    if name not in TILED:
        raise ConfigurationError(f"there is no tile space for {name!r}; {_listed()} have one")
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
    """Every feasible tile for `op` at `shape` on this machine and instruction set.

    The shape is (m, n, k) for matmul and int8_matmul; for conv2d it is (n, c, h, w, o, kh, kw, stride, stride, padding,
    padding, groups), which `conv2d_shape` gives. `threads` is how many tasks share the work; the default is the thread
    count in force.

    >>> len(tile_space("matmul", (512, 512, 512))) >= 200  # doctest: +SKIP
    True
    """
    module, tiled = _require_native(), tiled_op(op)
    tiled.check_shape(shape, layout)
    return tiled.space(module, tuple(shape), layout, module.num_threads() if threads is None else threads)


def check_tile(op: str, shape: tuple[int, ...], tile: Any, layout: str | None = None) -> None:
    """Raise a ConfigurationError saying why `tile` cannot be used for `op` at `shape`, if it cannot."""
    module, tiled = _require_native(), tiled_op(op)
    tiled.check_shape(shape, layout)
    problem = tiled.problem(module, tile, tuple(shape), layout)
    if problem is not None:
        raise ConfigurationError(f"this tile cannot be used: {problem}")


def _require_native() -> ModuleType:
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    return native


def _listed() -> str:
    *some, last = TILED
    return f"{', '.join(some)} and {last}"
