"""Tokenizers of GGUF files: byte-level BPE (GPT-2, LLaMA 3, Qwen, SmolLM, Phi-4) and SentencePiece (LLaMA 2, Gemma).

Byte-level BPE writes every byte as a printable character, splits the text into words, and joins neighbours in the order
of the file's merges. SentencePiece writes spaces as "▁" and joins the neighbours whose union has the highest score;
unknown characters become bytes. Both decode to bytes, so streamed text can end inside a character. Tokens that are
written out in a text (user-defined ones, and control tokens in chats) are taken out before anything else.
"""

from __future__ import annotations

import codecs
import heapq
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError, FileFormatError
from tilewise.tensor import Array

_SPACE = "▁"
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # token types of the format
_MAX_TOKENS = 1 << 21  # guards against hostile files
# Spellings of tokens that end an answer, whichever the file names as its end-of-text token.
_ENDINGS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens with their types, and the special tokens."""

    tokens: list[str]
    types: Array
    special: dict[str, int]  # by name: bos, eos, eot, eom
    adds_begin: bool

    def ids(self) -> dict[str, int]:
        """Map each token's text to its first id; control tokens are left out."""
        ids = dict(zip(reversed(self.tokens), range(len(self.tokens) - 1, -1, -1), strict=True))
        for token, i in self.of_types(_CONTROL).items():
            if ids.get(token) == i:
                del ids[token]
        return ids

    def of_types(self, *types: int) -> dict[str, int]:
        """Map the texts of tokens of these types to their ids."""
        places = np.flatnonzero(np.isin(self.types, types)).tolist()
        return {self.tokens[i]: i for i in places if self.tokens[i]}


class Tokenizer:
    """Converts text to token ids and back. `stops` are the tokens that end a text."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        """Collect the special tokens that are recognized as a whole in a text."""
        self._vocabulary, self._ids = vocabulary, vocabulary.ids()
        written = vocabulary.of_types(_CONTROL, _USER_DEFINED)
        ends = {written[spelling] for spelling in _ENDINGS if spelling in written}
        self.stops = frozenset(ends | {i for name, i in vocabulary.special.items() if name != "bos"})
        self._whole = {False: _WholeTokens(vocabulary.of_types(_USER_DEFINED)), True: _WholeTokens(written)}

    def encode(self, text: str, control: bool = False) -> list[int]:
        """Convert text to token ids, after the beginning-of-text token if the model uses one.

        Control tokens spelled out in the text are recognized only if `control`: a user's text must not contain them, a
        chat template's output does.
        """
        begin = self._vocabulary.special.get("bos")
        ids: list[int] = []
        for part in self._whole[control].split(text):
            ids += [part] if isinstance(part, int) else self._text_ids(part)
        return [begin, *ids] if self._vocabulary.adds_begin and begin is not None and ids[:1] != [begin] else ids

    def spelling(self, name: str) -> str:
        """Return the text of the special token `name` ("bos", "eos"); "" if the model has none."""
        token = self._vocabulary.special.get(name)
        return "" if token is None else self._vocabulary.tokens[token]

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; a control token has none."""
        if not 0 <= token < len(self._vocabulary.tokens) or self._vocabulary.types[token] == _CONTROL:
            return b""
        if self._vocabulary.types[token] == _USER_DEFINED:
            return self._vocabulary.tokens[token].encode("utf-8", "replace")
        return self._piece_bytes(token)

    def _text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        raise NotImplementedError

    def _piece_bytes(self, token: int) -> bytes:
        raise NotImplementedError


class _WholeTokens:
    """Finds special tokens spelled out in a text: the leftmost, and the longest at equal positions."""

    def __init__(self, ids: dict[str, int]) -> None:
        """Index the special tokens (text to id) by their first character and length."""
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(each, reverse=True) for first, each in lengths.items()}

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the special tokens' ids and the texts between them, in order."""
        start = position = 0
        while position < len(text):
            for length in self._lengths.get(text[position], ()):
                token = self._ids.get(text[position : position + length])
                if token is not None:
                    if start < position:
                        yield text[start:position]
                    yield token
                    start = position = position + length
                    break
            else:
                position += 1
        if start < len(text):
            yield text[start:]


