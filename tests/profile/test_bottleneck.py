"""Planted problems are named rightly, on real runs with made-up ceilings far from the edge of any decision.

Time is processor time here (`cpu_clock`): what is tested is the naming, and a loaded machine must not decide it.
"""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise import Tensor, nn, no_grad
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.profile import ProfilerContext
from tilewise.profile.report.bottleneck import ALLOCATION, BACKEND, COMPUTE, MEMORY, PYTHON

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("cpu_clock")


class RowByRow(nn.Module):
    """A loop over the batch in Python."""

    def __init__(self):
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return tilewise.stack([self.linear(x[i]) for i in range(x.shape[0])])


class ElementByElement(nn.Module):
    """A loop over numbers in Python, out of the framework's sight."""

    def forward(self, x):
        out = np.empty(x.shape, np.float32)
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                out[i, j] = max(0.0, float(x.data[i, j]))
        return Tensor(out)


class ChannelByChannel(nn.Module):
    """A loop over columns, each through an operation of its own."""

    def forward(self, x):
        return tilewise.cat([x[:, c : c + 1] * float(c) for c in range(x.shape[1])] * 4, axis=1)


class StepByStep(nn.Module):
    """A loop over time, each step waiting for the one before."""

    def forward(self, x):
        state, states = x[0], []
        for t in range(x.shape[0]):
            state = (state * 0.9 + x[t]).tanh()
            states.append(state)
        return tilewise.stack(states)


class Nested(nn.Module):
    """Layers within layers, called for one row at a time."""

    def __init__(self):
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, 32))

    def forward(self, x):
        return tilewise.cat([self.inner(x[i : i + 1]) for i in range(x.shape[0])])


class Recursive(nn.Module):
    """Python's own numbers, one function call each."""

    def forward(self, x):
        def squares(values):
            return sum(squares(v) for v in values) if isinstance(values, list) else values * values

        return x + squares(x.data.tolist())


class Chain(nn.Module):
    """Element-wise operations on an array larger than any cache's patience."""

    def forward(self, x):
        for _ in range(4):
            x = (x * 1.01 + 0.1).relu()
        return x


class Concatenator(nn.Module):
    """Grows a result by copying all of it, once for every part."""

    def forward(self, x):
        grown = x.data[:0]
        for _ in range(150):
            grown = np.concatenate([grown, np.repeat(x.data, 4, axis=0)])
        return x + float(grown[0, 0])


class CatInALoop(nn.Module):
    """The same through the framework."""

    def forward(self, x):
        grown = x
        for _ in range(150):
            grown = tilewise.cat([grown, x, x, x, x])
        return grown[: x.shape[0]]


class Converter(nn.Module):
    """To double precision and back, again and again."""

    def forward(self, x):
        wide = np.repeat(x.data, 300, axis=0)
        for _ in range(3):
            wide = wide.astype(np.float64).astype(np.float32)
        return Tensor(wide[: x.shape[0]].copy())


class Hoarder(nn.Module):
    """Takes and fills much more memory than its result needs."""

    def __init__(self):
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        arrays = [np.ones((500, 500), np.float32) for _ in range(80)]
        return self.linear(x) + float(arrays[0][0, 0])


class UntouchedHoarder(Hoarder):
    """The same, but never writes to it."""

    def forward(self, x):
        arrays = [np.zeros((1000, 1000), np.float32) for _ in range(60)]
        return self.linear(x) + float(arrays[0][0, 0])


class Copier(nn.Module):
    """Copies through the framework's own operations."""

    def forward(self, x):
        for _ in range(4):
            x = tilewise.cat([x] * 400)[: x.shape[0]].clone()
        return x


def slow_conv2d(x, w, bias=None, *, stride=(1, 1), padding=(0, 0), groups=1, activation=None, residual=None):
    """A convolution as three loops over pixels."""
    n, _, h, width = x.shape
    outs, _, kh, kw = w.shape
    padded = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    result = np.empty((n, outs, h, width), np.float32)
    for i in range(h):
        for j in range(width):
            window = padded[:, None, :, i : i + kh, j : j + kw]
            result[:, :, i, j] = (window * w[None]).sum(axis=(2, 3, 4))
    return result if bias is None else result + bias[:, None, None]


def bottleneck(ceilings, model, x):
    with no_grad():
        model(Tensor(x))
        with ProfilerContext(machine=ceilings) as profiler:
            for _ in range(5):  # enough for a call that something else interrupted to stand out
                model(Tensor(x))
    return profiler.get_results().bottleneck


LOOPS = [RowByRow, ElementByElement, ChannelByChannel, StepByStep, Nested, Recursive]


@pytest.mark.parametrize("layer", LOOPS)
def test_a_python_loop_is_named(ceilings, layer):
    model = nn.Sequential(nn.Linear(32, 32), layer(), nn.ReLU())
    finding = bottleneck(ceilings, model, RNG.random((200, 32), dtype=np.float32))
    assert finding.kind == PYTHON
    assert finding.where.startswith("1")
    assert "layer 1" in finding.sentence


