"""The example in docs/adding-a-family.md, as a reader would type it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from steady_clock import SteadyClock
from typer.testing import CliRunner

from tilewise._extension import native
from tilewise.cli.collect import collect
from tilewise.cli.tiles.app import tiles
from tilewise.costmodel import load_dataset
from tilewise.tune.measure.cpu import collector as cpu_collect

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-family.md"
pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_collect, "CpuClock", SteadyClock)


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "row_softmax", raising=False)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "row_softmax.py").write_text(block("python"))
    (tmp_path / "shapes.json").write_text(block("json"))
    return tmp_path


def test_the_pages_commands_measure_export_and_describe_the_new_family(folder: Path) -> None:
    for line in block("sh").splitlines():
        program, group, *arguments = line.split()
        assert program == "tilewise"
        app = {"collect": collect, "tiles": tiles}[group]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert "row_softmax" not in result.output or "train" in result.output
    data = load_dataset(folder / "softmax", progress=False)
    for split in ("train", "valid", "test"):
        assert [kernel.n_configs >= 3 for kernel in data.split(split)] == [True]


def test_the_pages_wrong_kernel_is_caught(folder: Path) -> None:
    right = block("python")
    wrong = right.replace("part /= part.sum(axis=1, keepdims=True)", "part /= part.sum(axis=0, keepdims=True)")
    assert wrong != right
    (folder / "row_softmax.py").write_text(wrong)
    arguments = ["cpu", "--plugin", "row_softmax", "--shapes", "shapes.json", "--out", "softmax.sqlite"]
    result = CliRunner().invoke(collect, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "holds 0 measured kernels" in result.stdout