def tokenizer_of(metadata: dict[str, Any], vocabulary: int, path: str) -> Tokenizer | None:
    """Create the tokenizer described in a file's metadata; None if there is none."""
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in _TOKENIZERS:
        supported = " and ".join(_TOKENIZERS)
        raise FileFormatError(
            f"{path} has a tokenizer of the unsupported kind {str(kind)[:40]!r}; {supported} are supported."
        )
    return _TOKENIZERS[kind](metadata, vocabulary, path)


def _sentence_piece(metadata: dict[str, Any], vocabulary: int, path: str) -> Tokenizer:
    """Build the tokenizer of a file with SentencePiece scores (tokenizer.ggml.model = llama)."""
    shared = _vocabulary(metadata, vocabulary, path, {"bos": 1, "eos": 2}, True)
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(shared.tokens), path, 0.0).tolist()
    return SentencePieceTokenizer(shared, scores, metadata.get("tokenizer.ggml.add_space_prefix", True) is not False)


def _byte_level(metadata: dict[str, Any], vocabulary: int, path: str) -> Tokenizer:
    """Build a byte-level BPE tokenizer; words are split as in GPT-2 unless the file says otherwise."""
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(name, str) or name not in _SPLITTERS:
        raise FileFormatError(f"{path} has a tokenizer that splits words in the unsupported way {str(name)[:40]!r}.")
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or len(merges) > _MAX_TOKENS:
        raise FileFormatError(f"{path} has a damaged tokenizer: its merges are not a list of strings.")
    splitter = _SPLITTERS[name]
    return ByteLevelTokenizer(_vocabulary(metadata, vocabulary, path, {}, splitter.whole_words), merges, splitter)


_TOKENIZERS = {"gpt2": _byte_level, "llama": _sentence_piece}


