"""What a tiled operation says about itself: its shapes, its feasible tiles, and the names that both have in files.

A tile is a real parameter of a compiled kernel. Everything that has to know one operation from another asks its
`TiledOp`, so that a further one is its own file here, its kernel, and one line in the registry (`tiled/__init__.py`).
The native code has the last word on what is feasible (`problem`); `candidates` only proposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Rows = npt.NDArray[np.int64]  # tiles as the numbers in them
Key = tuple[Shape, str, str]  # shape, dtype and layout, as a tile chooser is asked


class Tile(Protocol):
    """A frozen dataclass of numbers and words, each of which changes what the kernel does."""

    def as_dict(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Tile)


class TiledOp(ABC, Generic[T]):
    """One operation with tiles; `module` is always the compiled extension."""

    name: ClassVar[str]
    tile_type: type[T]
    columns: ClassVar[Mapping[str, str]]
    """The names that stores, features and choices use for a tile's fields, each with its field."""

    @abstractmethod
    def check_shape(self, shape: Shape, layout: str | None) -> None:
        """Raise a ConfigurationError where `shape` or `layout` is none of this operation."""

    @abstractmethod
    def default(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> T:
        """The tile that the kernel uses when it is given none."""

    @abstractmethod
    def candidates(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Iterable[T]:
        """Tiles worth a look, the default among the first; some may not be feasible, some may repeat."""

    @abstractmethod
    def problem(self, module: ModuleType, tile: T, shape: Shape, layout: str | None) -> str | None:
        """Why the kernel does not take a tile at a shape; None where it does."""

    @abstractmethod
    def keep(self, table: Any, shape: Shape, layout: str, threads: int, tile: T | None) -> None:
        """Write a tile (None: the default) into the table that the compiled kernels look in."""

    @abstractmethod
    def spec(self, shape: Shape, layout: str) -> dict[str, int | str] | None:
        """A shape in the words of the family that measures it; None where no family covers it."""

    @abstractmethod
    def key(self, spec: Mapping[str, Any]) -> Key | None:
        """The other way: where such a problem stands among the shapes a chooser is asked for; None if it does not."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a tile's values, in the order of `in_passing`."""
        return tuple(self.columns)

    def in_passing(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> Rows:
        """What a tile is chosen among where there is no time for objects: values in the order of `names`, the default
        first; some may not be feasible."""
        return np.array([tuple(self.values(self.default(module, shape, layout, threads)).values())], np.int64)

    def space(self, module: ModuleType, shape: Shape, layout: str | None, threads: int) -> list[T]:
        """Every feasible candidate, without repeats."""
        found = dict.fromkeys(self.candidates(module, shape, layout, threads))
        return [tile for tile in found if self.problem(module, tile, shape, layout) is None]

    def values(self, tile: T) -> dict[str, int]:
        """A tile under the names of `columns`."""
        return {name: int(getattr(tile, field)) for name, field in self.columns.items()}

    def tile(self, values: Mapping[str, Any]) -> T:
        """The tile that such values stand for."""
        return self.tile_type(**{field: int(values[name]) for name, field in self.columns.items()})


def grids(threads: int) -> list[tuple[int, int]]:
    """Grids of as many tasks as there are threads."""
    return [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
