"""Convolutions and pools of volumes in exported files give PyTorch's numbers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
import tilewise.plan
from tilewise._extension import native

torch = pytest.importorskip("torch", reason="PyTorch exports the networks")
pytest.importorskip("onnx", reason="PyTorch needs onnx to export")
nn = torch.nn
LAYERS: dict[str, Any] = {
    "conv": lambda: nn.Conv3d(4, 6, 3, padding=1),
    "strided and dilated": lambda: nn.Conv3d(4, 6, (2, 3, 1), stride=(2, 1, 2), dilation=(2, 1, 1), bias=False),
    "groups": lambda: nn.Conv3d(4, 8, (1, 3, 3), groups=2, padding=(0, 1, 0)),
    "max pool": lambda: nn.MaxPool3d((2, 2, 3), stride=(1, 2, 2), padding=(1, 0, 1)),
    "avg pool": lambda: nn.AvgPool3d((2, 3, 1)),
    "many taps": lambda: nn.Conv3d(4, 5, (5, 1, 2), padding=(2, 0, 1)),
    "two": lambda: nn.Sequential(nn.Conv3d(4, 5, 3, padding=1), nn.ReLU(), nn.Conv3d(5, 3, 3, padding=(1, 0, 1))),
    "norm": lambda: nn.Sequential(nn.Conv3d(4, 5, 2), nn.BatchNorm3d(5), nn.ReLU(), nn.AdaptiveAvgPool3d(1)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", [1, 2])
def test_layers_of_volumes(name: str, batch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().eval(), torch.randn(batch, 4, 5, 7, 6)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(layer, (x,), str(tmp_path / "net.onnx"), opset_version=17, dynamo=False)
        expected = layer(x).numpy()
    network = tilewise.onnx.load(tmp_path / "net.onnx")
    np.testing.assert_allclose(network(x.numpy()).data, expected, atol=1e-5)
    if native is not None:
        np.testing.assert_allclose(tilewise.plan.compile(network, x.numpy())(x.numpy()), expected, atol=1e-5)
