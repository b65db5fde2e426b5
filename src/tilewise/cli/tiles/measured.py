"""Reads measured kernels from a store, a collection file or a folder, with the columns in a model's order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tilewise.costmodel.data.collection import Collection, read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.data.shards import read_folder
from tilewise.errors import ConfigurationError

_STORES = (".sqlite", ".db")


def measured_kernels(path: Path, schema: Schema) -> list[Kernel]:
    """Return every kernel with runtimes at `path`, its columns selected by name in the order of `schema`."""
    collection = _read_any(path)
    columns = _column_indices(collection.schema, schema, path)
    kernels = [m.kernel for members in collection.splits.values() for m in members if m.kernel.labelled]
    return [dataclasses.replace(kernel, config_feat=kernel.config_feat.take(columns, axis=1)) for kernel in kernels]


def _read_any(path: Path) -> Collection:
    """Read a folder, a store of measurements, or a collection file."""
    if path.is_dir():
        return read_folder(path)
    if path.suffix in _STORES:
        from tilewise.store.store import Store
        from tilewise.tune.measure.export import make_collection

        with Store(path, create=False) as store:
            return make_collection(store, path.stem, split="train")
    return read_collection(find_collection(path))


def _column_indices(source: Schema, target: Schema, path: Path) -> list[int]:
    """Return the index in `source` of each column of `target`."""
    missing_columns = [name for name in target.config_features if name not in source.config_features]
    if missing_columns:
        raise ConfigurationError(f"{path} lacks columns that the model needs: {', '.join(missing_columns[:3])}.")
    index_of = {name: index for index, name in enumerate(source.config_features)}
    return [index_of[name] for name in target.config_features]
