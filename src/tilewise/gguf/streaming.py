"""Convert streamed tokens to text, holding back incomplete characters and possible beginnings of stop words."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """Call `add` with the bytes of each token and print what it returns; `stopped` is True after a stop word.

    >>> stream = TextStream(["END"])
    >>> [stream.add(part) for part in (b"a", b"E", b"N", b"x", b"EN", b"D!")], stream.stopped
    (['a', '', '', 'ENx', '', ''], True)
    """

    def __init__(self, stop_words: Iterable[str] = ()) -> None:
        self._stops: Sequence[str] = [word for word in stop_words if word]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self.stopped = False

    def add(self, content: bytes) -> str:
        """Add bytes and return the text that is complete and cannot belong to a stop word."""
        return self._release(self._decoder.decode(content))

    def end(self) -> str:
        """Return the remaining text at the end of the stream."""
        remaining = self._release(self._decoder.decode(b"", True)) + self._pending
        self._pending = ""
        return remaining

    def _release(self, text: str) -> str:
        """Add text to the pending text and return the part that cannot belong to a stop word."""
        if self.stopped:
            return ""
        self._pending += text
        positions = [position for position in map(self._pending.find, self._stops) if position >= 0]
        if positions:
            released, self._pending, self.stopped = self._pending[: min(positions)], "", True
            return released
        # Hold back the longest end that could still become a stop word.
        overlap = max(map(self._overlap, self._stops), default=0)
        end = len(self._pending) - overlap
        released, self._pending = self._pending[:end], self._pending[end:]
        return released

    def _overlap(self, word: str) -> int:
        """Length of the longest end of the pending text that is a beginning of the word."""
        longest = min(len(word) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(word[:n])), 0)
