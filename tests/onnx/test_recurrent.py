"""LSTM, GRU and RNN of exported files give PyTorch's numbers, and their plans are one native call."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise
import tilewise.onnx
import tilewise.plan
from tilewise._extension import native
from tilewise.nn.recurrent import GATES, Recurrent, unrolled
from tilewise.tensor import apply

torch = pytest.importorskip("torch", reason="PyTorch exports the networks")
pytest.importorskip("onnx", reason="PyTorch needs onnx to export")


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "RNN with ReLU"])
@pytest.mark.parametrize("size", [1, 5, 16, 33])
@pytest.mark.parametrize(
    ("bidirectional", "bias", "steps", "batch"), [(False, True, 5, 3), (True, False, 1, 1), (True, True, 4, 2)]
)
def test_recurrent_layers(
    kind: str, size: int, bidirectional: bool, bias: bool, steps: int, batch: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"nonlinearity": "relu"} if "ReLU" in kind else {}
    layer = getattr(torch.nn, kind[:4].strip())(7, size, 2, bidirectional=bidirectional, bias=bias, **settings).eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, last = self.layer(x)
            states = last if kind == "LSTM" else [last]
            return torch.cat([y.flatten(), *(state.flatten() for state in states)]).reshape(1, -1)

    x = torch.randn(steps, batch, 7)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(States().eval(), (x,), str(tmp_path / "net.onnx"), opset_version=17, dynamo=False)
        expected = States()(x).numpy()
    network = tilewise.onnx.load(tmp_path / "net.onnx")
    np.testing.assert_allclose(network(x.numpy()).data, expected, atol=2e-6)
    if native is not None:
        plan = tilewise.plan.compile(network, x.numpy())
        np.testing.assert_allclose(plan(x.numpy()), expected, atol=2e-6)
        assert plan.operations_outside == 0


@pytest.mark.parametrize("kind", ["lstm", "gru", "gru_reset_first", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("zero_state", [False, True])
def test_one_direction_agrees_with_its_steps(kind: str, reverse: bool, zero_state: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gates = GATES[kind] * 6
    shapes = [(4, 3, 5), (gates, 5), (gates, 6), (2 * gates,), *[(3, 6)] * (1 + (kind == "lstm"))]
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    arrays[4:] = [a * np.float32(not zero_state) for a in arrays[4:]]

    class Layer(tilewise.nn.Module):
        def __init__(self) -> None:
            self.weights = [tilewise.Tensor(a) for a in arrays[1:]]

        def forward(self, x: tilewise.Tensor) -> tilewise.Tensor:
            return apply(Recurrent, x, *self.weights, kind=kind, reverse=reverse)

    layer, x = Layer().eval(), arrays[0]
    with tilewise.no_grad():
        expected = unrolled(*map(tilewise.Tensor, arrays), kind=kind, reverse=reverse).data
        tolerance = 1e-6 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(layer(tilewise.Tensor(x)).data, expected, atol=tolerance)
    if kind != "gru_reset_first":  # loaded files run it step by step
        tilewise.onnx.save(layer, tmp_path / "net.onnx", x, dynamic=False)
        np.testing.assert_allclose(tilewise.onnx.load(tmp_path / "net.onnx")(x).data, expected, atol=tolerance)
    if native is not None:
        np.testing.assert_allclose(tilewise.plan.compile(layer, x)(x), expected, atol=tolerance)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh"])
def test_gradients_of_a_direction_are_those_of_its_steps(kind: str) -> None:
    rng = np.random.default_rng(0)
    gates = GATES[kind] * 2
    shapes = [(3, 2, 4), (gates, 4), (gates, 2), (2 * gates,), *[(2, 2)] * (1 + (kind == "lstm"))]
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]

    def gradients(run: Any) -> list[np.ndarray]:
        tensors = [tilewise.Tensor(a, requires_grad=True) for a in arrays]
        (run(*tensors, kind=kind, reverse=True) ** 2).sum().backward()
        return [t.grad.data for t in tensors]

    whole, steps = gradients(lambda *a, **settings: apply(Recurrent, *a, **settings)), gradients(unrolled)
    for a, b in zip(whole, steps, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
