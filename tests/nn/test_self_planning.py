"""Modules that compile themselves: when they do, when they do not, and that results stay right."""

import copy
import gc
import threading
import weakref

import numpy as np
import pytest

import tilewise as tw
from tilewise import Tensor, models, nn, no_grad, optim
from tilewise._extension import native
from tilewise.nn.self_planning import layer_by_layer
from tilewise.profile import FLOPCounter

pytestmark = pytest.mark.skipif(native is None, reason="plans need the compiled kernels")


@pytest.fixture
def model():
    return models.cnn(seed=3).eval()


@pytest.fixture
def images():
    return np.random.default_rng(1).random((4, 1, 8, 8), np.float32)


def by_layers(model, *inputs):
    with no_grad(), layer_by_layer():
        return model(*map(Tensor, inputs)).data


def assert_close(result, expected):
    assert np.allclose(np.asarray(result), expected, atol=1e-4 * np.abs(expected).max())


def is_planned(model):
    return ": planned" in tw.explain(model)


def test_a_module_in_eval_mode_plans_itself(model, images):
    assert_close(model(images), by_layers(model, images))
    assert is_planned(model)
    with no_grad():
        assert (model(Tensor(images)).data == model(images).data).all()


def test_training_and_gradients_run_layer_by_layer(model, images):
    assert model(Tensor(images)).requires_grad
    model.train()
    with no_grad():
        model(images)
    assert "was not called yet" in tw.explain(model)


def test_the_gradient_of_a_planned_call_is_that_of_the_layers(model, images):
    expected = model(Tensor(images))
    (expected * expected).sum().backward()
    gradients = [parameter.grad.data for parameter in model.parameters()]
    model.zero_grad()
    del expected
    planned = model(images)
    assert is_planned(model)
    model.train()  # the gradient is that of the call in eval mode
    (planned * planned).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient)
    assert model.training


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.mul_(2),
        lambda m: m[0].weight.fill_(0.1),
        lambda m: m[0].weight.data.__setitem__(3, 0.5),
        lambda m: np.asarray(m[0].weight).__setitem__(0, 0.5),
        lambda m: m[0].weight.numpy().__imul__(0.5),
        lambda m: m[0].weight.detach().data.__setitem__(..., 0.1),
        lambda m: m[0].weight[0].data.__setitem__(..., 0.1),
        lambda m: m[0].weight.reshape(-1).copy_(np.ones(m[0].weight.size)),
        lambda m: np.from_dlpack(m[0].weight).__setitem__(0, 0.5),
        lambda m: m[1].running_mean.data.__setitem__(0, 5),
        lambda m: m[1].running_var.copy_(np.full(32, 3)),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.data * 2)),
        lambda m: setattr(m[1], "eps", 2.0),
        lambda m: m.__setitem__(2, nn.GELU()),
        lambda m: m.load_state_dict(models.cnn(seed=9).state_dict()),
        lambda m: m.state_dict()["0.bias"].add_(3),
        lambda m: m.astype(np.float64),
    ],
)
def test_a_change_of_the_module_is_noticed(model, images, change):
    for _ in range(2):  # the second time there is a plan again
        model(images)
        assert is_planned(model)
        with no_grad():
            change(model)
        changed = by_layers(model, images)
        for _ in range(6):
            assert_close(model(images), changed)
        if model[0].weight.dtype != np.float32:
            break


def test_an_optimizer_step_is_noticed(model, images):
    model(images)
    model.train()
    model(images).sum().backward()
    optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    assert_close(model(images), by_layers(model, images))


def test_an_array_that_was_taken_out_before_the_first_call_is_compared(model, images):
    weight, state = model[0].weight.data, model.state_dict()
    model(images)
    assert is_planned(model)
    weight[...] = 0.25
    assert_close(model(images), by_layers(model, images))
    [model(images) for _ in range(4)]
    assert is_planned(model)
    state["3.bias"].data[2] = 7
    assert_close(model(images), by_layers(model, images))


def test_an_array_that_two_of_its_weights_share_is_planned_and_watched():
    model = nn.Sequential(nn.Linear(8, 8, rng=0), nn.ReLU(), nn.Linear(8, 8, rng=1)).eval()
    x = np.ones((2, 8), np.float32)
    model[2].weight._array = model[0].weight._array  # as a file with equal constants is loaded
    with no_grad():
        assert_close(model(x), by_layers(model, x))
        assert "planned" in tw.explain(model)
        model[2].weight.data[...] = 0.25
        assert_close(model(x), by_layers(model, x))


def test_a_layer_in_train_mode_is_not_planned(images):
    model = nn.Sequential(*models.cnn(seed=0), nn.Dropout(0.5)).eval()
    model[-1].train()
    with no_grad():
        assert (model(images).data == 0).any()
    assert "train mode" in tw.explain(model)
    model.eval()
    assert_close(model(images), by_layers(model, images))