def _vocabulary(
    metadata: dict[str, Any], size: int, path: str, special: dict[str, int], adds_begin: bool
) -> _Vocabulary:
    """Read the `size` tokens of a file; `special` and `adds_begin` are defaults for missing metadata."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= min(size, _MAX_TOKENS):
        raise FileFormatError(f"{path} has a damaged tokenizer: its tokens do not match {size} embeddings.")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), path, 1)
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", special.get(name))
        if isinstance(token, int) and 0 <= token < len(tokens):
            ids[name] = token
    return _Vocabulary(tokens, types, ids, metadata.get("tokenizer.ggml.add_bos_token", adds_begin) is True)


def _numbers(metadata: dict[str, Any], key: str, count: int, path: str, default: float) -> Array:
    """Read one number per token from the metadata; `default` for all tokens if the key is missing."""
    values = metadata.get(key, np.full(count, default))
    kinds = "iu" if isinstance(default, int) else "iuf"
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != count:
        raise FileFormatError(f"{path} has a damaged tokenizer: {key} does not have one number per token.")
    return values


# --- SentencePiece ---


def merge(pieces: list[str], cost: Callable[[str, str], float | None]) -> list[str]:
    """Merge adjacent pieces, the pair of lowest cost first, the leftmost among equals (BPE, Sennrich et al. 2016).

    `cost(a, b)` is None if `a` and `b` cannot be joined. The pieces form a linked list and the candidate pairs a heap,
    so a text of n pieces takes O(n log n) steps.
    """
    right_of = [*range(1, len(pieces)), -1]  # linked list of the remaining pieces
    left_of = [-1, *range(len(pieces) - 1)]
    current: list[str | None] = list(pieces)  # None: joined to its left neighbour
    heap: list[tuple[float, int, str, str]] = []

    def push(left: int) -> None:
        """Add the pair of piece `left` and its right neighbour to the heap, if they can be joined."""
        right = right_of[left]
        if right < 0:
            return
        a, b = current[left], current[right]
        assert a is not None
        assert b is not None
        pair_cost = cost(a, b)
        if pair_cost is not None:
            heapq.heappush(heap, (pair_cost, left, a, b))

    for i in range(len(pieces)):
        push(i)
    while heap:
        _, left, a, b = heapq.heappop(heap)
        right = right_of[left]
        if current[left] != a or right < 0 or current[right] != b:
            continue  # stale entry: one of the two was joined with another piece
        current[left], current[right] = a + b, None
        right_of[left] = right_of[right]
        if right_of[right] >= 0:
            left_of[right_of[right]] = left
        # The joined piece forms new pairs with both neighbours.
        push(left)
        if left_of[left] >= 0:
            push(left_of[left])
    return [piece for piece in current if piece is not None]


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece BPE: neighbours are joined by score; unknown characters become bytes."""

    def __init__(self, vocabulary: _Vocabulary, scores: list[float], prefix: bool) -> None:
        """Store the tokens' scores; `prefix` puts a space in front of every text."""
        super().__init__(vocabulary)
        self._prefix, self._scores = prefix, scores
        self._bytes = {
            int(token[3:5], 16): i
            for token, i in vocabulary.of_types(_BYTE).items()
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        }
        self._values = {i: byte for byte, i in self._bytes.items()}

    def _text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        # A text after a whole token begins a word, as the first one does.
        spelling = (_SPACE if self._prefix else "") + text.replace(" ", _SPACE)
        return [i for piece in merge(list(spelling), self._cost) for i in self._piece_ids(piece)]

    def _cost(self, left: str, right: str) -> float | None:
        """Return the merge cost of two adjacent pieces, minus the joined token's score; None if unknown."""
        token = self._ids.get(left + right)
        return None if token is None else -self._scores[token]

    def _piece_ids(self, piece: str) -> list[int]:
        """Return the token id of a piece, or those of its bytes if it is not a token."""
        token = self._ids.get(piece)
        if token is not None:
            return [token]
        ids = [self._bytes.get(byte) for byte in piece.encode("utf-8", "replace")]
        if None in ids:
            raise ConfigurationError(f"this model's vocabulary has no token for {piece!r}")
        return [i for i in ids if i is not None]

    def _piece_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; byte tokens are a single byte."""
        if token in self._values:
            return bytes([self._values[token]])
        return self._vocabulary.tokens[token].replace(_SPACE, " ").encode("utf-8", "replace")


# --- byte-level BPE ---


@cache
def _letters() -> list[str]:
    """Return GPT-2's printable character for each byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class _Splitter:
    """Splits a text into words by several patterns, each applied to the words of the one before."""

    patterns: tuple[re.Pattern[str], ...]
    whole_words: bool = False  # a word that is a token is not split; such models also add a beginning-of-text token

    def words(self, text: str) -> list[str]:
        r"""Split a text into words, the units that are encoded separately.

        The original patterns use Unicode classes (\p{L}, \p{N}), which Python's `re` lacks. So every character beyond
        ASCII is first replaced by one character that represents its class, and the patterns run on that.
        """
        classes, bounds = "".join(map(_class_representative, text)), [(0, len(text))]
        for pattern in self.patterns:
            pieces: list[tuple[int, int]] = []
            for position, end in bounds:
                for match in pattern.finditer(classes, position, end):
                    pieces += [(position, match.start()), match.span()]
                    position = match.end()
                pieces.append((position, end))
            bounds = [piece for piece in pieces if piece[0] < piece[1]]
        return [text[start:end] for start, end in bounds]


class ByteLevelTokenizer(Tokenizer):
    """Byte-level BPE: words are UTF-8 bytes, merged in the order of the file's merge list."""

    def __init__(self, vocabulary: _Vocabulary, merges: list[str], splitter: _Splitter) -> None:
        """Store the merge list ("left right" by priority) and the splitter of words."""
        super().__init__(vocabulary)
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))  # of "left right"
        self._splitter = splitter
        self._bytes = {letter: byte for byte, letter in enumerate(_letters())}

    def _text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        return [i for word in self._splitter.words(text) for i in self._word_ids(word)]

    def _word_ids(self, word: str) -> list[int]:
        """Return the token ids of one word, by BPE merges."""
        letters = _letters()
        spelling = [letters[byte] for byte in word.encode("utf-8", "replace")]
        whole = self._ids.get("".join(spelling)) if self._splitter.whole_words else None
        if whole is not None:
            return [whole]
        ids: list[int] = []
        for piece in merge(spelling, lambda a, b: self._ranks.get(f"{a} {b}")):
            token = self._ids.get(piece)
            piece_ids = [token] if token is not None else [self._ids.get(letter) for letter in piece]
            if None in piece_ids:
                raise ConfigurationError(f"this model's vocabulary has no token for {word!r}")
            ids += [i for i in piece_ids if i is not None]
        return ids

    def _piece_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, decoded from GPT-2's printable characters."""
        spelling = self._vocabulary.tokens[token]
        if all(letter in self._bytes for letter in spelling):
            return bytes(self._bytes[letter] for letter in spelling)
        return spelling.encode("utf-8", "replace")


