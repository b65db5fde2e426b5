"""Optimizers move parameters exactly as PyTorch's do, and resume exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch_reference import assert_close

import tilewise as tw
from tilewise import optim
from tilewise.errors import ConfigurationError, ShapeError

SETTINGS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.05}),
    "adam_l2": (optim.Adam, torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.2}),
}
TARGET = np.random.default_rng(1).standard_normal((7, 5))


def step(optimizer, params, target) -> None:
    optimizer.zero_grad()
    difference = params[0] @ params[1] - target
    (difference * difference).mean().backward()
    optimizer.step()


def start(dtype: type) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((7, 3)).astype(dtype), rng.standard_normal((3, 5)).astype(dtype)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_thirty_steps_equal_pytorch(backend, name, dtype):
    ours, theirs, settings = SETTINGS[name]
    a = [tw.Tensor(v.copy(), requires_grad=True) for v in start(dtype)]
    b = [torch.tensor(v, requires_grad=True) for v in start(dtype)]
    mine, reference = ours(a, **settings), theirs(b, **settings)
    for _ in range(30):
        step(mine, a, tw.Tensor(TARGET.astype(dtype)))
        step(reference, b, torch.tensor(TARGET.astype(dtype)))
    for x, y in zip(a, b, strict=True):
        assert_close(x, y.detach(), dtype)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_saved_optimizer_continues_bit_for_bit(tmp_path, name):
    kind, _, settings = SETTINGS[name]
    target = tw.Tensor(TARGET.astype(np.float32))
    params = [tw.Tensor(v, requires_grad=True) for v in start(np.float32)]
    optimizer = kind(params, **settings)
    for _ in range(3):
        step(optimizer, params, target)
    tw.save({str(i): p for i, p in enumerate(params)}, tmp_path / "weights")
    tw.save(optimizer.state_dict(), tmp_path / "optimizer")
    for _ in range(3):
        step(optimizer, params, target)

    again = [t.requires_grad_() for t in tw.load(tmp_path / "weights").values()]
    resumed = kind(again, **(settings | {"lr": 99.0}))
    resumed.load_state_dict(tw.load(tmp_path / "optimizer"))
    for _ in range(3):
        step(resumed, again, target)
    for x, y in zip(params, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_scales_the_joint_norm_as_pytorch(backend, max_norm):
    arrays = start(np.float32)
    ours = [tw.Tensor(np.zeros_like(v), requires_grad=True) for v in arrays]
    theirs = [torch.zeros(v.shape, requires_grad=True) for v in arrays]
    for a, b, v in zip(ours, theirs, arrays, strict=True):
        a.grad, b.grad = tw.Tensor(v.copy()), torch.tensor(v)
    norm = optim.clip_grad_norm(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert abs(norm - float(expected)) < 1e-5 * float(expected)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.grad, b.grad)


def test_the_cosine_schedule_warms_up_peaks_and_ends_at_its_floor():
    rates = [optim.cosine_schedule(i, 100, 1.0, warmup=10, floor=0.1) for i in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_a_parameter_without_gradient_stays_where_it_is():
    p, q = tw.Tensor([1.0], requires_grad=True), tw.Tensor([1.0], requires_grad=True)
    (p * 2).sum().backward()
    optim.AdamW([p, q], lr=0.1).step()
    assert p.data[0] != 1
    assert q.data[0] == 1


def test_wrong_settings_and_foreign_states_get_one_sentence():
    p = tw.Tensor([1.0], requires_grad=True)
    for call in (
        lambda: optim.SGD([], 0.1),
        lambda: optim.SGD([p], -1.0),
        lambda: optim.SGD([p], 0.1, nesterov=True),
        lambda: optim.Adam([p], betas=(0.9, 1.0)),
        lambda: optim.Adam([p]).load_state_dict({"steps": np.array(1), "lr": np.array(0.1), "3.m": np.zeros(1)}),
        lambda: optim.Adam([p]).load_state_dict({"0.m": np.zeros(1)}),
    ):
        with pytest.raises(ConfigurationError):
            call()
    with pytest.raises(ShapeError):
        optim.Adam([p]).load_state_dict({"steps": np.array(1), "lr": np.array(0.1), "0.m": np.zeros(2)})
