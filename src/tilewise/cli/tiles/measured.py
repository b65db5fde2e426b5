"""Measured kernels from wherever they lie (a store, a collection's file or folder), in a model's own columns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from tilewise.costmodel.data.collection import Collection, read_collection, read_folder
from tilewise.costmodel.data.dataset import find_collection
from tilewise.costmodel.data.devices import DEVICE_COLUMNS
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.errors import ConfigurationError

_STORES = (".sqlite", ".db")


def measured_kernels(path: Path, schema: Schema) -> list[Kernel]:
    """Every kernel with runtimes at `path`; its columns are put in the order of `schema` by their names."""
    collection = _collection(path)
    places = _places(collection.schema, schema, path)
    kernels = [m.kernel for members in collection.splits.values() for m in members if m.kernel.labelled]
    return [dataclasses.replace(kernel, config_feat=_placed(kernel, places)) for kernel in kernels]


def _collection(path: Path) -> Collection:
    if path.is_dir():
        return read_folder(path)
    if path.suffix in _STORES:
        from tilewise.store.store import Store
        from tilewise.tune.measure.export import make_collection

        with Store(path, create=False) as store:
            return make_collection(store, path.stem, split="train")
    return read_collection(find_collection(path))


def _places(have: Schema, want: Schema, path: Path) -> list[int]:
    """Where each wanted column stands; -1 for a device's that nothing is said of."""
    missing = [n for n in want.config_features if n not in have.config_features and n not in DEVICE_COLUMNS]
    if missing:
        raise ConfigurationError(
            f"{path} was measured with other settings than the model knows: it lacks {', '.join(missing[:3])}."
        )
    names = {name: place for place, name in enumerate(have.config_features)}
    return [names.get(name, -1) for name in want.config_features]


def _placed(kernel: Kernel, places: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    known = np.hstack([kernel.config_feat, np.zeros((kernel.n_configs, 1), np.float32)])
    return np.ascontiguousarray(known[:, places])