# Representatives of the Unicode classes beyond ASCII, and the classes as the patterns write them.
_REPRESENTATIVES = {"Lu": "À", "Lt": "À", "Ll": "à", "Lm": "א", "Lo": "א", "M": "\u0300", "N": "²", "P": "¡"}
_CLASSES = {
    "S": " \t\n\r\xa0",
    "L": "A-Za-zÀàא",
    "N": "0-9²",
    "P": r"!-#%-*,-/:;?@\[-\]_{}¡",
    "U": "A-ZÀא\u0300",  # letters that may begin a word in mixed case, with marks
    "W": "a-zàא\u0300",  # letters that may follow
}


@lru_cache(maxsize=4096)
def _class_representative(character: str) -> str:
    """Return one representative character of a character's Unicode class; ASCII characters are returned as is."""
    if character < "\x80":
        return {"\v": "\t", "\f": "\t"}.get(character, character)
    if character.isspace():
        return "\xa0"
    category = unicodedata.category(character)
    return _REPRESENTATIVES.get(category, _REPRESENTATIVES.get(category[0], "§"))


def _splitter(*patterns: str, whole_words: bool = False) -> _Splitter:
    """Compile patterns in which {S}, {L}, … inside brackets stand for the characters of a Unicode class."""
    texts = [re.sub(r"\{([SLNPUW])\}", lambda match: _CLASSES[match[1]], pattern) for pattern in patterns]
    return _Splitter(tuple(map(re.compile, texts)), whole_words)


# The word patterns of the original tokenizers. Names are those of llama.cpp, by which files refer to them.
_SHORT = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"[{S}]*[\n\r]+|[{S}]+(?![^{S}])|[{S}]+"
_GPT2 = "'(?:s|t|re|ve|m|ll|d)| ?[{L}]+| ?[{N}]+| ?[^{S}{L}{N}]+|[{S}]+(?![^{S}])|[{S}]+"
_GPT4 = _SHORT + r"|[^\n\r{L}{N}]?[{L}]+|[{N}]{1,%d}| ?[^{S}{L}{N}]+[\n\r]*|" + _SPACES  # with the digits per number
_CASED = r"[^\n\r{L}{N}]?[{U}]*[{W}]+%s|[^\n\r{L}{N}]?[{U}]+[{W}]*%s|[{N}]{1,%d}| ?[^{S}{L}{N}]+[\n\r/]*|" + _SPACES
_SPLITTERS = {
    **dict.fromkeys(("gpt-2", "phi-2"), _splitter(_GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _splitter("[{N}]", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _splitter(_GPT4 % 3, whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _splitter(_GPT4 % 3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _splitter(_GPT4 % 1)),
    "tekken": _splitter(_CASED % ("", "", 1), whole_words=True),
    "gpt-4o": _splitter(_CASED % (f"(?:{_SHORT})?", f"(?:{_SHORT})?", 3)),
    "default": _splitter(r"[{P}$+<=>^~|]+", _GPT2, "[{N}]+", "[0-9][0-9][0-9]"),
}


# --- streaming ---


class TextStream:
    """Assembles the text of streamed tokens; incomplete characters and possible beginnings of stop words are held back.

    Call `add` with the bytes of each token and print what it returns; `stopped` is True after a stop word.

    >>> stream = TextStream(["END"])
    >>> [stream.add(part) for part in (b"a", b"E", b"N", b"x", b"EN", b"D!")], stream.stopped
    (['a', '', '', 'ENx', '', ''], True)
    """

    def __init__(self, stop_words: Iterable[str] = ()) -> None:
        """Start an empty stream that ends at any of these words."""
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
        """Append decoded text to the pending text and return the part that cannot be in a stop word."""
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
        """Return the length of the longest suffix of the pending text that is a prefix of `word`."""
        longest = min(len(word) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(word[:n])), 0)
