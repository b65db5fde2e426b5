"""What was tuned on this machine, for the backend in force: read at the first operation, if there is anything to read.

``TILEWISE_TUNED=0`` leaves it alone. Backends that are made by hand have no chooser unless they are given one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tilewise._extension import native
from tilewise._system import cache_folder
from tilewise.errors import TilewiseError

if TYPE_CHECKING:
    from tilewise.backend.registry import TileChooser


def in_use() -> bool:
    return native is not None and os.environ.get("TILEWISE_TUNED", "1") != "0"


def kept_chooser() -> TileChooser | None:
    """A chooser of the tiles kept for this machine, tuned or calibrated; None where there are none."""
    if native is None or not in_use():
        return None
    folder = cache_folder() / "tune"
    if not any((place / "choices.jsonl").exists() for place in (folder, folder / "calibration")):
        return None
    from tilewise.tune.choose.kept import read_kept

    try:
        kept, _ = read_kept(native)
    except (OSError, TilewiseError):  # what cannot be read is as good as not there; `tilewise tune` says why
        return None
    return kept if kept.tiles else None


def calibration_offer() -> str | None:
    """One line that offers `tilewise calibrate` on a machine that was never calibrated: once, then never again."""
    folder = cache_folder() / "tune"
    offered = folder / "calibration-offered"
    try:
        if not in_use() or offered.exists() or (folder / "calibration").exists():
            return None
        folder.mkdir(parents=True, exist_ok=True)
        offered.touch()
    except OSError:  # where nothing can be kept, a calibration could not be either
        return None
    return "`tilewise calibrate` takes a minute and tunes a few dozen kernels on this machine, or shapes of yours."
