"""Networks exported by PyTorch: the same numbers as ONNX Runtime's, saved again the same, trained here."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_zoo import IMAGES, TOKENS, filled

import tilewise.onnx
import tilewise.plan
from tests.onnx_reference import reference
from tilewise import no_grad
from tilewise._extension import native
from tilewise.errors import ShapeError

Inputs = dict[str, np.ndarray]


def inputs_for(name: str, batch: int) -> Inputs:
    rng = np.random.default_rng(1)
    if name in IMAGES:
        return {"x": rng.standard_normal((batch, 3, 32, 32)).astype(np.float32)}
    ids = rng.integers(0, 50, (batch, 12))
    return {"ids": ids} | (
        {"mask": (np.arange(12) < 9).astype(np.int64)[None].repeat(batch, 0)} if name == "bert" else {}
    )


def exported(name: str, path: Path, dynamo: bool = False) -> Path:
    torch.manual_seed(0)
    model = filled((IMAGES | TOKENS)[name]())
    example = inputs_for(name, 2)
    tensors = tuple(torch.from_numpy(x) for x in example.values())
    free = {} if dynamo else {"dynamic_axes": {key: {0: "N"} for key in example}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, tensors, str(path), input_names=list(example), dynamo=dynamo, verbose=False, **free)
    return path


def assert_near(result: np.ndarray, want: np.ndarray) -> None:
    assert result.shape == want.shape and result.dtype == want.dtype
    assert np.abs(result - want).max() <= 1e-4 * np.abs(want).max()


def assert_planned(name: str, network: tilewise.onnx.Network, inputs: Inputs, want: np.ndarray) -> None:
    """A plan gives the same; blocks of attention, whoever wrote them how, are native calls and not their parts."""
    if native is None:
        return
    plan = tilewise.plan.compile(network, *inputs.values())
    assert_near(plan(*inputs.values()), want)
    assert plan.native_calls <= {"vit": 8, "bert": 12, "gpt2": 3}.get(name, 99)


@pytest.mark.parametrize("name", [*IMAGES, *TOKENS])
def test_a_network_that_pytorch_exported_gives_what_onnx_runtime_gives_and_so_does_its_copy(
    name: str, tmp_path: Path
) -> None:
    path = exported(name, tmp_path / "m.onnx")
    network = tilewise.onnx.load(path)
    inputs = inputs_for(name, 3)
    want = reference(path, *inputs.values())
    with no_grad():
        assert_near(network(*inputs.values()).data, want)
    assert_near(network(*inputs.values()).data, want)
    assert_planned(name, network, inputs, want)
    tilewise.onnx.save(network, tmp_path / "again.onnx")
    assert_near(reference(tmp_path / "again.onnx", *inputs.values()), want)


@pytest.mark.parametrize("name", ["resnet", pytest.param("vit", marks=pytest.mark.slow), "bert"])
def test_the_newer_exporters_files_are_read_too(name: str, tmp_path: Path) -> None:
    path = exported(name, tmp_path / "m.onnx", dynamo=True)
    inputs = inputs_for(name, 2)
    network, want = tilewise.onnx.load(path), reference(path, *inputs.values())
    with no_grad():
        assert_near(network(*inputs.values()).data, want)
    assert_planned(name, network, inputs, want)


class TorchEncoder(torch.nn.Module):
    """PyTorch's own layers, whose heads lie beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.before = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.before(x))


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
def test_pytorchs_own_encoder_is_one_native_call(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 9, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            TorchEncoder().eval(),
            (x,),
            tmp_path / "m.onnx",
            input_names=["x"],
            dynamo=True,
            opset_version=opset,
            verbose=False,
        )
    plan = tilewise.plan.compile(tilewise.onnx.load(tmp_path / "m.onnx"), x.numpy())
    assert plan.native_calls == 1
    assert_near(plan(x.numpy()), reference(tmp_path / "m.onnx", x.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IMAGES, *TOKENS])
def test_the_newer_exporters_files_of_every_network_are_read(name: str, tmp_path: Path) -> None:
    test_the_newer_exporters_files_are_read_too(name, tmp_path)


@pytest.mark.parametrize("name", ["resnet", "efficientnet", "vit", "gpt2"])
def test_a_network_that_pytorch_exported_has_its_gradients(name: str, tmp_path: Path) -> None:
    path = exported(name, tmp_path / "m.onnx")
    network = tilewise.onnx.load(path)
    inputs = inputs_for(name, 2)
    (network(*inputs.values()) ** 2).sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(np.isfinite(p.grad.data).all() for p in network.parameters())


def test_a_fixed_size_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    network = tilewise.onnx.load(exported("resnet", tmp_path / "m.onnx"))
    with pytest.raises(ShapeError, match="fixes dimension 1"):
        network(np.zeros((1, 4, 32, 32), np.float32))
