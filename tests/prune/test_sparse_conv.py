"""A sparse convolution computes what the dense one does, says which product it uses, and comes back from its file."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import Tensor, models, nn, no_grad
from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, GradientError, ShapeError, TilewiseError
from tilewise.nn import functional as F
from tilewise.prune import MagnitudePruner, SparseConv2d, prune, sparsify

RNG = np.random.default_rng(0)
ISAS = native.supported_isas() if native is not None else ["none"]


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=ISAS)
def isa(request):
    if native is None:
        yield
        return
    before, threads = native.isa(), tilewise.get_num_threads()
    native.set_isa(request.param)
    yield
    native.set_isa(before)
    tilewise.set_num_threads(threads)


@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 2, *[st.integers(1, 20)] * 2),
    batch=st.integers(0, 5),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    sparsity=st.sampled_from([0.0, 0.7, 0.9, 1.0]),
    relu=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def every_shape(sizes, batch, kernel, stride, padding, sparsity, relu, threads, seed) -> None:
    c, o, h, w = sizes
    if h + 2 * padding[0] < kernel[0] or w + 2 * padding[1] < kernel[1]:
        return
    tilewise.set_num_threads(threads)
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((o * 9, c, *kernel)).astype(np.float32)
    weight[rng.random(weight.shape) < sparsity] = 0
    bias, x = numbers(o * 9), numbers(batch, c, h, w)
    layer = SparseConv2d.from_weights(weight, bias, stride, padding, always_sparse=True)
    with no_grad():
        expected = F.conv2d(Tensor(x), Tensor(weight), Tensor(bias), stride, padding).data
    expected = np.maximum(expected, 0) if relu else expected
    output = layer(x, activation="relu" if relu else None).data
    assert output.shape == expected.shape
    assert np.abs(output - expected).max(initial=0) <= 1e-5 * max(1, np.abs(expected).max(initial=0))


def test_every_shape_stride_and_padding_gives_the_dense_result(isa) -> None:
    every_shape()


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_layer_of_many_channels_equals_the_dense_one_with_residual_and_activation(isa, kernel: int) -> None:
    conv = nn.Conv2d(70, 130, kernel, padding=kernel // 2, rng=0)
    conv.weight.data[...] = MagnitudePruner().prune(conv.weight.data, 0.8)
    sparse = SparseConv2d.from_dense(conv, always_sparse=True)
    x, residual = Tensor(numbers(3, 70, 7, 9)), Tensor(numbers(3, 130, 7, 9))
    with no_grad():
        for activation in (None, "relu", "gelu"):
            for skip in (None, residual):
                expected = conv(x, activation=activation, residual=skip).data
                np.testing.assert_allclose(sparse(x, activation=activation, residual=skip).data, expected, atol=1e-4)


@pytest.mark.skipif(native is None, reason="without kernels there is nothing to choose")
def test_the_layer_says_what_it_chose_for_each_size_and_still_computes_the_same() -> None:
    layer = SparseConv2d.from_weights(MagnitudePruner().prune(numbers(16, 8, 3, 3), 0.9), numbers(16), padding=(1, 1))
    reference = layer.to_dense()
    for shape in [(1, 8, 6, 6), (5, 8, 6, 6), (1, 8, 12, 5)]:
        x = numbers(*shape)
        with no_grad():
            np.testing.assert_allclose(layer(x).data, reference(Tensor(x)).data, atol=1e-4)
    explanation = layer.explain()
    assert len(explanation) == 3 and all(why.startswith(("sparse: ", "dense: ")) for why in explanation.values())


def test_saved_and_loaded_it_is_the_same_layer(tmp_path) -> None:
    weight = MagnitudePruner().prune(numbers(64, 32, 3, 3), 0.7)
    layer = SparseConv2d.from_weights(weight, numbers(64), (2, 1), (1, 0))
    path = tmp_path / "layer.safetensors"
    layer.save(path)
    assert path.stat().st_size <= 0.45 * weight.nbytes
    again = SparseConv2d.load(path)
    np.testing.assert_array_equal(again.to_dense().weight.data, weight)
    assert again.stride == (2, 1) and again.padding == (1, 0)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for at in RNG.integers(0, 700, 3):
            damaged[at] = RNG.integers(256)
        path.write_bytes(bytes(damaged))
        try:
            SparseConv2d.load(path)
        except TilewiseError as error:
            assert "\n" not in str(error)
    path.write_bytes(b"")
    with pytest.raises((FileFormatError, TilewiseError)):
        SparseConv2d.load(path)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: SparseConv2d.from_weights(numbers(3, 4)), ShapeError),
        (lambda: SparseConv2d.from_weights(numbers(3, 4, 1, 1), numbers(2)), ShapeError),
        (lambda: SparseConv2d.from_weights(numbers(3, 4, 1, 1), stride=(0, 1)), ShapeError),
        (lambda: SparseConv2d.from_weights(np.full((1, 1, 1, 1), np.nan, np.float32)), ConfigurationError),
        (lambda: SparseConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2)), ConfigurationError),
        (lambda: SparseConv2d.from_weights(numbers(3, 4, 3, 3))(numbers(1, 5, 6, 6)), ShapeError),
        (lambda: SparseConv2d.from_weights(numbers(3, 4, 3, 3))(numbers(4, 6, 6)), ShapeError),
        (lambda: SparseConv2d.from_weights(numbers(3, 4, 3, 3))(numbers(1, 4, 2, 6)), ShapeError),
        (
            lambda: SparseConv2d.from_weights(numbers(3, 4, 3, 3))(Tensor(numbers(1, 4, 6, 6), requires_grad=True)),
            GradientError,
        ),
    ],
)
def test_what_cannot_be_done_gets_a_sentence(call, error: type) -> None:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [models.vgg6, models.cnn, models.resnet8], ids=["vgg6", "cnn", "resnet8"])
def test_a_pruned_network_with_sparse_layers_computes_what_it_did(make) -> None:
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.data[...] = numbers(*module.running_mean.shape) * 0.1
            module.running_var.data[...] = np.abs(numbers(*module.running_var.shape)) + 0.5
    pruned = prune(model, 0.8, "layer")
    before = copy.deepcopy(pruned.state_dict())
    sparse = sparsify(pruned)
    assert not any(isinstance(m, nn.Conv2d | nn.Linear | nn.BatchNorm2d) for m in sparse.modules())
    x = Tensor(numbers(3, *((1, 8, 8) if make is models.cnn else (3, 32, 32))))
    with no_grad():
        expected = pruned(x).data
        np.testing.assert_allclose(sparse(x).data, expected, atol=1e-4 * max(1, np.abs(expected).max()))
    for name, value in pruned.state_dict().items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(before[name]))


def test_convolutions_with_groups_stay_dense_in_a_sparse_model() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, rng=0), nn.ReLU(), nn.Conv2d(8, 8, 1, rng=0)).eval()
    pruned = prune(model, 0.8, "layer")
    sparse = sparsify(pruned)
    assert [type(layer).__name__ for layer in sparse.children()] == ["Conv2d", "ReLU", "SparseConv2d"]
    x = Tensor(numbers(2, 4, 5, 5))
    with no_grad():
        np.testing.assert_allclose(sparse(x).data, pruned(x).data, atol=1e-5)


@pytest.mark.skipif(native is None, reason="without kernels there is nothing to choose")
def test_with_a_sample_only_layers_that_gain_become_sparse_and_the_model_says_why() -> None:
    pruned = prune(models.cnn().eval(), 0.9, "layer")
    x = numbers(4, 1, 8, 8)
    sparse = sparsify(pruned, sample=x)
    assert set(sparse.sparse_report) == {layer.name.removesuffix(".weight") for layer in pruned.pruning.layers}
    kinds = dict(sparse.named_modules())
    for name, why in sparse.sparse_report.items():
        assert type(kinds[name]).__name__.startswith("Sparse") == why.startswith("sparse")
    with no_grad():
        np.testing.assert_allclose(sparse(Tensor(x)).data, pruned(Tensor(x)).data, atol=1e-3)
