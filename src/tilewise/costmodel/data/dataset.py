"""Collections of measured kernels: ``load_dataset(root)`` gives the train, valid and test splits under a folder.

A collection is a folder with ``train``, ``valid`` and ``test`` full of npz files in TpuGraphs' format, and an optional
``schema.json``: its files are checked and converted once (see `shards`). The ones that come with tilewise are single
files that go by name (see `collection`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from tilewise._system import cache_folder
from tilewise.costmodel.data.collection import Collection, read_collection
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema, read_schema
from tilewise.costmodel.data.shards import INDEX, Split, from_kernels, open_packed, open_split
from tilewise.errors import ConfigurationError, FileFormatError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Dataset:
    """The three splits of a collection; a split whose folder is missing is empty."""

    root: Path
    schema: Schema
    train: Split
    valid: Split
    test: Split

    def split(self, name: str) -> Split:
        if name not in SPLITS:
            raise ConfigurationError(f"There is no split {name!r}; use train, valid or test.")
        found: Split = getattr(self, name)
        return found


def load_dataset(
    root: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> Dataset:
    """Open the collection in the folder `root`, or an embedded one by name.

    `limit` takes only the first so many files of each split, in the order of their names.

    >>> data = load_dataset("~/data/tpugraphs/npz/tile/xla")  # doctest: +SKIP
    >>> data.train[0].config_feat.shape                       # doctest: +SKIP
    (1128, 24)
    """
    folder = find_collection(root)
    if not folder.is_dir():
        return _from_file(folder, limit)
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    schema = read_schema(folder)
    packed = {name for name in SPLITS if (folder / name / INDEX).is_file()}
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] for name in SPLITS if name not in packed}
    if not packed and not any(files.values()):
        raise FileFormatError(f"{folder} holds no train, valid or test folder with npz files.")
    opened = {name: open_split(paths, schema, cache, f"reading {name}", progress) for name, paths in files.items()}
    for name in packed:
        split = open_packed(folder / name, schema)
        opened[name] = split if limit is None else from_kernels(split[:limit], schema)
    return Dataset(folder, schema, **opened)


def _from_file(path: Path, limit: int | None) -> Dataset:
    collection = with_noise(read_collection(path))
    parts = {name: [m.kernel for m in collection.splits.get(name, ())][:limit] for name in SPLITS}
    splits = {name: from_kernels(kernels, collection.schema) for name, kernels in parts.items()}
    return Dataset(path, collection.schema, **splits)


def with_noise(collection: Collection) -> Collection:
    """The collection with the usual scatter of its repeats in the schema, for the noise ceiling of evaluations."""
    scatter = [m.deviation[m.repeats > 1] for members in collection.splits.values() for m in members]
    known = np.concatenate([values[np.isfinite(values)] for values in scatter]) if scatter else np.zeros(0)
    if "noise" in collection.schema.extra or not len(known):
        return collection
    extra = collection.schema.extra | {"noise": float(np.median(known))}
    return Collection(Schema(collection.schema.config_features, extra), collection.splits)


def dataset_from_kernels(
    train: Sequence[Kernel], valid: Sequence[Kernel], test: Sequence[Kernel] = (), schema: Schema | None = None
) -> Dataset:
    """A collection held in memory."""
    schema = schema or Schema()
    parts = [from_kernels(kernels, schema) for kernels in (train, valid, test)]
    return Dataset(Path(), schema, *parts)


def embedded_folder() -> Path:
    return Path(str(files("tilewise") / "data" / "collections"))


def embedded_collections() -> list[str]:
    """The names of the collections that came with tilewise."""
    return sorted(path.stem for path in embedded_folder().glob("*.npz"))


def find_collection(root: str | os.PathLike[str]) -> Path:
    """The folder or file meant by a path or by the name of an embedded collection; what is on disk comes first."""
    path = Path(root).expanduser()
    if path.is_dir() or path.suffix == ".npz":
        return path
    if os.fspath(root) in embedded_collections():
        return embedded_folder() / f"{os.fspath(root)}.npz"
    if path.is_file():
        raise ConfigurationError(
            f"{root} is a file, not a collection; if it is a store of measurements, make one from it: "
            f"`tilewise collect export {root} --out FOLDER`."
        )
    names = ", ".join(embedded_collections()) or "none in this installation"
    raise ConfigurationError(f"There is no collection at {root}; give a folder, or an embedded one ({names}).")


def default_cache_dir() -> Path:
    """Where converted data goes unless told: in the user's cache folder."""
    return cache_folder() / "tiles"
