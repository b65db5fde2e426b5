"""Fused attention against the same thing written out in float64, forward and backward, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import DtypeError, ShapeError

torch = pytest.importorskip("torch")
if native is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

Array = np.ndarray[Any, Any]

few = settings(max_examples=30, deadline=None, derandomize=True)
lengths = st.sampled_from([0, 1, 2, 7, 31, 63, 64, 65, 100, 130])
widths = st.sampled_from([1, 3, 8, 16, 17, 32, 64, 96])
masks = st.sampled_from(["none", "boolean", "additive", "row", "head", "blind rows"])
layouts = st.sampled_from(["plain", "packed", "reversed", "columns"])


@pytest.fixture(params=native.supported_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def random(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def laid_out(x: Array, layout: str) -> Array:
    """The same (B, H, T, D) numbers, placed otherwise in memory."""
    b, h, t, d = x.shape
    if layout == "packed":  # one of three parts of a (B, T, 3, H, D) projection
        packed = np.zeros((b, t, 3, h, d), np.float32)
        view = packed[:, :, 1].transpose(0, 2, 1, 3)
        view[...] = x
        return view
    if layout == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    if layout == "columns":
        return np.asfortranarray(x)
    return x


def make_mask(kind: str, b: int, h: int, t: int, s: int, seed: int) -> Array | None:
    rng = np.random.default_rng(seed)
    if kind == "boolean":
        return rng.random((b, h, t, s)) < 0.7
    if kind == "additive":
        mask = rng.standard_normal((t, s)).astype(np.float32)
        mask[rng.random((t, s)) < 0.2] = -np.inf
        return mask
    if kind == "row":
        return rng.random((b, 1, 1, s)) < 0.5
    if kind == "head":
        return rng.standard_normal((1, h, t, 1)).astype(np.float32)
    if kind == "blind rows":
        return np.broadcast_to(rng.random((t, 1)) < 0.5, (t, s))
    return None


def reference(q: Any, k: Any, v: Any, causal: bool, mask: Array | None, scale: float | None) -> Any:
    """Attention in float64 PyTorch; rows with nothing to attend to are zeros and have no gradient."""
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    t, s = scores.shape[-2:]
    allowed = torch.ones(t, s, dtype=torch.bool).tril(s - t) if causal else torch.ones(t, s, dtype=torch.bool)
    if mask is not None and mask.dtype == bool:
        allowed = allowed & torch.tensor(mask)
    elif mask is not None:
        scores = scores + torch.tensor(mask, dtype=torch.float64)
        allowed = allowed & ~torch.isneginf(scores.detach())
    allowed = allowed.broadcast_to(scores.shape)
    sees_any = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed & sees_any, -math.inf).masked_fill(~sees_any, 0.0)
    return torch.where(sees_any, torch.softmax(scores, -1), 0.0) @ v


def run(op: str, *args: Any, **settings: Any) -> Any:
    assert current_backend().select(op, *args, **settings).name == "native"
    return current_backend().dispatch(op, *args, **settings)


def assert_close(ours: Array, theirs: Any, tolerance: float = 1e-5) -> None:
    expected = theirs.detach().numpy()
    assert ours.dtype == np.float32 and ours.shape == expected.shape
    limit = tolerance * max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=limit)


@few
@given(
    sizes=st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([1, 3]), lengths, lengths, widths, widths),
    causal=st.booleans(),
    mask_kind=masks,
    layout=layouts,
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 999),
)
def test_attention_and_its_gradients_are_right(
    sizes: tuple[int, ...], causal: bool, mask_kind: str, layout: str, scale: float | None, seed: int
) -> None:
    b, h, t, s, d, e = sizes
    mask = make_mask(mask_kind, b, h, t, s, seed)
    arrays = [random(seed, b, h, t, d), random(seed + 1, b, h, s, d), random(seed + 2, b, h, s, e)]
    gout = random(seed + 3, b, h, t, e)
    leaves = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    expected = reference(*leaves, causal, mask, scale)
    expected.backward(torch.tensor(gout, dtype=torch.float64))

    q, k, v = (laid_out(a, layout) for a in arrays)
    settings = {"causal": causal, "mask": mask, "scale": scale}
    out, logsumexp = run("attention", q, k, v, **settings)
    assert_close(out, expected)
    grads = run("attention_grad", laid_out(gout, layout), q, k, v, out, logsumexp, **settings)
    for ours, leaf in zip(grads, leaves, strict=True):
        assert_close(ours, leaf.grad)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences_are_right_too(d: int) -> None:
    q, k, v, gout = (random(i, 1, 2, 517, d) for i in range(4))
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    expected.backward(torch.tensor(gout))
    out, logsumexp = run("attention", q, k, v, causal=True)
    assert_close(out, expected)
    for ours, leaf in zip(
        run("attention_grad", gout, q, k, v, out, logsumexp, causal=True, mask=None, scale=None), leaves, strict=True
    ):
        assert_close(ours, leaf.grad)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = random(0, 1, 1, 9, 16, scale=300), random(1, 1, 1, 80, 16, scale=300), random(2, 1, 1, 80, 16)
    out, logsumexp = run("attention", q, k, v, causal=False)
    expected = reference(*(torch.tensor(a, dtype=torch.float64) for a in (q, k, v)), False, None, None)
    assert_close(out, expected, 1e-3)  # scores near 1e6 are known to 0.06 in float32
    assert np.isfinite(logsumexp).all()


def test_not_a_number_reaches_the_rows_that_see_it_and_no_other() -> None:
    q, k, v = (random(i, 1, 1, 70, 8) for i in range(3))
    k[0, 0, 65, 3] = np.nan
    out, _ = run("attention", q, k, v, causal=True)
    assert np.isnan(out[0, 0, 65:]).all() and np.isfinite(out[0, 0, :65]).all()


def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    q, k, v = random(0, 1, 2, 5, 8), random(1, 1, 2, 3, 8), random(2, 1, 2, 3, 8)
    out, logsumexp = run("attention", q, k, v, causal=True)  # queries 0 and 1 stand before all keys
    assert (out[:, :, :2] == 0).all() and np.isneginf(logsumexp[:, :, :2]).all()
    gq, gk, gv = run("attention_grad", out + 1, q, k, v, out, logsumexp, causal=True, mask=None, scale=None)
    assert (gq[:, :, :2] == 0).all() and np.isfinite(gk).all() and np.isfinite(gv).all()


def test_gradients_can_be_written_into_a_packed_array() -> None:
    packed = random(0, 2, 33, 3, 4, 16)
    q, k, v = packed.transpose(2, 0, 3, 1, 4)
    out, logsumexp = run("attention", q, k, v, causal=True)
    plain = run("attention_grad", out, q, k, v, out, logsumexp, causal=True, mask=None, scale=None)
    gpacked = np.full_like(packed, np.nan)
    into = tuple(gpacked.transpose(2, 0, 3, 1, 4))
    returned = run("attention_grad", out, q, k, v, out, logsumexp, causal=True, mask=None, scale=None, into=into)
    for one, two, three in zip(plain, into, returned, strict=True):
        np.testing.assert_array_equal(one, two)
        assert two is three


def test_joining_the_heads_needs_no_copy() -> None:
    q = random(0, 2, 3, 5, 8)
    out, _ = run("attention", q, q, q, causal=True)
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v, gout = (random(i, 2, 3, 150, 32) for i in range(4))
    before, results = native.num_threads(), []
    try:
        for threads in (1, 2, 7):
            native.set_num_threads(threads)
            out, logsumexp = run("attention", q, k, v, causal=True)
            grads = run("attention_grad", gout, q, k, v, out, logsumexp, causal=True, mask=None, scale=None)
            results.append((out, logsumexp, *grads))
    finally:
        native.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    q, k = random(0, 1, 2, 3, 4), random(1, 1, 2, 5, 6)
    with pytest.raises(ShapeError, match="attention takes"):
        run("attention", q, k, k, causal=False)
    with pytest.raises(ShapeError, match="four axes"):
        run("attention", q[0], q[0], q[0], causal=False)
    with pytest.raises(ShapeError, match="does not broadcast"):
        run("attention", q, q, q, causal=False, mask=np.ones((7, 3), bool))
    with pytest.raises(DtypeError, match="float32"):
        native.attention(q.astype(np.float64), q, q, False)
