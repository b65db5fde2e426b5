"""Activations, transposed convolution, interpolation and group norm: values and gradients are PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_reference import same_as_torch

from tilewise import nn
from tilewise.errors import ShapeError
from tilewise.nn import functional as F
from tilewise.tensor import Tensor

T = torch.nn.functional


def normal(*shape: int, scale: float = 1.0, dtype: type = np.float32) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(dtype)


ACTIVATIONS = {
    "silu": (F.silu, T.silu),
    "hardswish": (F.hardswish, T.hardswish),
    "hardsigmoid": (F.hardsigmoid, T.hardsigmoid),
    "relu6": (F.relu6, T.relu6),
    "leaky_relu": (F.leaky_relu, T.leaky_relu),
    "elu": (lambda x: F.elu(x, 0.7), lambda x: T.elu(x, 0.7)),
    "softplus": (F.softplus, T.softplus),
    "erf": (F.erf, torch.erf),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_gradient_are_pytorchs(name: str, dtype: type) -> None:
    ours, theirs = ACTIVATIONS[name]
    if name == "hardsigmoid" and dtype is np.float64:
        pytest.skip("PyTorch's sixth is a float32 one")
    x = normal(7, 33, scale=4.0, dtype=dtype)
    same_as_torch(ours, [x], theirs)


@pytest.mark.parametrize("name", ["silu", "softplus", "erf", "elu", "hardswish"])
def test_an_activation_of_large_numbers_is_pytorchs(name: str) -> None:
    ours, theirs = ACTIVATIONS[name]
    x = np.array([-1e4, -100.0, -3.0, 0.0, 3.0, 100.0, 1e4], np.float32)
    np.testing.assert_allclose(ours(Tensor(x)).data, theirs(torch.from_numpy(x)).numpy(), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("stride", "padding", "extra", "groups"), [(1, 0, 0, 1), (2, 1, 1, 1), ((2, 3), (1, 0), (0, 2), 2)]
)
def test_a_transposed_convolution_is_pytorchs(stride: object, padding: object, extra: object, groups: int) -> None:
    how = (stride, padding, extra, groups)
    arrays = [normal(2, 4, 5, 6), normal(4, 3, 3, 4), normal(3 * groups)]
    same_as_torch(
        lambda x, w, b: F.conv_transpose2d(x, w, b, *how),
        arrays,
        lambda x, w, b: T.conv_transpose2d(x, w, b, *how),
    )


@pytest.mark.parametrize(
    ("scale", "mode", "corners"),
    [(2, "nearest", False), (2, "bilinear", False), (3, "bilinear", True), (0.5, "bilinear", False)],
)
def test_interpolation_is_pytorchs(scale: float, mode: str, corners: bool) -> None:
    options = {} if mode == "nearest" else {"align_corners": corners}
    same_as_torch(
        lambda x: F.interpolate(x, scale, mode, corners),
        [normal(2, 3, 6, 5)],
        lambda x: T.interpolate(x, scale_factor=scale, mode=mode, **options),
    )


def test_group_norm_is_pytorchs() -> None:
    arrays = [normal(2, 6, 5, 4), normal(6), normal(6)]
    same_as_torch(lambda x, w, b: F.group_norm(x, 3, w, b), arrays, lambda x, w, b: T.group_norm(x, 3, w, b))


def test_layers_have_pytorchs_states() -> None:
    pairs = [
        (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, rng=0), torch.nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2)),
        (nn.GroupNorm(2, 4), torch.nn.GroupNorm(2, 4)),
        (nn.Upsample(2), torch.nn.Upsample(scale_factor=2)),
    ]
    x = normal(1, 4, 5, 5)
    for ours, theirs in pairs:
        theirs.load_state_dict({k: torch.from_numpy(v.data) for k, v in ours.state_dict().items()})
        with torch.no_grad():
            want = theirs(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(ours(Tensor(x)).data, want, atol=1e-5)


def test_sizes_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(ShapeError, match="cannot be transposed"):
        F.conv_transpose2d(Tensor(normal(1, 3, 4, 4)), Tensor(normal(4, 2, 3, 3)))
    with pytest.raises(ShapeError, match="group norm"):
        F.group_norm(Tensor(normal(1, 5, 4)), 2, Tensor(normal(5)), Tensor(normal(5)))
