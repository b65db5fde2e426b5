"""Text for training a character model: the language reference that comes with Python (`pydoc_data.topics`).

It needs no download and is English with code, 0.46 million characters. The vocabulary is fixed: newline and the 95
printable ASCII characters, in that order. Typographic quotes, dashes and the ellipsis are replaced by ASCII, other
characters by "?". The text differs slightly between Python versions, so a training result is valid for one version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.errors import ConfigurationError, UnavailableError

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
_TO_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
_UNKNOWN = VOCABULARY.index("?")
_PIECE = 1 << 16  # characters encoded at once; arbitrary

Ids = npt.NDArray[np.int64]


def _code_table() -> Ids:
    """Return each ASCII code's index in the vocabulary, `_UNKNOWN` for characters outside of it."""
    table = np.full(128, _UNKNOWN, np.int64)
    for i, character in enumerate(VOCABULARY):
        table[ord(character)] = i
    return table


def encode(string: str) -> Ids:
    """Convert characters to token ids.

    >>> encode("ab")
    array([66, 67])
    """
    string, table = string.translate(_TO_ASCII), _code_table()
    ids = np.empty(len(string), np.int64)
    # In pieces, so that a large text needs little more memory than its ids.
    for first in range(0, len(string), _PIECE):
        # Invalid UTF-8 from a terminal arrives as surrogates, which become unknown characters like any other.
        codes = np.frombuffer(string[first : first + _PIECE].encode("utf-32-le", "surrogatepass"), np.uint32)
        # Entry 127 (DEL) of the table is the unknown character.
        ids[first : first + _PIECE] = table[np.where(codes < 128, codes, 127)]
    return ids


def decode(ids: Any) -> str:
    """Convert token ids to characters."""
    numbers = np.asarray(ids).reshape(-1)
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(VOCABULARY)):
        raise ConfigurationError(f"token ids must be from 0 to {len(VOCABULARY) - 1}")
    return "".join(VOCABULARY[i] for i in numbers)


@dataclass(frozen=True)
class TextData:
    """Token ids for training, and the last tenth of the text for validation."""

    train: Ids
    valid: Ids
    vocabulary: str = VOCABULARY


def text(content: str | None = None) -> TextData:
    """Encode the topics of Python's language reference in alphabetical order, or your own text."""
    ids = encode(_topics() if content is None else content)
    cut = len(ids) - len(ids) // 10
    return TextData(ids[:cut], ids[cut:])


def _topics() -> str:
    """Return the text of Python's built-in help topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UnavailableError("this Python has no pydoc_data; pass your own text") from None
    return "\n\n".join(topics[name] for name in sorted(topics))
