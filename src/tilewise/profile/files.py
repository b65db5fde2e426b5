"""Where measurements are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """TILEWISE_CACHE, else tilewise under XDG_CACHE_HOME or ~/.cache."""
    override = os.environ.get("TILEWISE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewise"
