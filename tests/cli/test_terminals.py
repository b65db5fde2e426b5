"""Terminals unlike ours: another encoding, and too narrow for a table. Nothing fails and nothing is cut."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from costmodel.simulated import write_collection
from rich.console import Console
from rich.table import Table

from tilewise._wording import pluralize
from tilewise.cli.tables import show


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_a_terminal_without_our_signs_gets_letters(encoding: str, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "TILEWISE_CACHE": str(tmp_path)}
    lines = [["check"], ["compete", "run", "--help"], ["quantize", "--out", str(tmp_path / "é")]]
    for words in lines if encoding == "ascii" else lines[:2]:  # the poorest spells out what the others do, and more
        done = subprocess.run([sys.executable, "-m", "tilewise", *words], capture_output=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert b"Traceback" not in done.stderr


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    env = os.environ | {"TILEWISE_CACHE": str(tmp_path)}
    command = f"{shlex.quote(sys.executable)} -m tilewise check >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, env=env, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_input_is_an_empty_one(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m tilewise generate - <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("tilewise: the prompt is empty")


def test_with_closed_streams_nothing_that_is_printed_gets_into_a_file(tmp_path: Path) -> None:
    lines = ["import os, tilewise.cli.app as app", "app._open_standard_streams()", "file = open('new', 'w')"]
    lines += ["os.system('echo printed; echo wrong >&2')", "print('said')", "file.close()"]
    command = f"{shlex.join([sys.executable, '-c', '; '.join(lines)])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path).returncode == 0
    assert (tmp_path / "new").read_text() == ""


def test_no_column_of_a_collection_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    env = os.environ | {"COLUMNS": "40", "TILEWISE_CACHE": str(tmp_path)}
    collection = write_collection(tmp_path / "few", train=3, valid=1, test=1)
    command = [sys.executable, "-m", "tilewise", "tiles", "describe", str(collection)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert "…" not in done.stdout
    assert "  noise: " in done.stdout or "│" not in done.stdout


def output_at(width: int, capsys: pytest.CaptureFixture[str]) -> str:
    table = Table(title="models")
    for heading in ("model", "accuracy", "points lost", "empty"):
        table.add_column(heading)
    table.add_row("float32", "99.17 %", "none", "")
    show(table, Console(width=width))
    return capsys.readouterr().out


def test_a_table_is_drawn_where_its_words_fit(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_at(80, capsys)
    assert "│ float32 │" in lines


@pytest.mark.parametrize("width", [12, 20])
def test_a_table_that_does_not_fit_is_listed_whole(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_at(width, capsys)
    assert lines == "models\nfloat32\n  accuracy: 99.17 %\n  points lost: none\n"


def test_one_is_not_a_plural() -> None:
    assert (pluralize(1, "kernel"), pluralize(2000, "kernel")) == ("1 kernel", "2,000 kernels")