def test_an_interruption_between_calls_is_blamed_on_nobody(ceilings, cpu_clock):
    model = nn.Sequential(nn.Linear(32, 32), RowByRow())
    x = Tensor(RNG.random((100, 32), dtype=np.float32))
    with no_grad(), ProfilerContext(machine=ceilings) as profiler:
        for i in range(7):
            model(x)
            if i == 3:
                cpu_clock.skip(60.0)
    results = profiler.get_results()
    assert results.outside_seconds > 60 > results.outside_seconds - results.outside_interrupted_seconds
    assert results.bottleneck.kind == PYTHON and results.bottleneck.where.startswith("1")


def test_time_between_two_uses_of_a_context_is_no_interruption(ceilings, cpu_clock):
    x = Tensor(np.ones((4, 4), np.float32))
    profiler = ProfilerContext(machine=ceilings)
    for _ in range(8):
        cpu_clock.skip(1.0)
        with profiler:
            x.exp()
            x.exp()
    assert profiler.get_results().outside_seconds < 1.0
    assert profiler.get_results().outside_interrupted_seconds <= profiler.get_results().outside_seconds


CHAINS = {
    "multiply, add, relu": Chain().forward,
    "subtract, divide": lambda x: ((x - 0.5) / 1.5 - 0.1) / 1.1,
    "log, exp": lambda x: (x + 1.0).log().exp(),
    "tanh, sigmoid": lambda x: x.tanh().sigmoid(),
    "tensors": lambda x: x + x * x - x,
    "negate": lambda x: -((-x).relu()),
    "normalised by hand": lambda x: (x - x.mean(axis=-1, keepdims=True)) / ((x * x).mean(axis=-1, keepdims=True) + 1.0),
}


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("shape", [(2_000_000,), (1000, 1500), (8, 64, 48, 48)], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_a_memory_bound_chain_is_named(ceilings, name, shape):
    finding = bottleneck(ceilings, nn.Sequential(Function(CHAINS[name])), np.full(shape, 0.7, np.float32))
    assert finding.kind == MEMORY and finding.where == "0"
    assert "fuse" in finding.sentence


@pytest.mark.skipif(native is None, reason="allocations are counted by the extension")
@pytest.mark.parametrize("layer", [Hoarder, UntouchedHoarder, Copier, Concatenator, CatInALoop, Converter])
def test_an_over_allocating_layer_is_named(ceilings, layer):
    model = nn.Sequential(nn.Linear(32, 32), layer(), nn.Linear(32, 4))
    finding = bottleneck(ceilings, model, RNG.random((100, 32), dtype=np.float32))
    assert finding.kind == ALLOCATION
    assert finding.where == "1"


def test_a_convolution_on_a_slow_backend_is_named(ceilings):
    backend = OptimizedBackend()
    backend.register("conv2d", "loops", slow_conv2d)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    with use_backend(backend):
        finding = bottleneck(ceilings, model, RNG.random((2, 3, 16, 16), dtype=np.float32))
    assert finding.kind == BACKEND
    assert "'loops'" in finding.sentence and "conv2d" in finding.sentence and "switch to" in finding.sentence


@pytest.mark.skipif(native is None, reason="without the extension no other backend is faster")
@pytest.mark.parametrize("backend", ["naive", "blocked", "numpy"])
@pytest.mark.parametrize(("ins", "outs", "size"), [(4, 16, 32), (16, 16, 24)])
def test_a_slow_backend_of_ours_is_named_for_convolution(ceilings, backend, ins, outs, size):
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(ins, outs, 3, padding=1))
    with use_backend(backend):
        finding = bottleneck(ceilings, model, RNG.random((2, ins, size, size), dtype=np.float32))
    assert finding.kind == BACKEND and finding.where == "1"
    assert "conv2d" in finding.sentence and "'native'" in finding.sentence


@pytest.mark.skipif(native is None, reason="without the extension no other backend is faster")
@pytest.mark.parametrize("backend", ["naive", "blocked"])
def test_a_slow_backend_of_ours_is_named_for_products(ceilings, backend):
    model = nn.Sequential(nn.ReLU(), nn.Linear(96, 96))
    with use_backend(backend):
        finding = bottleneck(ceilings, model, RNG.random((96, 96), dtype=np.float32))
    assert finding.kind == BACKEND and f"{backend!r}" in finding.sentence and "matmul" in finding.sentence


def test_large_products_are_compute(ceilings):
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 768))
    finding = bottleneck(ceilings, model, RNG.random((768, 768), dtype=np.float32))
    assert finding.kind == COMPUTE
    assert "matmul" in finding.sentence


def test_shares_are_parts_of_the_whole(ceilings):
    with ProfilerContext(machine=ceilings) as profiler, no_grad():
        nn.Sequential(Chain(), nn.Linear(1500, 10))(Tensor(np.ones((500, 1500), np.float32)))
    findings = profiler.get_results().findings
    assert 0 < sum(finding.share for finding in findings) <= 1.01
    assert [f.share for f in findings] == sorted((f.share for f in findings), reverse=True)
