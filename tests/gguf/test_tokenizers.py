"""Tokenizers of GGUF files: known cuts and merges, every text comes back, llama.cpp's ids where it is installed."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("gguf")

from gguf_samples import byte_level_vocabulary, sentencepiece_vocabulary, small_llama, write_llama

from tilewise.errors import FileFormatError
from tilewise.gguf import TextStream, load_gguf
from tilewise.gguf.tokenizers import _SPLITTERS, tokenizer_of


def metadata(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """As a file's reader gives it."""
    return {
        "tokenizer.ggml.model": vocabulary["algorithm"],
        "tokenizer.ggml.tokens": vocabulary["tokens"],
        "tokenizer.ggml.token_type": np.array(vocabulary["types"]),
        "tokenizer.ggml.bos_token_id": vocabulary["bos"],
        "tokenizer.ggml.eos_token_id": vocabulary["eos"],
        **({"tokenizer.ggml.scores": np.array(vocabulary["scores"])} if "scores" in vocabulary else {}),
        **({"tokenizer.ggml.merges": vocabulary["merges"]} if "merges" in vocabulary else {}),
        **({"tokenizer.ggml.pre": vocabulary["pre"]} if "pre" in vocabulary else {}),
    }


SPLITTERS = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "default")
VOCABULARIES = {name: byte_level_vocabulary(name) for name in SPLITTERS} | {"sentencepiece": sentencepiece_vocabulary()}
TOKENIZERS: dict[str, Any] = {name: tokenizer_of(metadata(v), 10_000, "here") for name, v in VOCABULARIES.items()}


def spelled(name: str, text: str) -> list[str]:
    return [VOCABULARIES[name]["tokens"][i] for i in TOKENIZERS[name].encode(text)]


def test_words_are_cut_and_merged_in_the_order_of_the_merges() -> None:
    assert spelled("gpt-2", "the thing  the") == ["the", "Ġ", "th", "ing", "Ġ", "Ġthe"]
    assert spelled("gpt-2", "12") == ["12"]
    assert spelled("llama-bpe", "the") == ["<|endoftext|>", "the"]


@pytest.mark.parametrize(
    ("splitter", "words"),
    [
        ("gpt-2", "I|'m| the| 1234|  | x|\n|\n|YES|'|Ma| été|!?|\n"),
        ("smollm", "I|'m| the| |1|2|3|4|  | x|\n|\n|YES|'|Ma| été|!?|\n"),
        ("llama-bpe", "I|'m| the| |123|4|  | x|\n\n|YES|'M|a| été|!?\n"),
        ("qwen2", "I|'m| the| |1|2|3|4|  | x|\n\n|YES|'M|a| été|!?\n"),
        ("tekken", "I|'m| the| |1|2|3|4|  | x|\n\n|YES|'Ma| été|!?\n"),
        ("gpt-4o", "I'm| the| |123|4|  | x|\n\n|YES'M|a| été|!?\n"),
    ],
)
def test_words_are_split_as_the_original_patterns_do(splitter: str, words: str) -> None:
    assert _SPLITTERS[splitter].words(words.replace("|", "")) == words.split("|")


@pytest.mark.parametrize("name", ["qwen2", "sentencepiece"])
def test_control_tokens_in_a_text_count_only_in_chats(name: str) -> None:
    tokens, tokenizer = VOCABULARIES[name]["tokens"], TOKENIZERS[name]
    user, end = tokens.index("<user>"), tokens.index("<|im_end|>")
    assert [user, end] == [i for i in tokenizer.encode("the <user>the<|im_end|>", control=True) if i in (user, end)]
    assert [user] == [i for i in tokenizer.encode("the <user>the<|im_end|>") if i in (user, end)]
    assert end in tokenizer.stops
    assert (tokenizer.token_bytes(user), tokenizer.token_bytes(end)) == (b"<user>", b"")
    begin = tokenizer.spelling("bos")
    assert tokenizer.encode(begin + "the", control=True).count(tokens.index(begin)) == 1


def test_sentencepiece_joins_by_score_and_spells_the_unknown_in_bytes() -> None:
    assert spelled("sentencepiece", "the thing") == ["<s>", "▁the", "▁t", "h", "ing"]
    assert spelled("sentencepiece", "日") == ["<s>", "▁", "<0xE6>", "<0x97>", "<0xA5>"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    back = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    assert back.replace(" ", "") == text.replace(" ", "") if name == "sentencepiece" else back == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_llama_cpps(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", exc_type=Exception)
    import ctypes

    vocabulary = VOCABULARIES[name]
    write_llama(small_llama(vocab=len(vocabulary["tokens"])), tmp_path / "m.gguf", **vocabulary)
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(tmp_path / "m.gguf").encode(), settings)
    words, room = llama_cpp.llama_model_get_vocab(model), (ctypes.c_int32 * 1000)()
    tokenizer, rng = load_gguf(tmp_path / "m.gguf").tokenizer, np.random.default_rng(0)
    assert tokenizer is not None
    letters = [*"  the thing in\n\n\t'tS'lle 1234é²½Ⅷ日本。!?-_/xyz\r\n …́", "<user>", "<|im_end|>"]
    if name in ("tekken", "gpt-4o"):  # llama.cpp takes letters beyond ASCII for both upper and lower case
        letters = [letter for letter in letters if letter.isascii()]
    for control in (False, True):
        for _ in range(100):
            text = "".join(rng.choice(letters, rng.integers(0, 40)))
            count = llama_cpp.llama_tokenize(words, text.encode(), len(text.encode()), room, 1000, True, control)
            assert tokenizer.encode(text, control) == list(room[:count]), text


def test_a_damaged_vocabulary_is_one_sentence() -> None:
    good = metadata(VOCABULARIES["sentencepiece"])
    for change in (
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a"]},
        {"tokenizer.ggml.scores": 3},
        {"tokenizer.ggml.token_type": ["x"]},
        {"tokenizer.ggml.token_type": np.full(len(VOCABULARIES["sentencepiece"]["tokens"]), np.nan)},
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard-of"},
    ):
        with pytest.raises(FileFormatError, match="tokenizer"):
            tokenizer_of(good | change, 10_000, "here")


# --- streaming ---


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.data())
def test_a_stream_is_the_text_before_the_first_stop_word(text: str, stops: list[str], data: st.DataObject) -> None:
    content = codecs.encode(text, "utf-8", "replace")
    text = content.decode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    stream, out = TextStream(stops), ""
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        out += stream.add(content[start:end])
    out += stream.end()
    ends = [at for at in map(text.find, stops) if at >= 0]
    if not ends:
        assert out == text
    else:
        assert stream.stopped
        assert text.startswith(out)
        assert not any(word in out for word in stops)
