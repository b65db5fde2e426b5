"""What a plan promises: the module's numbers, in one native call, whatever its `forward` looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise import Tensor, get_num_threads, models, nn, no_grad, set_num_threads
from tilewise._environment import MachineOverride
from tilewise._extension import native
from tilewise.errors import ConfigurationError, DtypeError
from tilewise.graph.ops import NATIVE_OPS, OpSpec
from tilewise.models.zoo import ZOO
from tilewise.plan import compile
from tilewise.profile import FLOPCounter
from tilewise.profile.flops import Recording, summarise
from tilewise.tensor import cat

pytestmark = pytest.mark.skipif(native is None, reason="plans are native")

IMAGES = [name for name in ZOO if name not in ("vit_tiny", "bert_small")]


def images(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def own_result(module: nn.Module, x: Any) -> Any:
    module.eval()
    with no_grad():
        return module(Tensor(x)).data


def settled(module: nn.Module) -> nn.Module:
    """Batch norms with the statistics of a batch, as after training. Without, the features of a deep network with
    random weights vanish, its result is the last bias, and any two networks agree."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    module.train()
    with no_grad():
        module(Tensor(np.random.default_rng(2).standard_normal((2, 3, 64, 64), dtype=np.float32)))
    first, second = own_result(module, images(1, 3, 64, 64)), own_result(module, -images(1, 3, 64, 64))
    assert np.abs(first - second).max() > 0.01 * np.abs(first).max()
    return module


def assert_same(module: nn.Module, x: Any, plan: Any = None) -> None:
    output = (plan or compile(module, x))(x)
    want = own_result(module, x)
    assert output.shape == want.shape
    np.testing.assert_allclose(output, want, atol=1e-4 * max(1e-6, float(np.abs(want).max())), rtol=0)


@pytest.mark.parametrize("build", [models.vgg6, models.resnet8])
def test_reference_networks_run_in_one_call(build: Any) -> None:
    module, x = build(), images(3, 3, 32, 32)
    plan = compile(module, x)
    assert_same(module, x, plan)
    assert plan.native_calls == 1


@pytest.mark.parametrize("name", IMAGES)
def test_every_image_network_of_the_zoo_runs_in_one_call(name: str) -> None:
    module, x = settled(ZOO[name]()), images(1, 3, 64, 64)
    plan = compile(module, x)
    assert_same(module, x, plan)
    assert plan.native_calls == 1


def test_other_sizes_are_planned_when_they_come() -> None:
    module = models.resnet8()
    plan = compile(module, images(1, 3, 32, 32))
    for shape in ((2, 3, 32, 32), (1, 3, 17, 23), (5, 3, 9, 40)):
        assert_same(module, images(*shape), plan)


def test_results_are_equal_bit_for_bit_on_any_number_of_threads() -> None:
    module, x, before = ZOO["mobilenet_v3"](), images(2, 3, 64, 64), get_num_threads()
    plan = compile(module, x)
    try:
        set_num_threads(1)
        alone = plan(x)
        for threads in (2, 3):
            set_num_threads(threads)
            np.testing.assert_array_equal(plan(x), alone)
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("l3", [1 << 18, 1 << 28], ids=["in parts", "whole"])
def test_a_plan_for_a_batch_is_made_from_two_images(another_machine, l3: int) -> None:
    threads: list[int] = []

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            threads.append(x.shape[0])
            return self.layers(x)

    another_machine(MachineOverride(l3=l3, l2=1 << 16))
    module, x = Counting().eval(), images(13, 3, 40, 40)
    plan = compile(module, x)
    np.testing.assert_allclose(plan(x), own_result(module, x), rtol=1e-4, atol=1e-5)
    assert set(threads[:-1]) == {2, 3}  # traced and checked; the last is the module itself


class Compared(nn.Module):
    """Images of a batch that read each other, and one whose result does not say that it does."""

    def __init__(self, rows: bool) -> None:
        self.conv, self.rows = nn.Conv2d(3, 4, 3, padding=1, rng=0), rows

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        return y - y.mean(0, keepdims=True) if self.rows else y.reshape(y.shape[0] * 4, -1)[::4]


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_images_that_read_each_other_are_planned_together(rows: bool, batch: int) -> None:
    module, x = Compared(rows), images(batch, 3, 8, 8)
    assert_same(module, x, compile(module, x))


def test_a_large_batch_gives_what_its_images_give_one_by_one(another_machine) -> None:
    module, x = ZOO["squeezenet"](), images(7, 3, 128, 128)
    another_machine(MachineOverride(l3=4 << 20))
    plan = compile(module, x)
    assert_same(module, x, plan)
    together, alone = plan(x), np.concatenate([plan(x[i : i + 1]) for i in range(7)])
    # not bit for bit: how many images go together may change the algorithm of a convolution
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(alone).max()


class Fixed(nn.Module):
    """Written for one batch, as files with fixed sizes are."""

    def __init__(self, batch: int, checks: bool) -> None:
        self.conv, self.batch, self.checks = nn.Conv2d(3, 4, 3, padding=1, rng=0), batch, checks

    def forward(self, x: Tensor) -> Tensor:
        if self.checks and x.shape[0] != self.batch:
            raise ValueError("another batch")
        return self.conv(x).mean((2, 3)).reshape(self.batch, -1)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("batch", [2, 3, 4, 8])
