"""Tuning: families of kernels, measuring them, searching for their best configurations, and choosing.

families/    what is tuned: one family for each kind of kernel
workloads/   the programs whose kernels are measured
measure/     devices, sampling, the collectors, export
search/      the Gaussian process, stopping, calibration, replay
choose/      the tuner, the cache of choices, the framework's chooser, autotune, check
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.store.frame import frame
    from tilewise.tune.choose.chooser import disable, enable, tuned
    from tilewise.tune.choose.tuner import Tuned, Tuner
    from tilewise.tune.measure.collect import Collected, collect
    from tilewise.tune.search.replay import Replay, replay

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "frame", "replay", "tuned"]

_MODULES = {
    "Collected": "tune.measure.collect", "collect": "tune.measure.collect", "Replay": "tune.search.replay",
    "replay": "tune.search.replay", "Tuned": "tune.choose.tuner", "Tuner": "tune.choose.tuner",
    "disable": "tune.choose.chooser", "enable": "tune.choose.chooser", "tuned": "tune.choose.chooser",
    "frame": "store.frame",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Each at its first use: a process that only looks up what was tuned before needs none of them.
    if name in _MODULES:
        return getattr(importlib.import_module(f"tilewise.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
