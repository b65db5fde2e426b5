"""A ratchet: how many operations of small exported networks run outside the native call. The numbers only go down."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
import tilewise.plan
from tilewise._extension import native

torch = pytest.importorskip("torch", reason="PyTorch exports the networks")
pytest.importorskip("onnx", reason="PyTorch needs onnx to export")
pytestmark = pytest.mark.skipif(native is None, reason="plans are native")
nn, F = torch.nn, torch.nn.functional


class Function(nn.Module):
    """Layers and a function of them and the input."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleDict(layers), forward

    def forward(self, x: Any) -> Any:
        return self.function(x, **self.layers)


def heads(x: Any, count: int) -> Any:
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def rms_norm(x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate_halves(x: Any) -> Any:
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 1.0 / 100 ** torch.linspace(0, 1, x.shape[-1] // 2))
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def rotate_pairs(x: Any) -> Any:
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 1.0 / 100 ** torch.linspace(0, 1, x.shape[-1] // 2))
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)
    return rotated.flatten(-2)


def decoder(x: Any, q: Any, k: Any, v: Any, o: Any, rotate: Callable[[Any], Any], groups: int) -> Any:
    y, (b, t, c) = rms_norm(x), x.shape
    queries, keys, values = rotate(heads(q(y), 6)), rotate(heads(k(y), groups)), heads(v(y), groups)
    repeats = 6 // groups
    keys, values = (
        z[:, :, None].expand(b, groups, repeats, t, z.shape[-1]).reshape(b, 6, t, -1) for z in (keys, values)
    )
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(c // 6) + torch.full((t, t), -1e9).triu(1)
    return x + o((scores.softmax(-1) @ values).transpose(1, 2).reshape(b, t, c))


def llama(rotate: Callable[[Any], Any], groups: int) -> Any:
    linear = {
        "q": nn.Linear(24, 24),
        "k": nn.Linear(24, 4 * groups),
        "v": nn.Linear(24, 4 * groups),
        "o": nn.Linear(24, 24),
    }
    return Function(lambda x, **layers: decoder(x, **layers, rotate=rotate, groups=groups), **linear)


def pixel_attention(x: Any, qkv: Any) -> Any:
    q, k, v = qkv(x).reshape(x.shape[0], 3, 2, 4, -1).unbind(1)
    weights = (q.transpose(-1, -2) @ k / 2).softmax(-1)
    return x + (v @ weights.transpose(-1, -2)).reshape(x.shape)


def recurrence(x: Any, gate: Any) -> Any:
    decay, state, states = gate(x).sigmoid(), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1) / (1 + torch.exp(-x))


def response_norm(x: Any, c: Any) -> Any:
    y = c(x)
    norms = y.norm(dim=(2, 3), keepdim=True)
    return y * norms / (norms.mean(1, keepdim=True) + 1e-6)


def resized(mode: str, channels: int) -> Any:
    return Function(lambda x, c: F.interpolate(c(x), (11, 4), mode=mode), c=nn.Conv2d(8, channels, 3))


IMAGE, TOKENS, LINE = (1, 8, 9, 7), (1, 11, 24), (2, 8, 21)
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "rotary halves, repeated heads": (lambda: llama(rotate_halves, 2), TOKENS, 0),
    "rotary pairs": (lambda: llama(rotate_pairs, 6), TOKENS, 0),
    "one key head": (lambda: llama(rotate_halves, 1), TOKENS, 0),
    "attention over pixels": (lambda: Function(pixel_attention, qkv=nn.Conv2d(8, 24, 1)), IMAGE, 0),
    "unit vectors": (lambda: Function(lambda x, c: F.normalize(c(x), dim=1), c=nn.Conv2d(8, 5, 3)), IMAGE, 0),
    "cumulative sum": (lambda: Function(lambda x, a: a(x).cumsum(1), a=nn.Linear(24, 5)), TOKENS, 0),
    "recurrence": (lambda: Function(recurrence, gate=nn.Linear(24, 24)), TOKENS, 0),
    "lstm": (lambda: Function(lambda x, r: r(x)[0], r=nn.LSTM(24, 5, batch_first=True)), TOKENS, 0),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 6, 3, 2), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 1)), LINE, 0),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 3, 3)), IMAGE, 0),
    "nearest": (lambda: nn.Sequential(nn.Conv2d(8, 4, 3), nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 3)), IMAGE, 0),
    "nearest to a size": (lambda: Function(lambda x, c: F.interpolate(c(x), (11, 6)), c=nn.Conv2d(8, 4, 3)), IMAGE, 0),
    "bilinear": (lambda: resized("bilinear", 4), IMAGE, 0),
    "cubic": (lambda: resized("bicubic", 21), IMAGE, 0),
    "gru": (lambda: Function(lambda x, r: r(x)[0], r=nn.GRU(24, 5, 2, bidirectional=True)), TOKENS, 0),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3)), (1, 2, 4, 9, 7), 0),
    "global response norm": (lambda: Function(response_norm, c=nn.Conv2d(8, 6, 3)), IMAGE, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_outside_the_native_call(name: str, tmp_path: Path) -> None:
    build, shape, ceiling = NETWORKS[name]
    torch.manual_seed(0)
    network, x = build().eval(), torch.randn(*shape)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (x,), str(tmp_path / "net.onnx"), opset_version=17, dynamo=False)
        expected = network(x).numpy()
    plan = tilewise.plan.compile(tilewise.onnx.load(tmp_path / "net.onnx"), x.numpy())
    np.testing.assert_allclose(plan(x.numpy()), expected, atol=1e-5 * max(1.0, np.abs(expected).max()))
    assert plan.operations_outside == len(plan.explain().outside)
    assert plan.operations_outside <= ceiling, str(plan.explain())
