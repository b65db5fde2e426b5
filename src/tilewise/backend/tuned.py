"""Load the table of tiles tuned on this machine for the default backend, at its first operation.

``TILEWISE_TUNED=0`` disables it. A backend that a user constructs has no tile chooser unless one is passed to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tilewise._extension import native
from tilewise._system import cache_folder
from tilewise.errors import TilewiseError

if TYPE_CHECKING:
    from tilewise.backend.registry import TileChooser


def is_enabled() -> bool:
    """Tell whether tuned tiles are used: the extension exists and ``TILEWISE_TUNED`` is not 0."""
    return native is not None and os.environ.get("TILEWISE_TUNED", "1") != "0"


def tuned_chooser() -> TileChooser | None:
    """Return a chooser of the tiles tuned on this machine; None if there are none."""
    if native is None or not is_enabled():
        return None
    folder = cache_folder() / "tune"
    if not any((source / "choices.jsonl").exists() for source in (folder, folder / "calibration")):
        return None
    from tilewise.tune.choose.tuned_table import load_tuned_table

    try:
        table, _ = load_tuned_table(native)
    except (OSError, TilewiseError):  # an unreadable table is ignored here; `tilewise tune` reports the error
        return None
    return table if table.tiles else None


def calibration_offer() -> str | None:
    """Return a line that suggests `tilewise calibrate`, once per machine; None afterwards or if calibrated."""
    folder = cache_folder() / "tune"
    marker = folder / "calibration-offered"
    try:
        if not is_enabled() or marker.exists() or (folder / "calibration").exists():
            return None
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError:  # a calibration could not be stored either
        return None
    return "`tilewise calibrate` tunes a few dozen common kernels, or your own shapes, for this machine in a minute."
