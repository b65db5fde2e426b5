"""Text to token ids and back, by the vocabulary in a GGUF file: byte-level BPE (GPT-2, LLaMA 3, Qwen 2) or
SentencePiece's (LLaMA 1 and 2, Mistral).

Byte-level BPE spells every byte as a printable letter, cuts the text into words, and joins neighbours in the order of
the file's merges. SentencePiece writes spaces as "▁" and joins neighbours whose union has the highest score; characters
it does not know become their bytes. Both end in bytes, so a text that is streamed holds back half a character.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.gguf.merging import merge

_SPACE = "▁"
_CONTROL, _BYTE = 3, 6
_MOST_TOKENS = 1 << 21


class Tokenizer(Protocol):
    """What `generate` on a file needs."""

    stops: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids, with the beginning-of-text token where the model wants one."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text, in UTF-8."""
        ...


@dataclass(frozen=True)
class _Vocabulary:
    """What both kinds share."""

    tokens: list[str]
    types: list[int]
    begin: int | None  # the token put first, or None
    stops: frozenset[int]

    def ids(self) -> dict[str, int]:
        """The first token of each spelling; control tokens are not text."""
        found: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if self.types[i] != _CONTROL:
                found.setdefault(token, i)
        return found

    def started(self, ids: list[int]) -> list[int]:
        return ids if self.begin is None else [self.begin, *ids]


def tokenizer_of(metadata: dict[str, Any], vocabulary: int, path: str) -> Tokenizer | None:
    """The tokenizer in a file's metadata; None where it has none."""
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in ("gpt2", "llama"):
        raise FileFormatError(f"{path} has a tokenizer of the kind {str(kind)[:40]!r}; gpt2 and llama are read.")
    shared = _vocabulary(metadata, vocabulary, path, kind)
    if kind == "llama":
        scores = [float(s) for s in _numbers(metadata, "tokenizer.ggml.scores", len(shared.tokens), path, 0)]
        return SentencePieceTokenizer(
            shared, scores, metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
        )
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or len(merges) > _MOST_TOKENS:
        raise FileFormatError(f"{path} has a damaged tokenizer: its merges are no list of strings.")
    return ByteLevelTokenizer(shared, merges, str(metadata.get("tokenizer.ggml.pre", "gpt-2")))


def _vocabulary(metadata: dict[str, Any], size: int, path: str, kind: str) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= min(size, _MOST_TOKENS):
        raise FileFormatError(f"{path} has a damaged tokenizer: its tokens are not those of {size} embeddings.")
    types = [int(t) for t in _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), path, 1)]
    special: dict[str, int] = {}
    for name in ("bos", "eos", "eot"):
        usual = {"bos": 1, "eos": 2}.get(name) if kind == "llama" else None
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", usual)
        if isinstance(token, int) and 0 <= token < len(tokens):
            special[name] = token
    later = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    wanted = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or later)
    stops = frozenset(special[name] for name in ("eos", "eot") if name in special)
    return _Vocabulary(tokens, types, special.get("bos") if wanted is True else None, stops)


def _numbers(metadata: dict[str, Any], key: str, count: int, path: str, default: float) -> Any:
    values = metadata.get(key)
    if values is None:
        return [default] * count
    if isinstance(values, list | str | int | float) or len(values) != count:
        raise FileFormatError(f"{path} has a damaged tokenizer: {key} has not one number for each token.")
    return values.tolist()


# --- SentencePiece ---


