"""What holds for every command: help with an example, JSON, quiet, one sentence for what means nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import typer
from costmodel.simulated import write_collection

from tilewise.cli.app import app, main
from tilewise.cli.commands import register

if not app.registered_commands:
    register(app)
TREE = typer.main.get_command(app)


def leaves(command, path=()):
    if hasattr(command, "commands"):
        return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]
    return [(" ".join(path), command)]


COMMANDS = dict(leaves(TREE))
# These print logs or CSV.
WITHOUT_JSON = {"fleet serve", "fleet up", "compete serve", "compete work", "compete grades", "lock run"}


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


def test_quiet_prints_nothing_but_errors_and_json(typed):
    assert typed(["check", "pruning", "--start", "--file", "p.py", "--quiet"]) == (0, "", "")
    code, out, _ = typed(["check", "pruning", "--file", "p.py", "--quiet", "--json"])
    assert code == 1 and out.startswith("[")
    code, out, err = typed(["check", "nothing", "--quiet"])
    assert (code, out) == (2, "") and err.startswith("tilewise: There is no lesson")


def test_quiet_may_precede_the_command_and_is_shown_once(typed):
    assert typed(["--quiet", "check", "pruning", "--start", "--file", "p.py"]) == (0, "", "")
    assert "--quiet" in typed(["--help"])[1] and "--quiet" not in typed(["check", "--help"])[1]


def test_json_may_precede_the_command_and_is_shown_once(typed):
    assert typed(["--json", "check", "--progress"])[1] == typed(["check", "--progress", "--json"])[1]
    assert "--json" in typed(["--help"])[1] and "--json" not in typed(["check", "--help"])[1]
    code, _, err = typed(["--json", "fleet", "up", "--store", "nowhere.sqlite"])
    assert code == 2 and "no result to print as JSON" in err


def test_help_shows_at_most_350_options():
    output = [
        parameter
        for command in (TREE, *COMMANDS.values())
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
    ]
    assert len(output) <= 350


def test_help_has_at_most_twenty_entries(typed):
    assert len(TREE.commands) <= 20 and not {"serve", "layout"} & set(TREE.commands)


def test_a_former_name_works_and_says_the_new_one_on_stderr(typed):
    code, out, err = typed(["layout", "score", "--help"])
    assert code == 0 and out.startswith("Usage: tilewise layout score")
    assert err == "tilewise: `tilewise layout` is now `tilewise tiles layout`; the old name works until 0.2\n"
    _, _, err = typed(["serve", "--store", "nowhere.sqlite"])
    assert err.startswith("tilewise: `tilewise serve` is now `tilewise fleet serve`; the old name works until 0.2\n")
    assert typed(["--quiet", "layout", "score", "--help"])[2] == ""


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """A few simulated kernels: what is printed about them looks as it does for many."""
    return write_collection(tmp_path_factory.mktemp("c") / "few", train=3, valid=1, test=1)


def test_a_log_file_gets_no_colours_and_no_cursor_movements(collection):
    for arguments in (("--help",), ("tiles", "describe", str(collection))):
        done = run(*arguments, FORCE_COLOR="", NO_COLOR="1", TERM="xterm-256color")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_help_is_a_tour_in_sections(typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    _, text, _ = typed(["--help"])
    panels = ["Learn and measure", "Make models fast", "Choose tiles", "Compete and share"]
    places = [text.index(f"\n{panel}:\n") for panel in panels]
    assert places == sorted(places)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_typed_wrong_gets_one_sentence_and_exit_code_2(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tilewise", *name.split(), "--no-such-option"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tilewise: No such option: --no-such-option")
    assert err.count("\n") == 1
    assert f"`tilewise {name} --help`" in err


@pytest.mark.parametrize(
    "words", [["nothing"], ["tiles", "nothing"], ["fit"], ["machine", "more"], ["ladder", "--size", "x"]]
)
def test_other_mistakes_of_typing_are_one_sentence_too(words, typed):
    code, out, err = typed(words)
    assert (code, out) == (2, "")
    assert err.startswith("tilewise: ") and err.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error_to_speak_of(collection):
    command = f"{shlex.join([sys.executable, '-m', 'tilewise', 'tiles', 'describe', str(collection)])} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_help_speaks_of_tilewise_however_it_was_started_and_flags_take_no_value():
    text = run("ladder", "--help").stdout
    assert "Usage: tilewise ladder" in text
    assert "<bool>" not in text


def test_tables_in_a_log_are_wide_enough_to_be_read(collection):
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "tilewise", "tiles", "describe", str(collection)]
    assert "…" not in subprocess.run(command, capture_output=True, text=True, env=env).stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tilewise fit ", "mlp cnn gpt"),
        ("tilewise quantize --observer m", "minmax mse"),
        ("tilewise check pr", "profiling pruning"),
        ("tilewise qu", "quantize"),
    ],
)
def test_the_shell_completes_commands_and_values(line, words):
    env = {"_TILEWISE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    lines = run(**env).stdout.split()
    assert [word for word in words.split() if word not in lines] == []


@pytest.mark.parametrize("words", [[], ["tiles"], ["compete", "token"]])
def test_nothing_typed_after_a_group_is_its_help_and_nothing_else(words, typed):
    code, out, err = typed(words)
    assert code == 2 and out.startswith("Usage: tilewise") and not err
