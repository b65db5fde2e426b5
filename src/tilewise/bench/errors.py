"""Why the competition refuses something: a sentence for the person who sent it, and a short code for programs."""

from __future__ import annotations

from tilewise.errors import TilewiseError


class Rejected(TilewiseError, ValueError):
    """An entry that breaks a rule; `code` names the rule (see docs/competition.md), the message says where."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TooNoisy(TilewiseError, RuntimeError):
    """The machine was too restless for a score to mean anything; nothing is wrong with the entry."""
