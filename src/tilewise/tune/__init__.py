"""Collectors that measure tile spaces on a CPU or through Triton, the store of measurements, the tuner and replay."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.tune.chooser import disable, enable, tuned
    from tilewise.tune.measure.collect import Collected, collect
    from tilewise.tune.search.replay import Replay, replay
    from tilewise.tune.tuner import Tuned, Tuner

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "replay", "tuned"]

_MODULES = {
    "Collected": "measure.collect", "collect": "measure.collect", "Replay": "search.replay", "replay": "search.replay", "Tuned": "tuner",
    "Tuner": "tuner", "disable": "chooser", "enable": "chooser", "tuned": "chooser",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Each at its first use: a process that only looks up what was tuned before needs none of them.
    if name in _MODULES:
        return getattr(importlib.import_module(f"tilewise.tune.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
