"""Hand-ins under the grader's steps: the same rankings as ours, for every model, on kernels it has not seen.

Runs in the Keras environment (`make test-keras`), which has no PyTorch; ``$TILEWISE_PYTHON`` is the one that trains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_gnn")

from costmodel.simulated import write_collection

import tilewise
from course import grader
from tilewise.costmodel import load_dataset
from tilewise.costmodel.course.predictions import read_predictions
from tilewise.costmodel.ranking import rank

COURSE = Path(__file__).resolve().parents[2] / "course"
SOURCES = str(Path(tilewise.__file__).resolve().parents[1])
TRAINER = os.environ.get("TILEWISE_PYTHON", "")
BASELINES = {
    "MLP": {},
    "LateJoinSAGE": {"num_gnns": 2, "hidden_activation": "gelu"},
    "EarlyJoinSAGE": {},
    "LateJoinResGCN": {"directed": True, "reduction": "mean"},
    "EarlyJoinResGCN": {"hidden_dim": 32},
}
OWN_CLASS = '''

class Mine(TileModel):
    """A student's own."""

    def __init__(self, num_configs, num_ops=OPCODES, width=8):
        super().__init__(num_configs, num_ops, 4)
        self._hidden = tf.keras.layers.Dense(width, activation="relu")
        self._out = tf.keras.layers.Dense(1)

    def score(self, graph, configs):
        pooled = graph.pool(self.node_inputs(graph), "mean")
        return tf.squeeze(self._out(self._hidden(with_configs(pooled, configs))), -1)
'''


def command(python: str, script: Path, *arguments: str, home: Path, cwd: Path | None = None) -> str:
    settings = {"HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": SOURCES}
    environment = os.environ | settings
    result = subprocess.run(
        [python, "-W", "ignore", str(script), *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_collection(home / "data/tpugraphs/npz/tile/xla", train=20, valid=6, test=25)
    return home


def run_of(home: Path, model: str) -> Path:
    """The folder of the one run of that model."""
    from course.flags import read_run

    runs = (home / "out/tpugraphs_tiles").glob("run_*.jsonz")
    (run_file,) = (path for path in runs if read_run(path)["args"]["model"] == model)
    return run_file.with_name(run_file.name.replace("run_", "model_").removesuffix(".jsonz"))


@pytest.mark.skipif(not TRAINER, reason="TILEWISE_PYTHON does not name a Python with PyTorch")
@pytest.mark.parametrize("model", [*BASELINES, "TileRanker"])
def test_the_grader_ranks_unseen_kernels_exactly_as_we_do(home: Path, model: str) -> None:
    kwargs = json.dumps(BASELINES.get(model, {}))
    epochs = ["--epochs=2", f"--model_kwargs_json={kwargs}"]
    command(TRAINER, COURSE / "tiles_train.py", f"--model={model}", *epochs, home=home)
    folder = run_of(home, model)
    command(sys.executable, COURSE / "handin.py", str(folder), "--handin", str(home / "handin"), home=home)
    root = home / "data/tpugraphs/npz/tile/xla"
    theirs = grader.grade(home / "handin", folder.name, root, "test")
    test = load_dataset(root, cache_dir=home / "cache", progress=False).test
    assert len(test) == len(theirs) == 25
    for kernel in test:
        ours = rank(folder, kernel)
        assert grader.order(theirs[kernel.name]).tolist() == ours.order.tolist(), kernel.name
        np.testing.assert_allclose(theirs[kernel.name], ours.scores, rtol=0, atol=1e-4)


def test_a_students_own_keras_class_trains_predicts_and_is_gradable(home: Path, tmp_path: Path) -> None:
    course = tmp_path / "course"
    course.mkdir()
    for path in COURSE.glob("*.py"):
        (course / path.name).write_text(path.read_text() + (OWN_CLASS if path.name == "models.py" else ""))
    train = ["--framework=keras", "--model=Mine", "--epochs=2", '--model_kwargs_json={"width": 16}']
    out = command(sys.executable, course / "tiles_train.py", *train, home=home)
    assert "validation error" in out
    folder = run_of(home, "Mine")
    errors = json.loads(command(sys.executable, course / "tiles_evaluate.py", f"--dirs={folder}", home=home))
    assert set(errors) == {"1", "5"}
    command(sys.executable, course / "tiles_gen_predictions_csv.py", "--dir", str(folder), home=home, cwd=tmp_path)
    command(sys.executable, course / "handin.py", str(folder), "--handin", str(tmp_path / "handin"), home=home)
    theirs = grader.grade(tmp_path / "handin", folder.name, home / "data/tpugraphs/npz/tile/xla", "test")
    for name, row in read_predictions(tmp_path / "predictions_model_output.csv").items():
        assert grader.order(theirs[name.removeprefix("tile:xla:")])[:5].tolist() == row


def test_the_keras_loss_leaves_out_empty_slots() -> None:
    sys.path.insert(0, str(COURSE))
    import tensorflow as tf
    from keras_losses import CombinedLoss

    target, scores = tf.constant([[2.0, 1.0, 3.0]]), tf.constant([[0.5, 0.25, -1.0]])
    padded = [tf.constant([[2.0, 1.0, 3.0, -1.0, -1.0]]), tf.constant([[0.5, 0.25, -1.0, 7.0, -9.0]])]
    for losses in ("ListMLELoss:1", "PairwiseHingeLoss:1", "MSE:1", "ListMLELoss:1,MSE:0.02"):
        loss = CombinedLoss(losses)
        assert float(loss(target, scores)) == pytest.approx(float(loss(*padded)), rel=1e-5), losses


@pytest.mark.parametrize("name", ["ListMLELoss", "PairwiseHingeLoss"])
def test_the_ranking_losses_are_tf_rankings(name: str) -> None:
    sys.path.insert(0, str(COURSE))
    import tensorflow_ranking as tfr
    from keras_losses import CombinedLoss

    rng = np.random.default_rng(0)
    target, scores = rng.uniform(0.5, 3, (7, 9)).astype(np.float32), rng.normal(0, 5, (7, 9)).astype(np.float32)
    theirs = getattr(tfr.keras.losses, name)(temperature=10)
    assert float(CombinedLoss(name)(target, scores)) == pytest.approx(float(theirs(target, scores)), rel=1e-5)
