"""The errors that tilewise raises: one sentence saying what was wrong, where, and what to do.

The command line prints that sentence and exits with code 2; any other exception that escapes is a bug. Subclasses also
derive from the built-in exception a Python user would expect, so ``except ValueError`` works.
"""

from collections.abc import Iterable
from typing import Any


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Complete a sentence about a misspelt word with the most similar candidate, or with all candidates."""
    import difflib

    names = list(candidates)
    lower = {name.lower(): name for name in reversed(names)}
    similar = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[similar[0]]!r}?" if similar else f"known are {', '.join(names)}."


def type_name(value: object) -> str:
    """Name the type of a value, with its library if that is another one: `torch.Linear` is not `Linear`.

    A class or a function was passed instead of what a call of it gives.
    """
    if isinstance(value, type):
        return f"class {value.__name__} (pass an instance, as {value.__name__}(...) gives)"
    if callable(value) and hasattr(value, "__name__"):
        return f"function {value.__name__} (call it: {value.__name__}(...))"
    library = type(value).__module__.partition(".")[0]
    return type(value).__name__ if library in (object.__module__, __package__) else f"{library}.{type(value).__name__}"


def as_array(value: Any) -> Any:
    """Convert what people pass as an array: lists, tensors, and torch's tensors that require a gradient."""
    import numpy as np

    try:
        return np.asarray(value.detach() if type_name(value).startswith("torch.") else value)
    except ValueError as error:
        raise ShapeError(f"a {type_name(value)} is not an array: {error}") from None


_MAX_LENGTH, _MAX_ENDING = 400, 120  # characters of a sentence, and of the ending that a long one keeps


def printable_sentence(text: str) -> str:
    """Return a message as one line of at most 400 printable characters.

    Messages quote names and values of files that strangers have written: those may have thousands of characters, or
    control characters that change what a terminal shows. A long message keeps its beginning and its ending.

    >>> printable_sentence("a\\x1b[2Jb")
    'a?[2Jb'
    """
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - _MAX_ENDING - 3]} … {text[-_MAX_ENDING:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class TilewiseError(Exception):
    """Base class of all errors whose message is meant for the user: one line of printable characters."""

    def __init__(self, *arguments: object) -> None:
        """Bound the length and the characters of the message."""
        super().__init__(*(printable_sentence(a) if isinstance(a, str) else a for a in arguments))


class ShapeError(TilewiseError, ValueError):
    """Shapes do not fit together."""


class DtypeError(TilewiseError, TypeError):
    """The operation does not support this dtype."""


class GradientError(TilewiseError, RuntimeError):
    """A backward pass cannot be computed."""


class FileFormatError(TilewiseError, ValueError):
    """A file is truncated, malicious, or in another format than expected."""


class ConfigurationError(TilewiseError, ValueError):
    """A setting, flag or environment variable has an invalid value."""


class AccuracyError(TilewiseError, ArithmeticError):
    """A converted model that computes something else than the original, or is less precise than promised."""


class UnavailableError(TilewiseError, RuntimeError):
    """This machine or installation lacks something."""


class Rejected(TilewiseError, ValueError):
    """An entry or request that breaks a rule; `code` names the rule for programs, the message explains it to people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MissingFileError(FileFormatError, UnavailableError):
    """A file does not exist."""


class TooNoisy(TilewiseError, RuntimeError):
    """Timings on this machine vary too much for a score to mean anything; the entry itself is not at fault."""
