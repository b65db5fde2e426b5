"""`tilewise generate` on GGUF files: text from the file's own tokenizer, stop words, Ctrl-C, one sentence else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("gguf")

import tilewise.generate
from tilewise.cli import commands
from tilewise.errors import TilewiseError


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gguf")
    from gguf_samples import sentencepiece_vocabulary, small_llama, write_llama

    pieces = sentencepiece_vocabulary()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    write_llama(small_llama(vocab=len(pieces["tokens"])), tmp_path / "m.gguf", "Q4_0", template=template, **pieces)
    return tmp_path / "m.gguf"


def invoke(*arguments: str, typed: str | None = None) -> Any:
    app = typer.Typer()
    commands.register(app)
    return CliRunner().invoke(app, ["generate", *arguments], input=typed)


def test_a_file_continues_a_text_and_the_seed_fixes_it(sample: Path) -> None:
    first, again, other = (
        json.loads(invoke("the thing", "--model", str(sample), "--tokens", "20", "--seed", seed, "--json").output)
        for seed in ("1", "1", "2")
    )
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["text"]
    assert first["tokens_per_second"] > 0
    assert " Q4_0 weights" in invoke("the thing", "--model", str(sample), "--tokens", "3").output


def test_a_stop_word_ends_the_text_before_it(sample: Path) -> None:
    options = ("the", "--model", str(sample), "--tokens", "30", "--temperature", "0", "--json")
    whole = json.loads(invoke(*options).output)["text"]
    word = whole[5:7]
    cut = json.loads(invoke(*options, "--stop", word).output)
    assert cut["text"] == whole[: whole.index(word)]
    assert len(cut["tokens"]) < 30


def test_a_chat_answers_one_question_or_every_line(sample: Path) -> None:
    options = ("--tokens", "4", "--temperature", "0")
    answer = json.loads(invoke("the", "--model", str(sample), "--chat", *options, "--json").output)
    plain = json.loads(invoke("the", "--model", str(sample), *options, "--json").output)
    assert answer["prompt"] == "the"
    assert answer["tokens"] != plain["tokens"]
    typed = invoke(str(sample), "--chat", *options, "--system", "in", typed="the\n\nthing\n")
    assert typed.exit_code == 0
    assert typed.output.count("> ") == 4  # two questions, an empty line, the end
    assert "Q4_0 weights" in typed.output
    assert "longer than the model's context" in str(invoke("the " * 90, "--model", str(sample), "--chat").exception)
    assert "--chat needs a GGUF file" in str(invoke("the", "--chat").exception)


def test_an_interrupt_ends_with_what_was_written(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[int]:
        yield 265
        raise KeyboardInterrupt

    monkeypatch.setattr(tilewise.generate, "generate", interrupted)
    result = invoke("the", "--model", str(sample))
    assert result.exit_code == 130
    assert "1 token, " in result.output
    assert "interrupted" in result.output


def test_bits_that_exclude_each_other_and_damaged_files_are_one_sentence(sample: Path) -> None:
    assert isinstance(invoke("x", "--int8", "--int4").exception, TilewiseError)
    sample.write_bytes(sample.read_bytes()[:500])
    assert isinstance(invoke("x", "--model", str(sample)).exception, TilewiseError)
