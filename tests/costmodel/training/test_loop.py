"""Training: learns, repeats by seed, resumes after a kill as if nothing had happened, survives odd kernels."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from costmodel.simulated import simulated_kernel, simulated_kernels, write_collection  # noqa: E402
from tilewise.costmodel import load_dataset, load_model, load_scorer, rank, train  # noqa: E402
from tilewise.costmodel.data.dataset import dataset_from_kernels  # noqa: E402
from tilewise.costmodel.data.kernel import Kernel  # noqa: E402
from tilewise.costmodel.metrics import opa  # noqa: E402
from tilewise.costmodel.models import trained  # noqa: E402
from tilewise.costmodel.models.torch import MODELS  # noqa: E402
from tilewise.costmodel.training.config import default_settings  # noqa: E402
from tilewise.costmodel.training.resumable import selection_value  # noqa: E402
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError  # noqa: E402

QUICK = {"epochs": 2, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data():
    """Enough to train on; what is learned from it is not looked at."""
    kernels = simulated_kernels(16, seed=0, n_configs=24)
    return dataset_from_kernels(kernels[:10], kernels[10:13], kernels[13:])


@pytest.fixture(scope="module")
def much():
    """Enough to learn an order, and to say how sure one is."""
    kernels = simulated_kernels(40, seed=0, n_configs=40)
    return dataset_from_kernels(kernels[:28], kernels[28:34], kernels[34:])


def weights(model) -> bytes:
    return b"".join(v.numpy().tobytes() for v in model.module.state_dict().values())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_and_is_the_same_for_the_same_seed(name, data):
    first, second, other = (train(data, name, seed=seed, **QUICK) for seed in (1, 1, 2))
    assert weights(first) == weights(second) != weights(other)
    assert len(first.record["curve"]) == 2 and np.isfinite(first.record["curve"][-1]["val_opa"])


def test_ranker_learns_an_order_on_kernels_it_has_not_seen(much):
    model = train(much, "TileRanker", epochs=12, seed=0, progress=False)
    assert np.mean([opa(k.target, model.score(k)) for k in much.test]) > 0.8


def test_the_kept_weights_are_those_of_the_best_validation_metric(data):
    model = train(data, "MLP", epochs=6, learning_rate=0.02, progress=False)
    values = [row["val_opa"] for row in model.record["curve"]]
    accuracy = np.mean([opa(k.target, model.score(k)) for k in data.valid])
    assert accuracy == pytest.approx(max(values), abs=1e-6) and model.record["best_epoch"] == int(np.argmax(values))


def test_early_stopping_ends_after_so_many_epochs_without_gain(data):
    model = train(data, "MLP", epochs=50, early_stop=2, learning_rate=0.0, progress=False)
    assert len(model.record["curve"]) == 3


def test_a_saved_model_scores_the_same_in_torch_and_numpy(much, tmp_path):
    for name in ("TileRanker", "EarlyJoinSAGE"):
        model = train(much, name, out_dir=tmp_path / name, **QUICK)
        again, scorer = load_model(tmp_path / name), load_scorer(tmp_path / name)
        for kernel in much.test:
            # PyTorch's products may differ in the last bit with the alignment of their operands.
            np.testing.assert_allclose(again.score(kernel), model.score(kernel), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(scorer.score(kernel), model.score(kernel), rtol=1e-5, atol=1e-5)
        ranking = rank(tmp_path / name, much.test[0])
        assert ranking.top(5) == rank(model, much.test[0]).top(5) and 0 <= ranking.confidence_top5 <= 1


def test_the_scorer_imports_no_torch(data, tmp_path):
    train(data, "TileRanker", out_dir=tmp_path, **QUICK)
    code = (
        "import sys; from tilewise.costmodel import load_scorer; "
        f"load_scorer({str(tmp_path)!r}); assert 'torch' not in sys.modules and 'lightgbm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=os.environ | _path())


def _path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[3] / "src"), "OMP_NUM_THREADS": "1"}


def test_resuming_gives_the_weights_of_the_uninterrupted_run(data, tmp_path):
    whole = train(data, "TileRanker", epochs=6, seed=4, progress=False)

    def stop(row: dict) -> None:
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data, "TileRanker", epochs=6, seed=4, out_dir=tmp_path, report=stop)
    resumed = train(data, "TileRanker", epochs=6, seed=4, out_dir=tmp_path, progress=False)
    assert weights(resumed) == weights(whole)
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_not_used(data, tmp_path, capsys):
    def stop(row: dict) -> None:
        if row["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data, "MLP", epochs=3, seed=1, out_dir=tmp_path, report=stop)
    train(data, "MLP", epochs=3, seed=2, out_dir=tmp_path, progress=False)
    assert "another run" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "checkpoint.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    train(data, "MLP", epochs=3, seed=2, out_dir=tmp_path, progress=False)
    assert "starts again" in capsys.readouterr().err


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from tilewise.costmodel import load_dataset, train
data = load_dataset(sys.argv[1], cache_dir=sys.argv[2], progress=False)
train(data, sys.argv[4], epochs=int(sys.argv[5]), out_dir=sys.argv[3], progress=False)
"""


