"""The open division: plugins in a jail, asked, checked and timed from outside of it."""

from tilewise.bench.plugins.score import score_plugin

__all__ = ["score_plugin"]
