"""The choice of a calibrated machine, for shapes that nothing was tuned for and that have earned one.

The calibration and, where it proved to help, the cost model are loaded when the first shape has computed for long
enough that choosing pays; a program whose shapes hardly repeat never loads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilewise.errors import TilewiseError
from tilewise.tune.families.cpu.tiles import tile_for

LEAST_WORK, PATIENCE = 100_000, 1_000_000_000  # multiplications; some twenty milliseconds of computing before a choice


def calibrated_choice(module: Any) -> Callable[[Any], Any]:
    """The tile for a key of the backend, under the instruction set in force now; None for the default."""
    isa, load = module.isa(), functools.cache(lambda: _load(module))

    def choose(key: Any) -> Any:
        if key[2] != "float32" or module.isa() != isa:
            return None
        try:
            return _choose(module, load(), key)
        except (TilewiseError, ValueError, KeyError):  # nothing that was kept may end a product
            return None

    return choose


def _load(module: Any) -> Any:
    from tilewise.tune.choose.calibration.calibrated import find_calibration, model_scores

    found, _ = find_calibration(module)
    if found is None or not any(fitted.hyper.coefficient for fitted in found.families.values()):
        return found
    return find_calibration(module, scores=model_scores())[0]


def _choose(module: Any, calibrated: Any, key: Any) -> Any:
    from tilewise.tune.choose.chooser import problem_of
    from tilewise.tune.measure.cpu.device import CpuDevice

    problem = None if calibrated is None else problem_of(key, module.num_threads())
    if problem is None or not calibrated.covers(problem.family):
        return None
    device = CpuDevice()
    problem = device.problem(dict(problem))  # on one thread where it is too small to share
    config = calibrated.choose(problem, None if problem.family == "matmul" else device.configs(problem))
    return None if config is None else tile_for(key[0], config)
