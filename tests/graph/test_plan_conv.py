"""Convolutions of a plan, and dilation and uneven padding of the eager one, against PyTorch over odd shapes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilewise import Tensor
from tilewise._extension import native
from tilewise.nn import functional as F

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")
kernels: Any = native

ACTIVATIONS = {
    "": lambda x: x,
    "relu": TF.relu,
    "gelu": TF.gelu,
    "relu6": TF.relu6,
    "silu": TF.silu,
    "hard_swish": TF.hardswish,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": TF.hardsigmoid,
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.set_isa(isa)
    kernels.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    n: int
    groups: int
    group_c: int
    group_o: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    activation: str
    residual: bool

    @property
    def fits(self) -> bool:
        top, left, bottom, right = self.padding
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return self.size[0] + top + bottom >= reach[0] and self.size[1] + left + right >= reach[1]


small = st.integers(1, 3)
pairs = st.tuples(small, small)
plain = st.just((1, 1))
cases = st.builds(
    Case,
    n=st.integers(1, 3),
    groups=st.sampled_from([1, 1, 2, 3, 5, 16, 17, 33]),
    group_c=st.sampled_from([1, 1, 2, 4, 7, 8, 16]),
    group_o=st.sampled_from([1, 1, 2, 3, 4, 7, 8, 20]),
    size=st.tuples(st.integers(1, 23), st.integers(1, 23)),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (7, 7), (2, 2), (1, 4)]),
    stride=st.one_of(plain, pairs),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dilation=st.one_of(plain, pairs),
    activation=st.sampled_from(list(ACTIVATIONS)),
    residual=st.booleans(),
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = normal(case.n, case.groups * case.group_c, *case.size)
    w = normal(case.groups * case.group_o, case.group_c, *case.kernel, seed=1)
    return x, w, normal(len(w), seed=2)


def reference(case: Case, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> torch.Tensor:
    top, left, bottom, right = case.padding
    padded = TF.pad(torch.from_numpy(x).double(), (left, right, top, bottom))
    return TF.conv2d(
        padded,
        torch.from_numpy(w).double(),
        torch.from_numpy(bias).double(),
        case.stride,
        0,
        case.dilation,
        case.groups,
    )


def planned(case: Case, x: np.ndarray, w: np.ndarray, bias: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    layer = kernels.FloatConvLayer(w, bias, case.stride, case.padding, case.dilation, case.groups, case.activation)
    plan = kernels.Graph()
    values = [plan.input(*a.shape) for a in (x, residual) if a is not None]
    plan.output(plan.conv(layer, *values))
    plan.finish()
    out: np.ndarray = plan.run([a for a in (x, residual) if a is not None])[0]
    return out


def assert_near(result: np.ndarray, want: Any) -> None:
    expected = np.asarray(want)
    assert result.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    assert float(np.nanmax(np.abs(result - expected), initial=0)) <= 2e-5 * scale


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
def test_any_convolution_of_a_plan_equals_pytorch_on_any_number_of_threads(isa: str) -> None:
    kernels.set_isa(isa)

    @settings(max_examples=40, deadline=None)
    @given(cases)
    def check(case: Case) -> None:
        assume(case.fits)
        x, w, bias = arrays(case)
        want = reference(case, x, w, bias)
        residual = normal(*want.shape, seed=3) if case.residual else None
        want = ACTIVATIONS[case.activation](want if residual is None else want + torch.from_numpy(residual))
        kernels.set_num_threads(1)
        output = planned(case, x, w, bias, residual)
        assert_near(output, want)
        kernels.set_num_threads(3)
        np.testing.assert_array_equal(planned(case, x, w, bias, residual), output)

    check()


def point_then_depthwise(
    case: Case, channels: int, x: np.ndarray, residual: np.ndarray | None, keep: bool
) -> np.ndarray:
    """A 1x1 convolution and the depthwise one of `case` that reads it; `keep`: its result is one of the plan's too."""
    w, bias = normal(case.groups, channels, 1, 1, seed=4), normal(case.groups, seed=5)
    point = kernels.FloatConvLayer(w, bias, (1, 1), (0, 0, 0, 0), (1, 1), 1, case.activation)
    _, taps, shift = arrays(case)
    each = kernels.FloatConvLayer(taps, shift, case.stride, case.padding, case.dilation, case.groups, case.activation)
    plan = kernels.Graph()
    image, *others = [plan.input(*a.shape) for a in (x, residual) if a is not None]
    between = plan.conv(point, plan.affine(image, [], [], ""))
    plan.output(plan.conv(each, between, *others))
    if keep:
        plan.output(between)
    plan.finish()
    out: np.ndarray = plan.run([a for a in (x, residual) if a is not None])[0]
    return out


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
def test_a_point_convolution_joined_with_the_depthwise_one_after_it_gives_the_same_numbers(isa: str) -> None:
    kernels.set_isa(isa)
    alone = cases.map(lambda case: replace(case, groups=max(2, case.groups), group_c=1, group_o=1))
    heights = st.sampled_from([1, 2, 13, 97])

    @settings(max_examples=40, deadline=None)
    @given(alone, st.sampled_from([1, 3, 16, 33]), heights, st.sampled_from([1, 2, 3]))
    def check(case: Case, channels: int, height: int, threads: int) -> None:
        case = replace(case, size=(height, case.size[1]))
        assume(case.fits)
        kernels.set_num_threads(threads)
        x = normal(case.n, channels, *case.size)
        x[0, 0, height // 2, 0] = np.nan
        shape = reference(case, *arrays(case)).shape
        residual = normal(*shape, seed=3) if case.residual else None
        apart = point_then_depthwise(case, channels, x, residual, keep=True)
        np.testing.assert_array_equal(point_then_depthwise(case, channels, x, residual, keep=False), apart)

    check()


def test_what_lies_between_a_point_and_a_depthwise_convolution_has_no_memory() -> None:
    plan = kernels.Graph()
    image = plan.affine(plan.input(1, 16, 64, 64), [], [], "")
    point = kernels.FloatConvLayer(normal(96, 16, 1, 1), None, (1, 1), (0, 0, 0, 0), (1, 1), 1, "")
    each = kernels.FloatConvLayer(normal(96, 1, 3, 3), None, (2, 2), (1, 1, 1, 1), (1, 1), 96, "")
    plan.output(plan.conv(each, plan.conv(point, image)))
    plan.finish()
    assert plan.arena_bytes < 4 * 96 * 64 * 64


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("channels", [1, 5, 16, 33, 70])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)])
def test_pooling_in_a_plan_equals_pytorch_and_a_nan_wins(
    isa: str, channels: int, kernel: int, stride: int, padding: int
) -> None:
    kernels.set_isa(isa)
    x = normal(2, channels, 11, 7)
    x[0, :, 4, 3], x[1, 0, 0, 0], x[1, :, 6, 6] = np.nan, -np.inf, np.inf
    tensor = torch.from_numpy(x)
    for mean in (False, True):
        plan = kernels.Graph()
        value = plan.pool(plan.input(*x.shape), (kernel,) * 2, (stride,) * 2, (padding,) * 4, mean, True)
        plan.output(value)
        plan.finish()
        of = TF.avg_pool2d if mean else TF.max_pool2d
        np.testing.assert_allclose(plan.run([x])[0], of(tensor, kernel, stride, padding), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("half", [1, 4, 7, 8, 16, 29, 58])
def test_channels_that_take_turns_equal_any_other_choice_of_channels(isa: str, half: int) -> None:
    kernels.set_isa(isa)
    x = normal(2, 2 * half + 3, 5, 3)
    for first, second in ((0, half), (half + 3, 0), (2, 3)):
        turns = [c for i in range(half) for c in (first + i, second + i)]
        for channels in (turns, turns[:-1], turns[::-1]):
            plan = kernels.Graph()
            plan.output(plan.gather_channels(plan.input(*x.shape), channels))
            plan.finish()
            np.testing.assert_array_equal(plan.run([x])[0], x[:, channels])


def test_dilation_and_uneven_padding_and_their_gradients_equal_pytorch() -> None:
    @settings(max_examples=40, deadline=None)
    @given(cases)
    def check(case: Case) -> None:
        assume(case.fits)
        x, w, bias = arrays(case)
        ours = [Tensor(a, requires_grad=True) for a in (x, w, bias)]
        theirs = [torch.from_numpy(a).double().requires_grad_() for a in (x, w, bias)]
        y = F.conv2d(*ours, case.stride, case.padding, case.groups, dilation=case.dilation)
        top, left, bottom, right = case.padding
        padded = TF.pad(theirs[0], (left, right, top, bottom))
        want = TF.conv2d(padded, theirs[1], theirs[2], case.stride, 0, case.dilation, case.groups)
        assert_near(y.data, want.detach())
        grad = normal(*want.shape, seed=4)
        y.backward(Tensor(grad))
        want.backward(torch.from_numpy(grad).double())
        for mine, yours in zip(ours, theirs, strict=True):
            assert_near(mine.grad.data, yours.grad)

    check()


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
def test_nan_and_infinity_stay_in_their_group(isa: str) -> None:
    kernels.set_isa(isa)
    for per_group in (1, 2, 4):
        case = Case(1, 8, per_group, per_group, (6, 6), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "", False)
        x, w, bias = arrays(case)
        x[0, 0, 2, 2], x[0, -1, 3, 3] = np.nan, np.inf
        output, eager = planned(case, x, w, bias, None), F.conv2d(Tensor(x), Tensor(w), Tensor(bias), 1, 1, 8).data
        for out in (output, eager):
            assert np.isnan(out[0, :per_group]).any()
            assert np.isfinite(out[0, per_group:-per_group]).all()


def before_a_guard(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is followed by a page that may not be read."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    guarded = np.frombuffer(memory, np.float32, array.size, size - array.nbytes).reshape(array.shape)
    guarded[...] = array
    return guarded


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("channels, groups", [(3, 1), (5, 5), (17, 1), (37, 37), (12, 3), (64, 1), (40, 10)])
@pytest.mark.parametrize("side", [1, 3, 5])
def test_nothing_is_read_past_the_arrays(isa: str, channels: int, groups: int, side: int) -> None:
    kernels.set_isa(isa)
    case = Case(2, groups, channels // groups, 3, (7, 5), (side, side), (1, 1), (side // 2,) * 4, (1, 1), "silu", True)
    x, w, bias = (before_a_guard(a) for a in arrays(case))
    want = reference(case, np.array(x), np.array(w), np.array(bias))
    residual = before_a_guard(normal(*want.shape, seed=3))
    output = planned(case, x, w, bias, residual)
    assert_near(output, TF.silu(want + torch.from_numpy(np.array(residual))))
    assert_near(F.conv2d(Tensor(x), Tensor(w), Tensor(bias), 1, side // 2, groups).data, want)


ALGORITHMS = ["direct", "winograd", "winograd2", "winograd_late"]


def planned_by(algorithm: str, x: np.ndarray, w: np.ndarray, groups: int = 1) -> tuple[Any, Any]:
    """A plan of one 3x3 convolution whose layer has let its weights go, and how it computes."""
    layer = kernels.FloatConvLayer(w, None, (1, 1), (1, 1, 1, 1), (1, 1), groups, "")
    plan = kernels.Graph()
    value = plan.conv(layer, plan.input(*x.shape), algorithm=algorithm)
    plan.output(value)
    plan.finish()
    layer.release()
    return plan, plan.algorithm(value)


@pytest.mark.parametrize("isa", kernels.supported_isas() if native is not None else [])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("c, o, groups", [(3, 5, 1), (40, 17, 1), (64, 96, 2), (130, 33, 1), (260, 70, 1)])
def test_every_algorithm_gives_the_convolution_and_reads_nothing_past_the_arrays(
    isa: str, algorithm: str, c: int, o: int, groups: int
) -> None:
    kernels.set_isa(isa)
    x, w = before_a_guard(normal(2, c, 9, 7)), before_a_guard(normal(o, c // groups, 3, 3, seed=1))
    plan, used = planned_by(algorithm, x, w, groups)
    assert used == algorithm
    want = TF.conv2d(
        torch.from_numpy(np.array(x)).double(), torch.from_numpy(np.array(w)).double(), padding=1, groups=groups
    )
    assert_near(plan.run([x])[0], want)


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_winograd_cannot_take_is_right_after_the_weights_were_let_go(algorithm: str, value: float) -> None:
    x, w = normal(1, 20, 11, 9), normal(24, 20, 3, 3, seed=1)
    x[0, 3, 5, 7] = value
    plan, _ = planned_by(algorithm, x, w)
    output, want = plan.run([x])[0], TF.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1).numpy()
    far = np.ones((11, 9), bool)
    far[4:7, 6:9] = False  # the pixels that see the value
    assert_near(output[0][:, far], want[0][:, far])
    np.testing.assert_array_equal(np.isfinite(output), np.isfinite(want))


def test_filters_that_winograd_cannot_take_go_directly() -> None:
    x, w = normal(1, 20, 11, 9), normal(24, 20, 3, 3, seed=1)
    w[0, 0, 0, 0] = 1e30
    assert [planned_by(algorithm, x, w)[1] for algorithm in ALGORITHMS] == ["direct"] * 4


def test_an_algorithm_that_does_not_apply_or_exist() -> None:
    x, w = normal(1, 4, 8, 8), normal(4, 4, 5, 5)
    layer = kernels.FloatConvLayer(w, None, (1, 1), (2, 2, 2, 2), (1, 1), 1, "")
    plan = kernels.Graph()
    assert plan.algorithm(plan.conv(layer, plan.input(*x.shape), algorithm="winograd")) == "direct"
    with pytest.raises(ValueError, match="no algorithm fft"):
        plan.conv(layer, 0, algorithm="fft")
