"""Plans skip zero weights where that costs less: the results are the dense ones, and the choice is always the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import models, nn, no_grad
from tilewise._extension import native
from tilewise.nn import functional as F
from tilewise.plan import compile
from tilewise.prune import SparseConv2d, SparseLinear, prune, sparsify

pytestmark = pytest.mark.skipif(native is None, reason="plans need the compiled kernels")
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=native.supported_isas() if native is not None else [])
def isa(request):
    before, threads = native.isa(), tilewise.get_num_threads()
    native.set_isa(request.param)
    yield
    native.set_isa(before)
    tilewise.set_num_threads(threads)


@pytest.fixture
def skips_all_zeros():
    """The sparse kernel wherever it can be used."""
    native.prefer_sparse(True)
    yield
    native.prefer_sparse(False)


def pruned_conv(channels: int, filters: int, zeros: float, seed: int = 0, **geometry) -> nn.Conv2d:
    conv = nn.Conv2d(channels, filters, rng=seed, **geometry).eval()
    conv.weight.data[np.random.default_rng(seed).random(conv.weight.shape) < zeros] = 0
    return conv


@given(
    sizes=st.tuples(st.sampled_from([1, 3, 17, 70, 130]), st.sampled_from([1, 5, 16, 130]), *[st.integers(1, 23)] * 2),
    batch=st.sampled_from([1, 2, 3, 7, 20]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    zeros=st.sampled_from([0.6, 0.9, 1.0]),
    activation=st.sampled_from([None, "relu", "gelu"]),
    adds=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def every_geometry(sizes, batch, kernel, stride, dilation, padding, zeros, activation, adds, threads, seed) -> None:
    c, o, h, w = sizes
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if h + padding[0] + padding[2] < reach[0] or w + padding[1] + padding[3] < reach[1]:
        return
    tilewise.set_num_threads(threads)
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    conv = pruned_conv(c, o, zeros, seed, **geometry)

    class Network(nn.Module):
        def __init__(self) -> None:
            self.conv = conv

        def forward(self, x):
            y = self.conv(x)
            y = y + y.relu().mean(1, keepdims=True) if adds else y
            return y if activation is None else getattr(F, activation)(y)

    x = np.random.default_rng(seed).standard_normal((batch, c, h, w)).astype(np.float32)
    with no_grad():
        expected = np.asarray(Network().eval()(x))
    plan = compile(Network().eval(), x)
    mostly_zeros = 2 * np.count_nonzero(conv.weight.data) <= conv.weight.size
    assert [kind == "sparse" for _, kind in plan.algorithms] == [mostly_zeros]
    assert np.abs(plan(x) - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


def test_a_sparse_convolution_of_every_geometry_gives_the_dense_result(isa, skips_all_zeros) -> None:
    every_geometry()


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6, 17, 64, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_sparse_linear_layers_of_rows_and_tokens_give_the_dense_result(isa, skips_all_zeros, rows, threads) -> None:
    tilewise.set_num_threads(threads)
    layers = [nn.Linear(70, 130, rng=0), nn.GELU(), nn.Linear(130, 33, rng=1), nn.ReLU(), nn.Linear(33, 5, rng=2)]
    model = prune(nn.Sequential(*layers), 0.8, "layer").eval()
    for x in (numbers(rows, 70), numbers(1, rows, 70), numbers(2, rows, 70)):
        plan = compile(model, x)
        assert [kind for _, kind in plan.algorithms] == ["sparse"] * 3 and plan.native_calls == 1
        with no_grad():
            np.testing.assert_allclose(plan(x), np.asarray(model(x)), atol=1e-5)


@pytest.mark.parametrize("make", [models.vgg6, models.resnet8, models.cnn], ids=["vgg6", "resnet8", "cnn"])
def test_a_pruned_network_is_one_native_call_for_every_batch(isa, skips_all_zeros, make) -> None:
    model = prune(make().eval(), 0.8, "layer").eval()
    plan = None
    for batch in (1, 3, 2):
        x = numbers(batch, *((1, 8, 8) if make is models.cnn else (3, 32, 32)))
        plan = plan or compile(model, x)
        with no_grad():
            expected = np.asarray(model(x))
        assert np.abs(plan(x) - expected).max() <= 1e-5 * max(1, np.abs(expected).max())
        assert plan.native_calls == 1 and {kind for _, kind in plan.algorithms} == {"sparse"}


def test_infinite_inputs_give_what_dense_weights_give(skips_all_zeros) -> None:
    for layer, x in (
        (pruned_conv(20, 30, 0.9, kernel_size=3, padding=1), numbers(1, 20, 9, 9)),
        (prune(nn.Sequential(nn.Linear(40, 30, rng=0)), 0.9), numbers(1, 40)),
        (prune(nn.Sequential(nn.Linear(40, 30, rng=0)), 0.9), numbers(20, 40)),
    ):
        plan = compile(layer.eval(), x)
        assert plan.algorithms[0][1] == "sparse"
        for odd in (np.inf, np.nan):
            x.reshape(-1)[13] = odd
            with no_grad():
                np.testing.assert_array_equal(np.isfinite(plan(x)), np.isfinite(np.asarray(layer(x))))


def test_groups_and_few_zeros_stay_dense(skips_all_zeros) -> None:
    for conv in (pruned_conv(8, 8, 0.9, kernel_size=3, groups=2), pruned_conv(8, 8, 0.4, kernel_size=3)):
        x = numbers(1, 8, 9, 9)
        plan = compile(conv, x)
        assert plan.algorithms[0][1] != "sparse"
        with no_grad():
            np.testing.assert_allclose(plan(x), np.asarray(conv(x)), atol=1e-5)


def test_the_choice_follows_the_zeros_and_is_the_same_in_every_plan() -> None:
    x = numbers(1, 128, 28, 28)
    kinds = {
        zeros: compile(pruned_conv(128, 128, zeros, kernel_size=3, padding=1), x).algorithms for zeros in (0, 0.95)
    }
    assert kinds[0][0][1].startswith("winograd") and kinds[0.95][0][1] == "sparse"
    again = compile(pruned_conv(128, 128, 0.95, kernel_size=3, padding=1), x).algorithms
    assert again == kinds[0.95]


def test_a_module_that_plans_itself_notices_that_weights_were_pruned() -> None:
    model = nn.Sequential(nn.Linear(256, 256, rng=0), nn.ReLU(), nn.Linear(256, 256, rng=1)).eval()
    x = numbers(1, 256)
    with no_grad():
        for _ in range(3):
            model(x)
        for layer in (model[0], model[2]):
            layer.weight.data[np.abs(layer.weight.data) < np.quantile(np.abs(layer.weight.data), 0.9)] = 0
        expected = np.maximum(x @ model[0].weight.data.T + model[0].bias.data, 0) @ model[2].weight.data.T
        expected += model[2].bias.data
        for _ in range(6):
            np.testing.assert_allclose(np.asarray(model(x)), expected, atol=1e-5)


def test_sparse_layers_are_planned_like_the_dense_layers_they_replace(tmp_path, skips_all_zeros) -> None:
    model = prune(models.resnet8().eval(), 0.9, "layer").eval()
    sparse, x = sparsify(model), numbers(2, 3, 32, 32)
    assert any(isinstance(layer, SparseConv2d) for layer in sparse.modules())
    plan = compile(sparse, x)
    assert plan.native_calls == 1 and {kind for _, kind in plan.algorithms} == {"sparse"}
    with no_grad():
        np.testing.assert_allclose(plan(x), compile(model, x)(x), atol=1e-4)
    for layer, shape in ((sparse.block1.conv1, (1, 16, 8, 8)), (sparse.fc, (3, 64))):
        layer.save(tmp_path / "layer.safetensors")
        again = type(layer).load(tmp_path / "layer.safetensors")
        y = numbers(*shape)
        np.testing.assert_array_equal(compile(again, y)(y), compile(layer, y)(y))


def test_the_report_of_sparsify_is_what_its_plan_does() -> None:
    model = prune(nn.Sequential(nn.Linear(512, 512, rng=0), nn.ReLU(), nn.Linear(512, 4, rng=1)), 0.9, "layer").eval()
    sparse = sparsify(model, sample=numbers(1, 512))
    assert sparse.sparse_report["0"].startswith("sparse: 26,214 of 262,144 weights")
    assert isinstance(sparse[0], SparseLinear)
    kinds = {name: text.split(":")[0] for name, text in sparse.sparse_report.items()}
    planned = dict(compile(sparse, numbers(1, 512)).algorithms)
    assert {name for name, kind in kinds.items() if kind == "sparse"} == {
        n for n, k in planned.items() if k == "sparse"
    }
