"""Planted problems are named rightly, on real runs with made-up ceilings far from the edge of any decision."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise import Tensor, nn, no_grad
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.profile import ProfilerContext
from tilewise.profile.bottleneck import ALLOCATION, BACKEND, COMPUTE, MEMORY, PYTHON

RNG = np.random.default_rng(0)


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


class Chain(nn.Module):
    """Element-wise operations on an array larger than any cache's patience."""

    def forward(self, x):
        for _ in range(4):
            x = (x * 1.01 + 0.1).relu()
        return x


class Hoarder(nn.Module):
    """Takes and fills much more memory than its result needs."""

    def __init__(self):
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        held = [np.ones((500, 500), np.float32) for _ in range(80)]
        return self.linear(x) + float(held[0][0, 0])


class UntouchedHoarder(Hoarder):
    """The same, but never writes to it."""

    def forward(self, x):
        held = [np.zeros((1000, 1000), np.float32) for _ in range(60)]
        return self.linear(x) + float(held[0][0, 0])


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


@pytest.mark.parametrize("layer", [RowByRow, ElementByElement])
def test_a_python_loop_is_named(ceilings, layer):
    model = nn.Sequential(nn.Linear(32, 32), layer(), nn.Linear(32, 4))
    found = bottleneck(ceilings, model, RNG.random((600, 32), dtype=np.float32))
    assert found.kind == PYTHON
    assert found.where.startswith("1")
    assert "layer 1" in found.sentence


def test_a_memory_bound_chain_is_named(ceilings):
    found = bottleneck(ceilings, nn.Sequential(Chain()), np.ones((1000, 1500), np.float32))
    assert found.kind == MEMORY
    assert "fuse" in found.sentence


@pytest.mark.skipif(native is None, reason="allocations are counted by the extension")
@pytest.mark.parametrize("layer", [Hoarder, UntouchedHoarder, Copier])
def test_an_over_allocating_layer_is_named(ceilings, layer):
    model = nn.Sequential(nn.Linear(32, 32), layer(), nn.Linear(32, 4))
    found = bottleneck(ceilings, model, RNG.random((100, 32), dtype=np.float32))
    assert found.kind == ALLOCATION
    assert found.where == "1"


def test_a_convolution_on_a_slow_backend_is_named(ceilings):
    backend = OptimizedBackend()
    backend.register("conv2d", "loops", slow_conv2d)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    with use_backend(backend):
        found = bottleneck(ceilings, model, RNG.random((2, 3, 16, 16), dtype=np.float32))
    assert found.kind == BACKEND
    assert "'loops'" in found.sentence and "conv2d" in found.sentence and "switch to" in found.sentence


def test_large_products_are_compute(ceilings):
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 768))
    found = bottleneck(ceilings, model, RNG.random((768, 768), dtype=np.float32))
    assert found.kind == COMPUTE
    assert "matmul" in found.sentence


def test_shares_are_parts_of_the_whole(ceilings):
    with ProfilerContext(machine=ceilings) as profiler, no_grad():
        nn.Sequential(Chain(), nn.Linear(1500, 10))(Tensor(np.ones((500, 1500), np.float32)))
    findings = profiler.get_results().findings
    assert 0 < sum(finding.share for finding in findings) <= 1.01
    assert [f.share for f in findings] == sorted((f.share for f in findings), reverse=True)
