"""One native call for a whole quantized model: the integers of its steps one by one, however cut, whoever calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import Tensor, models, nn, no_grad
from tilewise._extension import native
from tilewise.errors import ShapeError
from tilewise.quantize import QuantizedArray, QuantizedModel, calibrate, quantize
from tilewise.quantize import layers as layers_module
from tilewise.quantize import parameters as parameters_module
from tilewise.quantize import plan as plan_module
from tilewise.quantize.graph import trace
from tilewise.quantize.plan import Segment, segments

needs_native = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
NETWORKS = [(models.resnet8, (3, 32, 32)), (models.vgg6, (3, 32, 32)), (models.cnn, (1, 8, 8)), (models.mlp, (64,))]


def inputs(n: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, *shape)).astype(np.float32)


def step_by_step(model: Any, x: np.ndarray) -> np.ndarray:
    return model.run(x, lambda _, value: None)


def quantized(model: nn.Module, x: np.ndarray, **options: Any) -> QuantizedModel:
    out = quantize(model.eval(), [x], **options)
    assert isinstance(out, QuantizedModel)
    return out


def numpy_only(patch: pytest.MonkeyPatch) -> None:
    for module in (parameters_module, layers_module, plan_module):
        patch.setattr(module, "native", None)


@needs_native
@pytest.mark.parametrize(("make", "shape"), NETWORKS, ids=lambda v: getattr(v, "__name__", ""))
def test_one_call_gives_the_integers_of_every_step(make, shape, settings_restored) -> None:
    model, x = make(), inputs(5, shape)
    q = quantized(model, x)
    assert len(q._segments) == 1 and isinstance(q._segments[0], Segment)
    expected = step_by_step(q, x)
    for isa in native.supported_isas():
        native.set_isa(isa)
        for threads in (1, 2, 7):
            native.set_num_threads(threads)
            for n in (1, 2, 5):
                np.testing.assert_array_equal(q(x[:n]).data, expected[:n], err_msg=f"{isa}, {threads} threads, {n}")


@needs_native
def test_a_batch_is_cut_into_chunks_without_a_trace(settings_restored) -> None:
    x = inputs(70, (64,))
    big = inputs(9, (3, 32, 32))
    for model, data in ((models.mlp(), x), (models.vgg6(), big)):
        q = quantized(model, data)
        whole = q(data).data
        for threads in (1, 3):
            native.set_num_threads(threads)
            np.testing.assert_array_equal(q(data).data, whole)
            np.testing.assert_array_equal(np.concatenate([q(data[i : i + 1]).data for i in range(len(data))]), whole)


@needs_native
def test_several_python_threads_may_run_one_model(settings_restored) -> None:
    native.set_num_threads(2)
    q = quantized(models.resnet8(), inputs(4, (3, 32, 32)))
    batches = [inputs(1 + i % 4, (3, 32, 32), i) for i in range(24)]
    expected = [q(x).data for x in batches]
    with ThreadPoolExecutor(6) as pool:
        for output, want in zip(pool.map(lambda x: q(x).data, batches), expected, strict=True):
            np.testing.assert_array_equal(output, want)


@needs_native
@pytest.mark.parametrize("float_layer", ["conv", "block1.conv1", "block2.skip", "block3.conv2", "fc"])
def test_a_float_step_breaks_the_plan_and_nothing_else(float_layer: str) -> None:
    model, x = models.resnet8(), inputs(3, (3, 32, 32))
    q = quantized(model, x, keep_float=[float_layer])
    assert any(isinstance(part, int) for part in q._segments)
    np.testing.assert_array_equal(q(x).data, step_by_step(q, x))
    with no_grad():
        expected = model(Tensor(x)).data
    assert np.abs(q(x).data - expected).max() <= 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("extra", [[], [nn.Flatten()]], ids=["one flatten", "two"])
@pytest.mark.parametrize("keep", [True, False], ids=["linear in float", "linear in int8"])
def test_a_linear_layer_behind_a_flattened_image_reads_it_in_the_right_order(keep: bool, extra: list) -> None:
    model = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1, rng=0), nn.Flatten(), *extra, nn.Linear(5 * 36, 7, rng=1))
    x = inputs(6, (2, 6, 6))
    q = quantized(model, x, keep_float=[trace(model, x).steps[-1].name] if keep else [])
    with no_grad():
        expected = model(Tensor(x)).data
    assert np.abs(q(x).data - expected).max() <= 0.03 * np.abs(expected).max()
    np.testing.assert_array_equal(q(x).data, step_by_step(q, x))


@pytest.mark.parametrize(
    "tail",
    [[], [nn.MaxPool2d(2)], [nn.Flatten()], [nn.AvgPool2d(2), nn.Flatten()]],
    ids=["image", "max", "rows", "mean"],
)
def test_a_model_may_end_anywhere(tail: list) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, rng=0), nn.ReLU(), *tail)
    x = inputs(3, (3, 8, 8))
    q = quantized(model, x)
    with no_grad():
        expected = model(Tensor(x)).data
    output = q(x).data
    assert output.shape == expected.shape and np.abs(output - expected).max() <= 0.03 * np.abs(expected).max()
    np.testing.assert_array_equal(output, step_by_step(q, x))


def test_sizes_other_than_the_calibrated_one_work_or_get_a_sentence() -> None:
    q = quantized(models.resnet8(), inputs(2, (3, 32, 32)))
    for size in ((32, 32), (17, 40), (32, 32), (5, 3)):
        x = inputs(2, (3, *size))
        np.testing.assert_array_equal(q(x).data, step_by_step(q, x))
    assert q(inputs(0, (3, 32, 32))).data.shape == (0, 10)
    small = quantized(models.cnn(), inputs(2, (1, 8, 8)))
    for size in (3, 12):
        with pytest.raises(ShapeError, match="the size of its calibration images"):
            small(inputs(2, (1, size, size)))
    with pytest.raises(ShapeError, match="calibrated on"):
        quantized(models.mlp(), inputs(2, (64,)))(inputs(2, (65,)))


class Shuffled:
    """An integer layer of another kind: it offers a call from bytes to bytes and no place in a native plan."""

    out_padding = 1

    def __init__(self, layer: Any) -> None:
        self.layer, self.calls = layer, 0

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        self.calls += 1
        return self.layer(x)


@needs_native
def test_an_integer_layer_of_another_kind_stands_between_segments() -> None:
    x = inputs(2, (3, 32, 32))
    q = quantized(models.vgg6(), x)
    expected = q(x).data
    other = q.integer[1] = Shuffled(q.integer[1])
    q._segments = segments(q)
    assert [isinstance(part, int) for part in q._segments] == [True, False]
    np.testing.assert_array_equal(q(x).data, expected)
    assert other.calls == 1


@st.composite
def small_networks(draw: st.DrawFn) -> tuple[list[nn.Module], tuple[int, int, int]]:
    channels, height, width = draw(st.integers(1, 6)), draw(st.integers(3, 9)), draw(st.integers(3, 9))
    shape, seed, layers = (channels, height, width), draw(st.integers(0, 99)), []
    for _ in range(draw(st.integers(1, 3))):
        kernel, padding, stride = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 2))
        out = draw(st.sampled_from([1, 3, 16, 21, 33]))
        if min(height, width) + 2 * padding < kernel:
            continue
        layers.append(nn.Conv2d(channels, out, kernel, stride=stride, padding=padding, rng=seed))
        layers += [nn.ReLU()] if draw(st.booleans()) else []
        height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
        channels = out
        if min(height, width) >= 2 and draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))(2))
            height, width = height // 2, width // 2
    if draw(st.booleans()):
        layers += [nn.Flatten(), nn.Linear(channels * height * width, draw(st.integers(1, 20)), rng=seed)]
    return layers, shape


@needs_native
@settings(max_examples=60, deadline=None, derandomize=True)
@given(small_networks(), st.integers(1, 4))
def test_any_small_network_gives_numpys_integers(network: tuple, n: int) -> None:
    layers, shape = network
    if not layers:
        return
    model, x = nn.Sequential(*layers).eval(), inputs(n, shape)
    calibration = calibrate(model, [x])
    with pytest.MonkeyPatch.context() as patch:
        numpy_only(patch)
        expected = quantize(model, calibration)(x).data
    q, before = quantize(model, calibration), native.isa()
    try:
        for isa in native.supported_isas():
            native.set_isa(isa)
            np.testing.assert_array_equal(q(x).data, expected, err_msg=isa)
    finally:
        native.set_isa(before)


@needs_native
def test_the_scratch_of_a_plan_is_sized_to_what_is_run() -> None:
    """A small network on a small batch keeps less scratch than it has weights, not a chunk of the largest size."""
    x = inputs(8, (64,))
    q = quantized(models.mlp(), x)
    before = native.memory_in_use()
    q(x)
    assert native.memory_in_use() - before < q.nbytes
