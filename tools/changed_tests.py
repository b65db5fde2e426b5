"""Print the test files of everything that changed, one per line, for `make check`.

    python -m tools.changed_tests [--base main]

A file has changed if it differs from the last commit shared with the base, committed or not. A changed test file
selects itself. A changed module selects the test file that mirrors it and those that name it, or else those of its
folder. At most a dozen are printed, so that they run within a minute; `make test` runs everything.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_TEST_FILES = 12
# Tests that take tens of seconds: left to `make test` unless they were changed themselves.
SLOW_TESTS = ("tests/bench/", "tests/docs/", "tests/fuzz/", "tests/tour/", "tests/cli/test_sweep.py", "tests/course/")


def changed_files(base: str) -> list[Path]:
    """List the files that differ from the base, including untracked ones."""
    fork = _git("merge-base", base, "HEAD") or ["HEAD"]
    names = [*_git("diff", "--name-only", fork[0]), *_git("ls-files", "--others", "--exclude-standard")]
    return [Path(name) for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def tests_of(path: Path, every: list[Path]) -> Iterator[Path]:
    """Yield the test files of a module, the one that mirrors it first."""
    module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    mirror = Path("tests", *path.parts[2:-1], f"test_{path.name}")
    short = [test for test in every if not str(test).startswith(SLOW_TESTS)]
    tests = [mirror] if mirror in every else []
    tests += [test for test in short if _names(test, module)]
    yield from tests or (test for test in short if test.parent == mirror.parent)


def _names(test: Path, module: str) -> bool:
    """Tell whether a test file mentions a module."""
    package, _, name = module.rpartition(".")
    text = (ROOT / test).read_text(encoding="utf-8")
    return f"{module} " in text or f"{module}." in text or f"from {package} import {name}\n" in text


def select_tests(base: str) -> list[Path]:
    """List the test files to run for everything that changed."""
    every = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    files = changed_files(base)
    selected = [path for path in files if path in every]
    for path in files:
        if path.parts[:2] == ("src", "tilewise") and path.suffix == ".py":
            selected += tests_of(path, every)
    return list(dict.fromkeys(selected))[:MAX_TEST_FILES]


def _git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints, or none if it fails."""
    process = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return process.stdout.splitlines() if process.returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the branch that the change goes to")
    for path in select_tests(parser.parse_args().base):
        print(path)


if __name__ == "__main__":
    main()
