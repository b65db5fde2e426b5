"""The sandbox: untrusted programs run in bubblewrap with a seccomp filter and limits, and are timed from outside."""

from tilewise_arena.sandbox.host import Submitted
from tilewise_arena.sandbox.score import score_plugin

__all__ = ["Submitted", "score_plugin"]
