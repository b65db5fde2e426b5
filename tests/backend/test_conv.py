"""The native convolution and pooling beside PyTorch: every shape, algorithm, instruction set and thread count."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise._extension import native
from tilewise.backend import ConvTile, OptimizedBackend
from tilewise.errors import ConfigurationError, ShapeError

pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled kernels")
kernels: Any = native

DIRECT = ConvTile("direct")
WINOGRAD, WINOGRAD2 = ConvTile("winograd"), ConvTile("winograd2")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    torch.set_num_threads(1)
    isa, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    x: tuple[int, int, int, int]
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1

    @property
    def geometry(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "groups": self.groups}

    @property
    def w(self) -> tuple[int, int, int, int]:
        return (self.outputs, self.x[1] // self.groups, *self.kernel)


def normal(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_near(result: np.ndarray, want: torch.Tensor | np.ndarray, what: str = "result") -> None:
    reference = np.asarray(want)
    assert result.dtype == np.float32 and result.shape == reference.shape, what
    np.testing.assert_array_equal(np.isnan(result), np.isnan(reference), err_msg=what)
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(result[~finite], reference[~finite], err_msg=what)
    worst = np.abs(result[finite] - reference[finite]).max(initial=0)
    assert worst <= 1e-5 * max(1.0, np.abs(reference[finite]).max(initial=0)), f"{what}: off by {worst}"


def check_against_torch(case: Case, tile: Any = None) -> None:
    """Forward with the whole epilogue, and both gradients; the reference is computed in double."""
    x, w, bias = normal(case.x, 1), normal(case.w, 2), normal((case.outputs,), 3)
    tx, tw = (torch.from_numpy(a).double().requires_grad_() for a in (x, w))
    plain = TF.conv2d(tx, tw, torch.from_numpy(bias).double(), **case.geometry)
    residual, gy = normal(plain.shape, 4), normal(plain.shape, 5)
    plain.backward(torch.from_numpy(gy).double())
    y = kernels.conv2d(x, w, bias, activation="relu", residual=residual, tile=tile, **case.geometry)
    assert_near(y, (plain + torch.from_numpy(residual)).relu().detach(), "forward")
    assert_near(kernels.conv2d_grad_input(gy, w, x.shape, **case.geometry), tx.grad, "gradient of the input")
    assert_near(kernels.conv2d_grad_weight(gy, x, w.shape, **case.geometry), tw.grad, "gradient of the weights")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 7]))
    kernel = draw(st.one_of(st.just((3, 3)), st.tuples(st.integers(1, 7), st.integers(1, 7))))
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    height, width = (draw(st.integers(max(1, k - 2 * p), 19)) for k, p in zip(kernel, padding, strict=True))
    c, o = draw(st.integers(1, 37)), draw(st.integers(1, 37))
    stride = draw(st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 4), st.integers(1, 4))))
    return Case((draw(st.integers(0, 3)), c * groups, height, width), o * groups, kernel, stride, padding, groups)


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_convolution_and_its_gradients_equal_pytorch(isa: str, threads: int) -> None:
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)

    @settings(max_examples=25)
    @given(cases())
    def check(case: Case) -> None:
        check_against_torch(case)

    check()


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3, 32, 32), 16, (3, 3), padding=(1, 1)),
        Case((2, 16, 32, 32), 32, (3, 3), (2, 2), (1, 1)),
        Case((2, 16, 32, 32), 32, (1, 1), (2, 2)),
        Case((3, 128, 8, 8), 96, (3, 3), padding=(1, 1)),
        Case((1, 64, 7, 7), 64, (1, 1)),
        Case((2, 24, 14, 14), 24, (3, 3), padding=(1, 1), groups=24),
        Case((2, 24, 14, 14), 48, (5, 5), (2, 2), (2, 2), groups=24),
        Case((1, 3, 40, 33), 20, (11, 9), (4, 3), (2, 5)),
        Case((1, 5, 2, 2), 7, (5, 5), padding=(2, 2)),
        Case((1, 4, 6, 6), 4, (1, 1), padding=(2, 2)),
    ],
    ids=str,
)
def test_layers_of_real_networks_equal_pytorch(isa: str, case: Case) -> None:
    kernels.set_isa(isa)
    kernels.set_num_threads(2)
    check_against_torch(case)


@pytest.mark.parametrize("tile", [DIRECT, WINOGRAD, WINOGRAD2], ids=["direct", "winograd", "winograd2"])
@settings(max_examples=25)
@given(c=st.integers(1, 70), o=st.integers(1, 70), h=st.integers(1, 21), w=st.integers(1, 21), pad=st.integers(1, 3))
def test_all_algorithms_give_the_same_convolution(tile: Any, c: int, o: int, h: int, w: int, pad: int) -> None:
    check_against_torch(Case((2, c, h, w), o, (3, 3), padding=(pad, pad)), tile)


@pytest.mark.parametrize("channels", [256, 512])
@pytest.mark.parametrize("positive", [False, True])
def test_winograd_stays_within_the_error_bar_with_many_channels(channels: int, positive: bool) -> None:
    x, w = normal((1, channels, 12, 12), 0), normal((64, channels, 3, 3), 1)
    if positive:
        x, w = np.maximum(x, 0), w / np.float32(np.sqrt(9 * channels))
    output = kernels.conv2d(x, w, padding=(1, 1), tile=WINOGRAD)
    assert_near(output, TF.conv2d(torch.from_numpy(x).double(), torch.from_numpy(w).double(), padding=1))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_winograd_cannot_take_spread_as_in_pytorch(value: float) -> None:
    x, w = normal((2, 16, 16, 16), 0), normal((16, 16, 3, 3), 1)
    x[1, 3, 5, 7] = value
    assert_near(kernels.conv2d(x, w, padding=(1, 1)), TF.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1))
    x[1, 3, 5, 7] = 1
    w[2, 3, 1, 1] = value
    assert_near(kernels.conv2d(x, w, padding=(1, 1)), TF.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1))


def test_weights_changed_in_place_are_seen_at_the_next_call() -> None:
    x, w = normal((1, 16, 8, 8), 0), normal((16, 16, 3, 3), 1)
    for tile in (DIRECT, WINOGRAD, WINOGRAD2):
        before = kernels.conv2d(x, w, padding=(1, 1), tile=tile)
        w[7, 3, 2, 1] += 1
        after = kernels.conv2d(x, w, padding=(1, 1), tile=tile)
        assert_near(after, TF.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1))
        assert np.abs(after - before)[:, 7].max() > 0.1


def test_kept_weights_are_bounded() -> None:
    x = normal((1, 64, 4, 4), 0)
    weights = [normal((256, 64, 3, 3), seed) for seed in range(60)]
    for w in weights:
        kernels.conv2d(x, w, padding=(1, 1), tile=WINOGRAD)
    assert 0 < kernels.weight_cache_bytes() <= kernels.weight_cache_limit()
    kernels.clear_weight_cache()
    assert kernels.weight_cache_bytes() == 0


@pytest.fixture
def small_weight_cache() -> Iterator[None]:
    """Room for the transformed filters of two layers of 64 channels, and for their plain copies."""
    kernels.clear_weight_cache()
    kernels.set_weight_cache_limit(2 << 20)
    yield
    kernels.set_weight_cache_limit(0)
    kernels.clear_weight_cache()


@pytest.mark.usefixtures("small_weight_cache")
def test_layers_used_in_turns_are_transformed_once_each_or_not_at_all() -> None:
    x = normal((1, 64, 12, 12), 0)
    layers = [normal((64, 64, 3, 3), seed) for seed in range(1, 7)]
    before = kernels.winograd_transforms()
    for _ in range(4):
        for w in layers:
            assert_near(
                kernels.conv2d(x, w, padding=(1, 1)), TF.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1)
            )
    assert 1 <= kernels.winograd_transforms() - before < len(layers)
    assert kernels.weight_cache_bytes() <= kernels.weight_cache_limit()


@pytest.mark.usefixtures("small_weight_cache")
def test_layers_that_nobody_uses_any_more_make_room() -> None:
    x = normal((1, 64, 12, 12), 0)
    old = [normal((64, 64, 3, 3), seed) for seed in range(1, 7)]
    new = normal((64, 64, 3, 3), 9)
    for w in old:
        kernels.conv2d(x, w, padding=(1, 1))
    before = kernels.winograd_transforms()
    for _ in range(1200):
        kernels.conv2d(x, new, padding=(1, 1))
    assert kernels.winograd_transforms() - before == 1


def test_arrays_of_any_layout_are_taken() -> None:
    x, w, bias = (
        normal((8, 9, 2, 5), 0).transpose(2, 3, 0, 1),
        normal((3, 3, 5, 8), 1).transpose(3, 2, 0, 1),
        normal((16,), 2)[::2],
    )
    want = TF.conv2d(torch.from_numpy(x.copy()), torch.from_numpy(w.copy()), torch.from_numpy(bias.copy()), padding=1)
    assert_near(kernels.conv2d(x, w, bias, padding=(1, 1)), want)


def test_concurrent_callers_get_their_own_results() -> None:
    kernels.set_num_threads(2)
    jobs = [Case((2, 8 + i, 16, 16), 24, (3, 3), padding=(1, 1)) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check_against_torch, jobs * 2))


def test_gelu_is_fused_and_exact() -> None:
    x, w = normal((1, 8, 9, 9), 0), normal((8, 8, 3, 3), 1)
    want = TF.gelu(TF.conv2d(torch.from_numpy(x).double(), torch.from_numpy(w).double(), padding=1))
    assert_near(kernels.conv2d(x, w, padding=(1, 1), activation="gelu"), want)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"x": (1, 3, 8, 8), "w": (4, 2, 3, 3)}, ShapeError, "channels"),
        ({"x": (1, 3, 2, 2), "w": (4, 3, 3, 3)}, ShapeError, "does not fit"),
        ({"x": (3, 8, 8), "w": (4, 3, 3, 3)}, ShapeError, "dimensions"),
        ({"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "groups": 2}, ShapeError, "divide"),
        ({"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "stride": (0, 1)}, ShapeError, "stride"),
        ({"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "activation": "tanh"}, ConfigurationError, "activation"),
        ({"x": (1, 3, 8, 8), "w": (4, 3, 5, 5), "tile": WINOGRAD}, ConfigurationError, "3x3"),
        ({"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "bias": np.zeros(5, np.float32)}, ShapeError, "bias"),
        (
            {"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "residual": np.zeros((1, 4, 8, 8), np.float32)},
            ShapeError,
            "residual",
        ),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(arguments: dict[str, Any], error: type, says: str) -> None:
    x, w = normal(arguments.pop("x"), 0), normal(arguments.pop("w"), 1)
    with pytest.raises(error, match=says):
        kernels.conv2d(x, w, **arguments)


def test_the_backend_runs_float32_natively_and_float64_in_numpy() -> None:
    x, w = normal((1, 3, 8, 8), 0), normal((4, 3, 3, 3), 1)
    backend = OptimizedBackend()
    assert backend.explain("conv2d", x, w).implementation == "native"
    assert backend.explain("conv2d", x.astype(np.float64), w.astype(np.float64)).implementation == "numpy"
    assert backend.explain("conv2d", x, w.astype(np.float64)).implementation == "numpy"
    assert backend.explain("max_pool2d", x, kernel=(2, 2), stride=(2, 2), padding=(0, 0)).implementation == "native"
    assert_near(backend.dispatch("conv2d", x, w), TF.conv2d(torch.from_numpy(x), torch.from_numpy(w)))


@st.composite
def pools(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, tuple[int, int]]]:
    kernel = draw(st.one_of(st.just((2, 2)), st.tuples(st.integers(1, 4), st.integers(1, 4))))
    stride = draw(st.one_of(st.just(kernel), st.tuples(st.integers(1, 3), st.integers(1, 3))))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    height, width = (draw(st.integers(k, 40)) for k in kernel)
    shape = (draw(st.integers(0, 2)), draw(st.integers(1, 5)), height, width)
    return shape, {"kernel": kernel, "stride": stride, "padding": padding}


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("special", [False, True])
def test_pooling_and_its_gradients_equal_pytorch(isa: str, special: bool) -> None:
    kernels.set_isa(isa)
    kernels.set_num_threads(2)

    @settings(max_examples=40)
    @given(pools())
    def check(case: tuple[tuple[int, ...], dict[str, tuple[int, int]]]) -> None:
        shape, window = case
        x = normal(shape, 0).round(1)  # ties
        if special and x.size:
            x.reshape(-1)[:: max(1, x.size // 7)] = np.resize(
                np.float32([np.nan, np.inf, -np.inf]), len(x.reshape(-1)[:: max(1, x.size // 7)])
            )
        check_max_pool(x, window)
        check_average_pool(x, window)

    check()


def check_max_pool(x: np.ndarray, window: dict[str, tuple[int, int]]) -> None:
    tx = torch.from_numpy(x).requires_grad_()
    want, places = TF.max_pool2d(tx, window["kernel"], window["stride"], window["padding"], return_indices=True)
    y, argmax = kernels.max_pool2d(x, **window)
    assert_near(y, want.detach())
    np.testing.assert_array_equal(argmax, places)
    gy = normal(y.shape, 1)
    want.backward(torch.from_numpy(gy))
    assert_near(kernels.max_pool2d_grad(gy, argmax, x.shape), tx.grad)


def check_average_pool(x: np.ndarray, window: dict[str, tuple[int, int]]) -> None:
    tx = torch.from_numpy(x).requires_grad_()
    want = TF.avg_pool2d(tx, window["kernel"], window["stride"], window["padding"])
    y = kernels.avg_pool2d(x, **window)
    assert_near(y, want.detach())
    gy = normal(y.shape, 1)
    want.backward(torch.from_numpy(gy))
    assert_near(kernels.avg_pool2d_grad(gy, x.shape, **window), tx.grad)


def test_global_average_pooling_equals_pytorch() -> None:
    x = normal((3, 17, 8, 7), 0)
    window = {"kernel": (8, 7), "stride": (8, 7), "padding": (0, 0)}
    check_average_pool(x, window)


def test_an_argmax_outside_the_plane_is_refused() -> None:
    gy = np.ones((1, 1, 1, 1), np.float32)
    with pytest.raises(ShapeError, match="outside"):
        kernels.max_pool2d_grad(gy, np.full((1, 1, 1, 1), 4, np.int32), (1, 1, 2, 2))


def test_large_results_reuse_memory_within_a_bound() -> None:
    x, w = normal((4, 16, 64, 64), 0), normal((16, 16, 1, 1), 1)
    kernels.give_back_memory()
    first = kernels.conv2d(x, w)
    want, address = first.copy(), first.ctypes.data
    del first
    assert kernels.array_pool_bytes() >= want.nbytes
    again = kernels.conv2d(x, w)
    assert again.ctypes.data == address
    np.testing.assert_array_equal(again, want)
    outputs = [kernels.conv2d(x, w) for _ in range(200)]
    assert len({y.ctypes.data for y in outputs}) == 200
    del outputs
    assert kernels.array_pool_bytes() <= 128 << 20
