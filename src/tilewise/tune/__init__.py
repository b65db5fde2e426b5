"""Tuning: families of kernels, measuring them, searching for their best configurations, and choosing.

problem.py   a problem, a configuration, a kernel
families/    what is tuned: one family for each kind of kernel
workloads/   the programs whose kernels are measured
measure/     devices, sampling, the store, the collector, export
search/      the Gaussian process, stopping, calibration, replay
choose/      the tuner, the cache of choices, the framework's chooser, autotune, check
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.tune.choose.chooser import disable, enable, tuned
    from tilewise.tune.choose.tuner import Tuned, Tuner
    from tilewise.tune.measure.collect import Collected, collect
    from tilewise.tune.measure.frame import frame
    from tilewise.tune.search.replay import Replay, replay

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "frame", "replay", "tuned"]

_MODULES = {
    "Collected": "measure.collect", "collect": "measure.collect", "Replay": "search.replay", "replay": "search.replay",
    "Tuned": "choose.tuner", "Tuner": "choose.tuner", "disable": "choose.chooser", "enable": "choose.chooser",
    "tuned": "choose.chooser", "frame": "measure.frame",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Each at its first use: a process that only looks up what was tuned before needs none of them.
    if name in _MODULES:
        return getattr(importlib.import_module(f"tilewise.tune.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
