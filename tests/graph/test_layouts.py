"""Reshapes, permutations and indices in a plan: whatever order a network writes its numbers in, the plan gives the
module's own, and copies only where pixels move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.graph.test_plan_tokens import assert_same, tokens
from tilewise import Tensor, nn
from tilewise._extension import native
from tilewise.nn import functional as F
from tilewise.plan import compile

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

Act = Callable[[Tensor], Tensor]


class Network(nn.Module):
    """A function as a network."""

    def __init__(self, forward: Act) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


@pytest.mark.parametrize("images", [1, 2, 5])
def test_an_image_as_tokens_and_back_is_one_native_call(images: int) -> None:
    conv, norm, linear = nn.Conv2d(3, 20, 3, padding=1), nn.LayerNorm(20), nn.Linear(20, 20)

    def forward(x: Tensor) -> Tensor:
        x = conv(x)
        n, c, h, w = x.shape
        t = x.reshape(n, c, h * w).permute(0, 2, 1)
        t = t + linear(norm(t))
        return F.relu(t.permute(0, 2, 1).reshape(n, c, h, w))

    assert assert_same(Network(forward), tokens(images, 3, 6, 5)).native_calls == 1


def test_channels_last_norms_and_layers_are_one_native_call() -> None:
    wide, norm, up, down = (
        nn.Conv2d(12, 12, 7, padding=3, groups=12),
        nn.LayerNorm(12),
        nn.Linear(12, 48),
        nn.Linear(48, 12),
    )

    def forward(x: Tensor) -> Tensor:  # as ConvNeXt writes it
        y = down(F.gelu(up(norm(wide(x).permute(0, 2, 3, 1))))) * 0.1
        return x + y.permute(0, 3, 1, 2)

    assert assert_same(Network(forward), tokens(2, 12, 9, 11)).native_calls == 1


def test_windows_of_an_image_are_one_native_call() -> None:
    """As windows of attention are cut and put together, whatever the batch."""
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = norm(x).reshape(n, h // 2, 2, w // 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6, c)
        y = linear(y).reshape(n, h // 2, w // 3, 2, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return x + y

    for images in (1, 3):
        assert assert_same(Network(forward), tokens(images, 6, 9, 8)).native_calls == 1


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3, 1.0, 2.0, -0.5])
def test_leaky_relu_goes_along_with_a_convolution(slope: float) -> None:
    conv = nn.Conv2d(5, 19, 3, padding=1)
    module = Network(lambda x: F.leaky_relu(conv(x), slope))
    assert assert_same(module, tokens(2, 5, 7, 9)).native_calls == 1
    plan = compile(module, tokens(1, 5, 3, 3))
    assert np.isnan(plan(np.full((1, 5, 3, 3), np.nan, np.float32))).all()


@pytest.mark.parametrize("widths", [(1, 2, 0, 1), (0, 0, 0, 0), (3, 0, 2, 5)])
def test_a_border_of_zeros_is_the_convolutions_own(widths: tuple[int, int, int, int]) -> None:
    conv, (top, bottom, left, right) = nn.Conv2d(4, 6, 3, padding=1), widths
    border = ((0, 0), (0, 0), (top, bottom), (left, right))
    plan = assert_same(Network(lambda x: conv(x.pad(border))), tokens(1, 4, 6, 7))
    assert plan.native_calls == 1
    assert_same(Network(lambda x: conv(x.pad(border, 1.0))), tokens(1, 4, 6, 7))


@pytest.mark.parametrize("fill", [0.0, -np.inf, -1.0])
@pytest.mark.parametrize("after", ["relu", "nothing"])
def test_a_border_of_a_maximum(fill: float, after: str) -> None:
    border = ((0, 0), (0, 0), (0, 1), (1, 0))

    def forward(x: Tensor) -> Tensor:
        x = F.relu(x) if after == "relu" else x
        return F.max_pool2d(x.pad(border, fill), 3, 2)

    assert_same(Network(forward), tokens(2, 4, 8, 8) - 3)


def test_a_result_that_is_a_view() -> None:
    linear = nn.Linear(6, 4)
    for view in (
        lambda x: linear(x).reshape(-1, 4),
        lambda x: linear(x).permute(0, 2, 1),
        lambda x: linear(x)[:, 0],
        lambda x: linear(x).reshape(x.shape[0], x.shape[1], 2, 2).permute(0, 2, 1, 3),
    ):
        assert_same(Network(view), tokens(2, 5, 6))


def test_a_batch_norm_over_rows_goes_into_the_layer() -> None:
    linear, norm = nn.Linear(6, 10, bias=False), nn.BatchNorm2d(10)
    norm.running_mean, norm.running_var = norm.running_mean + 0.3, norm.running_var * 2

    def forward(x: Tensor) -> Tensor:
        y = linear(x)
        rows = y.reshape(-1, 10, 1, 1)
        return norm(rows).reshape(*y.shape)

    assert_same(Network(forward), tokens(3, 7, 6))


@pytest.mark.parametrize("shape", [(1, 6, 5, 7), (3, 24, 4, 4), (2, 35, 1, 1), (1, 16, 9, 3)])
def test_a_group_norm_is_a_step(shape: tuple[int, ...]) -> None:
    channels = shape[1]
    conv, rng = nn.Conv2d(channels, channels, 1), np.random.default_rng(0)
    weight, bias = (Tensor(rng.standard_normal(channels, dtype=np.float32)) for _ in range(2))
    for groups in {1, channels, next(g for g in (2, 3, 5, 7) if channels % g == 0)}:
        module = Network(lambda x, groups=groups: F.relu(F.group_norm(conv(x), groups, weight, bias)))
        assert assert_same(module, tokens(*shape)).native_calls == 1
