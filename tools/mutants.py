"""A small mutation tester: changes one thing in a package's code at a time, and says which changes no test notices.

    python -m tools.mutants store --count 50 --seed 0

The sources are copied, so the working tree stays as it is. Every test file of the package runs once to see which lines
it reaches and how long it takes. A mutant runs the files that reach its line, the fastest first, until one fails.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FLEET = "packages/tilewise-fleet/src/tilewise_fleet"
PACKAGES = {
    "bench": ("src/tilewise/bench", "tests/bench"),
    "store": ("src/tilewise/store", "tests/store"),
    "fleet": (FLEET, "tests/fleet"),
    "quantize": ("src/tilewise/quantize", "tests/quantize"),
    "graph": ("src/tilewise/graph", "tests/graph tests/quantize"),
    "data": ("src/tilewise/costmodel/data", "tests/costmodel/data"),
}
_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
_COMPARISONS |= {"in": "not in", "not in": "in"}
_ARITHMETIC = {"+": "-", "-": "+", "*": "//", "/": "*", "//": "*", "%": "+", "<<": ">>", ">>": "<<", "|": "&", "&": "|"}
_SLOWEST_SECONDS = 120.0  # a test file that takes longer does not take part
_SPARE_SECONDS = 30.0  # a mutant may take this much longer than three times the usual


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the line, and the text that replaces a part of the source."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def describe(self, source: str) -> str:
        return f"{self.path}:{self.line}: {source[self.start : self.end]!r} -> {self.text!r}"


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every change that this tester knows for a source file."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data = source.encode()

    def offset(line: int, column: int) -> int:
        return len(data[: lines[line - 1] + column].decode())

    def replace(node: Any, text: str) -> Mutant:
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        return Mutant(path, node.lineno, start, end, text)

    def replace_operator(left: Any, right: Any, table: dict[str, str]) -> Iterator[Mutant]:
        start, end = offset(left.end_lineno, left.end_col_offset), offset(right.lineno, right.col_offset)
        operator = source[start:end].strip(" ()\n")
        if operator in table:
            yield Mutant(path, left.end_lineno, start, end, source[start:end].replace(operator, table[operator], 1))

    tree = ast.parse(source)
    # Annotations are never evaluated, so a change in one is not a fault.
    annotations = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    unused = {id(node) for annotation in annotations if annotation for node in ast.walk(annotation)}
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.Compare):
            yield from replace_operator(node.left, node.comparators[0], _COMPARISONS)
        elif isinstance(node, ast.BinOp):
            yield from replace_operator(node.left, node.right, _ARITHMETIC)
        elif isinstance(node, ast.BoolOp):
            yield from replace_operator(node.values[0], node.values[1], {"and": "or", "or": "and"})
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replace(node, ast.unparse(node.operand))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield replace(node, str(not node.value))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield replace(node, str(node.value + 1))
        elif isinstance(node, ast.Return) and node.value is not None:
            yield replace(node, "return None")
        elif isinstance(node, ast.If):
            yield replace(node.test, f"not ({ast.unparse(node.test)})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield replace(node, "pass")


def trace(package: str, output: Path, arguments: list[str]) -> int:
    """Run pytest in this process, and write which lines of the package it reaches."""
    import pytest

    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if package in frame.f_code.co_filename:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return local
        return None

    sys.settrace(enter)
    code = pytest.main(arguments)
    sys.settrace(None)
    output.write_text(json.dumps([[name.partition(package)[2], line] for name, line in lines]))
    return int(code)


class Tester:
    """A copy of the sources, the test files of a package, and the lines that they reach."""

    def __init__(self, package: str, folder: Path) -> None:
        """Copy the sources to `folder`, and run every test file of the package once."""
        self.package, tests = PACKAGES[package]
        self.folder = folder
        for name in ("src", "packages"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        roots = ["src", "packages/tilewise-arena/src", "packages/tilewise-fleet/src"]
        paths = os.pathsep.join([*(str(folder / root) for root in roots), str(ROOT)])
        self._environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        self.files: dict[str, tuple[float, set[tuple[str, int]]]] = {}
        folders = [ROOT / name for name in tests.split()]
        for path in sorted(file for name in folders if name.is_dir() for file in name.rglob("test_*.py")):
            self._trace(str(path.relative_to(ROOT)))

    def _trace(self, test: str) -> None:
        """Run one test file; one that fails or is slow does not take part."""
        output = self.folder / "trace.json"
        output.unlink(missing_ok=True)
        words = [sys.executable, "-m", "tools.mutants", "--trace", str(output), self.package, test]
        start = time.monotonic()
        try:
            code = subprocess.run(
                words, cwd=ROOT, env=self._environment, capture_output=True, timeout=_SLOWEST_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
        seconds = time.monotonic() - start
        if code == 0 and output.is_file():
            self.files[test] = seconds, {(path, line) for path, line in json.loads(output.read_text())}
        print(f"{test}: {f'{len(self.files[test][1])} lines' if test in self.files else 'left out'}, {seconds:.0f} s")

    def sample(self, count: int, seed: int) -> list[Mutant]:
        """Draw mutants of lines that a test reaches."""
        reached = set().union(*(lines for _, lines in self.files.values()))
        mutants = []
        for path in sorted((self.folder / self.package).rglob("*.py")):
            name = str(path).partition(self.package)[2]
            mutants += [mutant for mutant in mutants_of(name, path.read_text()) if (name, mutant.line) in reached]
        order = np.random.default_rng(seed).permutation(len(mutants))
        return [mutants[at] for at in order[:count]]

    def is_noticed(self, mutant: Mutant) -> bool:
        """Run the tests that reach a mutant's line, and return whether one of them fails."""
        path = self.folder / (self.package + mutant.path)
        source = path.read_text()
        reaching = [
            (seconds, test) for test, (seconds, lines) in self.files.items() if (mutant.path, mutant.line) in lines
        ]
        path.write_text(source[: mutant.start] + mutant.text + source[mutant.end :])
        try:
            return any(not self._passes(test, seconds) for seconds, test in sorted(reaching))
        finally:
            path.write_text(source)

    def _passes(self, test: str, seconds: float) -> bool:
        """Run a test file on the changed sources; one that takes three times as long as before counts as failed."""
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
        limit = 3 * seconds + _SPARE_SECONDS
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=self._environment, capture_output=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    """Draw mutants of a package, and print those that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help=", ".join(PACKAGES))
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=50, help="mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options.tests]
        return trace(options.package, options.trace, words)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tester = Tester(options.package, Path(folder))
        mutants, survivors = tester.sample(options.count, options.seed), 0
        for number, mutant in enumerate(mutants, 1):
            if not tester.is_noticed(mutant):
                survivors += 1
                source = (tester.folder / (tester.package + mutant.path)).read_text()
                print(f"not noticed: {tester.package}{mutant.describe(source)}", flush=True)
            if number % 10 == 0:
                print(f"{number} mutants, {number - survivors} noticed", flush=True)
    print(f"{options.package}: {len(mutants) - survivors} of {len(mutants)} mutants noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
