"""`tilewise fit`: learns, stops, and continues bit for bit after a kill at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilewise as tw
from tests.waiting import interruptible
from tilewise.cli import app
from tilewise.errors import ConfigurationError, FileFormatError, GradientError, TilewiseError
from tilewise.fit import fit, recipe_for
from tilewise.fit.loop import Trainer
from tilewise.fit.tasks import random_shift

# Runs a fit that dies by `signal` just before or after the `count`-th call of a function.
DIE = """
import os, signal, sys
from pathlib import Path
from tilewise.fit import loop
from tilewise.cli import app
where, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
calls = 0
def dying(function):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == count and where.endswith("before"): os.kill(os.getpid(), number)
        result = function(*args, **kwargs)
        if calls == count and where.endswith("after"): os.kill(os.getpid(), number)
        return result
    return wrapped
if where.startswith("step"): loop.Trainer.step = dying(loop.Trainer.step)
if where.startswith("epoch"): loop.Trainer.end_epoch = dying(loop.Trainer.end_epoch)
if where.startswith("rename"): Path.replace = dying(Path.replace)
if where.startswith("sync"): os.fsync = dying(os.fsync)
sys.argv = ["tilewise", *sys.argv[4:]]
app.main()
"""


def command(model: str, out: Path, *more: str) -> list[str]:
    return ["fit", model, "--epochs", "2", "--checkpoint-every", "7", "--threads", "1", "--out", str(out), *more]


def run(
    where: str, count: int, number: int, arguments: list[str], interrupts: bool = True
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    call = [sys.executable, "-c", DIE, where, str(count), str(number), *arguments]
    with interruptible(interrupts):
        return subprocess.run(call, capture_output=True, text=True, env=env)


@pytest.fixture
def typed(monkeypatch, capsys):
    """A command line in this process, which nothing kills: its exit code and what it said of errors."""

    def go(arguments: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tilewise", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            app.main()
        return int(exit_info.value.code or 0), capsys.readouterr().err

    return go


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert run("never", 0, 9, command("mlp", out)).returncode == 0
    return out


KILLS = [
    ("step before", 1),
    ("step after", 17),
    ("sync before", 1),
    ("sync after", 3),
    ("rename before", 2),
    ("rename after", 4),
    ("epoch before", 1),
    ("epoch after", 2),
]


@pytest.mark.parametrize(("where", "count"), KILLS)
def test_a_run_killed_anywhere_continues_to_the_same_weights_bit_for_bit(tmp_path, uninterrupted, typed, where, count):
    killed = run(where, count, signal.SIGKILL, command("mlp", tmp_path))
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "model.safetensors").exists()
    code, output = typed(command("mlp", tmp_path))
    assert code == 0, output
    assert weights(tmp_path) == weights(uninterrupted)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == (uninterrupted / "checkpoint.safetensors").read_bytes()


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, uninterrupted, typed):
    stopped = run("step before", 10, signal.SIGINT, command("mlp", tmp_path))
    assert stopped.returncode == 130
    assert "Interrupted after 10 steps" in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert typed(command("mlp", tmp_path))[0] == 0
    assert weights(tmp_path) == weights(uninterrupted)


def test_started_in_the_background_of_a_script_it_goes_on_after_ctrl_c(tmp_path, uninterrupted):
    done = run("step before", 10, signal.SIGINT, command("mlp", tmp_path), interrupts=False)
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path) == weights(uninterrupted)


def test_a_killed_gpt_continues_to_the_same_weights(tmp_path, typed):
    (tmp_path / "text").write_text("a small text to learn by heart, " * 200)
    runs = [tmp_path / "whole", tmp_path / "killed"]
    arguments = [command("gpt", out, "--data", str(tmp_path / "text"), "--checkpoint-every", "1") for out in runs]
    assert typed(arguments[0])[0] == 0
    assert run("step after", 2, signal.SIGKILL, arguments[1]).returncode == -signal.SIGKILL
    assert typed(arguments[1])[0] == 0
    assert weights(runs[0]) == weights(runs[1])


def test_json_reports_scores_history_and_paths(tmp_path):
    done = run("never", 0, 9, command("mlp", tmp_path, "--json"))
    report = json.loads(done.stdout)
    assert report["finished"]
    assert report["scores"]["test_accuracy"] > 0.7
    assert [epoch["epoch"] for epoch in report["history"]] == [1, 2]
    assert Path(report["model_path"]).exists()
    assert "epoch 1: training loss" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "gan"],
        ["fit", "mlp", "--epochs", "0"],
        ["fit", "cnn", "--data", "/nowhere"],
        ["fit", "gpt", "--data", "/"],
    ],
)
def test_impossible_wishes_get_one_sentence_and_exit_code_2(tmp_path, typed, arguments):
    code, output = typed([*arguments, "--out", str(tmp_path)])
    assert code == 2 and output.startswith("tilewise: ") and len(output.strip().splitlines()) == 1


def test_a_folder_with_another_run_is_not_mixed_up(tmp_path):
    fit(recipe_for("mlp", epochs=1), tmp_path)
    with pytest.raises(ConfigurationError, match="other settings"):
        fit(recipe_for("mlp", epochs=1, seed=1), tmp_path)
    assert fit(recipe_for("mlp", epochs=1, seed=1), tmp_path, fresh=True).finished


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = fit(recipe_for("mlp", epochs=2), tmp_path)
    again = fit(recipe_for("mlp", epochs=2), tmp_path)
    assert again.steps == first.steps
    assert again.scores == first.scores


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    tw.save({"x": np.zeros(2)}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(FileFormatError):
        fit(recipe_for("mlp", epochs=1), tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"garbage")
    with pytest.raises(FileFormatError):
        fit(recipe_for("mlp", epochs=1), tmp_path)


def test_training_stops_when_the_score_no_longer_gets_better(tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, *[0.1] * 100])
    recipe = recipe_for("mlp", epochs=90)
    trainer = Trainer(recipe, tmp_path, 10**9)
    monkeypatch.setattr(trainer.task, "validate", lambda: next(scores))
    monkeypatch.setattr(trainer.task, "batches", lambda: iter([]))
    monkeypatch.setattr(trainer, "save", lambda: None)
    assert trainer.train()
    result = trainer.result(True)
    assert result.stopped_early
    assert result.best_epoch == 2
    assert result.epochs == 2 + recipe.patience


def test_a_loss_that_is_no_number_stops_with_advice(tmp_path, monkeypatch):
    trainer = Trainer(recipe_for("mlp", epochs=1), tmp_path, 50)
    trainer.task.model[0].weight.data[...] = np.nan
    with pytest.raises(GradientError, match="--lr"):
        trainer.train()


def test_shifting_moves_each_image_by_its_own_pixels():
    x = np.zeros((50, 1, 8, 8), np.float32)
    x[:, 0, 4, 4] = 1
    shifted = random_shift(x, 1, np.random.default_rng(0))
    assert (shifted.sum(axis=(1, 2, 3)) == 1).all()
    places = {tuple(p) for p in np.argwhere(shifted[:, 0])[:, 1:]}
    assert places == {(r, c) for r in (3, 4, 5) for c in (3, 4, 5)}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "bar"), [("mlp", 0.97), ("cnn", 0.985)])
def test_the_recipes_reach_their_accuracy_on_the_held_out_fifth(tmp_path, model, bar):
    assert fit(recipe_for(model), tmp_path, checkpoint_every=10**9).scores["test_accuracy"] >= bar


def test_recipes_refuse_nonsense():
    for change in ({"seed": -1}, {"lr": 0.0}, {"epochs": -1}):
        with pytest.raises(TilewiseError):
            recipe_for("mlp", **change)
