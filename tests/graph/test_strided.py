"""Operations that are not layers run inside the native call and give NumPy's numbers, through any view."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilewise.onnx
from tilewise import Tensor, nn, no_grad, ops
from tilewise._extension import native
from tilewise.ops.activations import Shrink
from tilewise.plan import compile
from tilewise.tensor import apply, cat, where

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

Function = Callable[..., Tensor]


class AsModule(nn.Module):
    def __init__(self, function: Function) -> None:
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_one_call(function: Function, *inputs: Any) -> None:
    """Check that a plan runs in one native call and agrees with the operations themselves, also for other numbers."""
    module = AsModule(function).eval()
    plan = compile(module, *inputs)
    assert plan.native_calls == 1
    other = [x[..., ::-1].copy() for x in inputs]
    for array in (inputs, other):
        with no_grad():
            expected = module(*map(Tensor, array)).data
        np.testing.assert_allclose(plan(*array), expected, rtol=2e-5, atol=2e-6 * max(1.0, np.abs(expected).max()))


SHAPES = [(3,), (2, 5), (1, 17), (2, 3, 7), (3, 1, 1), (2, 3, 5, 7), (1, 4, 1, 9), (2, 2, 3, 2, 5)]
UNARY: dict[str, Function] = {
    "neg": lambda x: -x,
    "abs": lambda x: x.abs(),
    "exp": lambda x: x.exp(),
    "log": lambda x: (x * x + 0.5).log(),
    "sqrt": lambda x: (x * x).sqrt(),
    "tanh": lambda x: (x * 3.0).tanh(),
    "square": lambda x: x**2.0,
    "cube": lambda x: (x * x + 1.0) ** 1.7,
    "sin": lambda x: apply(ops.Sin, x),
    "cos": lambda x: apply(ops.Cos, x),
    "clip": lambda x: apply(ops.Clip, x, low=-0.5, high=None),
    "softplus": lambda x: apply(ops.Softplus, x * 20.0),
    "erf": lambda x: apply(ops.Erf, x),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_operand(name: str) -> None:
    for shape in SHAPES:
        assert_one_call(lambda x: UNARY[name](x) + 0.25, numbers(*shape))


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_shrink_is_pytorchs_in_a_plan_with_its_gradient_and_from_an_onnx_file(bias: float, tmp_path: Path) -> None:
    x = np.concatenate([numbers(3, 2), np.array([[0.5, -0.5]], np.float32)])
    theirs = torch.from_numpy(x).requires_grad_()
    expected = (torch.nn.functional.softshrink if bias else torch.nn.functional.hardshrink)(theirs, 0.5)
    expected.sum().backward()
    module = AsModule(lambda t: apply(Shrink, t, limit=0.5, bias=bias)).eval()
    tilewise.onnx.save(module, tmp_path / "m.onnx", x)
    for network in (module, tilewise.onnx.load(tmp_path / "m.onnx")):
        ours, plan = Tensor(x, requires_grad=True), compile(network, x)
        result = network(ours)
        result.sum().backward()
        assert plan.operations_outside == 0
        np.testing.assert_array_equal(result.data, expected.detach().numpy())
        np.testing.assert_array_equal(plan(x), expected.detach().numpy())
        np.testing.assert_array_equal(ours.grad, theirs.grad.numpy())


BINARY: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b * b + 1.0),
    "maximum": lambda a, b: apply(ops.Maximum, a, b),
    "minimum": lambda a, b: apply(ops.Maximum, a, b, sign=-1),
}
BROADCASTS = [
    ((2, 3, 5), (5,)),
    ((2, 3, 5), (2, 1, 5)),
    ((4, 1), (1, 7)),
    ((2, 3, 4, 5), (3, 1, 5)),
    ((3,), (2, 2, 2, 2, 3)),
]


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands_broadcast(name: str) -> None:
    for a, b in BROADCASTS:
        assert_one_call(BINARY[name], numbers(*a), numbers(*b, seed=1))
        assert_one_call(lambda y, a=a: BINARY[name](Tensor(numbers(*a)), y), numbers(*b, seed=1))


VIEWS: dict[str, tuple[tuple[int, ...], Function]] = {
    "heads": ((2, 5, 12), lambda x: x.reshape(2, 5, 3, 4).permute(0, 2, 1, 3)),
    "windows": ((1, 6, 6, 3), lambda x: x.reshape(1, 2, 3, 2, 3, 3).permute(0, 1, 3, 2, 4, 5).reshape(4, 9, 3)),
    "every second": ((2, 3, 9), lambda x: x[:, :, ::2]),
    "a slice of an image": ((1, 4, 7, 5), lambda x: x[:, 1:3, 2:, :3]),
    "repeated": ((2, 1, 3), lambda x: x.reshape(2, 1, 1, 3).expand(2, 4, 5, 3)),
    "repeated heads": ((1, 2, 5, 4), lambda x: x[:, :, None].expand(1, 2, 3, 5, 4).reshape(1, 6, 5, 4)),
    "not a view": ((2, 3, 5, 4), lambda x: x.permute(0, 2, 1, 3).reshape(2, 4, 15)),
    "six axes": ((2, 3, 4), lambda x: x.reshape(1, 2, 3, 2, 2, 1).permute(4, 0, 2, 1, 3, 5)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_in_place(name: str) -> None:
    shape, view = VIEWS[name]
    assert_one_call(lambda x: view(x).exp(), numbers(*shape))
    assert_one_call(lambda x: view(x.tanh()), numbers(*shape))
    assert_one_call(lambda x: view(x) * view(x.abs() + 1.0), numbers(*shape))


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (-2, -1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(axis: Any, keepdims: bool) -> None:
    for shape in [(3, 4, 6), (2, 3, 5, 7), (2, 2, 3, 2, 5)]:
        for reduce in (
            lambda x: x.sum(axis, keepdims),
            lambda x: x.mean(axis, keepdims),
            lambda x: x.max(axis, keepdims),
        ):
            assert_one_call(lambda x, reduce=reduce: reduce(x.exp()) * 2.0, numbers(*shape))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_and_cumulative_sums(axis: int) -> None:
    for shape in [(2, 5), (3, 4, 6), (2, 3, 5, 7)]:
        assert_one_call(lambda x: x.exp().softmax(axis), numbers(*shape))
        assert_one_call(lambda x: apply(ops.CumSum, x.exp(), axis=axis), numbers(*shape))


PRODUCTS = [
    ((5, 3), (3, 4)),
    ((2, 5, 3), (2, 3, 4)),
    ((2, 3, 5, 4), (2, 3, 4, 6)),
    ((2, 3, 5, 4), (3, 4, 1)),
    ((1, 1, 1, 7), (2, 3, 7, 5)),
]


def test_products_of_two_values() -> None:
    for a, b in PRODUCTS:
        assert_one_call(lambda x, y: x @ y, numbers(*a), numbers(*b, seed=1))
        assert_one_call(lambda x, y: x @ y.transpose(-1, -2), numbers(*a), numbers(*b[:-2], b[-1], b[-2], seed=1))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concatenation_along_any_axis(axis: int) -> None:
    for shape in [(2, 3, 5), (1, 2, 3, 5)]:
        assert_one_call(lambda x: cat([x, x.exp(), Tensor(numbers(*x.shape, seed=2))], axis), numbers(*shape))
        assert_one_call(lambda x: cat([x * float(i) for i in range(11)], axis), numbers(*shape))


@pytest.mark.parametrize("widths", [((0, 0), (1, 2), (0, 3)), ((1, 0), (0, 0), (2, 0))])
def test_padding(widths: Any) -> None:
    assert_one_call(lambda x: apply(ops.Pad, x.exp(), widths=widths, value=-1.5), numbers(2, 4, 5))
    assert_one_call(lambda x: apply(ops.Pad, x.exp(), widths=((0, 0), *widths), value=0.0), numbers(1, 2, 4, 5))


def test_a_constant_condition_selects() -> None:
    condition = numbers(4, 5) > 0
    assert_one_call(lambda x: where(condition, x.exp(), Tensor(np.float32(-2.0))), numbers(3, 4, 5))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_may_share_keys_and_values(groups: int, masked: bool) -> None:
    b, h, t, d = 2, 6, 5, 4
    mask = numbers(h, t, t, seed=5)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def heads(x: Tensor, count: int) -> Tensor:
            return x.reshape(b, t, count, d).permute(0, 2, 1, 3) * 1.5

        def repeat(x: Tensor) -> Tensor:
            return x.reshape(b, groups, 1, t, d).expand(b, groups, h // groups, t, d).reshape(b, h, t, d)

        scores = heads(q, h) @ repeat(heads(k, groups)).transpose(-1, -2) / math.sqrt(d)
        scores = scores + Tensor(mask) if masked else scores
        return (scores.softmax(-1) @ repeat(heads(v, groups))).permute(0, 2, 1, 3).reshape(b, t, h * d)

    assert_one_call(
        attention, numbers(b, t, h * d), numbers(b, t, groups * d, seed=1), numbers(b, t, groups * d, seed=2)
    )


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 4, 20, 17), (2, 33, 1, 9), (3, 16, 8, 12)])
def test_permuted_copies(shape: tuple[int, ...]) -> None:
    """Every order of the axes: rows of the copy are contiguous in the operand, or blocks of it are transposed."""
    for order in itertools.permutations(range(4)):
        assert_one_call(lambda x, order=order: (x * 1.5).permute(*order).reshape(-1, 1) * 2.0, numbers(*shape))
