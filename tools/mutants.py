"""A small mutation tester: changes one thing in a package's code at a time, and says which changes no test notices.

    python -m tools.mutants store --count 50 --seed 0

The sources are copied, so the working tree stays as it is. Every test file of the package runs once to see which lines
each of its tests reaches and how long it takes. A mutant runs the tests that reach its line, the fastest file first,
until one fails. One that they do not notice also runs these files whole: a cached result may hide who reaches a line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

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
_SLOWEST_SECONDS = 240.0  # a traced test file that takes longer does not take part
_SLOWEST_TEST_SECONDS = 15.0  # traced; a test that takes longer does not take part
# Editable installations find a package at its address whatever PYTHONPATH says; this sends them to the copy.
_REDIRECT = """
import sys
for finder in sys.meta_path:
    for table in (getattr(finder, "known_source_files", {{}}), getattr(finder, "submodule_search_locations", {{}})):
        for name, value in table.items():
            moved = [path.replace({old!r}, {new!r}, 1) for path in ([value] if isinstance(value, str) else value)]
            table[name] = moved[0] if isinstance(value, str) else type(value)(moved)
"""
_LARGE = 100  # numbers from here on are limits; one more is not a fault
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
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < _LARGE:
            yield replace(node, str(node.value + 1))
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node) != "return None":
            yield replace(node, "return None")
        elif isinstance(node, ast.If):
            yield replace(node.test, f"not ({ast.unparse(node.test)})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield replace(node, "pass")


class LineTracer:
    """A pytest plugin that records which lines of a package each test reaches.

    Lines reached outside of the body of a test, at import or in a fixture, count for every test of the file.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._shared: set[tuple[str, int]] = set()
        self._lines = self._shared
        self.tests: dict[str, tuple[float, set[tuple[str, int]]]] = {}

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace functions of the package only."""
        name = frame.f_code.co_filename
        if self._package not in name:
            return None
        name, lines = name.partition(self._package)[2], self._lines
        lines.add((name, frame.f_lineno))

        def step(frame: FrameType, event: str, _: Any) -> Any:
            lines.add((name, frame.f_lineno))
            return step

        return step

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Record the lines of a test, and its time if it passes."""
        self._lines, start = set(), time.monotonic()
        try:
            yield
            self.tests[item.nodeid] = time.monotonic() - start, self._lines
        finally:
            self._lines = self._shared

    def as_data(self) -> list[Any]:
        return [[name, seconds, sorted(lines | self._shared)] for name, (seconds, lines) in self.tests.items()]


def trace(package: str, output: Path, arguments: list[str]) -> int:
    """Run pytest in this process, and write which lines of the package each test reaches."""
    tracer = LineTracer(package)
    sys.settrace(tracer.enter)
    threading.settrace(tracer.enter)
    code = pytest.main(arguments, plugins=[tracer])
    sys.settrace(None)
    output.write_text(json.dumps(tracer.as_data()))
    return int(code)


class Tester:
    """A copy of the sources, the tests of a package, and the lines that they reach."""

    def __init__(self, package: str, folder: Path, processes: int) -> None:
        """Copy the sources to `folder`, and run every test file of the package once."""
        self.package, tests = PACKAGES[package]
        self.folder = folder
        for name in ("src", "packages"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("src", "packages"):
            old, new = f"{ROOT / name}{os.sep}", f"{folder / name}{os.sep}"
            with (folder / "sitecustomize.py").open("a") as redirect:
                redirect.write(_REDIRECT.format(old=old, new=new))
        roots = ["", "src", "packages/tilewise-arena/src", "packages/tilewise-fleet/src"]
        paths = os.pathsep.join([*(str(folder / root) for root in roots), str(ROOT)])
        self._environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        self.tests: dict[str, tuple[float, set[tuple[str, int]]]] = {}
        module = self.package.partition("src/")[2].replace("/", ".")
        check = f"import {module}, sys; sys.exit(not {module}.__file__.startswith({str(folder)!r}))"
        if not self._run([sys.executable, "-c", check], _SPARE_SECONDS):
            raise SystemExit(f"{module} is not imported from the copy of the sources: no mutant would be noticed")
        folders = [ROOT / name for name in tests.split()]
        files = sorted(file for name in folders if name.is_dir() for file in name.rglob("test_*.py"))
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(self._trace, (str(path.relative_to(ROOT)) for path in files)))

    def _trace(self, file: str) -> None:
        """Run one test file; tests that fail or are slow do not take part."""
        output = self.folder / f"{file.replace('/', '-')}.json"
        words = [sys.executable, "-m", "tools.mutants", "--trace", str(output), self.package, file]
        start, before = time.monotonic(), len(self.tests)
        self._run(words, _SLOWEST_SECONDS)
        for name, seconds, lines in json.loads(output.read_text()) if output.is_file() else []:
            if seconds <= _SLOWEST_TEST_SECONDS:
                self.tests[name] = seconds, {(path, line) for path, line in lines}
        print(f"{file}: {len(self.tests) - before} tests, {time.monotonic() - start:.0f} s", flush=True)

    def _run(self, words: list[str], seconds: float) -> bool:
        """Run a program on the copied sources; return whether it succeeds in time. Its children end with it."""
        process = subprocess.Popen(
            words, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def sample(self, count: int, seed: int) -> list[Mutant]:
        """Draw mutants of lines that a test reaches."""
        reached = set().union(*(lines for _, lines in self.tests.values()))
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
        files: dict[str, dict[str, float]] = {}
        for test, (seconds, lines) in self.tests.items():
            if (mutant.path, mutant.line) in lines:
                files.setdefault(test.partition("::")[0], {})[test] = seconds
        by_time = sorted(files.items(), key=lambda item: sum(item[1].values()))
        path.write_text(source[: mutant.start] + mutant.text + source[mutant.end :])
        try:
            return any(not self._pass(list(tests)) for _, tests in by_time) or any(
                not self._pass([test for test in self.tests if test.partition("::")[0] == file]) for file, _ in by_time
            )
        finally:
            path.write_text(source)

    def _pass(self, tests: list[str]) -> bool:
        """Run tests on the changed sources; three times as long as before counts as failed."""
        seconds = sum(self.tests[test][0] for test in tests)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        return self._run(words, 3 * seconds + _SPARE_SECONDS)


def main() -> int:
    """Draw mutants of a package, and print those that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help=", ".join(PACKAGES))
    parser.add_argument("tests", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=50, help="mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="test files to trace at once")
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options.tests]
        return trace(options.package, options.trace, words)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tester = Tester(options.package, Path(folder), options.processes)
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