def test_a_module_that_changes_at_every_call_is_rarely_planned(images, monkeypatch):
    model, compiled = models.mlp().eval(), []
    from tilewise.graph import plan as module

    build = module.SelfPlan.__init__
    monkeypatch.setattr(module.SelfPlan, "__init__", lambda *args: (compiled.append(1), build(*args))[1])
    x = np.random.default_rng(0).random((2, 64), np.float32)
    for step in range(60):
        with no_grad():
            model[0].bias.fill_(step / 100)
        assert_close(model(x), by_layers(model, x))
    assert len(compiled) <= 6


def test_new_batch_sizes_are_planned_and_many_shapes_are_not(model):
    images = np.random.default_rng(1).random((16, 1, 8, 8), np.float32)
    for batch in range(1, 17):
        assert_close(model(images[:batch]), by_layers(model, images[:batch]))
    assert tw.explain(model).count(": planned") == 4
    model(images[:9])
    model(images[:9])
    assert "(9, 1, 8, 8) float32: planned" in tw.explain(model)


def test_the_switch_and_other_backends_are_obeyed(model, images):
    from tilewise.backend import use_backend

    tw.set_self_planning(False)
    try:
        model(images)
        assert "self-planning is off" in tw.explain(model)
    finally:
        tw.set_self_planning(True)
    with use_backend("numpy"):
        model(images)
    assert not is_planned(model)
    with pytest.raises(tw.errors.ConfigurationError, match="True or False"):
        tw.set_self_planning(0)
    assert tw.get_self_planning() is True


def test_a_profile_sees_the_layers(model, images):
    model(images)
    counts = FLOPCounter().count_ops(model, images)
    assert {"0", "3"} <= set(counts.by_layer)


def test_copies_and_lifetime(model, images):
    model(images)
    other = copy.deepcopy(model)
    assert "was not called yet" in tw.explain(other) or not is_planned(other)
    assert_close(other(images), by_layers(model, images))
    gc.disable()
    try:
        layer_ref = weakref.ref(model[0])
        reference = weakref.ref(other[0])
        del other
        assert reference() is None
    finally:
        gc.enable()
    assert layer_ref() is not None


def test_several_threads_may_call_one_module(model, images):
    expected = {batch: by_layers(model, images[:batch]) for batch in (1, 2, 3, 4)}
    wrong = []

    def work(batch):
        for _ in range(20):
            if not np.allclose(model(images[:batch]).data, expected[batch], atol=1e-4):
                wrong.append(batch)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in (1, 2, 3, 4, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Custom(nn.Module):
    """A module of somebody else, with one oddity at a time."""

    def __init__(self, oddity=""):
        self.first, self.second = nn.Linear(8, 8, rng=0), nn.Linear(8, 8, rng=1)
        self.oddity, self.scale, self.sizes, self.calls = oddity, 2.0, [1, 2], 0

    def forward(self, x):
        x = self.first(x).relu()
        if self.oddity == "branch" and x.max() > 100:
            return x * 0
        if self.oddity == "data" and (x.data > 100).any():
            return x * 0
        if self.oddity == "where":
            x = tw.where(x > 100, x * 0, x)
        if self.oddity == "counter":
            self.calls += 1
        if self.oddity == "list":
            self.sizes.append(1)
        return self.second(x) * self.scale * self.sizes[0]


@pytest.mark.parametrize("oddity", ["branch", "data", "where", "counter", "list"])
def test_code_that_a_plan_would_not_repeat_runs_layer_by_layer(oddity):
    model = Custom(oddity).eval()
    x = np.random.default_rng(0).random((2, 8), np.float32)
    for factor in (1, 1, 1000):
        assert_close(model(x * factor), by_layers(model, x * factor))
    assert "layer by layer" in tw.explain(model)


def test_a_module_of_the_user_is_planned_and_watched():
    model = Custom().eval()
    x = np.random.default_rng(0).random((2, 8), np.float32)
    model(x)
    assert is_planned(model)
    model.scale = 3.0
    assert_close(model(x), by_layers(model, x))
    [model(x) for _ in range(8)]
    assert is_planned(model)
    model.sizes[0] = 5
    assert_close(model(x), by_layers(model, x))
    model.rng = np.random.default_rng(0)
    [model(x) for _ in range(40)]
    assert "whose changes cannot be noticed" in tw.explain(model)


def test_errors_are_those_of_the_layers(model):
    for _ in range(2):
        with pytest.raises(tw.errors.ShapeError, match="cannot apply weights"):
            model(np.zeros((1, 3, 8, 8), np.float32))
    assert "layer by layer, because" in tw.explain(model)


def test_a_loaded_network_takes_its_inputs_by_name_and_plans_itself(model, images, tmp_path):
    tw.onnx.save(model, tmp_path / "cnn.onnx")
    network = tw.onnx.load(tmp_path / "cnn.onnx")
    (name,) = [port.name for port in network.inputs]
    for result in (network(images), network(**{name: images}), network({name: images.astype(np.float64)})):
        assert_close(result, by_layers(model, images))
    assert is_planned(network)


def test_compile_is_a_public_name(model, images):
    assert_close(tw.compile(model, images)(images), by_layers(model, images))
