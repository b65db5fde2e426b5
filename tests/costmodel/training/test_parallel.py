"""Training by several processes: the same gradients, steps and model as by one, on the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tilewise.costmodel import load_model
from tilewise.errors import ConfigurationError

_PROGRAM = """
import os, sys, numpy as np, torch
torch.set_num_threads(1)
from pathlib import Path
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.training import loop
from tilewise.costmodel.training.config import default_settings

grads = []
class RecordingRun(loop.TrainingRun):
    def _train_epoch(self, epoch, started=0.0):
        step = self.optimizer.step
        def recorded_step():
            grads.append(self.optimizer.grads.clone().numpy())
            step()
        self.optimizer.step = recorded_step
        return super()._train_epoch(epoch, started)
loop.TrainingRun = RecordingRun
data = load_dataset("cpu", limit=23)
for model, kwargs in (("MLP", {}), ("TileRanker", {"dropout": 0.0})):
    settings = default_settings(
        model, epochs=1, batch=7, configs=24, seed=3, model_kwargs=kwargs, eval_every=1, least_steps=0
    )
    out = Path(sys.argv[1], model)
    loop.train(data, settings, out_dir=out, progress=False)
    if int(os.environ.get("RANK", "0")) == 0:
        np.save(out / "grads.npy", np.stack(grads))
    grads.clear()
"""


@pytest.fixture(scope="module")
def by_one_and_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of both models with their gradients, trained by one process and by two."""
    folder = tmp_path_factory.mktemp("parallel")
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launch in (("one", []), ("two", two)):
        command = [sys.executable, *launch, str(program), str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder / "one", folder / "two"


@pytest.mark.parametrize("model", ["MLP", "TileRanker"])
def test_two_processes_find_the_gradients_of_one(model: str, by_one_and_by_two: tuple[Path, Path]) -> None:
    one, two = (np.load(folder / model / "grads.npy") for folder in by_one_and_by_two)
    assert one.shape == two.shape and len(one) == 4
    scale = np.abs(one).max(axis=1, keepdims=True)
    # One process learns by the compiled kernels, two by torch: both round float32 sums in another order.
    assert (np.abs(one[0] - two[0]) <= 1e-4 * scale[0]).all(), "the first step starts from the same weights"
    # Adam divides a gradient by its own size: where that is almost zero, rounding decides the sign of a whole update,
    # so later steps agree closely but not to the last digits, and by how much depends on the CPU.
    assert (np.abs(one - two) <= 5e-2 * scale).all()
    assert all(np.corrcoef(a, b)[0, 1] > 0.9995 for a, b in zip(one, two, strict=True))
    assert load_model(by_one_and_by_two[1] / model).record["model"] == model


def test_a_limit_of_seconds_is_refused_where_processes_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.costmodel.training.parallel import torchrun_group

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="stop together"):
        torchrun_group("cpu", 10.0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torchrun_group("cpu", 10.0) is None
