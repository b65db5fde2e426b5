"""The tests of what changed, for `make check`: prints the test files, one a line.

    python -m tools.changed_tests [--base main]

Changed is what differs from the base (the last commit shared with it), committed or not. A changed test file stands
for itself; a changed module for the test file that mirrors it and for those that name it, or where there is none for
those of its folder, the nearest first and at most a dozen in all, so that the answer comes within a minute. `make test`
runs everything.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 12
# What takes tens of seconds by itself: left to `make test` unless it was changed itself.
LONG = ("tests/bench/", "tests/docs/", "tests/fuzz/", "tests/tour/", "tests/cli/test_sweep.py", "tests/course/")


def changed(base: str) -> list[Path]:
    """Files that differ from the base, those that git does not know yet included."""
    fork = _git("merge-base", base, "HEAD") or ["HEAD"]
    names = [*_git("diff", "--name-only", fork[0]), *_git("ls-files", "--others", "--exclude-standard")]
    return [Path(name) for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def tests_of(path: Path, every: list[Path]) -> Iterator[Path]:
    """The test files of a module, the one that mirrors it first."""
    module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    mirror = Path("tests", *path.parts[2:-1], f"test_{path.name}")
    short = [test for test in every if not str(test).startswith(LONG)]
    found = [mirror] if mirror in every else []
    found += [test for test in short if _names(test, module)]
    yield from found or (test for test in short if test.parent == mirror.parent)


def _names(test: Path, module: str) -> bool:
    package, _, name = module.rpartition(".")
    text = (ROOT / test).read_text(encoding="utf-8")
    return f"{module} " in text or f"{module}." in text or f"from {package} import {name}\n" in text


def chosen(base: str) -> list[Path]:
    """The test files to run for everything that changed."""
    every = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    files = changed(base)
    found = [path for path in files if path in every]
    for path in files:
        if path.parts[:2] == ("src", "tilewise") and path.suffix == ".py":
            found += tests_of(path, every)
    return list(dict.fromkeys(found))[:MOST]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="the branch that the change goes to")
    for path in chosen(parser.parse_args().base):
        print(path)


if __name__ == "__main__":
    main()
