"""The sandbox: strangers' programs in bubblewrap with seccomp rules and limits, asked and timed from outside."""

from tilewise_arena.sandbox.host import Submitted
from tilewise_arena.sandbox.score import score_plugin

__all__ = ["Submitted", "score_plugin"]
