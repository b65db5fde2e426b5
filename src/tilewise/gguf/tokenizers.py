"""Tokenizers of GGUF files: byte-level BPE (GPT-2, LLaMA 3, Qwen 2) and SentencePiece (LLaMA 1 and 2, Mistral).

Byte-level BPE writes every byte as a printable character, splits the text into words, and joins neighbours in the order
of the file's merges. SentencePiece writes spaces as "▁" and joins the neighbours whose union has the highest score;
unknown characters become bytes. Both decode to bytes, so streamed text can end inside a character.
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
_CONTROL, _BYTE = 3, 6  # token types of the format
_MAX_TOKENS = 1 << 21  # guards against hostile files


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    stops: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Convert text to token ids, with the beginning-of-text token if the model uses one."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token."""
        ...


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens with their types, and the special tokens."""

    tokens: list[str]
    types: list[int]
    begin: int | None  # beginning-of-text token, if the model uses one
    stops: frozenset[int]

    def ids(self) -> dict[str, int]:
        """Map each spelling to its first token, without control tokens."""
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if self.types[i] != _CONTROL:
                ids.setdefault(token, i)
        return ids

    def with_begin(self, ids: list[int]) -> list[int]:
        return ids if self.begin is None else [self.begin, *ids]


def tokenizer_of(metadata: dict[str, Any], vocabulary: int, path: str) -> Tokenizer | None:
    """Create the tokenizer described in a file's metadata; None if there is none."""
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in ("gpt2", "llama"):
        raise FileFormatError(
            f"{path} has a tokenizer of the unsupported kind {str(kind)[:40]!r}; gpt2 and llama are supported."
        )
    shared = _vocabulary(metadata, vocabulary, path, kind)
    if kind == "llama":
        scores = [float(s) for s in _numbers(metadata, "tokenizer.ggml.scores", len(shared.tokens), path, 0)]
        return SentencePieceTokenizer(
            shared, scores, metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
        )
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or len(merges) > _MAX_TOKENS:
        raise FileFormatError(f"{path} has a damaged tokenizer: its merges are not a list of strings.")
    return ByteLevelTokenizer(shared, merges, str(metadata.get("tokenizer.ggml.pre", "gpt-2")))


def _vocabulary(metadata: dict[str, Any], size: int, path: str, kind: str) -> _Vocabulary:
    """Read the tokens and the special tokens; `size` is the number of embeddings."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= min(size, _MAX_TOKENS):
        raise FileFormatError(f"{path} has a damaged tokenizer: its tokens do not match {size} embeddings.")
    types = [int(t) for t in _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), path, 1)]
    special: dict[str, int] = {}
    for name in ("bos", "eos", "eot"):
        default = {"bos": 1, "eos": 2}.get(name) if kind == "llama" else None
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        if isinstance(token, int) and 0 <= token < len(tokens):
            special[name] = token
    is_llama3 = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    add_begin = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or is_llama3)
    stops = frozenset(special[name] for name in ("eos", "eot") if name in special)
    return _Vocabulary(tokens, types, special.get("bos") if add_begin is True else None, stops)


def _numbers(metadata: dict[str, Any], key: str, count: int, path: str, default: float) -> Any:
    """Read one number per token, or `default` for all tokens if the key is missing."""
    values = metadata.get(key)
    if values is None:
        return [default] * count
    if isinstance(values, list | str | int | float) or len(values) != count:
        raise FileFormatError(f"{path} has a damaged tokenizer: {key} does not have one number per token.")
    return values.tolist()


# --- SentencePiece ---


class SentencePieceTokenizer:
    """SentencePiece BPE: neighbours are joined by score; unknown characters become bytes."""

    def __init__(self, vocabulary: _Vocabulary, scores: list[float], prefix: bool) -> None:
        self._vocabulary, self._prefix, self.stops = vocabulary, prefix, vocabulary.stops
        self._ids, self._scores = vocabulary.ids(), scores
        self._bytes = {
            int(token[3:5], 16): i
            for i, token in enumerate(vocabulary.tokens)
            if vocabulary.types[i] == _BYTE and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        }
        self._values = {i: byte for byte, i in self._bytes.items()}

    def encode(self, text: str) -> list[int]:
        spelling = text.replace(" ", _SPACE)
        if self._prefix and text:
            spelling = _SPACE + spelling
        pieces = merge(list(spelling), self._cost)
        return self._vocabulary.with_begin([i for piece in pieces for i in self._piece_ids(piece)])

    def _cost(self, left: str, right: str) -> float | None:
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _piece_ids(self, piece: str) -> list[int]:
        """The token of a piece, or the tokens of its bytes."""
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        ids = [self._bytes.get(byte) for byte in piece.encode("utf-8", "replace")]
        if None in ids:
            raise ConfigurationError(f"this model's vocabulary has no token for {piece!r}")
        return [i for i in ids if i is not None]

    def token_bytes(self, token: int) -> bytes:
        if token in self._values:
            return bytes([self._values[token]])
        if not 0 <= token < len(self._vocabulary.tokens) or self._vocabulary.types[token] == _CONTROL:
            return b""
        return self._vocabulary.tokens[token].replace(_SPACE, " ").encode("utf-8", "replace")


# --- byte-level BPE ---


@cache
def _letters() -> list[str]:
    """The printable character of each byte (as in GPT-2): the byte itself if printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


