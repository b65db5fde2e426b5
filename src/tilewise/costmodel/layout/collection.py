"""Opens a layout collection: a folder such as ``npz/layout/xla/random`` with train, valid and test graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.costmodel.data.dataset import SPLITS
from tilewise.costmodel.data.shards import default_cache_dir, track
from tilewise.costmodel.layout.graph import LayoutGraph, open_graph
from tilewise.errors import ConfigurationError, FileFormatError

SOURCES, SEARCHES = ("xla", "nlp"), ("random", "default")
COLLECTIONS = tuple(f"{source}:{search}" for source in SOURCES for search in SEARCHES)


@dataclass(frozen=True, eq=False)
class LayoutDataset:
    """The three splits of a layout collection, and its name (``xla:random``) if its folders are named like that."""

    name: str
    train: Sequence[LayoutGraph]
    valid: Sequence[LayoutGraph]
    test: Sequence[LayoutGraph]

    def split(self, name: str) -> Sequence[LayoutGraph]:
        if name not in SPLITS:
            raise ConfigurationError(f"There is no split {name!r}; use train, valid or test.")
        graphs: Sequence[LayoutGraph] = getattr(self, name)
        return graphs


def open_layouts(
    root: str | os.PathLike[str],
    *,
    splits: Sequence[str] = SPLITS,
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> LayoutDataset:
    """Open the layout collection in the folder `root`; `limit` loads only that many files of each split.

    >>> open_layouts("~/data/tpugraphs/npz/layout/xla/random").train[0].config_feat.shape  # doctest: +SKIP
    (47712, 26, 18)
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"There is no layout collection at {root}; give a folder with train, valid and test.")
    unknown = [name for name in splits if name not in SPLITS]
    if unknown:
        raise ConfigurationError(f"There is no split {unknown[0]!r}; use train, valid or test.")
    # Splits that were not requested stay empty.
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] if name in splits else [] for name in SPLITS}
    if not any(files.values()):
        raise FileFormatError(f"{folder} contains no npz files in {', '.join(splits)}.")
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    # Opening converts a graph once and then maps its files, so that a split may exceed the memory.
    graphs = {
        name: [open_graph(path, cache) for path in track(paths, f"reading {name}", len(paths), progress)]
        for name, paths in files.items()
    }
    return LayoutDataset(collection_name(folder), **graphs)


def collection_name(folder: Path) -> str:
    """Return ``xla:random`` for ``…/xla/random``, or an empty text if the folders have other names."""
    name = ":".join(folder.absolute().parts[-2:])
    return name if name in COLLECTIONS else ""


def check_name(name: str) -> str:
    """Return `name`; raise `ConfigurationError` unless it is one of the four collections."""
    if name not in COLLECTIONS:
        short_name = re.sub(r"\s+", " ", name)[:80]
        raise ConfigurationError(f"{short_name!r} is not a layout collection; use one of {', '.join(COLLECTIONS)}.")
    return name
