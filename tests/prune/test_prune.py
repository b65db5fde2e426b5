"""Pruning drops exactly what was asked for, holds through training, and smaller models compute what masked ones do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.sparse

from tilewise import Tensor, data, models, nn, no_grad, optim
from tilewise._extension import native
from tilewise.errors import ConfigurationError, DtypeError, FileFormatError, GradientError, ShapeError, TilewiseError
from tilewise.nn import functional as F
from tilewise.prune import (
    MagnitudePruner,
    SparseLinear,
    prune,
    prune_conv_filters,
    prune_gradually,
    sensitivity,
    shrink,
    sparsify,
)
from tilewise.prune.sparse_layer import KernelChoice

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# --- arrays ---


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (4, 3, 3, 3), (0, 4)])
def test_exactly_the_smallest_share_is_dropped(sparsity: float, shape: tuple[int, ...]) -> None:
    w = weights(*shape)
    pruned = MagnitudePruner().prune(w, sparsity)
    assert np.count_nonzero(pruned == 0) == round(sparsity * w.size)
    survivors, dropped = np.abs(w[pruned != 0]), np.abs(w[pruned == 0])
    assert survivors.size == 0 or dropped.size == 0 or survivors.min() >= dropped.max()
    np.testing.assert_array_equal(pruned[pruned != 0], w[pruned != 0])


def test_equal_weights_are_dropped_by_number_all_the_same() -> None:
    assert np.count_nonzero(MagnitudePruner().prune(np.ones((10, 10)), 0.37)) == 63


def test_two_of_four_keeps_the_two_largest_of_every_four() -> None:
    w = weights(6, 8)
    pruned = MagnitudePruner("2:4").prune(w)
    groups, before = pruned.reshape(-1, 4), np.abs(w).reshape(-1, 4)
    assert (np.count_nonzero(groups, 1) == 2).all()
    assert (np.sort(np.abs(groups), 1)[:, 2:] == np.sort(before, 1)[:, 2:]).all()


def test_blocks_go_as_a_whole() -> None:
    pruned = MagnitudePruner("block:2x4").prune(weights(8, 16), 0.5)
    blocks = pruned.reshape(4, 2, 4, 4).transpose(0, 2, 1, 3).reshape(16, 8)
    counts = np.count_nonzero(blocks, 1)
    assert sorted(set(counts)) == [0, 8] and (counts == 0).sum() == 8


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: MagnitudePruner().prune(np.ones(3), -0.1), ConfigurationError, "between 0 and 1"),
        (lambda: MagnitudePruner().prune(np.ones(3), float("nan")), ConfigurationError, "between 0 and 1"),
        (lambda: MagnitudePruner().prune(np.array([np.nan]), 0.5), ConfigurationError, "NaN"),
        (lambda: MagnitudePruner().prune(np.array([1, 2]), 0.5), DtypeError, "floating"),
        (lambda: MagnitudePruner("2:3").prune(np.ones((2, 4))), ShapeError, "groups of 3"),
        (lambda: MagnitudePruner("5:4"), ConfigurationError, ""),
        (lambda: MagnitudePruner("stripes"), ConfigurationError, "pattern"),
        (lambda: prune(models.mlp(), 1.0), ConfigurationError, "lose every weight"),
        (lambda: prune(models.mlp(), 0.5, "everywhere"), ConfigurationError, "scope"),
        (lambda: prune(models.mlp(), 0.5, skip=["9"]), ConfigurationError, "no layer '9'"),
        (lambda: prune(nn.ReLU(), 0.5), ConfigurationError, "no linear or convolution"),
        (lambda: prune_conv_filters(nn.Conv2d(2, 4, 3), 1.0), ConfigurationError, "lose them all"),
        (lambda: prune_conv_filters(nn.Conv2d(4, 4, 3, groups=2), 0.5), ConfigurationError, "groups"),
        (lambda: shrink(models.gpt("4x128"), 0.5), ConfigurationError, "not GPT"),
        (lambda: SparseLinear.from_weights(np.ones(3)), ShapeError, "two dimensions"),
    ],
)
def test_what_cannot_be_done_gets_a_sentence(call, error: type, sentence: str) -> None:
    if sentence == "":
        with pytest.raises(error):
            call().prune(np.ones((2, 4)))
        return
    with pytest.raises(error, match=sentence):
        call()


# --- models ---


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_model_reaches_its_sparsity_and_the_original_is_left_alone(scope: str) -> None:
    model = models.cnn()
    before = copy.deepcopy(model.state_dict())
    pruned = prune(model, 0.7, scope)
    assert abs(pruned.pruning.sparsity - 0.7) < 1e-3
    if scope == "layer":
        assert all(abs(layer.sparsity - 0.7) < 0.01 for layer in pruned.pruning.layers)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(before[name]))


def test_masks_hold_through_training() -> None:
    model = prune(models.mlp(), 0.8)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    model.pruning.hold(optimizer)
    x, y = weights(32, 64), RNG.integers(0, 10, 32)
    zeros = {name: mask.copy() for name, mask in model.pruning.masks.items()}
    start = [p.data.copy() for p in model.parameters()]
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(Tensor(x)), y).backward()
        optimizer.step()
    assert any(not np.array_equal(a, p.data) for a, p in zip(start, model.parameters(), strict=True))
    state = model.state_dict()
    for name, mask in zeros.items():
        assert not np.asarray(state[name])[~mask].any()


def test_gradual_pruning_rises_to_the_sparsity_asked_for() -> None:
    losses = []

    def loss(model: nn.Module) -> Tensor:
        losses.append(model.pruning.sparsity)
        return F.cross_entropy(model(Tensor(weights(8, 64))), np.zeros(8, np.int64))

    pruned = prune_gradually(models.mlp(), 0.9, loss, steps=10, scope="layer")
    assert len(set(losses)) >= 4 and losses == sorted(losses) and abs(losses[-1] - 0.9) < 1e-3
    assert abs(pruned.pruning.sparsity - 0.9) < 1e-3


def test_the_scan_names_the_layer_that_must_not_be_pruned() -> None:
    model = models.mlp()
    x = weights(200, 64)
    with no_grad():
        labels = model(Tensor(x)).data.argmax(1)

    def evaluate(candidate) -> float:
        with no_grad():
            return float((candidate(Tensor(x)).data.argmax(1) == labels).mean())

    reports = sensitivity(model, evaluate, (0.0, 0.7))
    assert [r.name for r in reports] == [n.removesuffix(".weight") for n in prune(model, 0.5).pruning.masks]
    assert all(r.accuracy[0.0] == 1.0 for r in reports) and any(r.fragile for r in reports)


# --- structured ---


def masked_filters(conv: nn.Conv2d, kept_filters: np.ndarray) -> None:
    pruned_filters = np.setdiff1d(np.arange(conv.out_channels), kept_filters)
    conv.weight.data[pruned_filters] = 0
    if conv.bias is not None:
        conv.bias.data[pruned_filters] = 0


def test_removed_filters_are_those_of_smallest_norm() -> None:
    conv = nn.Conv2d(3, 8, 3, padding=1, rng=0)
    small, survivors = prune_conv_filters(conv, 0.5)
    norms = np.linalg.norm(conv.weight.data.reshape(8, -1), axis=1)
    assert set(survivors) == set(np.argsort(-norms)[:4]) and list(survivors) == sorted(survivors)
    x = Tensor(weights(2, 3, 6, 6))
    with no_grad():
        np.testing.assert_allclose(small(x).data, conv(x).data[:, survivors], atol=1e-6)


@pytest.mark.parametrize("make", [models.vgg6, models.cnn], ids=["vgg6", "cnn"])
def test_a_shrunken_network_computes_what_the_masked_one_does(make) -> None:
    model = make().eval()
    for layer in model.children():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.data[...] = weights(*layer.running_mean.shape) * 0.1
            layer.running_var.data[...] = np.abs(weights(*layer.running_var.shape)) + 0.5
            layer.bias.data[...] = weights(*layer.bias.shape) * 0.1
    small = shrink(model, 0.5).eval()
    masked = copy.deepcopy(model)
    layers = list(masked.children())
    convs = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    for i in convs:
        _, survivors = prune_conv_filters(layers[i], 0.5)
        masked_filters(layers[i], survivors)
        if isinstance(layers[i + 1], nn.BatchNorm2d):
            pruned_filters = np.setdiff1d(np.arange(layers[i].out_channels), survivors)
            for part in (layers[i + 1].weight, layers[i + 1].bias, layers[i + 1].running_mean):
                part.data[pruned_filters] = 0
    x = Tensor(weights(3, *((3, 32, 32) if make is models.vgg6 else (1, 8, 8))))
    with no_grad():
        expected = masked(x).data
        assert np.abs(small(x).data - expected).max() <= 1e-5 * max(1, np.abs(expected).max())
    if make is models.vgg6:
        assert sum(p.size for p in small.parameters()) <= 0.3 * sum(p.size for p in model.parameters())


def test_a_network_without_convolutions_loses_hidden_units_and_computes_what_the_masked_one_does() -> None:
    model = models.pretrained("mlp")
    small, masked = shrink(model, 0.5), copy.deepcopy(model)
    for layer, inner in ((0, 2), (2, 4)):
        hidden = masked[layer]
        removed = np.argsort(np.linalg.norm(model[layer].weight.data, axis=1))[: len(hidden.weight.data) // 2]
        masked[inner].weight.data[:, removed] = 0
    assert [layer.weight.shape for layer in (small[0], small[2], small[4])] == [(128, 64), (64, 128), (10, 64)]
    x = Tensor(weights(3, 64))
    # The second layer's units are chosen with all of its inputs, before those of the first are gone.
    with no_grad():
        assert np.allclose(small(x).data, masked(x).data, atol=1e-4)


def test_residual_joins_keep_the_same_channels_on_both_sides() -> None:
    model = models.resnet8().eval()
    small = shrink(model, 0.5).eval()
    assert small.conv.out_channels == small.block1.conv2.out_channels == small.block2.conv1.in_channels == 8
    assert small.block3.conv2.out_channels == small.block3.skip.out_channels == small.fc.in_features == 32
    with no_grad():
        assert small(Tensor(weights(2, 3, 32, 32))).shape == (2, 10)
        assert (
            np.abs(
                shrink(model, 0.0)(Tensor(np.ones((1, 3, 32, 32)))).data - model(Tensor(np.ones((1, 3, 32, 32)))).data
            ).max()
            < 1e-5
        )


# --- sparse layers ---


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_sparse_layer_computes_what_the_dense_one_does(always: bool, activation: str | None) -> None:
    linear = nn.Linear(70, 33, rng=0)
    linear.weight.data[...] = MagnitudePruner().prune(linear.weight.data, 0.8)
    sparse = SparseLinear.from_dense(linear, always_sparse=always)
    for batch in (0, 1, 3, 20, 70):
        x, residual = Tensor(weights(batch, 70)), Tensor(weights(batch, 33))
        with no_grad():
            for skip in (None, residual):
                expected = linear(x, activation=activation, residual=skip).data
                output = sparse(x, activation=activation, residual=skip).data
                assert np.abs(output - expected).max(initial=0) <= 1e-5 * max(1, np.abs(expected).max(initial=0))
    if not always:
        assert all(why.startswith(("sparse", "dense")) for why in sparse.explain().values()) and sparse.explain()


@pytest.mark.parametrize("shape", [(70,), (6, 70), (2, 3, 70)])
@pytest.mark.parametrize("dense", [True, False])
def test_a_shape_met_before_gives_what_it_gave_at_first(
    shape: tuple[int, ...], dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = KernelChoice(2.0, 1.0, "") if dense else KernelChoice(1.0, 2.0, "")
    monkeypatch.setattr("tilewise.prune.sparse_layer.time_both", lambda *_: choice)
    w = MagnitudePruner().prune(weights(33, 70), 0.8)
    layer, x = SparseLinear.from_weights(w), weights(*shape)
    for values in (x, x, np.asfortranarray(x), x.astype(np.float64)):
        with no_grad():
            out = layer(values).data
        assert out.shape == (*shape[:-1], 33) and out.dtype == np.float32
        np.testing.assert_allclose(out, x @ w.T, atol=1e-5)
    assert [why.split(":")[0] for why in layer.explain().values()] == ["dense" if dense else "sparse"]


@pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_weights_in_memory_are_small_though_rows_differ_in_length(spread: float) -> None:
    scale = np.exp(spread * RNG.standard_normal((512, 1))).astype(np.float32)
    w = MagnitudePruner().prune(weights(512, 512) * scale, 0.7)
    assert SparseLinear.from_weights(w, always_sparse=True).nbytes <= 0.45 * w.nbytes


def test_the_slower_kernel_is_never_said_to_run() -> None:
    assert str(KernelChoice(447e-6, 411e-6, "batch 1")) == "dense: sparse 447 µs, dense 411 µs at batch 1"
    assert str(KernelChoice(411e-6, 411e-6, "batch 1")).startswith("sparse: ")  # which needs less memory


def test_sparse_layers_convert_save_and_load(tmp_path) -> None:
    w = MagnitudePruner().prune(weights(256, 200), 0.7)
    layer = SparseLinear.from_weights(w, weights(256))
    assert abs(layer.sparsity - 0.7) < 1e-3
    np.testing.assert_array_equal(layer.to_dense().weight.data, w)
    np.testing.assert_array_equal(layer.to_csr().toarray(), w)
    np.testing.assert_array_equal(SparseLinear.from_csr(scipy.sparse.csr_matrix(w)).to_dense().weight.data, w)
    layer.save(tmp_path / "layer.safetensors")
    assert (tmp_path / "layer.safetensors").stat().st_size <= 0.45 * w.nbytes
    again = SparseLinear.load(tmp_path / "layer.safetensors")
    np.testing.assert_array_equal(again.to_dense().weight.data, w)
    np.testing.assert_array_equal(again.float_bias, layer.float_bias)
    whole = (tmp_path / "layer.safetensors").read_bytes()
    for _ in range(40):
        damaged = bytearray(whole)
        for at in RNG.integers(0, 600, 3):
            damaged[at] = RNG.integers(256)
        (tmp_path / "layer.safetensors").write_bytes(bytes(damaged))
        try:
            SparseLinear.load(tmp_path / "layer.safetensors")
        except TilewiseError as error:
            assert "\n" not in str(error)


def test_sparse_layers_refuse_gradients_and_wrong_widths() -> None:
    layer = SparseLinear.from_weights(weights(3, 4))
    with pytest.raises(GradientError):
        layer(Tensor(weights(2, 4), requires_grad=True))
    with pytest.raises(ShapeError, match="4"):
        layer(weights(2, 5))
    with pytest.raises((FileFormatError, TilewiseError)):
        SparseLinear.load("nowhere.safetensors")


def test_a_pruned_model_becomes_one_with_sparse_layers() -> None:
    model = prune(models.mlp(), 0.8, "layer")
    sparse = sparsify(model)
    assert [type(m).__name__ for m in sparse.children()].count("SparseLinear") == 3
    x = Tensor(weights(5, 64))
    with no_grad():
        np.testing.assert_allclose(sparse(x).data, model(x).data, atol=1e-5)


# --- gradual pruning, Wanda scores, sparse decoding ---


def test_gradual_pruning_ends_at_the_sparsity_and_loses_less_than_one_shot():
    digits, rng = data.digits().flat(), np.random.default_rng(0)
    model = models.pretrained("mlp")

    def loss(network):
        rows = rng.integers(0, len(digits.x_train), 64)
        return F.cross_entropy(network(Tensor(digits.x_train[rows])), digits.y_train[rows])

    def accuracy(network):
        with no_grad():
            return float((np.asarray(network(Tensor(digits.x_test))).argmax(1) == digits.y_test).mean())

    levels = []
    tuned = prune_gradually(model, 0.7, loss, steps=100, progress=lambda step, value: levels.append(step))
    assert abs(tuned.pruning.sparsity - 0.7) < 1e-3 and levels == list(range(1, 101))
    assert all((w.data[~tuned.pruning.masks[n]] == 0).all() for n, w in tuned.pruning._weights.items())
    assert accuracy(tuned) > accuracy(prune(model, 0.7)) + 0.02


def test_wanda_keeps_small_weights_of_large_inputs():
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    model[0].weight.data[...] = [[1.0, 1.0, 0.5, 0.5], [1.0, 0.9, 0.2, 0.1]]
    x = np.array([[0.1, 0.1, 5.0, 5.0]], np.float32)
    pruned = prune(model, 0.5, "row", calibration=[x])
    assert np.array_equal(pruned.pruning.masks["0.weight"], [[False, False, True, True]] * 2)
    with pytest.raises(ConfigurationError, match="calibration data"):
        prune(model, 0.5, calibration=[])


def test_wanda_scores_lose_less_than_magnitudes_without_training():
    digits, model = data.digits().flat(), models.pretrained("mlp")

    def wrong(network):
        with no_grad():
            return int((np.asarray(network(Tensor(digits.x_test))).argmax(1) != digits.y_test).sum())

    assert wrong(prune(model, 0.7, calibration=[digits.x_train[:256]])) < wrong(prune(model, 0.7)) / 2


def test_a_sparse_gpt_writes_what_the_pruned_one_writes():
    from tilewise.generate import generate, make_engine

    pruned = prune(models.pretrained("gpt"), 0.7)
    assert "blocks.0.self_attn.in_proj_weight" in pruned.pruning.masks
    sparse, prompt = sparsify(pruned), data.text().valid[:40]
    assert list(generate(sparse, prompt, 30)) == list(generate(pruned, prompt, 30))
    pair = [prompt, prompt[:7]]
    assert np.array_equal(list(generate(sparse, pair, 8)), list(generate(pruned, pair, 8)))
    if native is not None:
        assert type(make_engine(sparse)).__name__ == "NativeEngine"
        # Batches of tokens pack a second layout of the weights.
        assert make_engine(sparsify(pruned)).weight_bytes <= 0.5 * make_engine(pruned).weight_bytes
        with pytest.raises(ConfigurationError, match="sparse weights"):
            list(generate(sparse, prompt, 2, weights="int8"))


def test_consecutive_sparse_layers_run_as_one_and_give_what_they_give_alone() -> None:
    rng = np.random.default_rng(0)
    network = prune(nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8), nn.GELU(), nn.Linear(8, 8)), 0.7)
    x = Tensor(rng.standard_normal((5, 24)).astype(np.float32))
    with no_grad():
        expected = np.asarray(network.eval()(x))
        sparse = sparsify(network, at_least=0.0)
        first, again = np.asarray(sparse(x)), np.asarray(sparse(x))  # the second call skips checks
        float64 = np.asarray(sparse(Tensor(x.data.astype(np.float64))))
    for result in (first, again, float64):
        np.testing.assert_allclose(result, expected, atol=1e-5)
    if native is not None:  # otherwise the layers are dense
        assert sparse[0].forward_fused(x, list(sparse))[1] == 3  # up to the GELU
