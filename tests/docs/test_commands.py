"""Every command line in README and the docs: all are read by the command line as typed; those in blocks also run.

Running them takes minutes, so that part is marked slow (`make test-docs`). What needs a GPU, a download or TensorFlow
has a target or a test of its own, named here beside it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tilewise.cli.app import app
from tilewise.cli.commands import register

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = {
    "make ": "the Makefile's targets are run by CI and by hand",
    "tilewise collect triton": "needs a GPU; tests/tune/test_collect_triton.py runs its collector on the interpreter",
    "--device triton": "needs a GPU",
    "tilewise tiles download": "tests/costmodel/test_download.py runs it against a local server",
    "tilewise collect embed": "writes into the package",
    "tilewise collect compare": "needs a second day's store; tests/tune/test_compare_collections.py",
    "tilewise compete serve": "runs until it is stopped; tests/bench runs the server",
}


def blocks(page: Path, kind: str = "sh") -> list[str]:
    found = re.findall(rf"^```(?:{kind})\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line.split(" #")[0].strip() for block in found for line in block.splitlines()]
    return [line for line in lines if line]


def inline(page: Path) -> list[str]:
    found = re.findall(r"`(tilewise [^`\n]+)`", page.read_text())
    return [command for command in found if not re.search(r"[…|<]|\.\.\.", command)]


def documented() -> list[tuple[str, str]]:
    rows = [(page, command) for page in PAGES for command in [*blocks(page, "sh|bash"), *inline(page)]]
    apart = [(str(page.relative_to(ROOT)), part) for page, command in rows for part in command.split(" && ")]
    return sorted({(page, command) for page, command in apart if command.startswith("tilewise ")})


@pytest.fixture(scope="module")
def command_line():
    if not app.registered_commands:
        register(app)
    return typer.main.get_command(app)


@pytest.mark.parametrize(("page", "command"), documented(), ids=lambda value: value.replace("/", "-")[:60])
def test_the_command_line_reads_it_as_typed(page, command, command_line):
    words = shlex.split(command)[1:]
    current = command_line
    while words and hasattr(current, "commands") and not words[0].startswith("-"):
        assert words[0] in current.commands, f"{page}: {command}"
        current, words = current.commands[words[0]], words[1:]
    assert hasattr(current, "commands") or current is not command_line
    if words and "--help" not in words:
        current.make_context("tilewise", list(words))


def runnable(page: Path) -> list[str]:
    return [line for line in blocks(page) if not any(word in line for word in ELSEWHERE)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_typed(page, tmp_path):
    """In order, in one folder, with the files that the page says to save."""
    for name, code in re.findall(r"[Ss]ave[^`]*`(\w+\.\w+)`:?\s+```\w*\n(.*?)```", page.read_text(), re.S):
        (tmp_path / name).write_text(code)
    (tmp_path / "shapes.json").exists() or (tmp_path / "shapes.json").write_text(
        '[{"family": "matmul", "m": 64, "n": 96, "k": 80}, {"family": "matmul", "m": 7, "n": 33, "k": 129}]'
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, call in (("tilewise", f"{sys.executable} -m tilewise.cli.app"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT / "src"),
    }
    where = ROOT / "course" if page.name == "course.md" else tmp_path
    for line in runnable(page):
        done = subprocess.run(["bash", "-c", line], cwd=where, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
