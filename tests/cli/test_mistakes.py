"""Mistakes that people make at a terminal, each answered by a sentence that says what to do, and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewise._extension import native
from tilewise.cli.app import main
from tilewise.learn import check

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


def typed(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out + output.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compete", "board", "--board", "https://[::1"], "is not an address"),
        (["compete", "board", "--board", "http://x:abc"], "nonnumeric port"),
        (["compete", "board", "--board", "b.sqlite", "--event", "mlp_sprin"], "did you mean 'MLP_SPRINT'?"),
        (["check", "CACHING"], "did you mean 'caching'?"),
        (["check", "caching", "--more"], "--hint EXERCISE"),
        pytest.param(["tune", "matmul", "8x8x8", "--set", "m=3"], "m is 8 already", marks=needs_native),
        pytest.param(["tune", "matmul", "8×8"], "the sizes of matmul are m x n x k", marks=needs_native),
        (["profile", "mlp", "--html", "one.json", "--trace", "one.json"], "name the same file"),
        (["tiles", "train", "h200", "--max-seconds", "0", "--out", "run"], "--max-seconds"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output = typed(words, monkeypatch, capsys)
    assert code == 2
    assert sentence in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


@needs_native
def test_sizes_may_be_written_as_tables_write_them(tmp_path, monkeypatch, capsys):
    words = ["tune", "matmul", "8×8×8", "--budget", "1", "--cache", str(tmp_path)]
    assert typed(words, monkeypatch, capsys)[0] == 0


def test_a_started_file_of_another_name_is_checked_by_the_command_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output = typed(["check", "caching", "--start", "--file", "my answers.py"], monkeypatch, capsys)
    assert code == 0
    assert "tilewise check caching --file 'my answers.py'" in output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import sys\nsys.exit(0)\n", "leaves Python"),
        ("import os\nos._exit(0)\n", "there is no answer"),
        ("a = '\0'\n", "null bytes"),
    ],
)
def test_a_file_that_cannot_answer_is_told_why(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "caching.py").write_text(text)
    (result,) = check("caching", tmp_path / "caching.py", only="attend")
    assert sentence in result.feedback
    assert "None" not in result.feedback