class ByteLevelTokenizer:
    """Byte-level BPE: words are written as bytes, and neighbours joined in the order of the file's merges."""

    def __init__(self, vocabulary: _Vocabulary, merges: list[str], splitter: str) -> None:
        self._vocabulary, self.stops = vocabulary, vocabulary.stops
        self._ids = vocabulary.ids()
        self._ranks = {tuple(pair.split(" ", 1)): rank for rank, pair in reversed(list(enumerate(merges)))}
        self._pattern, self._endings = _SPLITTERS.get(splitter, _SPLITTERS["gpt-2"])
        self._whole_words = splitter == "llama-bpe"  # LLaMA 3 does not split a word that is a token
        self._bytes = {letter: byte for byte, letter in enumerate(_letters())}

    def encode(self, text: str) -> list[int]:
        return self._vocabulary.with_begin([i for word in self._words(text) for i in self._word_ids(word)])

    def _words(self, text: str) -> list[str]:
        """Split a text into words.

        The original patterns use Unicode classes (\\p{L}, \\p{N}), which Python's `re` lacks. So the text is first
        converted to one class character per character, and the pattern runs on that.
        """
        classes, words, start = "".join(map(_class_of, text)), [], 0
        while start < len(text):
            match = self._endings.match(text, start) or self._pattern.match(classes, start)
            end = match.end() if match is not None and match.end() > start else start + 1
            words.append(text[start:end])
            start = end
        return words

    def _word_ids(self, word: str) -> list[int]:
        """Tokens of one word."""
        letters = _letters()
        spelling = [letters[byte] for byte in word.encode("utf-8", "replace")]
        whole = self._ids.get("".join(spelling)) if self._whole_words else None
        if whole is not None:
            return [whole]
        ids: list[int] = []
        for piece in merge(spelling, lambda a, b: self._ranks.get((a, b))):
            token = self._ids.get(piece)
            piece_ids = [token] if token is not None else [self._ids.get(letter) for letter in piece]
            if None in piece_ids:
                raise ConfigurationError(f"this model's vocabulary has no token for {word!r}")
            ids += [i for i in piece_ids if i is not None]
        return ids

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._vocabulary.tokens) or self._vocabulary.types[token] == _CONTROL:
            return b""
        spelling = self._vocabulary.tokens[token]
        if all(letter in self._bytes for letter in spelling):
            return bytes(self._bytes[letter] for letter in spelling)
        return spelling.encode("utf-8", "replace")


@lru_cache(maxsize=4096)
def _class_of(character: str) -> str:
    """Class character: "a" for letters, "0" for numbers, " ", newline, tab for other white space, "!" for the rest."""
    if character in " \n":
        return character
    if character == "\r":
        return "\n"
    if character.isspace():
        return "\t"
    kind = unicodedata.category(character)[0]
    return {"L": "a", "N": "0"}.get(kind, "!")


# Contractions, and the word patterns of the original tokenizers written with class characters.
_ENDINGS = re.compile("'(?:s|t|re|ve|m|ll|d)")
_ENDINGS_ANY_CASE = re.compile("'(?:s|t|re|ve|m|ll|d)", re.IGNORECASE)
_GPT2 = " ?a+| ?0+| ?!+|[ \t\n]+(?![^ \t\n])|[ \t\n]+"
_GPT4 = "[^\na0]?a+|0{1,%d}| ?!+\n*|[ \t\n]*\n+|[ \t\n]+(?![^ \t\n])|[ \t\n]+"  # with the digits per number
_SPLITTERS = {
    "gpt-2": (re.compile(_GPT2), _ENDINGS),
    "llama-bpe": (re.compile(_GPT4 % 3), _ENDINGS_ANY_CASE),
    "qwen2": (re.compile(_GPT4 % 1), _ENDINGS_ANY_CASE),
}
