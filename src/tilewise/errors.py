"""Every error tilewise raises on purpose: one sentence saying what was wrong, where, and what to do.

The command line prints that sentence and exits with code 2; anything else that escapes is a defect. Subclasses also
derive from the built-in exception a Python user would expect, so ``except ValueError`` keeps working.
"""

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a misspelt word: what is near it, or all there is."""
    import difflib

    names = list(known)
    plain = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.6)
    return f"did you mean {plain[near[0]]!r}?" if near else f"known are {', '.join(names)}."


class TilewiseError(Exception):
    """Base of all errors with a sentence meant for the user."""


class ShapeError(TilewiseError, ValueError):
    """Sizes that do not fit together."""


class DtypeError(TilewiseError, TypeError):
    """A number type the operation does not take."""


class GradientError(TilewiseError, RuntimeError):
    """A backward pass that cannot be carried out."""


class FileFormatError(TilewiseError, ValueError):
    """A file that is truncated, hostile, or not what its name says."""


class ConfigurationError(TilewiseError, ValueError):
    """A setting, flag or environment variable with a value that means nothing."""


class UnavailableError(TilewiseError, RuntimeError):
    """Something this machine or installation does not have."""


class Rejected(TilewiseError, ValueError):
    """An entry or request that breaks a rule; `code` names the rule for programs, the message explains it to people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MissingFileError(FileFormatError, UnavailableError):
    """A file that is not there."""
