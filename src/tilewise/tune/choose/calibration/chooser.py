"""The chooser of a calibrated machine: tiles that were tuned, else the calibration's choice once a shape has earned it.

The calibration and, where it proved to help, the cost model are loaded when the first shape has computed for long
enough that choosing pays; a program whose shapes hardly repeat never loads them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tilewise.errors import TilewiseError
from tilewise.tune.choose.cache import Choice
from tilewise.tune.choose.kept import KeptTiles, Key
from tilewise.tune.families.cpu.tiles import tile_for

_MOST_WORK = 1 << 33  # multiplications of the largest kernels that are ever measured


class CalibratedTiles(KeptTiles):
    """A `TileChooser` of what was kept and what was learned on this machine."""

    least_work, patience = 100_000, 1_000_000_000  # some twenty milliseconds of computing before a choice

    def __init__(self, module: Any, choices: Sequence[Choice]) -> None:
        super().__init__(module, choices)
        self.calibrated = functools.cache(self._load)

    def choose(self, key: Key) -> Any:
        if key[2] != "float32" or self._native.isa() != self._isa:
            return None
        try:
            return self._choose(key)
        except (TilewiseError, ValueError, KeyError):  # nothing that was kept may end a product
            return None

    def _load(self) -> Any:
        from tilewise.tune.choose.calibration.calibrated import find_calibration, model_scores

        found, _ = find_calibration(self._native)
        if found is None or not any(fitted.hyper.slope for fitted in found.families.values()):
            return found
        return find_calibration(self._native, scores=model_scores())[0]

    def _choose(self, key: Key) -> Any:
        from tilewise.tune.choose.chooser import problem_of
        from tilewise.tune.measure.cpu.device import CpuDevice

        calibrated = self.calibrated()
        problem = None if calibrated is None else problem_of(key, self._native.num_threads())
        if problem is None or not calibrated.covers(problem.family):
            return None
        device = CpuDevice()
        problem = device.problem(dict(problem))  # on one thread where it is too small to share
        configs = None if problem.family == "matmul" else device.configs(problem)
        config = calibrated.choose(problem, configs)
        return None if config is None else tile_for(key[0], config)
