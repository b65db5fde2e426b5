"""Training by several processes: the same gradients, steps and model as by one, on the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tilewise.costmodel import load_model
from tilewise.errors import ConfigurationError

_PROGRAM = """
import os, sys, numpy as np, torch
torch.set_num_threads(1)
from pathlib import Path
from tilewise.costmodel.data.dataset import load_dataset
from tilewise.costmodel.train import loop
from tilewise.costmodel.train.config import default_settings

out, model, kwargs = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
grads = []
class Kept(loop._Run):
    def _epoch(self, epoch, started=0.0):
        step = self.optimizer.step
        def kept():
            grads.append(self.optimizer.grads.clone().numpy())
            step()
        self.optimizer.step = kept
        return super()._epoch(epoch, started)
loop._Run = Kept
settings = default_settings(
    model, epochs=1, batch=7, configs=24, seed=3, model_kwargs=kwargs, eval_every=1, least_steps=0
)
data = load_dataset("cpu", limit=23)
loop.train(data, settings, out_dir=out / "model", progress=False)
if int(os.environ.get("RANK", "0")) == 0:
    np.save(out / "grads.npy", np.stack(grads))
"""


def _run(folder: Path, processes: int, model: str, kwargs: str) -> None:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *launch, str(program), str(folder), model, kwargs]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("model", "kwargs"), [("MLP", "{}"), ("TileRanker", "{'dropout': 0.0}")])
def test_two_processes_find_the_gradients_of_one(model: str, kwargs: str, tmp_path: Path) -> None:
    import numpy as np

    for processes in (1, 2):
        _run(tmp_path / str(processes), processes, model, kwargs)
    one, two = (np.load(tmp_path / str(processes) / "grads.npy") for processes in (1, 2))
    assert one.shape == two.shape and len(one) == 4
    scale = np.abs(one).max(axis=1, keepdims=True)
    assert (np.abs(one[0] - two[0]) <= 3e-5 * scale[0]).all(), "the first step starts from the same weights"
    assert (np.abs(one - two) <= 1e-3 * scale).all(), "rounding grows from step to step, and no more than that"
    assert load_model(tmp_path / "2" / "model").record["model"] == model


def test_a_limit_of_seconds_is_refused_where_processes_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.costmodel.train.parallel import ranks_here

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="stop together"):
        ranks_here("cpu", 10.0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks_here("cpu", 10.0) is None
