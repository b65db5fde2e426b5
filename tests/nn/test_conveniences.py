"""Names that a PyTorch user types, and models that print themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise
from tilewise import Tensor, data, models, nn
from tilewise.errors import ConfigurationError, ShapeError, UnavailableError
from tilewise.nn.describe import label, layer_names


def test_a_model_prints_as_a_tree_with_shapes_and_parameters():
    lines = str(models.cnn()).splitlines()
    total = sum(p.size for p in models.cnn().parameters())
    assert lines[0] == "Sequential"
    assert lines[1].startswith("├─ 0 Conv2d(1→")
    assert "weight " in lines[1]
    assert lines[-1] == f"{total:,} parameters"
    assert models.cnn()._repr_html_().startswith("<pre>Sequential")


def test_every_model_prints():
    for model in (models.mlp(), models.resnet8(), models.vgg6(), models.gpt("4x128")):
        assert repr(model).endswith("parameters")


def test_layers_have_one_name():
    assert label(nn.Conv2d(64, 64, 3)) == "Conv2d(64→64, 3×3)"
    assert label(nn.Conv2d(8, 8, (1, 3), padding=(0, 1), groups=8)) == "Conv2d(8→8, 1×3, padding 0×1, groups 8)"
    assert label(nn.Linear(64, 10)) == "Linear(64→10)"
    assert label(nn.MaxPool2d(2)) == "MaxPool2d(2×2)"
    assert label(nn.ReLU()) == "ReLU"
    assert layer_names(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))["1"] == "1 Linear(3→2)"


def test_losses_and_softmax_as_layers_agree_with_pytorch():
    rng = np.random.default_rng(0)
    logits, target = rng.standard_normal((4, 3)).astype(np.float32), np.array([0, 2, 1, 1])
    theirs = torch.from_numpy(logits)
    ours = Tensor(logits)
    expected = torch.nn.CrossEntropyLoss()(theirs, torch.from_numpy(target))
    np.testing.assert_allclose(nn.CrossEntropyLoss()(ours, target).item(), expected.item(), rtol=1e-6)
    np.testing.assert_allclose(
        nn.MSELoss()(ours, ours * 2).item(), torch.nn.MSELoss()(theirs, theirs * 2).item(), rtol=1e-6
    )
    np.testing.assert_allclose(nn.Softmax(dim=0)(ours).numpy(), torch.nn.Softmax(dim=0)(theirs).numpy(), rtol=1e-5)


def test_a_data_loader_takes_a_pair_or_a_list_of_examples():
    x, y = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5)
    for dataset in ((x, y), list(zip(x, y, strict=True))):
        batches = list(data.DataLoader(dataset, batch_size=2))
        assert [len(labels) for _, labels in batches] == [2, 2, 1]
        np.testing.assert_array_equal(np.concatenate([part for part, _ in batches]), x)
    shuffled = data.DataLoader((x, y), batch_size=5, shuffle=True)
    (_, first), (_, second) = next(iter(shuffled)), next(iter(shuffled))
    assert sorted(first) == sorted(second) == list(y)


def test_to_changes_the_number_type_and_knows_no_other_device():
    x = Tensor([1.0, 2.0])
    assert x.to("cpu") is x
    assert x.to("float64").dtype == x.to(np.float64).dtype == np.float64
    with pytest.raises(UnavailableError, match="are on the CPU"):
        x.to("cuda:0")


@pytest.mark.parametrize("dataset", [data.digits(), 5, [1, 2, 3], np.zeros((4, 3))])
def test_what_is_no_dataset_is_refused_with_what_one_is(dataset):
    with pytest.raises(ShapeError, match=r"a pair \(x, y\) of arrays"):
        data.DataLoader(dataset)


@pytest.mark.parametrize("layer", [[nn.ReLU()], nn.ReLU, "relu", np.tanh], ids=["list", "class", "name", "function"])
def test_a_sequential_refuses_what_it_would_not_run(layer):
    with pytest.raises(ConfigurationError, match="Sequential takes layers, not"):
        nn.Sequential(nn.Linear(4, 3), layer)


def test_a_module_list_takes_a_list_or_modules():
    layers = [nn.Linear(4, 3), nn.ReLU()]
    assert list(nn.ModuleList(layers)) == list(nn.ModuleList(*layers)) == layers


@pytest.mark.parametrize("module", [torch.nn.Linear(4, 3), lambda x: x], ids=["torch", "function"])
def test_compile_says_what_it_takes(module):
    with pytest.raises(ConfigurationError, match=r"compile takes a module of tilewise, not a .*tilewise\.onnx\.load"):
        tilewise.compile(module, np.ones((2, 4), np.float32))
