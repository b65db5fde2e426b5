"""What holds for every command: help with an example, JSON, quiet, one sentence for what means nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from tilewise.cli.app import app
from tilewise.cli.commands import register

if not app.registered_commands:
    register(app)
TREE = typer.main.get_command(app)


def leaves(command, path=()):
    if hasattr(command, "commands"):
        return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]
    return [(" ".join(path), command)]


COMMANDS = dict(leaves(TREE))
WITHOUT_JSON = {"compete serve", "compete work", "compete grades"}  # logs of their own; a CSV


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_teaches_itself(name):
    command = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert f"Example: tilewise {name}" in (command.help or "")
    assert "--quiet" in options
    assert name in WITHOUT_JSON or "--json" in options
    assert all(parameter.help for parameter in command.params if hasattr(parameter, "help"))


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewise.cli.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def test_quiet_prints_nothing_but_errors_and_json(tmp_path):
    started = run("check", "pruning", "--start", "--file", str(tmp_path / "p.py"), "--quiet")
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    judged = run("check", "pruning", "--file", str(tmp_path / "p.py"), "--quiet", "--json")
    assert judged.returncode == 1
    assert judged.stdout.startswith("[")
    wrong = run("check", "nothing", "--quiet")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.startswith("tilewise: There is no lesson")


def test_a_log_file_gets_no_colours_and_no_cursor_movements():
    for arguments in (("--help",), ("tiles", "describe", "h200")):
        done = run(*arguments, FORCE_COLOR="", NO_COLOR="1", TERM="xterm-256color")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_help_is_a_tour_in_panels():
    text = run("--help", COLUMNS="100").stdout
    panels = ["Start here", "Measure", "Make models fast", "Learn tiles", "Compete"]
    places = [text.index(f"─ {panel} ─") for panel in panels]
    assert places == sorted(places)
