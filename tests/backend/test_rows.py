"""The native row kernels against PyTorch, on every instruction set, over awkward shapes, values and memory orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ShapeError

torch = pytest.importorskip("torch")
if native is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

F = torch.nn.functional
Array = np.ndarray[Any, Any]

few = settings(max_examples=25, deadline=None, derandomize=True)
sizes = st.sampled_from([0, 1, 2, 3, 7, 15, 16, 17, 31, 64, 65, 127, 384, 1031])
shapes = st.tuples(st.sampled_from([0, 1, 2, 3, 13]), st.sampled_from([1, 2, 5]), sizes)
fills = st.sampled_from(["normal", "huge", "offset", "nan", "inf", "all -inf", "tiny"])
orders = st.sampled_from(["C", "strided", "transposed"])
seeds = st.integers(0, 2**16)


@pytest.fixture(params=native.supported_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def make(shape: tuple[int, ...], fill: str = "normal", order: str = "C", seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if fill == "huge":
        x *= np.float32(1e4)
    elif fill == "tiny":
        x *= np.float32(1e-30)
    elif fill == "offset":
        x += np.float32(1000)
    elif fill in ("nan", "inf") and x.size:
        x.reshape(-1)[rng.integers(x.size)] = np.nan if fill == "nan" else np.inf
    elif fill == "all -inf" and x.size:
        x[..., :1, :] = -np.inf
    return reorder(x, order)


def reorder(x: Array, order: str) -> Array:
    """The same numbers in another memory layout."""
    if order == "strided":
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if order == "transposed":
        return np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)
    return x


def assert_close(ours: Array, theirs: Any, tolerance: float = 1e-5) -> None:
    theirs = theirs.detach().numpy()
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    finite = np.abs(theirs[np.isfinite(theirs)])
    limit = tolerance * max(1.0, float(finite.max()) if finite.size else 0.0)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit)


def torch_and_gradients(function: Any, gy: Array, *inputs: Array) -> tuple[Any, list[Any]]:
    leaves = [torch.tensor(np.ascontiguousarray(x), requires_grad=True) for x in inputs]
    y = function(*leaves)
    y.backward(torch.tensor(np.ascontiguousarray(gy)))
    return y, [leaf.grad for leaf in leaves]


def run(op: str, *args: Any, **settings: Any) -> Any:
    assert current_backend().select(op, *args, **settings).name == "native"
    return current_backend().dispatch(op, *args, **settings)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@few
@given(shape=shapes, fill=fills, order=orders, seed=seeds)
def test_softmax_and_its_gradient_are_those_of_pytorch(
    op: str, shape: tuple[int, ...], fill: str, order: str, seed: int
) -> None:
    x, gy = make(shape, fill, order, seed), make(shape, order=order, seed=seed + 1)
    y, (gx,) = torch_and_gradients(lambda t: getattr(torch, op)(t, -1), gy, x)
    ours = run(op, x)
    assert_close(ours, y)
    assert_close(run(op + "_grad", ours, gy), gx)


@few
@given(shape=shapes, fill=st.sampled_from(["normal", "huge", "nan", "tiny"]), order=orders, seed=seeds)
def test_gelu_and_its_gradient_are_those_of_pytorch(shape: tuple[int, ...], fill: str, order: str, seed: int) -> None:
    x, gy = make(shape, fill, order, seed), make(shape, order=order, seed=seed + 1)
    y, (gx,) = torch_and_gradients(F.gelu, gy, x)
    assert_close(run("gelu", x), y)
    assert_close(run("gelu_grad", x, gy), gx)


@few
@given(shape=shapes, fill=fills, order=orders, seed=seeds)
def test_relu_and_its_gradient_are_those_of_pytorch(shape: tuple[int, ...], fill: str, order: str, seed: int) -> None:
    x, gy = make(shape, fill, order, seed), make(shape, order=order, seed=seed + 1)
    y, (gx,) = torch_and_gradients(torch.relu, gy, x)
    ours = run("relu", x)
    assert_close(ours, y)
    assert_close(run("relu_grad", ours, gy), gx)


def test_gelu_of_infinity_is_its_limit() -> None:
    x = np.array([np.inf, 60.0, -60.0], np.float32)
    np.testing.assert_array_equal(run("gelu", x), np.array([np.inf, 60.0, -0.0], np.float32))
    np.testing.assert_array_equal(
        run("gelu_grad", np.array([np.inf, -np.inf], np.float32), np.ones(2, np.float32)), [1, 0]
    )


@few
@given(
    shape=shapes.filter(lambda s: s[-1] > 0),
    fill=st.sampled_from(["normal", "huge", "nan", "tiny", "offset"]),
    order=orders,
    seed=seeds,
)
def test_layer_norm_and_its_gradients_are_those_of_pytorch(
    shape: tuple[int, ...], fill: str, order: str, seed: int
) -> None:
    x, gy = make(shape, fill, order, seed), make(shape, order=order, seed=seed + 1)
    weight, bias = make(shape[-1:], seed=seed + 2), make(shape[-1:], seed=seed + 3)
    double = [a.astype(np.float64) for a in (gy, x, weight, bias)]
    y, (gx, gweight, gbias) = torch_and_gradients(lambda t, w, b: F.layer_norm(t, shape[-1:], w, b, 1e-5), *double)
    ours, mean, rstd = run("layer_norm", x, weight, bias, 1e-5)
    assert mean.shape == rstd.shape == shape[:-1]
    # float32 holds the mean to one part in 2^24, which rstd magnifies: in PyTorch just as here.
    with np.errstate(invalid="ignore"):
        loose = max(1e-5, 4e-7 * float(np.nan_to_num(np.abs(mean * rstd)).max(initial=0)))
    assert_close(ours, y, loose)
    for ours, theirs in zip(run("layer_norm_grad", gy, x, weight, mean, rstd), (gx, gweight, gbias), strict=True):
        assert_close(ours, theirs, loose)


@few
@given(
    shape=st.tuples(st.integers(1, 5), st.sampled_from([1, 3, 17]), st.integers(2, 9), st.integers(1, 9)),
    fill=st.sampled_from(["normal", "huge", "nan"]),
    order=orders,
    seed=seeds,
)
def test_batch_norm_and_its_gradients_are_those_of_pytorch(
    shape: tuple[int, ...], fill: str, order: str, seed: int
) -> None:
    x, gy = make(shape, fill, order, seed), make(shape, order=order, seed=seed + 1)
    weight, bias = make(shape[1:2], seed=seed + 2), make(shape[1:2], seed=seed + 3)
    double = [a.astype(np.float64) for a in (gy, x, weight, bias)]
    y, (gx, gw, gb) = torch_and_gradients(lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5), *double)
    ours, mean, var = run("batch_norm", x, weight, bias, 1e-5)
    assert_close(ours, y)
    for mine, theirs in zip(run("batch_norm_grad", gy, x, weight, mean, var, 1e-5), (gx, gw, gb), strict=True):
        assert_close(mine, theirs)
    for name in ("batch_norm", "batch_norm_grad"):
        args = (x, weight, bias, 1e-5) if name == "batch_norm" else (gy, x, weight, mean, var, 1e-5)
        numpys = current_backend().implementations(name)[-1].run(*args)
        for mine, plain in zip(run(name, *args), numpys, strict=True):
            assert_close(mine, torch.tensor(plain), 2e-5)


@few
@given(rows=sizes, columns=sizes.filter(bool), fill=fills, order=orders, seed=seeds)
def test_cross_entropy_and_its_gradient_are_those_of_pytorch(
    rows: int, columns: int, fill: str, order: str, seed: int
) -> None:
    logits = make((rows, columns), fill, order, seed)
    targets = np.random.default_rng(seed).integers(0, columns, rows)
    weights = make((rows,), seed=seed + 1)
    y, (glogits,) = torch_and_gradients(
        lambda t: F.cross_entropy(t, torch.tensor(targets), reduction="none"), weights, logits
    )
    losses, logsumexp = run("cross_entropy", logits, targets)
    assert_close(losses, y)
    ours = run("cross_entropy_grad", logits, targets, logsumexp, weights)
    assert_close(ours, glogits, 1e-5 if fill not in ("huge", "offset") else 2e-3)


def test_a_target_outside_the_classes_is_refused_in_one_sentence() -> None:
    logits = make((3, 4))
    with pytest.raises(ShapeError, match="between 0 and 3, but one is 4"):
        run("cross_entropy", logits, np.array([0, 4, 1]))
    with pytest.raises(ShapeError, match="ids must be"):
        run("embedding_grad", logits, np.array([0, -1, 1]), 5)


def test_shapes_that_do_not_fit_are_refused_in_one_sentence() -> None:
    with pytest.raises(ShapeError, match="same shape"):
        run("gelu_grad", make((2, 3)), make((3, 2)))
    with pytest.raises(ShapeError, match="weight and bias"):
        run("layer_norm", make((2, 3)), make((4,)), make((3,)), 1e-5)


@few
@given(rows=sizes, table=st.sampled_from([1, 2, 65, 300]), columns=sizes, order=orders, seed=seeds)
def test_embedding_gradient_sums_the_rows_of_each_id(
    rows: int, table: int, columns: int, order: str, seed: int
) -> None:
    gout = make((rows, columns), order=order, seed=seed)
    ids = np.random.default_rng(seed).integers(0, table, rows)
    expected = np.zeros((table, columns))
    np.add.at(expected, ids, gout)
    assert_close(run("embedding_grad", gout, ids, table), torch.tensor(expected))


@few
@given(rows=sizes, columns=sizes, order=orders, seed=seeds)
def test_column_sums_are_accurate(rows: int, columns: int, order: str, seed: int) -> None:
    x = make((rows, columns), "offset", order, seed)
    assert_close(run("sum_rows", x), torch.tensor(x.sum(axis=0, dtype=np.float64)), 1e-6)
    planes = make((rows % 7, 3, columns), "offset", order, seed)
    assert_close(run("sum_channels", planes), torch.tensor(planes.sum(axis=(0, 2), dtype=np.float64)), 1e-6)


def test_long_sums_keep_their_digits() -> None:
    x = np.full((300_000, 3), 0.1, np.float32)
    np.testing.assert_allclose(run("sum_rows", x), x.sum(axis=0, dtype=np.float64), rtol=3e-7)
    assert run("sum_of_squares", x) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert run("sum_of_squares", np.full(10, 1e30, np.float32)) == pytest.approx(1e61)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("n", [1, 17, 1000])
def test_adam_takes_the_steps_of_pytorch(n: int, decoupled: bool, weight_decay: float) -> None:
    param = make((n,), seed=1)
    theirs = torch.nn.Parameter(torch.tensor(param))
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [theirs], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay
    )
    m, v = np.zeros_like(param), np.zeros_like(param)
    for step in range(1, 21):
        grad = make((n,), seed=step)
        theirs.grad = torch.tensor(grad)
        optimizer.step()
        run(
            *("adam_step", param, grad, m, v),
            **{"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": step},
            **{"weight_decay": weight_decay, "decoupled": decoupled},
        )
    assert_close(param, theirs, 1e-6)


def test_in_place_updates_change_their_array() -> None:
    total, more = make((70_000,)), make((70_000,), seed=1)
    expected = (total + more) * np.float32(0.5)
    run("add_in_place", total, more)
    run("scale_in_place", total, 0.5)
    np.testing.assert_array_equal(total, expected)


def test_what_the_kernels_do_not_take_goes_to_numpy() -> None:
    backend = current_backend()
    x = np.ones((4, 3))
    assert backend.select("sum_rows", x).name == "numpy"
    assert "float32" in backend.explain("sum_rows", x).rejected["native"]
    assert backend.select("add_in_place", make((4, 4)).T, make((4, 4))).name == "numpy"


@pytest.mark.parametrize("op", ["softmax", "layer_norm_grad", "sum_rows", "batch_norm", "gelu"])
def test_results_do_not_depend_on_the_number_of_threads(op: str) -> None:
    x = make((700, 129))
    per_row, per_column = np.ones(700, np.float32), make((129,))
    args: dict[str, tuple[Any, ...]] = {
        "layer_norm_grad": (make(x.shape, seed=2), x, per_column, per_row, per_row),
        "batch_norm": (x.reshape(10, 70, 129), make((70,)), make((70,)), 1e-5),
    }
    before = native.num_threads()
    try:
        results = []
        for threads in (1, 2, 7):
            native.set_num_threads(threads)
            result = run(op, *args.get(op, (x,)))
            results.append(result if isinstance(result, tuple) else (result,))
    finally:
        native.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0), (0, 0)])
def test_a_layer_norm_over_no_columns_has_means_of_no_numbers(shape: tuple[int, ...], backend: str) -> None:
    y, mean, rstd = current_backend().dispatch(
        "layer_norm", np.zeros(shape, np.float32), np.ones(0, np.float32), np.ones(0, np.float32), 1e-5
    )
    assert y.shape == shape and mean.shape == rstd.shape == shape[:-1]
    assert np.isnan(mean).all() and np.isnan(rstd).all()


def test_the_slope_of_gelu_at_infinity_is_its_limit(backend: str) -> None:
    x = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(
        current_backend().dispatch("gelu_grad", x, np.ones(3, np.float32)), np.array([1, 0, np.nan], np.float32)
    )


def at_offset(array: Array, offset: int) -> Array:
    memory = np.zeros(array.nbytes + offset, np.uint8)
    out = memory[offset:].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_cross_entropy_takes_arrays_that_start_anywhere(offset: int) -> None:
    logits, targets = make((5, 9)), np.arange(5)
    expected = run("cross_entropy", logits, targets)
    for ours, plain in zip(
        run("cross_entropy", at_offset(logits, offset), at_offset(targets, offset)), expected, strict=True
    ):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("offset", [1, 4])
def test_gradients_of_embeddings_take_arrays_that_start_anywhere(offset: int) -> None:
    gout, ids = make((5, 9)), np.array([3, 0, 3, 1, 2])
    expected = run("embedding_grad", gout, ids, 4)
    np.testing.assert_array_equal(run("embedding_grad", at_offset(gout, offset), at_offset(ids, offset), 4), expected)
