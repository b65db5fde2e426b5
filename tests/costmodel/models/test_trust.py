"""A model file is data: it never decides which code runs, nor how much memory is taken before it is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from costmodel.simulated import simulated_kernels, write_collection  # noqa: E402
from tilewise.cli.app import main  # noqa: E402
from tilewise.costmodel import load_model, load_scorer, train  # noqa: E402
from tilewise.costmodel.data.dataset import dataset_from_kernels  # noqa: E402
from tilewise.costmodel.models.file_writer import write_tensors  # noqa: E402
from tilewise.costmodel.models.files import read_tensors  # noqa: E402
from tilewise.errors import FileFormatError, TilewiseError  # noqa: E402

OWN = """
import pathlib, torch
pathlib.Path("ran").touch()
class Model(torch.nn.Module):
    def __init__(self, node_width, config_width, depth=1):
        super().__init__()
        self.layer = torch.nn.Linear(config_width, 1)
    def forward(self, batch):
        return self.layer(batch.config).squeeze(-1)
"""


@pytest.fixture(scope="module")
def data():
    kernels = simulated_kernels(20, seed=0, n_configs=20)
    return dataset_from_kernels(kernels[:14], kernels[14:17], kernels[17:])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a user's own class in it."""
    (tmp_path / "evil.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return tmp_path


def changed(path: Path, **changes: object) -> Path:
    tensors, record = read_tensors(path)
    write_tensors(path, tensors, record | changes)
    return path


def typed(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["tilewise", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


def test_a_file_that_names_code_runs_none(data, folder, capsys, monkeypatch):
    train(data, "MLP", out_dir="run", epochs=1, progress=False)
    path = changed(Path("run/model.safetensors"), model="evil:Model")
    before = list(sys.path)
    with pytest.raises(FileFormatError, match="not a tilewise model"):
        load_model(path)
    with pytest.raises(TilewiseError):
        load_scorer(path).score(data.test[0])
    write_collection(folder / "data", train=4, valid=2, test=2)
    assert typed(monkeypatch, "tiles", "evaluate", "data", str(path), "--no-gbdt") == 2
    assert "not a tilewise model" in capsys.readouterr().err
    assert not (folder / "ran").exists() and "evil" not in sys.modules
    assert sys.path == before


def test_a_class_of_the_users_own_is_read_when_the_user_names_it(data, folder, monkeypatch):
    trained = train(data, "evil:Model", out_dir="run", epochs=1, progress=False)
    again = load_model("run", model_class="evil:Model")
    assert (again.score(data.test[0]) == trained.score(data.test[0])).all()
    write_collection(folder / "data", train=4, valid=2, test=2)
    assert typed(monkeypatch, "tiles", "evaluate", "data", "run", "--no-gbdt", "--model-class", "evil:Model") == 0


@pytest.mark.parametrize(
    "kwargs",
    [{"hidden_dim": 10**9}, {"hidden_dim": 60_000}, {"mlp_layers": 10**7}, {"op_embed_dim": 2**62}, [1], "x", {"a": 1},
     {"hidden_activation": []}, {"hidden_dim": 1e300}, {"reduction": {}}],
)  # fmt: skip
def test_sizes_that_a_file_claims_and_does_not_hold_are_one_sentence(data, folder, kwargs):
    train(data, "MLP", out_dir="run", epochs=1, progress=False)
    path = changed(Path("run/model.safetensors"), model_kwargs=kwargs)
    with pytest.raises(TilewiseError):
        load_model(path).score(data.test[0])
    try:
        load_scorer(path).score(data.test[0])  # it goes by the weights, and may not care
    except TilewiseError as error:
        assert "\n" not in str(error)
