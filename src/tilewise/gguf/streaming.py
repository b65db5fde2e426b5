"""Tokens to text as they come: half characters are held back, and whatever may be the beginning of a stop word."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """`add` the bytes of each token and write what it returns; `stopped` says that a stop word has come.

    >>> stream = TextStream(["END"])
    >>> [stream.add(part) for part in (b"a", b"E", b"N", b"x", b"EN", b"D!")], stream.stopped
    (['a', '', '', 'ENx', '', ''], True)
    """

    def __init__(self, stop_words: Iterable[str] = ()) -> None:
        self._stops: Sequence[str] = [word for word in stop_words if word]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def add(self, content: bytes) -> str:
        """The text that is certain now."""
        return self._certain(self._decoder.decode(content))

    def end(self) -> str:
        """What was still held back."""
        rest = self._certain(self._decoder.decode(b"", True)) + self._held
        self._held = ""
        return rest

    def _certain(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(word) for word in self._stops) if at >= 0]
        if found:
            certain, self._held, self.stopped = self._held[: min(found)], "", True
            return certain
        keep = max((self._overlap(word) for word in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def _overlap(self, word: str) -> int:
        """How much of the end may be the beginning of the word."""
        longest = min(len(word) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(word[:n])), 0)