def _kill_and_compare(tmp_path: Path, model: str, epochs: int, kills: int) -> None:
    root = write_collection(tmp_path / "c", 16, 6, 1)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(root), str(tmp_path / "cache")]
    tail = [model, str(epochs)]
    started = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole"), *tail], check=True, env=os.environ | _path())
    length = time.monotonic() - started
    rng = np.random.default_rng(0)
    for _ in range(kills):
        process = subprocess.Popen([*command, str(tmp_path / "killed"), *tail], env=os.environ | _path())
        try:
            process.wait(timeout=float(rng.uniform(0.3, 1.0)) * length)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    subprocess.run([*command, str(tmp_path / "killed"), *tail], check=True, env=os.environ | _path())
    kernel = load_dataset(root, cache_dir=tmp_path / "cache", progress=False).test[0]
    a, b = load_model(tmp_path / "whole"), load_model(tmp_path / "killed")
    assert weights(a) == weights(b)
    np.testing.assert_array_equal(a.score(kernel), b.score(kernel))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["TileRanker", "EarlyJoinSAGE"])
def test_twenty_kills_change_nothing(tmp_path, model):
    _kill_and_compare(tmp_path, model, epochs=60, kills=20)


def _with(kernel: Kernel, rows, **changes) -> Kernel:
    parts = {name: getattr(kernel, name)[rows] for name in ("config_feat", "runtime", "normalizer")}
    return dataclasses.replace(kernel, **(parts | changes))


@pytest.mark.parametrize("name", ["TileRanker", "EarlyJoinSAGE", "LateJoinResGCN"])
def test_odd_kernels_train_and_rank(name):
    plain = simulated_kernels(8, seed=2, n_configs=20)
    rng = np.random.default_rng(0)
    one = _with(plain[0], [0], name="a_1")
    two = _with(plain[1], [0, 1], name="a_2")
    repeated = _with(plain[2], [0] * 10, name="a_3")
    equal = dataclasses.replace(plain[3], name="a_4", runtime=np.full(20, 77))
    alone = dataclasses.replace(
        plain[4],
        name="a_5",
        node_feat=plain[4].node_feat[-1:],
        node_opcode=plain[4].node_opcode[-1:],
        edge_index=np.zeros((0, 2), np.int32),
    )
    odd = [one, two, repeated, equal, alone]
    data = dataset_from_kernels([*plain, *odd], [*odd, *plain[:3]], odd)
    model = train(data, name, epochs=2, progress=False)
    for kernel in odd:
        assert sorted(rank(model, kernel).order) == list(range(kernel.n_configs))
    many = simulated_kernel(rng, "big_0", n_configs=200_000)
    assert np.isfinite(model.score(many)).all()
    only_odd = dataset_from_kernels([one, equal], [one])
    assert train(only_odd, name, epochs=1, progress=False).score(two).shape == (2,)


