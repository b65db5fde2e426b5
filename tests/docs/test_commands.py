"""Every command line in README and the docs: all are read by the command line as typed, and run as typed.

Running them takes minutes, so that part is marked slow (`make test-docs`). What needs a GPU, a download or TensorFlow
has a target or a test of its own, named here beside it. A command's bare name in a sentence is not a command line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
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
    "tilewise collect triton": "needs a GPU; tests/gpu/test_collect_triton.py runs its collector on the interpreter",
    "--device triton": "needs a GPU, where `python3 -m tilewise.tune.triton.check` does the same by hand",
    "~/data/tpugraphs": "needs the dataset; tests/course/test_commands.py runs the same steps on a small one",
    "tilewise tiles download": "tests/costmodel/course/test_download.py runs it against a local server",
    "tilewise tiles from-pb": "needs an autotuner's file; tests/cli/test_tiles_data.py makes one",
    "tilewise tiles from-jax": "needs JAX; tests/cli/test_tiles_data.py",
    "tilewise tiles import": "needs other tools' logs; tests/costmodel/data/importers makes some",
    " a100": "needs a collection imported from such a log; tests/costmodel/data/importers makes some",
    "tiles kaggle predictions_model_output.csv": "needs the dataset; tests/course/test_commands.py has a small one",
    "tilewise collect embed": "writes into the package; tests/cli/test_collect.py gives it another folder",
    "tilewise collect compare": "needs a second day's store; tests/tune/test_compare_collections.py",
    "tilewise compete serve": "runs until it is stopped; tests/bench/site.py starts it",
    "tilewise fleet serve": "runs until it is stopped; tests/fleet/served.py starts it",
    "tilewise fleet up": "runs until it is stopped; tests/fleet/test_up.py starts it",
    "--ray 127.0.0.1": "needs a Ray cluster; tests/fleet starts some",
    "tilewise store merge h200.sqlite": "needs a PostgreSQL; tests/store/test_shared_store.py starts one",
    "postgresql://tilewise": "needs a PostgreSQL; tests/store/test_shared_store.py starts one",
    "--head HASH": "HASH stands for one; tests/bench/test_board.py",
    "tilewise compete rerun 17": "17 stands for an entry; tests/bench/test_server.py",
    "tilewise compete reinstate 17": "17 stands for an entry; tests/bench/test_integrity_of_board.py",
    "https://board.example": "stands for a server; tests/bench/test_roster.py starts one",
    "tilewise check --otter": "needs otter-grader; `make test-grading` runs tests/learn/grading/test_dry_run.py",
    ".gguf": "needs a model's file; tests/cli/test_generate_files.py writes one",
    "python -m benchmarks.ranks": "needs the source tree; tests/gpu/pinning/test_ranks.py",
    "--plugin mine.py": "tests/bench/test_plugins.py runs plugins",
}


def blocks(page: Path, kind: str = "sh") -> list[str]:
    code_blocks = re.findall(rf"^```(?:{kind})\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line.split(" #")[0].strip() for block in code_blocks for line in block.splitlines()]
    return [line for line in lines if line]


def inline(page: Path) -> list[str]:
    commands = re.findall(r"`(tilewise [^`\n]+)`", page.read_text())
    return [command for command in commands if not re.search(r"[…|<]|\.\.\.", command)]


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
    if words and words[0] not in ("--help", "--version"):
        current.make_context("tilewise", list(words))


def elsewhere(line: str) -> bool:
    return any(word in line for word in ELSEWHERE)


def runnable(page: Path) -> list[str]:
    """The lines of a page's shell blocks, and the command lines inside its sentences."""
    apart = [line for line in inline(page) if len(shlex.split(line)) > 2 or line in ("tilewise kv", "tilewise ladder")]
    prefixes = {" ".join(line.split()[:3]) for line in apart if line.split()[1] in ("collect", "compete", "tiles")}
    apart = [line for line in apart if line not in prefixes]  # two words are a name where commands have groups
    return [line for line in dict.fromkeys([*blocks(page), *course_table(page), *apart]) if not elsewhere(line)]


def course_table(page: Path) -> list[str]:
    """The course page names its commands in a table, with <hash> for what training made up."""
    return re.findall(r"^\| `(python3? [^`]+)`", page.read_text(), re.M) if page.name == "course.md" else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_blocks_of_the_kind_that_is_run(page):
    kinds = re.findall(r"^```(\w*)\n((?:tilewise|python3?) .*)$", page.read_text(), re.M)
    assert {kind for kind, _ in kinds} <= {"sh"}


def test_what_is_left_to_other_tests_is_there():
    for why in ELSEWHERE.values():
        assert all((ROOT / name).exists() for name in re.findall(r"tests/[\w/]+\.py", why)), why


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_as_typed(page, tmp_path):
    """In order, in one folder, with the files that the page says to save."""
    for name, code in re.findall(r"[Ss]ave[^`\n]*`(\w+\.\w+)`:?\s+```\w*\n(.*?)```", page.read_text(), re.S):
        (tmp_path / name).write_text(code)
    (tmp_path / "shapes.json").exists() or (tmp_path / "shapes.json").write_text(
        '[{"family": "matmul", "m": 64, "n": 96, "k": 80}, {"family": "matmul", "m": 7, "n": 33, "k": 129}]'
    )
    env = environment(tmp_path)
    where = tmp_path
    if page.name == "course.md":
        where = Path(shutil.copytree(ROOT / "course", tmp_path / "course"))
    for line in runnable(page):
        done = typed(line, where, env)
        if "not scored" in done.stderr:
            pytest.skip(f"{line}: the machine is too busy to score anything, which is what it should say")
        assert done.returncode in allowed(line), f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def environment(folder: Path) -> dict[str, str]:
    """An empty home, and `tilewise` and `python` as an installation would put them on the path."""
    programs = folder / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    calls = {"tilewise": f"{python} -m tilewise.cli.app", "python": python, "python3": python}
    for name, call in calls.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT / "src")}


_CALM = {
    "tilewise collect cpu": """
from steady_clock import SteadyClock
from tilewise.tune.measure.cpu.clock import CpuClock
CpuClock.time_units, CpuClock.watch = SteadyClock.time_units, SteadyClock.watch
""",
}


def typed(line: str, where: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a line. What refuses to measure on a busy machine is given a calm one."""
    trained = sorted(Path(env["HOME"]).glob("out/tpugraphs_tiles/model_*"))
    line = line.replace("model_<hash>", trained[0].name if trained else "model_none")
    for calm in (code for start, code in _CALM.items() if line.startswith(start)):
        (Path(env["HOME"]) / "sitecustomize.py").write_text(calm)
        env = env | {"PYTHONPATH": f"{env['HOME']}:{ROOT / 'tests'}:{env['PYTHONPATH']}"}
    return subprocess.run(["bash", "-c", line], cwd=where, env=env, capture_output=True, text=True, timeout=900)


def allowed(line: str) -> set[int]:
    """Return the exit codes of a line: 1 for exercises that nobody has finished, 2 for a hand-in of toy predictions."""
    if line == "python create_kaggle_csv.py":
        return {2}
    return {0, 1} if line.startswith("tilewise check ") and "--start" not in line else {0}
