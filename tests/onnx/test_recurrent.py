"""LSTM, GRU and RNN of exported files give PyTorch's numbers, and their plans are one native call."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import tilewise.onnx
import tilewise.plan
from tilewise._extension import native

torch = pytest.importorskip("torch", reason="PyTorch exports the networks")
pytest.importorskip("onnx", reason="PyTorch needs onnx to export")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("bidirectional", "bias", "steps", "batch"), [(False, True, 5, 3), (True, False, 1, 1), (True, True, 4, 2)]
)
def test_recurrent_layers(kind: str, bidirectional: bool, bias: bool, steps: int, batch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(7, 5, 2, bidirectional=bidirectional, bias=bias).eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, last = self.layer(x)
            hidden = last[0] if kind == "LSTM" else last
            return torch.cat([y.flatten(), hidden.flatten()]).reshape(1, -1)

    x = torch.randn(steps, batch, 7)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(States().eval(), (x,), str(tmp_path / "net.onnx"), opset_version=17, dynamo=False)
        expected = States()(x).numpy()
    network = tilewise.onnx.load(tmp_path / "net.onnx")
    np.testing.assert_allclose(network(x.numpy()).data, expected, atol=1e-6)
    if native is not None:
        plan = tilewise.plan.compile(network, x.numpy())
        np.testing.assert_allclose(plan(x.numpy()), expected, atol=1e-6)
        assert plan.operations_outside == 0
