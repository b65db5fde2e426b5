"""Collectors that measure tile spaces on a CPU or through Triton, the store of measurements, the tuner and replay."""

from typing import Any

from tilewise.tune.collecting import Collected, collect
from tilewise.tune.replay import Replay, replay
from tilewise.tune.tuner import Tuned, Tuner

__all__ = ["Collected", "Replay", "Tuned", "Tuner", "collect", "disable", "enable", "replay", "tuned"]


def __getattr__(name: str) -> Any:
    # The chooser reads the backend's tiles, which collecting and replaying do without.
    if name in ("disable", "enable", "tuned"):
        from tilewise.tune import chooser

        return getattr(chooser, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
