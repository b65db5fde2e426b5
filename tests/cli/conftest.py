"""A command line typed in this process: what it prints and its exit code, without starting Python again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewise.cli import app

SECONDS = 60  # a bad value that is not refused would start the work, or a server
Typed = Callable[[list[str]], tuple[int, str, str]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Run a command line in an empty folder that has FILE and FOLDER; give the exit code and what was printed."""
    (tmp_path / "FILE").write_text("not what you expect\n")
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))

    def give_up(*_: object) -> None:
        raise TimeoutError(f"still at work after {SECONDS} s: {sys.argv}")

    def run(words: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tilewise", *words])
        before = signal.signal(signal.SIGALRM, give_up)
        signal.alarm(SECONDS)
        try:
            with pytest.raises(SystemExit) as exit_info:
                app.main()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        return (int(exit_info.value.code or 0), *capsys.readouterr())

    return run
