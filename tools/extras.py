"""Install the core, every extra and every add-on alone, and check that each does its job: `make test-extras`.

A missing dependency shows only where nothing else brings it along. For each installation this tool makes a virtual
environment with exactly that (wheels built from this tree), runs commands that a user of it would type first, and runs
the tests that need nothing more. pytest is kept outside the environment and reaches it through PYTHONPATH.

    python -m tools.extras                  every installation but `keras`, which downloads TensorFlow
    python -m tools.extras core arena       some of them
    python -m tools.extras --list           what is installed and run
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "extras"
SECONDS_PER_COMMAND = 600  # a hanging command fails; the slowest takes about a minute


@dataclass(frozen=True)
class Command:
    """One command line, started in an empty folder, with the exit code and the text that it must give."""

    line: str
    exit_code: int = 0
    text: str = ""


@dataclass(frozen=True)
class Installation:
    """A requirement for pip, and the commands and tests that must then work."""

    requirement: str  # of wheels built here: "tilewise[plots]"
    commands: tuple[Command, ...]
    tests: str = ""  # arguments of pytest
    by_default: bool = True


# Writes cnn.onnx, a network to run.
_EXPORT = (
    "from tilewise import models, onnx; import numpy as np; "
    'onnx.save(models.cnn(), "cnn.onnx", np.zeros((1, 1, 8, 8), np.float32))'
)
INSTALLATIONS = {
    "core": Installation(
        "tilewise",
        (
            Command("tilewise --version", text="tilewise"),
            Command("tilewise tour --quick"),
            Command("tilewise quantize cnn", text="int8"),
            Command("tilewise check quantization --start"),
            Command("tilewise tiles describe cpu"),
            Command("tilewise tune matmul 64x64x64 --budget 2"),
            Command("tilewise compete run --help"),
            Command("tilewise run missing.onnx", 2),
            Command("python ROOT/course/tiles_train.py --help"),
            Command("tilewise compete serve", 2, "tilewise-arena"),
            Command("tilewise fleet", 2, "tilewise-fleet"),
            Command("tilewise tiles train ROOT --out model", 2),
        ),
        "tests/test_tensor.py tests/test_autograd.py tests/tour",
    ),
    "plots": Installation("tilewise[plots]", (Command("tilewise ladder --size 64 --python-size 16 --seconds 0.05"),)),
    "train": Installation(
        "tilewise[train]",
        (Command("python ROOT/course/tiles_train.py --model=MLP --toy_data=True --out_dir=run", text="error"),),
    ),
    "onnx": Installation("tilewise[onnx]", (Command("python -c 'EXPORT'"), Command("tilewise run cnn.onnx"))),
    "bench": Installation("tilewise[bench]", (Command("python -m benchmarks --help"),)),
    "notebooks": Installation("tilewise[notebooks]", (Command("python -c 'import nbclient, tilewise.learn'"),)),
    "arena": Installation(
        "tilewise-arena",
        (
            Command("tilewise compete serve --help"),
            Command("tilewise compete verify missing.sqlite", 2),
            Command("python -c 'import tilewise_arena.server, tilewise_arena.sandbox'"),
        ),
    ),
    "fleet": Installation(
        "tilewise-fleet",
        (Command("tilewise fleet --help"), Command("tilewise store info missing.sqlite", 2)),
    ),
    "ray": Installation("tilewise-fleet[ray]", (Command("python -c 'import ray, tilewise_fleet'"),)),
    "keras": Installation("tilewise[keras]", (Command("python ROOT/course/tiles_train.py --help"),), by_default=False),
}


def main() -> int:
    """Check the installations that are named on the command line, and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to install; all but keras by default")
    parser.add_argument("--list", action="store_true", help="print what is installed and run")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(INSTALLATIONS))
    if unknown:
        parser.error(f"there is no installation {unknown[0]!r}; choose from {', '.join(INSTALLATIONS)}")
    names = options.names or [name for name, entry in INSTALLATIONS.items() if entry.by_default]
    if options.list:
        for name in names:
            print(f"{name}: pip install '{INSTALLATIONS[name].requirement}'")
            print("".join(f"    {command.line}\n" for command in INSTALLATIONS[name].commands), end="")
        return 0
    wheels, pytest = build_wheels(), install_pytest()
    failures = [failure for name in names for failure in check(name, INSTALLATIONS[name], wheels, pytest)]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def build_wheels() -> Path:
    """Build the wheels of the core and the add-ons from this tree; return their folder.

    The build tools are those of this environment, so that a compiler cache finds the same headers every time.
    """
    folder = WORK / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    print("building wheels", flush=True)
    sources = [ROOT, *sorted((ROOT / "packages").iterdir())]
    _pip(sys.executable, ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *map(str, sources)])
    return folder


def install_pytest() -> Path:
    """Install pytest into a folder of its own, which tests put on PYTHONPATH."""
    folder = WORK / "pytest"
    if not folder.exists():
        _pip(sys.executable, ["install", "--target", str(folder), "pytest>=8"])
    return folder


def check(name: str, installation: Installation, wheels: Path, pytest: Path) -> list[str]:
    """Install one thing into a fresh environment, run its commands and tests, and return a line per failure."""
    started, folder = time.monotonic(), WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    # Other dependencies come from the index, the three distributions of this tree from their wheels alone.
    _pip(str(python), ["install", "--find-links", str(wheels), "--only-binary", ":all:", installation.requirement])
    playground = folder / "work"
    playground.mkdir()
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(playground), "LANG": "C.UTF-8"}
    failures = [_failure(name, command, playground, environment) for command in installation.commands]
    if installation.tests:
        line = f"python -m pytest -p no:cacheprovider --rootdir {ROOT} -c {ROOT / 'pyproject.toml'} " + " ".join(
            str(ROOT / path) for path in installation.tests.split()
        )
        tests = environment | {"PYTHONPATH": f"{pytest}:{ROOT}"}
        failures.append(_failure(name, Command(line), playground, tests))
    shortfalls = [failure for failure in failures if failure]
    verdict = "works" if not shortfalls else f"{len(shortfalls)} of {len(failures)} fail"
    print(f"{name:10} {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return shortfalls


def _failure(name: str, command: Command, folder: Path, environment: dict[str, str]) -> str:
    """Run a command; return "" if it does what it should, and else what went wrong with its last lines."""
    line = command.line.replace("ROOT", str(ROOT)).replace("EXPORT", _EXPORT)
    try:
        outcome = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_PER_COMMAND,
        )
    except subprocess.TimeoutExpired:
        return f"{name}: `{command.line}` did not end within {SECONDS_PER_COMMAND} s"
    output = outcome.stdout + outcome.stderr
    if outcome.returncode == command.exit_code and command.text in output and "Traceback" not in output:
        return ""
    last_lines = "\n    ".join(output.strip().splitlines()[-8:])
    expected = f"{command.exit_code} and {command.text!r}" if command.text else command.exit_code
    return f"{name}: `{command.line}` ended with {outcome.returncode}, not with {expected}\n    {last_lines}"


def _pip(python: str, arguments: list[str]) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments], check=True, cwd=ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
