"""tilewise.toml: defaults for every command, behind options and environment; a mistake is one sentence."""

from __future__ import annotations

import os

import pytest

from tests.cli.test_sweep import assert_refused
from tilewise.cli.app import command_line, defaults


def test_settings_are_the_defaults_of_the_commands_that_have_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE", "restored when the test ends")
    monkeypatch.delenv("TILEWISE_CACHE")
    (tmp_path / "tilewise.toml").write_text('threads = 2\nboard = "class.sqlite"\ncache = "kept"\n')
    settings = defaults(command_line())
    assert settings["quantize"] == {"threads": 2}
    assert settings["compete"]["board"] == {"where": "class.sqlite"}
    assert settings["machine"] == {}
    assert os.environ["TILEWISE_CACHE"] == "kept"


def test_a_command_takes_its_threads_from_the_file_unless_told(typed, tmp_path):
    (tmp_path / "tilewise.toml").write_text("threads = 100000\n")
    assert_refused(*typed(["generate", "a", "--tokens", "1"]))
    code, *_ = typed(["generate", "a", "--tokens", "1", "--threads", "1"])
    assert code == 0


@pytest.mark.parametrize("text", ["threads = 'two'", "thread = 2", "threads = ", "board = 3", "threads = true"])
def test_a_mistake_in_the_file_is_one_sentence_with_its_name(typed, tmp_path, text):
    (tmp_path / "tilewise.toml").write_text(text + "\n")
    code, out, err = typed(["generate", "a", "--tokens", "1"])
    assert_refused(code, out, err)
    assert "tilewise.toml" in err
