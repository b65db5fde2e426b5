"""Tile spaces, collectors that measure them on a CPU or through Triton, and the store that keeps the measurements."""

from tilewise.tune.collecting import Collected, collect

__all__ = ["Collected", "collect"]
