"""The ops that networks become: a fusion that is lost and a copy that is added show here, as the numbers stay equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.graph.test_patterns import GELUS, MASKS, OTHER_MASKS, SCALES, Written, numbers, of_heads, planned
from tilewise import Tensor, nn, ops
from tilewise._extension import native
from tilewise.nn import functional as F
from tilewise.tensor import apply, cat, where

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

IMAGE, TOKENS = (2, 6, 8, 10), (2, 7, 24)


class Network(nn.Module):
    """Layers by name, and a function of the input and them."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.names = tuple(layers)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(x, *more, **{name: getattr(self, name) for name in self.names})


def conv(inputs: int = 6, outputs: int = 6, kernel: int = 3, **options: Any) -> nn.Conv2d:
    options = {"padding": kernel // 2} | options
    return nn.Conv2d(inputs, outputs, kernel, rng=outputs + kernel, **options)


def linear(inputs: int = 24, outputs: int = 24) -> nn.Linear:
    return nn.Linear(inputs, outputs, rng=outputs)


def norm(channels: int = 6) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    layer.running_mean[:], layer.running_var[:] = numbers(channels), np.abs(numbers(channels)) + 0.5
    return layer


def gated(x: Tensor, a: nn.Module, down: nn.Module, up: nn.Module, b: nn.Module) -> Tensor:
    y = a(x).relu()
    return b(y * up(down(F.global_avg_pool(y)).relu()).sigmoid().reshape(*y.shape[:2], 1, 1))


def shuffled(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, groups, c // groups, h, w).permute(0, 2, 1, 3, 4).reshape(b, c, h, w)


def enlarged(x: Tensor, by: int) -> Tensor:
    b, c, h, w = x.shape
    return x.reshape(b, c // by**2, by, by, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // by**2, by * h, by * w)


def heads_of(x: Tensor, count: int) -> Tensor:
    return x.reshape(*x.shape[:2], count, -1).permute(0, 2, 1, 3)


def merged(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def self_attention(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module, o: nn.Module, **options: Any) -> Tensor:
    mixed = F.scaled_dot_product_attention(*(heads_of(layer(x), 3) for layer in (q, k, v)), **options)
    return x + o(merged(mixed))


def projections() -> dict[str, nn.Module]:
    return {name: linear() for name in "qkvo"}


def pixels(x: Tensor, rows: Any, columns: Any) -> Tensor:
    return x[:, :, rows, columns]


NETWORKS: dict[str, tuple[str, nn.Module, tuple[int, ...]]] = {
    "norm and activation": ("conv/relu", Network(lambda x, a, n: n(a(x)).relu(), a=conv(), n=norm()), IMAGE),
    "norm before": ("affine conv/relu", Network(lambda x, a, n: a(n(x)).relu(), a=conv(kernel=1), n=norm()), IMAGE),
    "hardswish": ("conv/hard_swish", Network(lambda x, a: F.hardswish(a(x)), a=conv()), IMAGE),
    "leaky": ("conv/leaky_relu 0.2", Network(lambda x, a: F.leaky_relu(a(x), 0.2), a=conv()), IMAGE),
    "clipped": ("conv/relu6", Network(lambda x, a: F.relu6(a(x)), a=conv()), IMAGE),
    "silu by parts": ("conv/silu", Network(lambda x, a: (y := a(x)) * y.sigmoid(), a=conv()), IMAGE),
    "residual": (
        "conv/relu conv/relu/residual",
        Network(lambda x, a, b: (x + b(a(x).relu())).relu(), a=conv(), b=conv()),
        IMAGE,
    ),
    "residual of a convolution": (
        "conv conv/relu/residual",
        Network(lambda x, a, b: (a(x) + b(x)).relu(), a=conv(), b=conv(kernel=1)),
        IMAGE,
    ),
    "two readers": (
        "conv affine/relu conv/residual",
        Network(lambda x, a, b: (y := a(x)).relu() + b(y), a=conv(), b=conv()),
        IMAGE,
    ),
    "gate": (
        "conv/relu global_mean linear/relu linear/sigmoid mul conv",
        Network(gated, a=conv(), down=linear(6, 2), up=linear(2, 6), b=conv()),
        IMAGE,
    ),
    "depthwise": ("conv/relu conv", Network(lambda x, a, b: b(a(x).relu()), a=conv(groups=6), b=conv(kernel=1)), IMAGE),
    "pools": (
        "conv max_pool avg_pool",
        Network(lambda x, a: F.avg_pool2d(F.max_pool2d(a(x), 3, 2, 1), 2), a=conv()),
        IMAGE,
    ),
    "head": (
        "conv/relu global_mean linear",
        Network(lambda x, a, b: b(F.global_avg_pool(a(x).relu())), a=conv(), b=linear(6, 5)),
        IMAGE,
    ),
    "flattened": (
        "conv/relu flatten linear",
        Network(lambda x, a, b: b(a(x).relu().reshape(2, -1)), a=conv(), b=linear(480, 5)),
        IMAGE,
    ),
    "flattened first": (
        "conv flatten affine/relu linear",
        Network(lambda x, a, b: b(a(x).reshape(2, -1).relu()), a=conv(), b=linear(480, 5)),
        IMAGE,
    ),
    "joined": (
        "conv/relu conv concat conv",
        Network(lambda x, a, b, c: c(cat([a(x).relu(), x, b(x)], 1)), a=conv(), b=conv(6, 3), c=conv(15, 4)),
        IMAGE,
    ),
    "halves": (
        "conv slice affine/relu slice conv concat",
        Network(lambda x, a, b: cat([(y := a(x))[:, :3].relu(), b(y[:, 3:])], 1), a=conv(), b=conv(3, 3)),
        IMAGE,
    ),
    "shuffled": (
        "conv/relu gather_channels conv",
        Network(lambda x, a, b: b(shuffled(a(x).relu(), 3)), a=conv(), b=conv(groups=3)),
        IMAGE,
    ),
    "enlarged": (
        "conv/relu map/copy conv",
        Network(lambda x, a, b: b(enlarged(a(x), 2).relu()), a=conv(6, 12), b=conv(3, 4)),
        IMAGE,
    ),
    "enlarged by three": (
        "conv/silu map/copy conv",
        Network(lambda x, a, b: b(F.silu(enlarged(a(x), 3))), a=conv(6, 9), b=conv(1, 4)),
        IMAGE,
    ),
    "nearest": (
        "conv upsample upsample affine/relu conv",
        Network(lambda x, a, b: b(F.interpolate(a(x), 2).relu()), a=conv(), b=conv()),
        IMAGE,
    ),
    "bilinear": (
        "conv resample resample conv",
        Network(lambda x, a, b: b(F.interpolate(a(x), 2, "bilinear")), a=conv(), b=conv()),
        IMAGE,
    ),
    "mirrored rows": (
        "conv gather_spatial conv",
        Network(lambda x, a, b: b(pixels(a(x), slice(None), np.arange(11) % 9)), a=conv(), b=conv()),
        IMAGE,
    ),
    "mirrored columns": (
        "conv gather_spatial conv",
        Network(lambda x, a, b: b(pixels(a(x), np.array([1, *range(8)]), slice(None))), a=conv(), b=conv()),
        IMAGE,
    ),
    "cropped": (
        "conv gather_spatial conv",
        Network(lambda x, a, b: b(a(x)[:, :, 1:-1, 2:]), a=conv(), b=conv()),
        IMAGE,
    ),
    "transposed": (
        "conv/relu depth_to_space gather_spatial conv",
        Network(lambda x, a, b: b(a(x).relu()), a=nn.ConvTranspose2d(6, 4, 4, 2, 1, rng=0), b=conv(4, 3)),
        IMAGE,
    ),
    "transposed and cropped": (
        "conv/silu depth_to_space gather_spatial conv",
        Network(lambda x, a, b: b(F.silu(a(x))), a=nn.ConvTranspose2d(6, 4, 3, 2, 1, 1, rng=0), b=conv(4, 3)),
        IMAGE,
    ),
    "group norm": (
        "conv group_norm affine/silu conv",
        Network(lambda x, a, n, b: b(F.silu(n(a(x)))), a=conv(), n=nn.GroupNorm(3, 6), b=conv()),
        IMAGE,
    ),
    "channels last norm": (
        "conv layer_norm",
        Network(lambda x, a, n: n(a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2), a=conv(), n=nn.LayerNorm(6)),
        IMAGE,
    ),
    "pixels as tokens": (
        "conv gather_spatial linear",
        Network(lambda x, a, b: b(a(x).reshape(2, 24, -1).permute(0, 2, 1)), a=conv(6, 24), b=linear()),
        IMAGE,
    ),
    "tokens as pixels": (
        "linear gather_spatial conv",
        Network(lambda x, a, b: b(a(x).permute(0, 2, 1).reshape(2, 24, 7, 1)), a=linear(), b=conv(24, 3, 1)),
        TOKENS,
    ),
    "scaled": (
        "conv",
        Network(lambda x, a: a(x) * Tensor(numbers(1, 6, 1, 1)) + Tensor(numbers(6, 1, 1)), a=conv()),
        IMAGE,
    ),
    "shifted by a scalar": ("conv/relu map/div", Network(lambda x, a: (a(x) + 3.0).relu() / 6.0, a=conv()), IMAGE),
    "mlp": ("linear/gelu linear", Network(lambda x, a, b: b(F.gelu(a(x))), a=linear(24, 40), b=linear(40, 24)), TOKENS),
    "mlp with residual": (
        "layer_norm linear/gelu linear/residual",
        Network(lambda x, n, a, b: x + b(F.gelu(a(n(x)))), n=nn.LayerNorm(24), a=linear(24, 40), b=linear(40, 24)),
        TOKENS,
    ),
    "swiglu": (
        "linear/silu linear mul linear",
        Network(lambda x, a, b, c: c(F.silu(a(x)) * b(x)), a=linear(24, 40), b=linear(24, 40), c=linear(40, 24)),
        TOKENS,
    ),
    "attention": ("linear linear linear attention linear/residual", Network(self_attention, **projections()), TOKENS),
    "causal attention": (
        "linear linear linear attention linear/residual",
        Network(lambda x, **layers: self_attention(x, is_causal=True, **layers), **projections()),
        TOKENS,
    ),
    "heads with a bias": (
        "linear linear linear attention linear/residual",
        Network(lambda x, **layers: self_attention(x, mask=numbers(3, 7, 7), **layers), **projections()),
        TOKENS,
    ),
    "packed attention": (
        "linear attention linear",
        Network(lambda x, a, b: b(F.packed_causal_attention(a(x), 3)), a=linear(24, 72), b=linear()),
        TOKENS,
    ),
    "encoder block": (
        "layer_norm linear attention linear/residual layer_norm linear/gelu linear/residual",
        Network(lambda x, block: block(x), block=nn.TransformerBlock(24, 3, causal=False, rng=0)),
        TOKENS,
    ),
    "mean of tokens": (
        "linear global_mean linear",
        Network(lambda x, a, b: b(a(x).mean(1)), a=linear(), b=linear(24, 3)),
        TOKENS,
    ),
    "first token": (
        "linear gather_spatial linear",
        Network(lambda x, a, b: b(a(x)[:, 0]), a=linear(), b=linear(24, 3)),
        TOKENS,
    ),
    "class token": (
        "linear assemble linear",
        Network(lambda x, a, b: b(cat([Tensor(numbers(1, 1, 24)).expand(2, 1, 24), a(x)], 1)), a=linear(), b=linear()),
        TOKENS,
    ),
    "softmax of scores": ("linear softmax", Network(lambda x, a: (a(x) * 0.5).softmax(-1), a=linear(24, 5)), TOKENS),
    "rolled": (
        "linear gather_spatial gather_spatial assemble linear",
        Network(lambda x, a, b: b(cat([(y := a(x))[:, 3:], y[:, :3]], 1)), a=linear(), b=linear()),
        TOKENS,
    ),
    "windows": (
        "identity linear gather_spatial linear",
        Network(
            lambda x, a, b: b(
                a(x.permute(0, 2, 3, 1)).reshape(2, 2, 4, 2, 5, 24).permute(0, 1, 3, 2, 4, 5).reshape(8, 20, 24)
            ),
            a=linear(6, 24),
            b=linear(),
        ),
        IMAGE,
    ),
    "product of two": (
        "linear linear matmul",
        Network(lambda x, a, b: a(x) @ b(x).permute(0, 2, 1), a=linear(), b=linear()),
        TOKENS,
    ),
    "cumulative": (
        "linear cumulative_sum linear",
        Network(lambda x, a, b: b(apply(ops.CumSum, a(x), axis=1)), a=linear(), b=linear()),
        TOKENS,
    ),
    "selected": (
        "linear map/select linear",
        Network(lambda x, a, b: b(where(numbers(7, 24) > 0, a(x), 0.0)), a=linear(), b=linear()),
        TOKENS,
    ),
}
NETWORKS |= {
    f"gelu: {how}": (f"linear/{'gelu_tanh' if 'tanh' in how else 'gelu'} linear", Written(function), TOKENS)
    for how, function in GELUS.items()
}
FUSED = "linear attention linear"
# A query that sees nothing would be NaN in one form and not in the other; a mask of -3 hides nothing.
IN_PARTS = {
    "moderate": "linear matmul map/div map/select softmax matmul map/copy linear",
    "a query that sees nothing": "linear matmul map/div add softmax matmul map/copy linear",
}
NETWORKS |= {
    f"mask: {how}": (IN_PARTS.get(how, FUSED), Written(lambda x, mask=mask: of_heads(x, mask=mask)), TOKENS)
    for how, mask in (MASKS | OTHER_MASKS).items()
}
NETWORKS |= {
    f"scale on {where_to}": (FUSED, Written(lambda x, where_to=where_to: of_heads(x, where_to=where_to)), TOKENS)
    for where_to in SCALES
}
ALGORITHMS = {"direct", "winograd"}  # which one is faster depends on the machine


def structure(module: nn.Module, *inputs: Any) -> str:
    """Return the kinds of all ops, each with what is fused into it."""
    words = []
    for op in planned(module, *inputs).explain().ops:
        assert not op.outside_reason, str(op)
        words.append("/".join([op.kind, *(note for note in op.detail.split(", ") if note and note not in ALGORITHMS)]))
    return " ".join(words)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_becomes_these_ops(name: str) -> None:
    expected, module, shape = NETWORKS[name]
    assert structure(module, numbers(*shape)) == expected
