"""Loads collections of measured kernels: ``load_dataset(root)`` returns the train, valid and test splits.

A collection is a folder with npz files in TpuGraphs' format under ``train``, ``valid`` and ``test``, and an optional
``schema.json``. The files are checked and converted once (see `shards`). The collections that ship with tilewise are
single files and are loaded by name (see `collection`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from tilewise.costmodel.data.kernel import Kernel, program_of
from tilewise.costmodel.data.schema import NODE_FEATURES, Schema, read_schema
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.costmodel.data.npz import Array

SPLITS = ("train", "valid", "test")
INDEX = "index.json"  # names the kernels of a split that is stored as flat files

# File stem -> (dtype, unit of a row: node, edge or configuration).
COLUMNS = {
    "node_feat": ("<f4", "nodes"),
    "node_opcode": ("|u1", "nodes"),
    "edge_index": ("<i4", "edges"),
    "config_feat": ("<f4", "configs"),
    "runtime": ("<i8", "configs"),
    "normalizer": ("<i8", "configs"),
}


class Split(Sequence[Kernel]):
    """The kernels of one split; a kernel is built from views of the flat arrays on access."""

    def __init__(
        self, names: Sequence[str], offsets: dict[str, Array], arrays: dict[str, Array], schema: Schema
    ) -> None:
        """Store the flat arrays of all kernels, and the first row of each kernel in them (`offsets`)."""
        self.names = list(names)
        self.schema = schema
        self._offsets = offsets
        self._arrays = arrays
        self.prepared: dict[str, Any] = {}  # inputs by kind of preparation, which models of an ensemble share

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Kernel: ...
    @overload
    def __getitem__(self, index: slice) -> list[Kernel]: ...
    def __getitem__(self, index: int | slice) -> Kernel | list[Kernel]:
        """Return one kernel, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # `range` resolves negative indices and raises IndexError.
        position = range(len(self))[index]
        # Slice every flat array between this kernel's offset and the next one's.
        views = {}
        for column, (_, rows) in COLUMNS.items():
            first, last = self._offsets[rows][position : position + 2]
            views[column] = self._arrays[column][first:last]
        name = self.names[position]
        return Kernel(name=name, program=program_of(name), **views)

    @property
    def n_configs(self) -> int:
        return int(self._offsets["configs"][-1])

    @property
    def labelled(self) -> bool:
        return len(self) > 0 and self[0].labelled

    @property
    def programs(self) -> list[str]:
        return [program_of(name) for name in self.names]

    def column(self, name: str) -> Array:
        """Return a flat array over all kernels, such as ``node_feat`` of every node in the split."""
        return self._arrays[name]

    def offsets(self, rows: str) -> Array:
        """Return the first row of each kernel's ``nodes``, ``edges`` or ``configs``, followed by the total."""
        return self._offsets[rows]


def from_kernels(kernels: Sequence[Kernel], schema: Schema) -> Split:
    """Build a split in memory from a few kernels."""
    width = {"node_feat": (len(NODE_FEATURES),), "edge_index": (2,), "config_feat": (schema.width,)}
    offsets = {
        "nodes": np.cumsum([0, *(k.n_nodes for k in kernels)], dtype=np.int64),
        "edges": np.cumsum([0, *(len(k.edge_index) for k in kernels)], dtype=np.int64),
        "configs": np.cumsum([0, *(k.n_configs for k in kernels)], dtype=np.int64),
    }
    # The empty first array gives the result its dtype and width if there are no kernels.
    arrays = {
        column: np.concatenate([np.empty((0, *width.get(column, ())), dtype), *(getattr(k, column) for k in kernels)])
        for column, (dtype, _) in COLUMNS.items()
    }
    return Split([k.name for k in kernels], offsets, arrays, schema)


@dataclass(frozen=True, eq=False)
class Dataset:
    """The three splits of a collection; a split whose folder is missing is empty."""

    root: Path
    schema: Schema
    train: Split
    valid: Split
    test: Split

    def split(self, name: str) -> Split:
        """Return the split with this name: train, valid or test."""
        if name not in SPLITS:
            raise ConfigurationError(f"There is no split {name!r}; use train, valid or test.")
        split: Split = getattr(self, name)
        return split


def load_dataset(
    root: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> Dataset:
    """Open the collection in the folder `root`, or an embedded collection by its name.

    `limit` loads only that many files of each split, in the order of their names.

    >>> data = load_dataset("~/data/tpugraphs/npz/tile/xla")  # doctest: +SKIP
    >>> data.train[0].config_feat.shape                       # doctest: +SKIP
    (1128, 24)
    """
    folder = find_collection(root)
    if not folder.is_dir():
        return _from_file(folder, limit)
    from tilewise.costmodel.data.shards import open_folder

    schema = read_schema(folder)
    cache = None if cache_dir is None else Path(cache_dir).expanduser()
    return Dataset(folder, schema, **open_folder(folder, schema, cache, limit, progress))


def _from_file(path: Path, limit: int | None) -> Dataset:
    """Read a collection file as a `Dataset` with at most `limit` kernels per split."""
    from tilewise.costmodel.data.collection import read_collection, with_noise

    collection = with_noise(read_collection(path))
    kernels = {name: [m.kernel for m in collection.splits.get(name, ())][:limit] for name in SPLITS}
    splits = {name: from_kernels(members, collection.schema) for name, members in kernels.items()}
    return Dataset(path, collection.schema, **splits)


def dataset_from_kernels(
    train: Sequence[Kernel], valid: Sequence[Kernel], test: Sequence[Kernel] = (), schema: Schema | None = None
) -> Dataset:
    """Make a dataset in memory from lists of kernels."""
    schema = schema or Schema()
    splits = [from_kernels(kernels, schema) for kernels in (train, valid, test)]
    return Dataset(Path(), schema, *splits)


def embedded_folder() -> Path:
    """Return the folder of the collections that ship with tilewise."""
    return Path(str(files("tilewise") / "data" / "collections"))


def embedded_collections() -> list[str]:
    """List the names of the collections that ship with tilewise."""
    return sorted(path.stem for path in embedded_folder().glob("*.npz"))


def find_collection(root: str | os.PathLike[str]) -> Path:
    """Resolve a path or the name of an embedded collection; an existing folder takes precedence over a name."""
    path = Path(root).expanduser()
    # A folder named like an embedded collection, such as ./cpu, is the user's own.
    if path.is_dir() or path.suffix == ".npz":
        return path
    if os.fspath(root) in embedded_collections():
        return embedded_folder() / f"{os.fspath(root)}.npz"
    if path.is_file():
        raise ConfigurationError(
            f"{root} is a file, not a collection; if it is a store of measurements, export it with "
            f"`tilewise collect export {root} --out FOLDER`."
        )
    names = ", ".join(embedded_collections()) or "none in this installation"
    raise ConfigurationError(f"There is no collection at {root}; give a folder, or an embedded one ({names}).")
