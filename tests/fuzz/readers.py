"""Which functions of the package read what somebody else may have written, and which of them a target has gone through.

A reader is a function with a call that opens an input or takes a document apart; the sources are searched for them.
While a target runs, those calls note who made them. A reader that no target reaches has no fuzzing: the test that
compares the two fails, until it has a target or stands in `APART` with the reason.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sqlite3
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import tilewise
import tilewise_arena
import tilewise_fleet
from tilewise import _files

# Where packages' sources are; add-ons are named with their package: `tilewise_arena/worker.py:main`.
ROOTS = (
    Path(tilewise.__file__).parent,
    *(Path(package.__file__).parents[1] for package in (tilewise_arena, tilewise_fleet)),
)
OPENING = ("open_input", "read_input", "read_text_input", "read_json_input", "parse_json", "gunzip")
PARSING = (("json", "loads"), ("tomllib", "loads"), ("sqlite3", "connect"))

_OWN = "written by this process, or by a child that it has started"
_WORDS = "a word of the command line, not a file; tests/cli tries it"
_SHIPPED = "a file of the package"
_PROGRAM = "the user's program, run in a process of its own and never parsed here; hostile paths try it"
APART = {
    "tilewise_arena/board/transactions.py:BoardTransaction.result": _OWN,
    "bench/client.py:submit": _PROGRAM,
    "bench/isolated.py:main": _OWN,
    "tilewise_arena/sandbox/host.py:Submitted.read": _PROGRAM,
    "tilewise_arena/sandbox/bubblewrap.py:start_process": _OWN,
    "bench/leaderboard.py:_hash": _OWN,
    "bench/submission.py:exchange": _OWN,
    "tilewise_arena/worker.py:main": _WORDS,
    "cli/tiles/models.py:export": "read whole by the scorer just before, which has targets",
    "costmodel/board.py:_row_key": "only hashed, never taken apart",
    "costmodel/training/config.py:parse_kwargs": _WORDS,
    "learn/checking.py:check": _PROGRAM,
    "tilewise_arena/grading/judging.py:must_be_solved": _PROGRAM,
    "tilewise_arena/grading/judging.py:must_be_predicted": _PROGRAM,
    "learn/labs/labwork.py:Lab._append": _OWN,
    "learn/notebook.py:hints": _SHIPPED,
    "profile/timing/processes.py:_run_child": _OWN,
    "tune/choose/calibrate.py:built_in_problems": _SHIPPED,
    "tune/measure/confirm.py:OtherProcesses._ask": _OWN,
    "tune/measure/confirm.py:serve": _OWN,
    "tune/measure/cpu/device.py:serve": _OWN,
    "tune/workloads/__init__.py:built_in_kernels": _SHIPPED,
}


def readers() -> set[str]:
    """Every reader in the sources, such as ``io.py:load_arrays``."""
    names: set[str] = set()
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            if path.name != "_files.py":
                _search(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).as_posix(), (), names)
    return names


def _search(node: ast.AST, file: str, names: tuple[str, ...], functions: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*names, child.name)
        if isinstance(child, ast.Call) and _reads(child.func):
            functions.add(f"{file}:{'.'.join(names)}")
        _search(child, file, inner, functions)


def _reads(callee: ast.expr) -> bool:
    if isinstance(callee, ast.Name):
        return callee.id in OPENING
    if isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name):
        return (callee.value.id, callee.attr) in PARSING
    return False


@contextlib.contextmanager
def noted(reached: set[str]) -> Iterator[None]:
    """Add to `reached` every function of the package from which an input is opened or taken apart in this block."""
    originals = [(name, getattr(_files, name)) for name in OPENING]
    originals += [("loads", json.loads), ("loads", tomllib.loads), ("connect", sqlite3.connect)]
    watched = [(name, original, _watched(original, reached)) for name, original in originals]
    for name, original, instead in watched:
        _replace(name, original, instead)
    try:
        yield
    finally:
        for name, original, instead in watched:
            _replace(name, instead, original)


def _replace(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """In every module that knows `old` by this name."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _watched(original: Callable[..., Any], reached: set[str]) -> Callable[..., Any]:
    def watched(*arguments: Any, **keywords: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            root = next((root for root in ROOTS if file.startswith(f"{root}/")), None)
            if root is not None:
                reached.add(f"{file[len(str(root)) + 1 :]}:{frame.f_code.co_qualname.replace('.<locals>', '')}")
            frame = frame.f_back
        return original(*arguments, **keywords)

    return watched
