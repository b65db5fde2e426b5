"""`tilewise tiles download | from-pb | kaggle | score` as a user types them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from costmodel.hlo.test_featurize import tuning_data
from costmodel.simulated import write_collection
from typer.testing import CliRunner

from tilewise.cli.tiles import data
from tilewise.cli.tiles.app import tiles
from tilewise.costmodel import load_dataset
from tilewise.costmodel.course.predictions import read_predictions, write_predictions
from tilewise.errors import ConfigurationError, TilewiseError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(tiles, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_from_pb_writes_kernel_files_and_says_how_many_runs_were_valid(tmp_path: Path) -> None:
    (tmp_path / "prog.pb").write_bytes(tuning_data().SerializeToString())
    result = json.loads(run("from-pb", str(tmp_path / "prog.pb"), "--out", str(tmp_path / "out"), "--json"))
    assert (result["runs"], result["valid_runs"], len(list((tmp_path / "out").glob("*.npz")))) == (9, 4, 2)


def test_download_unpacks_local_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        info = tarfile.TarInfo("npz/tile/xla/valid/a_1.npz")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    out = run("download", "--from", str(tmp_path / "t.tar"), "--out", str(tmp_path / "data"), "--json")
    assert json.loads(out)["kernels"] == {"valid": 1}
    assert (tmp_path / "data/npz/tile/xla/valid/a_1.npz").read_bytes() == b"abc"


def test_score_gives_one_for_perfect_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    write_collection(tmp_path / "data", train=1, valid=3, test=1)
    valid = load_dataset(tmp_path / "data").valid
    write_predictions(tmp_path / "p.csv", {kernel.name: np.argsort(kernel.target) for kernel in valid})
    result = json.loads(run("score", str(tmp_path / "p.csv"), "--truth", str(tmp_path / "data/valid"), "--json"))
    assert result["tile_score"] == 1.0
    assert "tile score 1.0000 over 3 kernels" in run(
        "score", str(tmp_path / "p.csv"), "--truth", str(tmp_path / "data/valid")
    )


def test_describe_counts_what_a_collection_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    write_collection(tmp_path / "data", train=5, valid=3, test=1)
    result = json.loads(run("describe", str(tmp_path / "data"), "--json"))
    assert [result["splits"][name]["kernels"] for name in ("train", "valid", "test")] == [5, 3, 1]
    assert result["splits"]["train"]["configs"] == 300
    assert result["total"]["median_config"] > 1
    assert "columns a configuration" in run("describe", str(tmp_path / "data"))
    (tmp_path / "data/schema.json").unlink(missing_ok=True)  # a folder without a schema is read from converted files
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "own"))
    run("describe", str(tmp_path / "data"))
    assert any((tmp_path / "own").iterdir())


def test_kaggle_finds_the_predictions_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_predictions(tmp_path / "predictions_output_model.csv", {"d6f5f54247bd1e58a10b9e7062c636ab": [7, 1]})
    with pytest.raises(TilewiseError, match="1 of 844"):
        run("kaggle")
    run("kaggle", "--force")
    rows = read_predictions(tmp_path / "predictions_kaggle.csv")
    assert len(rows) == 894
    assert rows["tile:xla:d6f5f54247bd1e58a10b9e7062c636ab"] == [7, 1, 0, 0, 0]


def test_a_jax_function_without_jax_or_module_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TilewiseError):
        run("from-jax", "nowhere:nothing", "--out", str(tmp_path / "x.npz"))
    assert not (tmp_path / "x.npz").exists()


def test_errors_leave_the_command_as_one_line_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.pb").write_bytes(b"\xff\xff")
    command = [sys.executable, "-W", "ignore", "-m", "tilewise.cli.app", "tiles", "from-pb", "bad.pb", "--out", "o"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("tilewise: bad.pb is not a readable") and result.stderr.count("\n") == 1


def test_a_truth_without_a_split_is_told_how_to_name_one(tmp_path):
    with pytest.raises(ConfigurationError, match="names no split"):
        data.score(tmp_path / "p.csv", "h200")
