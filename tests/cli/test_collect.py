"""`tilewise collect` as a user types it; tests/tune has the collectors themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from steady_clock import SteadyClock
from typer.testing import CliRunner

from tilewise._extension import native
from tilewise.cli.collect import collect
from tilewise.tune.measure.cpu import collector as cpu_collect

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_collect, "CpuClock", SteadyClock)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(collect, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@needs_native
def test_from_shapes_to_one_file_and_compared_with_itself(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text('[{"family": "matmul", "m": 16, "n": 32, "k": 24}]')
    store = str(tmp_path / "s.sqlite")
    arguments = ("cpu", "--shapes", str(tmp_path / "shapes.json"), "--out", store, "--configs", "6", "--json")
    document = json.loads(run(*arguments))
    assert (document["kernels"], document["pairs"]) == (1, 6)
    assert json.loads(run(*arguments))["kernels"] == 0
    embedded = json.loads(
        run("embed", store, "--name", "mine", "--telling", "0", "--out", str(tmp_path / "mine.npz"), "--json")
    )
    assert embedded["pairs"] == 6
    agreement = json.loads(run("compare", store, str(tmp_path / "mine.npz"), "--json"))
    assert agreement["least_correlation"] == pytest.approx(1.0)
    assert "rank correlation" in run("compare", store, store).lower()


@pytest.mark.parametrize("command", ["cpu", "triton", "export", "embed", "compare"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    assert f"Example: tilewise collect {command}" in run(command, "--help")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cpu", "--minutes", "0"), "minutes must be a positive number"),
        (("cpu", "--shapes", "none.json"), "none.json does not exist"),
        (("cpu", "--plugin", "no_such_module"), "cannot be imported"),
        (("export", "none.sqlite", "--out", "x"), "none.sqlite does not exist"),
        (("compare", "nowhere", "h200"), "There is nothing at nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], sentence: str, typed: Any) -> None:
    code, _, err = typed(["collect", *arguments])
    assert code == 2 and err.startswith("tilewise: ") and sentence in err
