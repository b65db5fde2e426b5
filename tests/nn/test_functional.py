"""Layers as functions: values and gradients equal PyTorch's on every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_reference import assert_close, same_as_torch

import tilewise as tw
from tilewise.errors import ConfigurationError, DtypeError, ShapeError
from tilewise.nn import functional as F

EXAMPLES = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([np.float32, np.float64])
SEEDS = st.integers(0, 1000)
SIDES = st.sampled_from([0, 1, 2, 3, 5, 7, 13, 17, 33])


def normal(seed: int, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@EXAMPLES
@given(lead=st.sampled_from([(), (3,), (2, 5), (0,), (2, 0, 3)]), k=SIDES, n=SIDES, dtype=DTYPES, seed=SEEDS)
def test_linear_equals_pytorch(backend, lead, k, n, dtype, seed):
    if k == 0 or n == 0:  # PyTorch warns about layers without weights; nothing to compare
        k, n = max(k, 1), max(n, 1)
    arrays = [
        normal(seed, *lead, k, dtype=dtype),
        normal(seed + 1, n, k, dtype=dtype),
        normal(seed + 2, n, dtype=dtype),
    ]
    same_as_torch(F.linear, arrays, TF.linear)
    same_as_torch(F.linear, arrays[:2], TF.linear)
    same_as_torch(lambda *a: F.linear(*a, activation="relu"), arrays, lambda *a: TF.linear(*a).relu())


@st.composite
def convolutions(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return {
        "n": draw(st.sampled_from([0, 1, 2, 3])),
        "c": groups * draw(st.sampled_from([1, 2, 3, 5])),
        "o": groups * draw(st.sampled_from([1, 2, 5, 17])),
        "size": (draw(st.sampled_from([1, 4, 7, 8, 13])), draw(st.sampled_from([1, 5, 8, 11]))),
        "kernel": (draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from([1, 3]))),
        "stride": (draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2]))),
        "padding": (draw(st.integers(0, 2)), draw(st.integers(0, 2))),
        "groups": groups,
    }


@settings(EXAMPLES, max_examples=40)
@given(case=convolutions(), dtype=DTYPES, seed=SEEDS)
def test_conv2d_equals_pytorch_for_strides_padding_and_groups(backend, case, dtype, seed):
    size, kernel, padding = case["size"], case["kernel"], case["padding"]
    size = tuple(max(n, k - 2 * p) for n, k, p in zip(size, kernel, padding, strict=True))
    x = normal(seed, case["n"], case["c"], *size, dtype=dtype)
    w = normal(seed + 1, case["o"], case["c"] // case["groups"], *kernel, dtype=dtype)
    b = normal(seed + 2, case["o"], dtype=dtype)
    args = (case["stride"], padding, case["groups"])
    same_as_torch(
        lambda x, w, b: F.conv2d(x, w, b, *args), [x, w, b], lambda x, w, b: TF.conv2d(x, w, b, *args[:2], 1, args[2])
    )
    same_as_torch(
        lambda x, w: F.conv2d(x, w, None, *args, activation="relu"),
        [x, w],
        lambda x, w: TF.conv2d(x, w, None, *args[:2], 1, args[2]).relu(),
    )


@EXAMPLES
@given(
    shape=st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([1, 5]), st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pad=st.booleans(),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_pooling_equals_pytorch(backend, shape, kernel, stride, pad, dtype, seed):
    padding = (kernel[0] // 2, kernel[1] // 2) if pad else (0, 0)
    x = normal(seed, *shape, dtype=dtype)
    same_as_torch(
        lambda x: F.max_pool2d(x, kernel, stride, padding), [x], lambda x: TF.max_pool2d(x, kernel, stride, padding)
    )
    same_as_torch(
        lambda x: F.avg_pool2d(x, kernel, stride, padding), [x], lambda x: TF.avg_pool2d(x, kernel, stride, padding)
    )


def test_max_pooling_passes_nan_on_as_pytorch(backend):
    x = normal(0, 1, 1, 4, 4)
    x[0, 0, 1, 2] = np.nan
    np.testing.assert_array_equal(F.max_pool2d(tw.Tensor(x), 2), TF.max_pool2d(torch.from_numpy(x), 2))


@EXAMPLES
@given(lead=st.sampled_from([(), (3,), (2, 5), (0,)]), n=st.sampled_from([1, 2, 7, 64, 129]), dtype=DTYPES, seed=SEEDS)
def test_layer_norm_equals_pytorch(backend, lead, n, dtype, seed):
    arrays = [normal(seed, *lead, n, dtype=dtype), normal(seed + 1, n, dtype=dtype), normal(seed + 2, n, dtype=dtype)]
    if n == 1:  # 1/sqrt(variance + eps) of a constant magnifies rounding; PyTorch's own gradient is noise there
        arrays[0][...] = 1
    same_as_torch(F.layer_norm, arrays, lambda x, w, b: TF.layer_norm(x, w.shape, w, b))


def test_layer_norm_over_several_axes_equals_pytorch(backend):
    arrays = [normal(0, 3, 4, 5), normal(1, 4, 5), normal(2, 4, 5)]
    same_as_torch(F.layer_norm, arrays, lambda x, w, b: TF.layer_norm(x, w.shape, w, b))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (2, 7, 1, 1), (1, 2, 3, 4)])
def test_batch_norm_and_its_running_statistics_equal_pytorch(shape, training, dtype):
    c = shape[1]
    arrays = [normal(0, *shape, dtype=dtype), normal(1, c, dtype=dtype), normal(2, c, dtype=dtype)]
    running = [normal(3, c, dtype=dtype), np.abs(normal(4, c, dtype=dtype)) + 1]
    ours = [tw.Tensor(r.copy()) for r in running]
    theirs = [torch.from_numpy(r.copy()) for r in running]
    same_as_torch(
        lambda x, w, b: F.batch_norm(x, *ours, w, b, training, 0.2),
        arrays,
        lambda x, w, b: TF.batch_norm(x, *theirs, w, b, training, 0.2),
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, dtype)


@EXAMPLES
@given(n=st.sampled_from([0, 1, 5, 17]), c=st.sampled_from([1, 2, 10, 65, 130]), dtype=DTYPES, seed=SEEDS)
def test_cross_entropy_equals_pytorch(backend, n, c, dtype, seed):
    logits = 4 * normal(seed, n, c, dtype=dtype)
    targets = np.random.default_rng(seed).integers(0, c, n)
    for reduction in ("sum", "none") if n == 0 else ("mean", "sum", "none"):
        same_as_torch(
            lambda x, r=reduction: F.cross_entropy(x, targets, r),
            [logits],
            lambda x, r=reduction: TF.cross_entropy(x, torch.from_numpy(targets), reduction=r),
        )


def test_cross_entropy_ignores_what_it_is_told_to(backend):
    targets = np.array([1, -100, 0, -100])
    same_as_torch(
        lambda x: F.cross_entropy(x, targets),
        [normal(0, 4, 3)],
        lambda x: TF.cross_entropy(x, torch.from_numpy(targets)),
    )


def test_cross_entropy_takes_any_number_of_leading_axes(backend):
    targets = np.random.default_rng(0).integers(0, 5, (2, 3))
    same_as_torch(
        lambda x: F.cross_entropy(x, targets),
        [normal(0, 2, 3, 5)],
        lambda x: TF.cross_entropy(x.reshape(6, 5), torch.from_numpy(targets.reshape(-1))),
    )


def test_nll_and_mse_losses_equal_pytorch():
    targets = np.array([1, 0, 2])
    same_as_torch(
        lambda x: F.nll_loss(x, targets), [normal(0, 3, 4)], lambda x: TF.nll_loss(x, torch.from_numpy(targets))
    )
    same_as_torch(F.mse_loss, [normal(0, 3, 4), normal(1, 3, 4)], TF.mse_loss)
    with pytest.raises(ShapeError):  # not the mean over all pairs of predictions and targets
        F.mse_loss(tw.Tensor(normal(0, 3, 1)), normal(1, 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (6,), (2, 5), (0,)])
def test_embedding_equals_pytorch_and_repeated_rows_add_up(backend, shape, dtype):
    ids = np.random.default_rng(0).integers(0, 4, shape)
    same_as_torch(
        lambda w: F.embedding(ids, w),
        [normal(0, 4, 9, dtype=dtype)],
        lambda w: TF.embedding(torch.from_numpy(np.array(ids)), w),
    )


def torch_attention(q, k, v, allowed):
    """Attention with an explicit boolean mask, giving zeros where nothing may be attended to."""
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.where(allowed.any(-1, keepdim=True), weights, 0.0).nan_to_num() @ v


@settings(EXAMPLES, max_examples=25)
@given(
    batch=st.sampled_from([(1, 1), (2, 3), (0, 2)]),
    t=st.sampled_from([1, 2, 7, 33]),
    extra=st.sampled_from([0, 1, 5]),
    d=st.sampled_from([1, 8, 17]),
    kind=st.sampled_from(["none", "causal", "mask", "both"]),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_attention_equals_pytorch_for_causal_and_masked(backend, batch, t, extra, d, kind, dtype, seed):
    s = t + extra
    arrays = [normal(seed + i, *batch, n, d, dtype=dtype) for i, n in enumerate((t, s, s))]
    allowed = np.ones((t, s), bool)
    mask = None
    if kind in ("mask", "both"):
        mask = np.random.default_rng(seed).random((t, s)) < 0.7
        mask[:, 0] = True  # an empty row is tested by itself: there PyTorch has no gradient to compare with
        allowed &= mask
    if kind in ("causal", "both"):
        allowed &= np.tri(t, s, extra, dtype=bool)
    same_as_torch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind in ("causal", "both")),
        arrays,
        lambda q, k, v: torch_attention(q, k, v, torch.from_numpy(allowed)),
    )


def test_attention_with_a_float_mask_equals_pytorch(backend):
    arrays = [normal(i, 2, 2, 5, 4) for i in range(3)]
    mask = normal(9, 2, 1, 5, 5)
    same_as_torch(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask),
        arrays,
        lambda q, k, v: TF.scaled_dot_product_attention(q, k, v, torch.from_numpy(mask)),
    )


def test_a_query_with_nothing_to_attend_to_gives_zeros_and_no_gradient(backend):
    q, k, v = (tw.Tensor(normal(i, 1, 1, 2, 4), requires_grad=True) for i in range(3))
    out = F.scaled_dot_product_attention(q, k, v, np.array([[True, True], [False, False]]))
    np.testing.assert_array_equal(out.data[0, 0, 1], 0)
    out.sum().backward()
    np.testing.assert_array_equal(q.grad.data[0, 0, 1], 0)
    assert np.isfinite(k.grad.data).all()


def test_packed_causal_attention_equals_pytorch(backend):
    b, t, h, d = 2, 7, 3, 8

    def reference(qkv):
        q, k, v = qkv.reshape(b, t, 3, h, d).permute(2, 0, 3, 1, 4)
        return TF.scaled_dot_product_attention(q, k, v, is_causal=True).permute(0, 2, 1, 3).reshape(b, t, h * d)

    same_as_torch(lambda x: F.packed_causal_attention(x, h), [normal(0, b, t, 3 * h * d)], reference)


def test_dropout_keeps_the_mean_and_zeroes_the_gradient_of_what_it_drops():
    x = tw.Tensor(np.ones((200, 200), np.float32), requires_grad=True)
    y = F.dropout(x, 0.25, rng=0)
    dropped = y.data == 0
    assert abs(dropped.mean() - 0.25) < 0.01
    assert_close(y.data[~dropped], np.full((~dropped).sum(), 1 / 0.75, np.float32))
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y)
    assert F.dropout(x, 0.5, training=False) is x
    np.testing.assert_array_equal(F.dropout(x, 0.5, rng=3), F.dropout(x, 0.5, rng=3))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_fused_products_in_inference_equal_the_steps_one_by_one(backend, activation):
    act = {None: lambda t: t, "relu": torch.relu, "gelu": TF.gelu}[activation]
    x, w, b, r = normal(0, 6, 5), normal(1, 7, 5), normal(2, 7), normal(3, 6, 7)
    with tw.no_grad():
        ours = F.linear(*map(tw.Tensor, (x, w, b)), activation=activation, residual=tw.Tensor(r))
    assert_close(ours, act(TF.linear(*map(torch.from_numpy, (x, w, b))) + torch.from_numpy(r)))
    x, w, b, r = normal(0, 2, 3, 6, 6), normal(1, 4, 3, 3, 3), normal(2, 4), normal(3, 2, 4, 6, 6)
    with tw.no_grad():
        ours = F.conv2d(*map(tw.Tensor, (x, w, b)), padding=1, activation=activation, residual=tw.Tensor(r))
    assert_close(ours, act(TF.conv2d(*map(torch.from_numpy, (x, w, b)), padding=1) + torch.from_numpy(r)))


def ones(*shape: int) -> tw.Tensor:
    return tw.Tensor(np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ShapeError, lambda: ones(2, 3) @ ones(2, 3)),
        (ShapeError, lambda: ones(2, 3) + ones(2, 4)),
        (ShapeError, lambda: ones(2, 3).reshape(5)),
        (ShapeError, lambda: ones(2, 3)[5]),
        (ShapeError, lambda: ones(2, 3).sum(axis=2)),
        (ShapeError, lambda: ones(0).max()),
        (ShapeError, lambda: ones(2, 3).permute(0, 0)),
        (ShapeError, lambda: tw.cat([ones(2, 3), ones(2, 4)])),
        (ShapeError, lambda: F.linear(ones(2, 3), ones(4, 5))),
        (ShapeError, lambda: F.linear(ones(2, 3), ones(4, 3), ones(5))),
        (ShapeError, lambda: F.conv2d(ones(1, 3, 4, 4), ones(2, 4, 3, 3))),
        (ShapeError, lambda: F.conv2d(ones(1, 3, 2, 2), ones(2, 3, 3, 3))),
        (ShapeError, lambda: F.conv2d(ones(1, 3, 4, 4), ones(2, 3, 3, 3), stride=0)),
        (ShapeError, lambda: F.conv2d(ones(3, 4, 4), ones(2, 3, 3, 3))),
        (ShapeError, lambda: F.conv2d(ones(1, 3, 4, 4), ones(2, 3, 3, 3), ones(3))),
        (ShapeError, lambda: F.max_pool2d(ones(1, 1, 4, 4), 2, padding=2)),
        (ShapeError, lambda: F.avg_pool2d(ones(1, 1, 4, 4), 5)),
        (ShapeError, lambda: F.layer_norm(ones(2, 3), ones(4), ones(4))),
        (ShapeError, lambda: F.batch_norm(ones(2, 3, 1, 1), None, None, ones(4), ones(4), True)),
        (ShapeError, lambda: F.batch_norm(ones(1, 3, 1, 1), None, None, ones(3), ones(3), True)),
        (ShapeError, lambda: F.cross_entropy(ones(2, 3), [0, 3])),
        (ShapeError, lambda: F.cross_entropy(ones(2, 3), [0])),
        (ShapeError, lambda: F.embedding(np.array([4]), ones(4, 2))),
        (ShapeError, lambda: F.embedding(np.array([-1]), ones(4, 2))),
        (ShapeError, lambda: F.scaled_dot_product_attention(ones(1, 1, 2, 3), ones(1, 1, 2, 4), ones(1, 1, 2, 4))),
        (
            ShapeError,
            lambda: F.scaled_dot_product_attention(*[ones(1, 1, 2, 4)] * 3, mask=np.ones((3, 3), bool)),
        ),
        (DtypeError, lambda: F.embedding(np.array([0.5]), ones(4, 2))),
        (DtypeError, lambda: F.cross_entropy(ones(1, 3), np.array([0.5]))),
        (DtypeError, lambda: tw.Tensor(["a"])),
        (DtypeError, lambda: tw.Tensor([1, 2], requires_grad=True)),
        (ShapeError, lambda: tw.Tensor([[1.0], [1.0, 2.0]])),
        (ConfigurationError, lambda: F.dropout(ones(2), 1.5)),
        (ConfigurationError, lambda: F.cross_entropy(ones(1, 3), [0], "median")),
    ],
)
def test_what_does_not_fit_gets_one_sentence(backend, error, call):
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)