def test_a_module_written_for_one_batch_is_planned_for_it(batch: int, checks: bool) -> None:
    module, x = Fixed(batch, checks), images(batch, 3, 8, 8)
    plan = compile(module, x)
    assert_same(module, x, plan)


def test_a_batch_of_any_size_needs_bounded_memory(another_machine) -> None:
    """Weights that no cache holds are read once a part; parts grow until that is little, and no further."""
    another_machine(MachineOverride(l3=1 << 18, l2=1 << 16))
    module, x = nn.Sequential(*(nn.Conv2d(64, 64, 1, bias=False, rng=i) for i in range(40))), images(900, 64, 3, 3)
    plan = compile(module, x)
    arena = plan.arena_bytes
    assert 0 < arena < 2 * 400 * 3 * 3 * 64 * 4
    assert_same(module, x, plan)


class Odd(nn.Module):
    """A forward in plain Python: a slice, a shared value, an operation that plans do not know."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(5, 12, 3, padding=1, rng=0)
        self.deep = nn.Conv2d(6, 6, 5, padding=(2, 2, 2, 2), groups=6, rng=1)
        self.wide = nn.Conv2d(6, 6, 3, padding=(4, 3, 0, 1), dilation=2, groups=3, rng=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        left, right = y[:, :6], y[:, 6:]
        return cat([self.deep(left) * left.sigmoid(), self.wide(right).log_softmax(1), left], axis=1).mean((2, 3))


def test_what_a_plan_does_not_know_is_called_between_native_parts() -> None:
    module, x = Odd(), images(2, 5, 9, 10)
    plan = compile(module, x)
    assert_same(module, x, plan)
    assert plan.native_calls > 1


class Shared(nn.Module):
    """Values that several read: fusing one of them away would lose it."""

    def __init__(self) -> None:
        self.a, self.b = nn.Conv2d(3, 8, 1, rng=0), nn.Conv2d(8, 8, 3, padding=1, rng=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        z = y.relu()
        both = cat([y, z, x, x], axis=1)
        return both + cat([x, y + z, (y + x).relu(), y * z], axis=1)


def test_shared_values_survive_fusion() -> None:
    assert_same(Shared(), images(2, 3, 7, 5))


def test_a_profile_sees_the_layers_of_a_plan() -> None:
    module, x = models.resnet8(), images(2, 3, 16, 16)
    plan = compile(module, x)
    eager = FLOPCounter().count_ops(module, x)
    with Recording() as recording:
        plan(x)
    planned = summarise(recording.events)
    assert planned.total == eager.total
    assert planned.by_layer.keys() == eager.by_layer.keys()


class Aside(nn.Module):
    """Numbers that go around the tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return x + Tensor(x.data * 2)


def test_numbers_that_go_around_the_tensors_are_refused() -> None:
    module = nn.Sequential(nn.ReLU(), Aside(), nn.ReLU())
    with pytest.raises(ConfigurationError, match=r"cannot be planned: layer '1' \(Add\) depends on the values"):
        compile(module, images(1, 2, 3, 3))


@pytest.mark.parametrize(("batch", "parts"), [(3, 2), (4, 2), (8, 2), (6, 3), (8, 4)])
def test_a_batch_is_not_planned_from_two_images_by_a_module_with_a_number_of_parts(batch: int, parts: int) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            self.conv = nn.Conv2d(3, 4, 3, padding=1, rng=0)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).mean((2, 3)).reshape(parts, -1)

    module, x = Parts().eval(), images(batch, 3, 8, 8)
    assert_same(module, x, compile(module, x))


def test_a_native_op_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Conv2d(2, 4, 3, rng=0), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, rng=1), nn.MaxPool2d(2)]
    means = OpSpec(lambda context, op, x: int(context.plan.pool(x[0], mean=True, **op.options)))
    monkeypatch.setitem(NATIVE_OPS, "max_pool", means)
    with pytest.raises(ConfigurationError, match=r"deviates at layer '2' \(MaxPool2d\)"):
        compile(nn.Sequential(*layers), images(2, 2, 12, 12))


def test_another_dtype_is_refused() -> None:
    plan = compile(models.resnet8(), images(1, 3, 8, 8))
    with pytest.raises(DtypeError, match="float32"):
        plan(np.zeros((1, 3, 8, 8)))


def test_nan_and_infinity_spread_as_in_the_module() -> None:
    module, x = models.vgg6(), images(1, 3, 16, 16)
    plan = compile(module, x)
    x[0, 1, 2, 3], x[0, 2, 9, 9] = np.nan, np.inf
    np.testing.assert_array_equal(np.isnan(plan(x)), np.isnan(own_result(module, x)))


def test_a_plan_keeps_the_weights_of_its_making_and_the_module_its_mode() -> None:
    module, x = models.cnn(), images(2, 1, 8, 8)
    module.train()
    plan = compile(module, x)
    assert module.training
    before = plan(x)
    for parameter in module.parameters():
        parameter.data[...] = 0
    np.testing.assert_array_equal(plan(x), before)


def test_a_thousand_passes_hold_no_more_memory_than_the_first() -> None:
    module, x = models.resnet8(), images(1, 3, 8, 8)
    plan = compile(module, x)
    plan(x)
    bytes_in_use = native.memory_in_use()
    for _ in range(1000):
        plan(x)
    assert native.memory_in_use() == bytes_in_use
