"""Flattened images keep the module's order (C, H, W), whatever reads them: elementwise ops, sums, concatenations, the
result of the network, files and ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise import nn, onnx
from tilewise.quantize import QuantizedModel, load_quantized, quantize, save_quantized
from tilewise.tensor import Tensor, cat

FEATURES = 60  # of (C, H, W) = (5, 4, 3): all different, so that no wrong order goes unnoticed


class After(nn.Module):
    """Conv → MaxPool → Flatten, and `head(module, row)` behind it."""

    def __init__(self, head: Callable[[After, Tensor], Tensor]) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.head = head
        self.conv, self.second = nn.Conv2d(3, 5, 3, padding=1, rng=rng), nn.Conv2d(3, 5, 1, rng=rng)
        self.pool, self.flatten, self.dropout = nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5)
        self.linear, self.other = nn.Linear(FEATURES, 7, rng=rng), nn.Linear(FEATURES, 7, rng=rng)
        self.long, self.square = nn.Linear(2 * FEATURES, 7, rng=rng), nn.Linear(FEATURES, FEATURES, rng=rng)
        self.relu, self.gelu, self.silu, self.sigmoid = nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Sigmoid()
        self.scale = rng.standard_normal(FEATURES).astype(np.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, x)

    def row(self, x: Tensor) -> Tensor:
        return self.flatten(self.pool(self.conv(x)))

    def row_2(self, x: Tensor) -> Tensor:
        return self.flatten(self.pool(self.second(x)))


HEADS: dict[str, Callable[[After, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(m.row(x)),
    "two linear": lambda m, x: m.linear(m.row(x)) + m.other(m.row(x)),
    "relu, linear": lambda m, x: m.linear(m.relu(m.row(x))),
    "gelu, linear": lambda m, x: m.linear(m.gelu(m.row(x))),
    "silu, linear": lambda m, x: m.linear(m.silu(m.row(x))),
    "sigmoid, linear": lambda m, x: m.linear(m.sigmoid(m.row(x))),
    "leaky, linear": lambda m, x: m.linear(m.relu(m.row(x)) + m.row(x) * 0.1),
    "relu, dropout, reshape, linear": lambda m, x: m.linear(m.dropout(m.relu(m.row(x))).reshape((-1, FEATURES))),
    "scale by feature, linear": lambda m, x: m.linear(m.relu(m.row(x) * Tensor(m.scale))),
    "end": lambda m, x: m.row(x),
    "relu, end": lambda m, x: m.relu(m.row(x)),
    "sum of two": lambda m, x: m.linear(m.relu(m.row(x) + m.row_2(x))),
    "sum with a linear layer's result": lambda m, x: m.linear(m.row(x) + m.square(m.row_2(x))),
    "product": lambda m, x: m.linear(m.row(x) * m.sigmoid(m.square(m.row_2(x)))),
    "concatenation": lambda m, x: m.long(cat([m.row(x), m.row_2(x)], 1)),
    "concatenation with a linear layer's result": lambda m, x: m.long(m.relu(cat([m.square(m.row(x)), m.row_2(x)], 1))),
    "slice": lambda m, x: m.row(x)[:, 7:31],
    "row and linear": lambda m, x: cat([m.relu(m.row(x)), m.linear(m.row(x))], 1),
}


def images(count: int = 6) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((count, 3, 8, 6)).astype(np.float32)


def error_of(result: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(result) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("max_error", [None, 0.01])
def test_a_flattened_image_is_read_in_the_order_of_the_module(head: str, max_error: float | None) -> None:
    model, x = After(HEADS[head]).eval(), images()
    expected = model(Tensor(x)).data
    q = quantize(model, [x], max_error=max_error)
    assert isinstance(q, QuantizedModel)
    bound = 0.04 if max_error is None else max_error
    assert error_of(q.run(x), expected) <= bound
    assert error_of(q.run(x, lambda _, value: None), expected) <= bound
    np.testing.assert_array_equal(q.run(x), q.run(x, lambda _, value: None))


@pytest.mark.parametrize("head", HEADS)
def test_a_saved_network_keeps_the_order(head: str, tmp_path: Path) -> None:
    q = quantize(After(HEADS[head]).eval(), [images()], max_error=None)
    save_quantized(q, tmp_path / "model")
    np.testing.assert_array_equal(load_quantized(tmp_path / "model").run(images()), q.run(images()))


@pytest.mark.parametrize("head", ["linear", "relu, linear", "sum of two"])
def test_a_network_written_as_onnx_keeps_the_order(head: str, tmp_path: Path) -> None:
    model, x = After(HEADS[head]).eval(), images()
    q = quantize(model, [x], max_error=None)
    onnx.save(q, tmp_path / "model.onnx", x)
    again = onnx.load(tmp_path / "model.onnx").eval()
    assert error_of(again(Tensor(x)).data, model(Tensor(x)).data) < 0.04
