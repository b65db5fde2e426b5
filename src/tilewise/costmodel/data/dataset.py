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
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    # A split is either a folder of npz files, which are converted once, or already a set of flat files.
    schema = read_schema(folder)
    packed = {name for name in SPLITS if (folder / name / INDEX).is_file()}
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] for name in SPLITS if name not in packed}
    if not packed and not any(files.values()):
        raise FileFormatError(f"{folder} contains no train, valid or test folder with npz files.")
    splits = {name: open_split(paths, schema, cache, f"reading {name}", progress) for name, paths in files.items()}
    for name in packed:
        split = open_packed(folder / name, schema)
        splits[name] = split if limit is None else from_kernels(split[:limit], schema)
    return Dataset(folder, schema, **splits)


def _from_file(path: Path, limit: int | None) -> Dataset:
    collection = with_noise(read_collection(path))
    kernels = {name: [m.kernel for m in collection.splits.get(name, ())][:limit] for name in SPLITS}
    splits = {name: from_kernels(members, collection.schema) for name, members in kernels.items()}
    return Dataset(path, collection.schema, **splits)


def with_noise(collection: Collection) -> Collection:
    """Add the median relative deviation of repeated timings to the schema, unless the schema states it.

    Evaluations derive the noise ceiling from it.
    """
    # A single timing has no deviation (NaN).
    deviations = [m.deviation[m.repeats > 1] for members in collection.splits.values() for m in members]
    finite = np.concatenate([values[np.isfinite(values)] for values in deviations]) if deviations else np.zeros(0)
    if "noise" in collection.schema.extra or not len(finite):
        return collection
    extra = collection.schema.extra | {"noise": float(np.median(finite))}
    return Collection(Schema(collection.schema.config_features, extra), collection.splits)


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


def default_cache_dir() -> Path:
    """Return the folder of converted data under the user's cache folder."""
    return cache_folder() / "tiles"
