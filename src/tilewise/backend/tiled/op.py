"""Interface of an operation with tiles: its shapes, its feasible tiles, and the names of both in files.

A tile is a parameter of a compiled kernel. All code that depends on the operation calls its `TiledOp`, so adding one
takes a file here, its kernel, and one line in the registry (`tiled/__init__.py`). The native code decides what is
feasible (`infeasible_reason`); `candidates` only proposes tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
TileRows = npt.NDArray[np.int64]  # (tiles, values per tile)
Key = tuple[Shape, str, str]  # shape, dtype and layout: the arguments of a tile chooser


class Tile(Protocol):
    """A frozen dataclass of numbers and strings, each of which changes how the kernel runs."""

    def as_dict(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Tile)


class TiledOp(ABC, Generic[T]):
    """An operation with tiles. The parameter `module` is always the compiled extension."""

    name: ClassVar[str]
    tile_type: type[T]
    columns: ClassVar[Mapping[str, str]]
    """Names of a tile's values in stores, features and choices -> fields of the tile."""

    @abstractmethod
    def check_shape(self, shape: Shape, layout: str | None) -> None:
        """Raise a ConfigurationError if `shape` or `layout` is not valid for this operation."""

    @abstractmethod
    def default(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> T:
        """Return the tile that the kernel uses by default."""

    @abstractmethod
    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterable[T]:
        """Yield tiles to consider, the default among the first; some may be infeasible or repeat."""

    @abstractmethod
    def infeasible_reason(self, module: ModuleType, tile: T, shape: Shape, layout: str | None) -> str | None:
        """Return why the kernel rejects a tile at a shape; None if it accepts it."""

    @abstractmethod
    def add_to_table(self, table: Any, shape: Shape, layout: str, threads: int, tile: T | None) -> None:
        """Store a tile (None: the default) in the table that the compiled kernels read."""

    @abstractmethod
    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        """Return the tuning problem of a shape by parameter name; None if no kernel family covers it."""

    @abstractmethod
    def key(self, spec: Mapping[str, Any]) -> Key | None:
        """Convert a tuning problem to the tile chooser's key, the inverse of `spec`; None if it has none."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of `quick_candidates`, a tile's values."""
        return tuple(self.columns)

    def quick_candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> TileRows:
        """Return fewer candidates quickly, for a choice during a call; some may be infeasible.

        Each row is a tile's values in the order of `names`, because creating tile objects takes too long. The default
        comes first.
        """
        return np.array([tuple(self.values(self.default(module, shape, layout, threads)).values())], np.int64)

    def space(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> list[T]:
        """List every feasible candidate, without repeats."""
        tiles = dict.fromkeys(self.candidates(module, shape, layout, threads))
        return [tile for tile in tiles if self.infeasible_reason(module, tile, shape, layout) is None]

    def values(self, tile: T) -> dict[str, int]:
        """Convert a tile to numbers by column name, as in files (see `columns`)."""
        return {name: int(getattr(tile, field)) for name, field in self.columns.items()}

    def tile(self, values: Mapping[str, Any]) -> T:
        """Create a tile from numbers by column name, the inverse of `values`."""
        return self.tile_type(**{field: int(values[name]) for name, field in self.columns.items()})


def grids(threads: int) -> list[tuple[int, int]]:
    """List the thread grids (rows, columns) with exactly `threads` tasks."""
    return [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
