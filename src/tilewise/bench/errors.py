"""Errors of the competition: an entry that breaks a rule, and a machine too noisy to score one."""

from __future__ import annotations

from tilewise.errors import Rejected, TilewiseError

__all__ = ["Rejected", "TooNoisy"]


class TooNoisy(TilewiseError, RuntimeError):
    """Timings on this machine vary too much for a score to mean anything; the entry itself is not at fault."""
