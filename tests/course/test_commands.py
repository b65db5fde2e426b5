"""The course's commands as a student types them, on a small collection: from training to the Kaggle file."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from costmodel.simulated import write_collection

from tilewise.costmodel.course.predictions import read_predictions

pytest.importorskip("torch")

COURSE = Path(__file__).resolve().parents[2] / "course"
ARGUMENT_KEYS = {
    "epochs", "eval_every", "batch_size", "configs", "early_stop", "losses", "learning_rate", "clip_norm", "model",
    "model_kwargs_json", "test_mode", "out_dir", "results_csv", "validate_batches", "run_id",
}  # fmt: skip


def command(script: str, *arguments: str, home: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(COURSE / script), *arguments],
        cwd=cwd or COURSE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The same in this process, which has PyTorch already: exit code, and what was printed."""

    def run(script: str, *arguments: str, home: Path, cwd: Path | None = None) -> tuple[int, str, str]:
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.chdir(cwd or COURSE)
        monkeypatch.setattr(sys, "argv", [str(COURSE / script), *arguments])
        monkeypatch.syspath_prepend(str(COURSE))
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(COURSE / script), run_name="__main__")
        return (int(exit_info.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student's home with a small dataset where the course keeps it, and one trained MLP."""
    home = tmp_path_factory.mktemp("home")
    write_collection(home / "data/tpugraphs/npz/tile/xla", train=12, valid=6, test=4)
    result = command("tiles_train.py", "--model=MLP", "--toy_data=True", "--epochs", "2", home=home)
    assert result.returncode == 0, result.stderr
    assert "chance would give: top-1" in result.stdout
    return home


def only(home: Path, pattern: str) -> Path:
    (file,) = (home / "out/tpugraphs_tiles").glob(pattern)
    return file


def test_training_leaves_the_courses_files_under_the_md5_of_its_arguments(home: Path) -> None:
    run = json.loads(gzip.decompress(only(home, "run_*.jsonz").read_bytes()))
    digest = hashlib.md5(json.dumps(run["args"], sort_keys=True).encode(), usedforsecurity=False).hexdigest()
    assert only(home, "run_*.jsonz").name == f"run_{digest}.jsonz"
    assert only(home, "model_*").name == f"model_{digest}"
    assert set(run["args"]) == ARGUMENT_KEYS
    assert run["args"]["losses"] == "ListMLELoss:1,MSE:0.02"
    assert (run["args"]["eval_every"], run["args"]["epochs"], run["args"]["clip_norm"]) == (5, 2, 1e-3)
    assert run["args"]["results_csv"] == str(only(home, "results_*.csv"))
    assert set(run["train_curve"]) == {"epoch", "train_loss", "train_opa", "val_loss", "val_opa"}
    assert run["train_curve"]["epoch"] == [0, 1]
    assert set(run["final_error"]["val"]) == {"1", "5", "10"}


def test_the_results_file_holds_ten_per_test_kernel(home: Path) -> None:
    rows = read_predictions(only(home, "results_*.csv"))
    assert len(rows) == 4
    assert {len(row) for row in rows.values()} == {10}
    run = json.loads(gzip.decompress(only(home, "run_*.jsonz").read_bytes()))
    assert {f"tile:xla:{name}": row for name, row in run["test_predictions"].items()} == rows


def test_evaluation_prints_json_by_k_and_program(home: Path) -> None:
    result = command("tiles_evaluate.py", f"--dirs={only(home, 'model_*').name}", home=home)
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout)
    assert set(errors) == {"1", "5"}
    assert all(errors["5"][program] <= errors["1"][program] for program in errors["1"])
    run = json.loads(gzip.decompress(only(home, "run_*.jsonz").read_bytes()))
    assert len(errors["1"]) == 4 and min(errors["1"].values()) >= 0
    assert run["final_error"]["val"]["1"] > 0


def test_predictions_then_kaggle_in_the_working_folder(home: Path, tmp_path: Path) -> None:
    model = str(only(home, "model_*"))
    result = command("tiles_gen_predictions_csv.py", "--dir", model, home=home, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = read_predictions(tmp_path / "predictions_model_output.csv")
    assert {len(row) for row in rows.values()} == {5}
    ten = read_predictions(only(home, "results_*.csv"))
    assert all(ten[name][:5] == row for name, row in rows.items())
    assert read_predictions(tmp_path / "predictions_output_model.csv") == rows  # the name in the course's text
    process = command("create_kaggle_csv.py", home=home, cwd=tmp_path)
    assert process.returncode == 2 and "--toy_data" in process.stderr and "--force" in process.stderr
    assert not (tmp_path / "predictions_kaggle.csv").exists()
    result = command("create_kaggle_csv.py", "--force", home=home, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(read_predictions(tmp_path / "predictions_kaggle.csv")) == 894
    assert "844 of 844 tile rows have no prediction" in result.stdout


def test_the_kaggle_command_takes_the_working_folders_sample(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sample_submission.csv").write_text("ID,TopConfigs\ntile:xla:b,0;1;2;3;4\ntile:xla:a,0;1;2;3;4\n")
    (tmp_path / "mine.csv").write_text("ID,TopConfigs\ntile:xla:a,9;8;7;6;5\ntile:xla:b,4;3;2;1;0\n")
    result = command("create_kaggle_csv.py", "--inputcsv", "mine.csv", home=home, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "predictions_kaggle.csv").read_text() == (
        "ID,TopConfigs\ntile:xla:b,4;3;2;1;0\ntile:xla:a,9;8;7;6;5\n"
    )


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("tiles_train.py", ["--data_root=/nowhere"], "There is no dataset at /nowhere"),
        ("tiles_train.py", ["--model=NoSuchModel"], "There is no model 'NoSuchModel'"),
        ("tiles_train.py", ["--losses=Nothing:1"], "There is no loss 'Nothing'"),
        ("tiles_train.py", ["--model_kwargs_json={"], "--model_kwargs_json is not JSON"),
        ("tiles_evaluate.py", ["--dirs=model_none"], "There is no model folder model_none"),
        ("tiles_gen_predictions_csv.py", ["--dir", "."], "holds no trained model"),
        ("create_kaggle_csv.py", ["--inputcsv=none.csv"], "none.csv does not exist"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    home: Path, tmp_path: Path, typed: Any, script: str, arguments: list[str], sentence: str
) -> None:
    code, _, err = typed(script, *arguments, home=home, cwd=tmp_path)
    assert code == 2 and sentence in err
    assert not list(tmp_path.iterdir())


def test_one_dash_is_enough_and_both_names_of_the_predictions_are_read(home: Path, tmp_path: Path, typed: Any) -> None:
    code, _, err = typed("tiles_gen_predictions_csv.py", "-dir", str(only(home, "model_*")), home=home, cwd=tmp_path)
    assert code == 0, err
    (tmp_path / "predictions_model_output.csv").unlink()
    code, out, err = typed("create_kaggle_csv.py", "-force", home=home, cwd=tmp_path)
    assert code == 0, err
    assert "predictions_output_model.csv" in out


def test_a_misspelt_model_leaves_nothing_and_is_told_of_keras(home: Path, typed: Any) -> None:
    before = sorted((home / "out/tpugraphs_tiles").iterdir())
    code, _, err = typed("tiles_train.py", "--model=MPL", "--toy_data=True", home=home)
    assert code == 2 and "--framework=keras" in err
    assert sorted((home / "out/tpugraphs_tiles").iterdir()) == before


def test_a_class_of_models_py_is_found_without_a_flag() -> None:
    spec = importlib.util.spec_from_file_location("course_train", COURSE / "tiles_train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(COURSE))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(COURSE))
    assert module.framework_of("MLP") == module.framework_of("NoSuchModel") == "torch"
    assert module.framework_of("TileModel") == "keras"


def test_download_commands_are_shell_that_fetches_three_archives() -> None:
    script = subprocess.run(
        [sys.executable, str(COURSE / "echo_download_commands.py")], capture_output=True, check=True
    )
    assert subprocess.run(["bash", "-n"], input=script.stdout, check=False).returncode == 0
    for split in ("train", "valid", "test"):
        assert f"npz_tile_xla_{split}.tar".encode() in script.stdout


def test_a_reader_who_has_read_enough_is_no_error() -> None:
    piped = f"{shlex.join([sys.executable, str(COURSE / 'echo_download_commands.py')])} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", piped], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set -e\n", "")


def test_training_without_pytorch_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = command("tiles_train.py", "--toy_data=True", home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tiles_train.py: Training needs PyTorch") and done.stderr.count("\n") == 1


def test_an_own_keras_class_is_handed_over_with_its_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that has TensorFlow has no PyTorch to find out by itself whose class it is."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("TILEWISE_KERAS_PYTHON", str(python))
    done = command("tiles_train.py", "--model=TileModel", "--toy_data=True", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--model=TileModel --toy_data=True --framework=keras" in done.stdout
