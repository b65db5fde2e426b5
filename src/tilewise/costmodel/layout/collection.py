"""A layout collection: the folder ``npz/layout/xla/random`` or one like it, with its train, valid and test graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.costmodel.data.dataset import SPLITS, default_cache_dir
from tilewise.costmodel.data.progress import track
from tilewise.costmodel.layout.graph import LayoutGraph, open_graph
from tilewise.errors import ConfigurationError, FileFormatError

SOURCES, SEARCHES = ("xla", "nlp"), ("random", "default")
COLLECTIONS = tuple(f"{source}:{search}" for source in SOURCES for search in SEARCHES)


@dataclass(frozen=True, eq=False)
class Layouts:
    """The three splits of a layout collection, and its name, such as ``xla:random``, where its folders tell it."""

    name: str
    train: Sequence[LayoutGraph]
    valid: Sequence[LayoutGraph]
    test: Sequence[LayoutGraph]

    def split(self, name: str) -> Sequence[LayoutGraph]:
        if name not in SPLITS:
            raise ConfigurationError(f"There is no split {name!r}; use train, valid or test.")
        found: Sequence[LayoutGraph] = getattr(self, name)
        return found


def open_layouts(
    root: str | os.PathLike[str],
    *,
    splits: Sequence[str] = SPLITS,
    cache_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> Layouts:
    """Open the layout collection in the folder `root`; `limit` takes the first so many files of each split.

    >>> open_layouts("~/data/tpugraphs/npz/layout/xla/random").train[0].config_feat.shape  # doctest: +SKIP
    (47712, 26, 18)
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"There is no layout collection at {root}; give a folder with train, valid and test.")
    unknown = [name for name in splits if name not in SPLITS]
    if unknown:
        raise ConfigurationError(f"There is no split {unknown[0]!r}; use train, valid or test.")
    files = {name: sorted((folder / name).glob("*.npz"))[:limit] if name in splits else [] for name in SPLITS}
    if not any(files.values()):
        raise FileFormatError(f"{folder} holds no npz files in {', '.join(splits)}.")
    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    opened = {
        name: [open_graph(path, cache) for path in track(paths, f"reading {name}", len(paths), progress)]
        for name, paths in files.items()
    }
    return Layouts(collection_name(folder), **opened)


def collection_name(folder: Path) -> str:
    """``xla:random`` of ``…/xla/random``; empty where the folders are called otherwise."""
    name = ":".join(folder.absolute().parts[-2:])
    return name if name in COLLECTIONS else ""


def check_name(name: str) -> str:
    """`name`, where it is one of the four."""
    if name not in COLLECTIONS:
        found = re.sub(r"\s+", " ", name)[:80]
        raise ConfigurationError(f"{found!r} is none of the layout collections {', '.join(COLLECTIONS)}.")
    return name
