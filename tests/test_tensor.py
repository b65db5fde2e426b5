"""The tensor: every operation equals PyTorch in value and gradient, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_reference import assert_close, same_as_torch

import tilewise as tw

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXAMPLES = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIDES = st.sampled_from([0, 1, 2, 3, 5, 7, 13, 17])
SHAPES = st.lists(SIDES, min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from([np.float32, np.float64])
SEEDS = st.integers(0, 1000)


def numbers(shape: tuple[int, ...], dtype: type, seed: int, positive: bool = False) -> np.ndarray:
    """Normal numbers, laid out in one of several ways: contiguous, transposed, or every second of a larger array."""
    rng = np.random.default_rng(seed)
    layout = seed % 3
    if layout == 1:
        values = rng.standard_normal(shape[::-1]).T
    elif layout == 2 and shape:
        values = rng.standard_normal((*shape[:-1], 2 * shape[-1]))[..., ::2]
    else:
        values = rng.standard_normal(shape)
    values = values.astype(dtype, order="K")
    return np.abs(values) + dtype(0.1) if positive else values


UNARY = {
    "neg": lambda x: -x,
    "exp": lambda x: x.exp(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "sin": lambda x: x.sin(),
    "cos": lambda x: x.cos(),
    "relu": lambda x: x.relu(),
    "abs": lambda x: abs(x),
    "square": lambda x: x**2,
    "cube": lambda x: x**3.0,
    "two_to_the": lambda x: 2.0**x,
    "scaled": lambda x: (3.0 * x - 1.0) / 2.0 + (1.0 - x),
    "clip": lambda x: x.clip(-0.5, 0.7),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "clone": lambda x: x.clone() + x,
    "used_twice": lambda x: x * x + x,
}
POSITIVE = {
    "log": lambda x: x.log(),
    "sqrt": lambda x: x.sqrt(),
    "root": lambda x: x**0.3,
    "reciprocal": lambda x: 1.0 / x,
}


@pytest.mark.parametrize("name", UNARY)
@EXAMPLES
@given(shape=SHAPES, dtype=DTYPES, seed=SEEDS)
def test_unary_operations_equal_pytorch(backend, name, shape, dtype, seed):
    if name == "mean" and 0 in shape:
        return
    same_as_torch(UNARY[name], [numbers(shape, dtype, seed)])


@pytest.mark.parametrize("name", POSITIVE)
@EXAMPLES
@given(shape=SHAPES, dtype=DTYPES, seed=SEEDS)
def test_operations_on_positive_numbers_equal_pytorch(name, shape, dtype, seed):
    same_as_torch(POSITIVE[name], [numbers(shape, dtype, seed, positive=True)])


@EXAMPLES
@given(shape=SHAPES, dtype=DTYPES, seed=SEEDS)
def test_gelu_equals_pytorch(backend, shape, dtype, seed):
    same_as_torch(lambda x: x.gelu(), [3 * numbers(shape, dtype, seed)], torch.nn.functional.gelu)


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "maximum": lambda a, b: a.maximum(b),
    "minimum": lambda a, b: a.minimum(b),
}


@st.composite
def broadcastable(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(SHAPES)
    other = tuple(1 if draw(st.booleans()) else n for n in shape)[draw(st.integers(0, len(shape))) :]
    return (shape, other) if draw(st.booleans()) else (other, shape)


@pytest.mark.parametrize("name", BINARY)
@EXAMPLES
@given(shapes=broadcastable(), dtype=DTYPES, seed=SEEDS)
def test_binary_operations_broadcast_as_pytorch(name, shapes, dtype, seed):
    a, b = (numbers(shape, dtype, seed + i, positive=name in ("div", "pow")) for i, shape in enumerate(shapes))
    same_as_torch(BINARY[name], [a, b])


@st.composite
def matmul_shapes(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    m, k, n = draw(SIDES), draw(SIDES), draw(SIDES)
    batch, other = draw(
        st.sampled_from([((), ()), ((3,), ()), ((), (2,)), ((2, 1), (3,)), ((2, 3), (2, 3)), ((0,), ())])
    )
    left = draw(st.sampled_from([(*batch, m, k), (k,)]))
    right = draw(st.sampled_from([(*other, k, n), (k,)]))
    return left, right


@settings(EXAMPLES, max_examples=60)
@given(shapes=matmul_shapes(), dtype=DTYPES, seed=SEEDS)
def test_matmul_equals_pytorch_for_vectors_matrices_and_batches(backend, shapes, dtype, seed):
    a, b = (numbers(shape, dtype, seed + i) for i, shape in enumerate(shapes))
    same_as_torch(lambda x, y: x @ y, [a, b])


@st.composite
def reductions(draw):
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=1, max_size=4).map(tuple))
    axes = draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda a: a % len(shape)))
    return shape, tuple(axes), draw(st.booleans())


REDUCTIONS = {
    "sum": (lambda x, a, k: x.sum(a, k), lambda x, a, k: x.sum(a, k)),
    "mean": (lambda x, a, k: x.mean(a, k), lambda x, a, k: x.mean(a, k)),
    "max": (lambda x, a, k: x.max(a, k), lambda x, a, k: x.amax(a, k)),
    "min": (lambda x, a, k: x.min(a, k), lambda x, a, k: x.amin(a, k)),
    "var": (lambda x, a, k: x.var(a, k, 0), lambda x, a, k: x.var(a, correction=0, keepdim=k)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@EXAMPLES
@given(case=reductions(), dtype=DTYPES, seed=SEEDS)
def test_reductions_equal_pytorch_over_any_axes(name, case, dtype, seed):
    shape, axes, keep = case
    ours, theirs = REDUCTIONS[name]
    same_as_torch(lambda x: ours(x, axes, keep), [numbers(shape, dtype, seed)], lambda x: theirs(x, axes, keep))


def test_equal_maxima_share_the_gradient():
    x = tw.Tensor([1.0, 3.0, 3.0], requires_grad=True)
    x.max().backward()
    np.testing.assert_array_equal(x.grad, [0, 0.5, 0.5])


@pytest.mark.parametrize("log", [False, True])
@EXAMPLES
@given(shape=st.lists(SIDES, min_size=1, max_size=3).map(tuple), axis=st.integers(-3, 2), dtype=DTYPES, seed=SEEDS)
def test_softmax_equals_pytorch_on_any_axis(backend, log, shape, axis, dtype, seed):
    axis = axis % len(shape)
    same_as_torch(
        lambda x: x.log_softmax(axis) if log else x.softmax(axis),
        [5 * numbers(shape, dtype, seed)],
        lambda x: x.log_softmax(axis) if log else x.softmax(axis),
    )


INDICES = {
    "row": np.s_[1],
    "last": np.s_[..., -1],
    "slice": np.s_[1:3],
    "steps": np.s_[::2, :, 1:],
    "new_axis": np.s_[:, None, 0],
    "integers": np.s_[[0, 2, 2, 1]],
    "pairs": np.s_[[0, 1, 1], [2, 2, 2]],
    "matrix_of_integers": np.s_[np.array([[0, 1], [3, 0]])],
    "mixed": np.s_[[0, 0, 3], 1:, [1, 1, 0]],
    "nothing": np.s_[2:2],
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing_equals_pytorch_and_repeated_positions_add_up(backend, name):
    index = INDICES[name]
    same_as_torch(lambda x: x[index], [numbers((4, 3, 5), np.float32, 1)])


def test_a_boolean_mask_selects_as_in_pytorch():
    x = numbers((4, 5), np.float64, 3)
    same_as_torch(lambda t: t[x > 0], [x], lambda t: t[torch.from_numpy(x > 0)])


def test_looking_up_rows_of_a_matrix_adds_up_gradients(backend):
    ids = np.array([[1, 1, 0], [4, -1, 1]])
    same_as_torch(lambda x: x[ids], [numbers((5, 7), np.float32, 0)])


SHAPE_CHANGES = {
    "reshape": (lambda x: x.reshape(4, -1), None),
    "flatten": (lambda x: x.flatten(1), None),
    "permute": (lambda x: x.permute(2, 0, 1), None),
    "transpose": (lambda x: x.transpose(0, 2), None),
    "T": (lambda x: x[0].T, None),
    "unsqueeze": (lambda x: x.unsqueeze(1).unsqueeze(-1), None),
    "squeeze": (lambda x: x[:1].squeeze(0), None),
    "expand": (lambda x: x[:, :1].expand(4, 6, 5), None),
    "expand_kept": (lambda x: x[:, :1].expand(2, -1, 6, -1), None),
    "iterate": (lambda x: sum(row * i for i, row in enumerate(x)), None),
    "cumsum": (lambda x: x.cumsum(1), None),
    "split": (lambda x: x.split(2, 1)[1] * x.split(2, 1)[0][:, :1], None),
    "split_sizes": (lambda x: x.split([1, 3, 1], 2)[1], None),
    "cat": (lambda x: tw.cat([x, x * 2, x[:, :1]], 1), lambda x: torch.cat([x, x * 2, x[:, :1]], 1)),
    "stack": (lambda x: tw.stack([x, x + 1], 1), lambda x: torch.stack([x, x + 1], 1)),
    "pad": (
        lambda x: x.pad([(0, 0), (1, 2), (0, 3)], 1.5),
        lambda x: torch.nn.functional.pad(x, (0, 3, 1, 2), value=1.5),
    ),
    "where": (lambda x: tw.where(x > 0, x, x * 0.1), lambda x: torch.where(x > 0, x, x * 0.1)),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, -2.0), None),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SHAPE_CHANGES)
def test_shape_changes_equal_pytorch(name, dtype):
    ours, theirs = SHAPE_CHANGES[name]
    same_as_torch(ours, [numbers((4, 3, 5), dtype, 4)], theirs)


def test_gather_equals_pytorch():
    indices = np.array([[0, 2, 2], [1, 0, 0]])
    same_as_torch(
        lambda x: x.gather(1, indices),
        [numbers((2, 4), np.float64, 0)],
        lambda x: x.gather(1, torch.from_numpy(indices)),
    )


def test_nan_and_infinity_flow_as_in_pytorch(backend):
    x = np.array([[np.nan, 1.0, -np.inf, np.inf, 0.0]], np.float32)
    for name in ("relu", "exp", "tanh", "sqrt", "log", "sigmoid"):
        ours = getattr(tw.Tensor(x), name)()
        assert_close(ours, getattr(torch.from_numpy(x), name)(), what=name)
    for function in (lambda t: t + t, lambda t: t - t, lambda t: t * 0.0, lambda t: t.sum(), lambda t: t.softmax(-1)):
        assert_close(function(tw.Tensor(x)), function(torch.from_numpy(x)))
    assert np.isnan(tw.Tensor(x).max().item())


def test_numbers_are_float32_unless_asked_otherwise():
    assert tw.Tensor([1.0, 2.0]).dtype == np.float32
    assert tw.Tensor([1, 2]).dtype == np.int64
    assert tw.Tensor([1.0], dtype=np.float64).dtype == np.float64
    assert tw.Tensor(np.zeros(2)).dtype == np.float64
    assert (tw.Tensor([1.0]) * 2.5 + 1).dtype == np.float32
    assert (tw.Tensor([1, 2]) / 2).dtype == np.float32
    assert (np.float32(2) * tw.Tensor([1.0])).dtype == np.float32


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int8, np.int64])
def test_means_of_integers_are_real_numbers(dtype: type) -> None:
    x = (np.arange(900).reshape(3, 300) % 5 > 1).astype(dtype)  # more elements than a byte can count
    np.testing.assert_allclose(tw.Tensor(x).mean().numpy(), x.mean(), rtol=1e-6)
    np.testing.assert_allclose(tw.Tensor(x).mean(axis=1).numpy(), x.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(tw.Tensor(x).var(axis=1).numpy(), x.var(axis=1, ddof=1), rtol=1e-5)
