"""Import every benchmark, so that a renamed function is noticed before somebody runs it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = [
    ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts)
    for path in sorted(BENCHMARKS.rglob("*.py"))
    if path.stem != "__main__"
]


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_imports(module):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("tilewise", "benchmarks", "tools"):
            raise
        pytest.skip(f"{error.name}, which it compares with, is not installed")