class SentencePieceTokenizer:
    """Neighbours are joined by score; what is unknown becomes bytes."""

    def __init__(self, vocabulary: _Vocabulary, scores: list[float], prefix: bool) -> None:
        self._shared, self._prefix, self.stops = vocabulary, prefix, vocabulary.stops
        self._ids, self._scores = vocabulary.ids(), scores
        self._bytes = {
            int(token[3:5], 16): i
            for i, token in enumerate(vocabulary.tokens)
            if vocabulary.types[i] == _BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        }
        self._values = {i: byte for byte, i in self._bytes.items()}

    def encode(self, text: str) -> list[int]:
        spelled = text.replace(" ", _SPACE)
        if self._prefix and text:
            spelled = _SPACE + spelled
        return self._shared.started([i for piece in merge(list(spelled), self._cost) for i in self._piece(piece)])

    def _cost(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _piece(self, piece: str) -> list[int]:
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        found = [self._bytes.get(byte) for byte in piece.encode("utf-8", "replace")]
        if None in found:
            raise ConfigurationError(f"this model's vocabulary has no token for {piece!r}")
        return [i for i in found if i is not None]

    def token_bytes(self, token: int) -> bytes:
        if token in self._values:
            return bytes([self._values[token]])
        if not 0 <= token < len(self._shared.tokens) or self._shared.types[token] == _CONTROL:
            return b""
        return self._shared.tokens[token].replace(_SPACE, " ").encode("utf-8", "replace")


# --- byte-level BPE ---


@cache
def _letters() -> list[str]:
    """The printable letter that stands for each byte: itself where it is one, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class ByteLevelTokenizer:
    """Words are spelled in bytes, and neighbours joined in the order of the file's merges."""

    def __init__(self, vocabulary: _Vocabulary, merges: list[str], cut: str) -> None:
        self._shared, self.stops = vocabulary, vocabulary.stops
        self._ids = vocabulary.ids()
        self._ranks = {tuple(pair.split(" ", 1)): rank for rank, pair in reversed(list(enumerate(merges)))}
        self._pattern, self._endings = _CUTS.get(cut, _CUTS["gpt-2"])
        self._whole_words = cut == "llama-bpe"  # a word that is a token is not taken apart
        self._bytes = {letter: byte for byte, letter in enumerate(_letters())}

    def encode(self, text: str) -> list[int]:
        return self._shared.started([i for word in self._words(text) for i in self._word(word)])

    def _words(self, text: str) -> list[str]:
        """The text cut into words, as by a regular expression with Unicode's letters and numbers. Python's has none of
        these, so it runs over a text of classes."""
        classes, words, at = "".join(map(_class_of, text)), [], 0
        while at < len(text):
            ending = self._endings.match(text, at)
            found = ending or self._pattern.match(classes, at)
            end = found.end() if found is not None and found.end() > at else at + 1
            words.append(text[at:end])
            at = end
        return words

    def _word(self, word: str) -> list[int]:
        letters = _letters()
        spelled = [letters[byte] for byte in word.encode("utf-8", "replace")]
        whole = self._ids.get("".join(spelled)) if self._whole_words else None
        if whole is not None:
            return [whole]
        found: list[int] = []
        for piece in merge(spelled, lambda a, b: self._ranks.get((a, b))):
            token = self._ids.get(piece)
            parts = [token] if token is not None else [self._ids.get(letter) for letter in piece]
            if None in parts:
                raise ConfigurationError(f"this model's vocabulary has no token for {word!r}")
            found += [i for i in parts if i is not None]
        return found

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._shared.tokens) or self._shared.types[token] == _CONTROL:
            return b""
        spelled = self._shared.tokens[token]
        if all(letter in self._bytes for letter in spelled):
            return bytes(self._bytes[letter] for letter in spelled)
        return spelled.encode("utf-8", "replace")


@lru_cache(maxsize=4096)
def _class_of(character: str) -> str:
    """a letter, 0 number, space, newline, tab (any other white space), ! (anything else)."""
    if character in " \n":
        return character
    if character == "\r":
        return "\n"
    if character.isspace():
        return "\t"
    kind = unicodedata.category(character)[0]
    return {"L": "a", "N": "0"}.get(kind, "!")


_ENDINGS = re.compile("'(?:s|t|re|ve|m|ll|d)")
_ENDINGS_OF_ANY_CASE = re.compile("'(?:s|t|re|ve|m|ll|d)", re.IGNORECASE)
_GPT2 = " ?a+| ?0+| ?!+|[ \t\n]+(?![^ \t\n])|[ \t\n]+"
_LATER = "[^\na0]?a+|0{1,%d}| ?!+\n*|[ \t\n]*\n+|[ \t\n]+(?![^ \t\n])|[ \t\n]+"
_CUTS = {
    "gpt-2": (re.compile(_GPT2), _ENDINGS),
    "llama-bpe": (re.compile(_LATER % 3), _ENDINGS_OF_ANY_CASE),
    "qwen2": (re.compile(_LATER % 1), _ENDINGS_OF_ANY_CASE),
}