def test_settings_that_mean_nothing_are_one_sentence(data):
    for settings in ({"epochs": 0}, {"batch": -1}, {"learning_rate": -1.0}, {"select": "x"}, {"no_such": 1}):
        with pytest.raises(ConfigurationError):
            train(data, "MLP", progress=False, **settings)
    unlabelled = [dataclasses.replace(k, runtime=np.zeros_like(k.runtime)) for k in data.test]
    with pytest.raises(ConfigurationError, match="runtimes"):
        train(dataset_from_kernels(unlabelled, unlabelled), "MLP", progress=False)


def test_divergence_is_said(data):
    with pytest.raises(ConfigurationError, match="diverged"):
        train(data, "MLP", learning_rate=1e30, clip_norm=None, epochs=5, losses="MSE:1", progress=False)


def test_mutated_model_files_are_one_sentence_or_work(data, tmp_path):
    train(data, "MLP", out_dir=tmp_path, epochs=1, progress=False)
    original = (tmp_path / "model.safetensors").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        content = bytearray(original)
        for _ in range(rng.integers(1, 6)):
            content[int(rng.integers(2000) if rng.random() < 0.7 else rng.integers(len(content)))] = rng.integers(256)
        if rng.random() < 0.2:
            content = content[: rng.integers(len(content))]
        (tmp_path / "m.safetensors").write_bytes(content)
        try:
            load_scorer(tmp_path / "m.safetensors").score(data.test[0])
        except TilewiseError as error:
            assert "\n" not in str(error)


def test_a_model_refuses_kernels_of_another_width(data, tmp_path):
    model = train(data, "MLP", epochs=1, progress=False)
    kernel = data.test[0]
    with pytest.raises(FileFormatError, match="columns"):
        model.score(dataclasses.replace(kernel, config_feat=kernel.config_feat[:, :3]))


def test_a_saved_model_records_its_sizes_so_that_later_defaults_do_not_matter(data, tmp_path):
    model = train(data, "TileRanker", epochs=1, out_dir=tmp_path, progress=False)
    assert model.record["model_kwargs"]["hidden_dim"] == model.module.config_in.kernel.shape[1]
    assert model.record["model_kwargs"]["members"] == len(model.module.scaling)


def test_the_shipped_model_scores_the_same_in_torch_and_numpy():
    path = Path(trained.__file__).parents[1] / "shipped_models" / "h200.safetensors"
    kernel = load_dataset("h200", progress=False).test[0]
    np.testing.assert_allclose(load_model(path).score(kernel), load_scorer(path).score(kernel), rtol=1e-4, atol=1e-5)


def test_a_limit_of_seconds_shapes_the_learning_rate_and_ends_the_run(data):
    settings = default_settings("TileRanker", epochs=1000, max_seconds=10.0)
    rates = [settings.learning_rate_at(settings.share_done(epoch=1, seconds=s)) for s in (0.5, 5.0, 9.99)]
    assert rates[0] > rates[1] > rates[2] and rates[2] < 1e-3 * rates[0]
    model = train(data, "TileRanker", epochs=100_000, max_seconds=1.0, progress=False)
    assert len(model.record["curve"]) < 100_000 and "val_top5" in model.record["curve"][-1]


def test_weights_from_before_a_run_has_settled_are_not_kept():
    kernels = simulated_kernels(6, seed=3, n_configs=24)
    data = dataset_from_kernels(kernels[:4], kernels[4:])
    for seed in range(2):
        model = train(data, "TileRanker", epochs=8, eval_every=1, seed=seed, settled=0.75, progress=False, device="cpu")
        values = [selection_value(row, "top") for row in model.record["curve"]]
        assert model.record["best_epoch"] == 5 + int(np.argmax(values[5:]))
