"""Collectors that measure tile spaces on a CPU or through Triton, the store of measurements, the tuner and replay."""

from tilewise.tune.collecting import Collected, collect
from tilewise.tune.replay import Replay, replay

__all__ = ["Collected", "Replay", "collect", "replay"]
