"""Modules called with arrays of NumPy and PyTorch."""

import numpy as np
import pytest

from tilewise import Tensor, models, nn
from tilewise.errors import DtypeError, GradientError, ShapeError

torch = pytest.importorskip("torch")


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).random((4, 1, 8, 8), np.float32)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x,
        lambda x: x.astype(np.float64),
        lambda x: np.asfortranarray(x),
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x),
        lambda x: torch.from_numpy(x).double(),
    ],
)
def test_arrays_give_what_a_tensor_gives(images, convert):
    model = models.pretrained("cnn")
    result, expected = model(convert(images)), model(Tensor(images))
    assert np.allclose(np.asarray(result), expected.data, atol=1e-5)
    assert np.asarray(result).dtype == np.float32


def test_the_result_is_a_tensor_and_for_pytorch_tensors_a_pytorch_tensor(images):
    model = models.pretrained("cnn")
    assert type(model(images)) is Tensor
    assert type(model(torch.from_numpy(images))) is torch.Tensor
    assert type(model.train()(torch.from_numpy(images))) is Tensor


def test_arrays_have_the_gradients_of_a_tensor(images):
    model = models.pretrained("cnn")
    gradients = []
    for x in (images, Tensor(images)):
        model.zero_grad()
        model(x).sum().backward()
        gradients.append(model[0].weight.grad.data.copy())
    assert (gradients[0] == gradients[1]).all()


def test_several_inputs_may_be_arrays():
    class Sum(nn.Module):
        def forward(self, a, b):
            return a + b

    assert Sum().eval()(np.ones(3, np.float32), b=np.ones(3, np.float32)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.array(["a"]), DtypeError, "Sequential takes numbers, not <U1"),
        (np.zeros((8, 8), np.float32), ShapeError, "four dimensions"),
        (np.zeros((1, 3, 8, 8), np.float32), ShapeError, "cannot apply weights"),
        ("text", DtypeError, "takes Tensors, not a str"),
        (None, DtypeError, "takes Tensors, not a NoneType"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16), DtypeError, r"pass x\.float\(\)"),
        (torch.zeros(1, 1, 8, 8, requires_grad=True), GradientError, r"pass x\.detach\(\)"),
    ],
)
def test_wrong_inputs_are_one_sentence(value, error, message):
    with pytest.raises(error, match=message):
        models.pretrained("cnn")(value)
