"""Every command with every option and every kind of bad value: one sentence, exit code 2, never a traceback.

The commands, their options and a command line that works are taken from the command line itself (each command's help
ends with an example), so a new command is swept without being named here.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tilewise._extension import native
from tilewise.cli import app as module


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    if hasattr(command, "commands"):
        return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]
    return [(" ".join(path), command)]


COMMANDS = dict(leaves(module.command_line()))
OUTPUTS = frozenset({"out", "plot", "html", "trace", "cache", "otter", "nbgrader", "csv", "tensorboard"})


def example(name: str) -> list[str]:
    """The command line that the help shows, without the program."""
    example_match = re.search(rf"Example: tilewise ({re.escape(name)}[^\n]*)", COMMANDS[name].help)
    assert example_match, f"tilewise {name} --help shows no example"
    return shlex.split(example_match.group(1).split(", then")[0])


def kind(parameter: Any) -> str:
    """number, output, path or word."""
    type_name = str(parameter.type_descriptor.annotation)
    if "int" in type_name or "float" in type_name:
        return "number"
    if "Path" in type_name:
        return "output" if parameter.name in OUTPUTS else "path"
    return "word"


def takes_value(parameter: Any) -> bool:
    return not getattr(parameter, "is_flag", False)


def is_option(parameter: Any) -> bool:
    return parameter.opts[0].startswith("-")


def with_value(name: str, parameter: Any, value: str) -> list[str]:
    """The example with this value in place of what it has there, if it has."""
    words = example(name)[len(name.split()) :]
    options_by_flag = {opt: p for p in COMMANDS[name].params for opt in p.opts if is_option(p)}
    lines, places, skip = [], [], False
    for word in words:
        replaced = skip is parameter or (word in options_by_flag and options_by_flag[word] is parameter)
        if not replaced:
            lines.append(word)
            places += [len(lines) - 1] if not skip and word not in options_by_flag else []
        skip = (
            options_by_flag[word]
            if not skip and word in options_by_flag and takes_value(options_by_flag[word])
            else False
        )
    if is_option(parameter):
        lines += [next(opt for opt in parameter.opts if opt.startswith("--")), value]
    else:
        order = [p for p in COMMANDS[name].params if not is_option(p)].index(parameter)
        lines[places[order] : places[order] + 1] = [value] if order < len(places) else []
    return [*name.split(), *lines]


FREE = {
    "arguments",
    "student",
    "team",
    "prompt",
    "reason",
    "host",
    "token",
    "head",
    "truth",
    "stop",
}  # words that may be anything
CREATABLE = {"key", "file"}  # files that are made where there are none


def _is_picture(parameter: Any) -> bool:
    return bool(parameter.name == "plot" or str(parameter.help).startswith("File for the picture"))


def bad_values(parameter: Any) -> list[str]:
    """What this option must refuse, by its kind; FILE and FOLDER are there."""
    if kind(parameter) == "number":
        return ["x", "", "-1", "99999999999999999999", "nan"][: 5 if is_option(parameter) else 2]
    if kind(parameter) == "output":
        is_folder = str(parameter.help).startswith("Folder")
        odd = ["FILE" if is_folder else "FOLDER"] + ["picture.txt"] * _is_picture(parameter)
        return ["FILE/below/it", "/proc/nothing/here", *odd]
    if kind(parameter) == "path":
        return ["FILE/below/it"] + ["no/such/file"] * (parameter.name not in CREATABLE)
    if parameter.name == "where":  # a board, which is made where there is none
        return ["FILE/below/it"]
    return [] if parameter.name in FREE else ["no/such: word"]


def cases() -> list[Any]:
    rows = [
        (name, parameter, value)
        for name, command in COMMANDS.items()
        for parameter in command.params
        if takes_value(parameter)
        for value in bad_values(parameter)
    ]
    return [pytest.param(with_value(*row), id=f"{row[0]} {row[1].opts[0]} {row[2]}") for row in rows]


def assert_refused(code: int, out: str, err: str) -> None:
    assert (code, out) == (2, ""), err
    assert err.startswith("tilewise: ")
    assert err.count("\n") == 1, err


@pytest.mark.parametrize("words", cases())
def test_a_bad_value_is_refused_with_one_sentence_before_any_work(words, typed):
    assert_refused(*typed(words))


@pytest.mark.skipif(native is None, reason="instruction sets belong to the compiled kernels, which are not built")
@pytest.mark.parametrize(
    "words", ["machine", "profile cnn", "ladder", "fit mlp", "quantize", "prune", "generate", "kv", "tour --quick"]
)
def test_a_wrong_instruction_set_is_one_sentence_too(words, tmp_path):
    env = os.environ | {"TILEWISE_ISA": "abacus"}
    command = [sys.executable, "-m", "tilewise", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert_refused(done.returncode, done.stdout, done.stderr)
    assert "abacus" in done.stderr


@pytest.mark.parametrize("words", ["profile cnn --batch 100000000", "ladder --size 100000", "kv --tokens 100000"])
def test_sizes_that_no_memory_holds_are_refused(words, typed):
    assert_refused(*typed(words.split()))


@pytest.mark.parametrize("words", ["tour", "ladder", "quantize", "prune", "fit mlp", "kv"])
def test_a_folder_that_cannot_be_written_stops_a_command_before_its_work(words, typed, monkeypatch, tmp_path):
    """The outputs that nobody named go below the folder one is in."""
    (tmp_path / "out").write_text("a file where the folder for results would be\n")
    code, out, err = typed(words.split())
    assert_refused(code, out, err)
    assert "out" in err
