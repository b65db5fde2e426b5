"""Text to train a character model on: the language reference inside Python itself (`pydoc_data.topics`).

It needs no download, and is plain English with code: 0.46 million characters. The vocabulary is fixed: newline and the
95 printable ASCII characters, in that order; typographic quotes, dashes and the ellipsis are spelled in ASCII, anything
else becomes "?". The text differs a little between Python versions, so figures belong to one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, UnavailableError

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
_SPELLED = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
_UNKNOWN = VOCABULARY.index("?")

Ids = npt.NDArray[np.int64]


def _code_table() -> Ids:
    table = np.full(128, _UNKNOWN, np.int64)
    for i, character in enumerate(VOCABULARY):
        table[ord(character)] = i
    return table


def encode(string: str) -> Ids:
    """Characters to token ids.

    >>> encode("ab")
    array([66, 67])
    """
    # What a terminal sends that is no UTF-8 arrives as surrogates: unknown characters, like any other.
    codes = np.frombuffer(string.translate(_SPELLED).encode("utf-32-le", "surrogatepass"), np.uint32)
    return _code_table()[np.where(codes < 128, codes, 127)]


def decode(ids: Any) -> str:
    """Token ids to characters."""
    numbers = np.asarray(ids).reshape(-1)
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(VOCABULARY)):
        raise ConfigurationError(f"token ids go from 0 to {len(VOCABULARY) - 1}")
    return "".join(VOCABULARY[i] for i in numbers)


@dataclass(frozen=True)
class TextData:
    """Token ids to train on, and the last tenth of the text to validate with."""

    train: Ids
    valid: Ids
    vocabulary: str = VOCABULARY


def text(content: str | None = None) -> TextData:
    """The topics of Python's own reference in alphabetical order, or a text of your own, as token ids."""
    ids = encode(_topics() if content is None else content)
    cut = len(ids) - len(ids) // 10
    return TextData(ids[:cut], ids[cut:])


def _topics() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UnavailableError("this Python comes without pydoc_data; pass a text of your own") from None
    return "\n\n".join(topics[name] for name in sorted(topics))
