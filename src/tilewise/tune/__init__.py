"""Tuning: kernel families, their measurement, the search for the best configuration, and its use.

families/    the kernels that are tuned, one family per kind
workloads/   the programs whose kernels are measured
measure/     devices, sampling, the collectors, export
search/      the Gaussian process, stopping, calibration, confidence, replay
choose/      the decision procedure, the tuner, the cache of choices, the framework's chooser
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.store.aggregate import frame
    from tilewise.tune.choose.chooser import disable, enable, tuned
    from tilewise.tune.choose.tuner import Tuned, Tuner
    from tilewise.tune.measure.collect import Collected, collect
    from tilewise.tune.search.replay import Replay, replay

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "frame", "replay", "tuned"]

_MODULES = {
    "Collected": "tune.measure.collect", "collect": "tune.measure.collect", "Replay": "tune.search.replay",
    "replay": "tune.search.replay", "Tuned": "tune.choose.tuner", "Tuner": "tune.choose.tuner",
    "disable": "tune.choose.chooser", "enable": "tune.choose.chooser", "tuned": "tune.choose.chooser",
    "frame": "store.aggregate",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Import each name at its first use: a process that only looks up tuned tiles needs none of them.
    if name in _MODULES:
        return getattr(importlib.import_module(f"tilewise.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
