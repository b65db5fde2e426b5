"""The reference models equal PyTorch's: same names, same results, same loss curves."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as TF
from torch_reference import assert_close

import tilewise as tw
from benchmarks import torch_models
from tilewise import data, interop, models, optim
from tilewise.errors import FileFormatError, TilewiseError
from tilewise.generate.gpt2 import load_gpt
from tilewise.io import save
from tilewise.models.saved import load_saved
from tilewise.nn import functional as F

PARAMETERS = {"mlp": 50_826, "cnn": 58_634, "resnet8": 77_706, "vgg6": 557_898, "gpt": 842_752}
VOCAB = 65


def pair(name: str, **settings: object):
    """Our model and PyTorch's with our weights."""
    ours, theirs = getattr(models, name)(**settings), torch_models.MODELS[name](**settings)
    theirs.load_state_dict(interop.to_torch(ours))
    return ours, theirs


def batch(name: str, n: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    if name == "gpt":
        ids = rng.integers(0, VOCAB, (n, 33))
        return ids[:, :-1], ids[:, 1:]
    shape = {"mlp": (64,), "cnn": (1, 8, 8)}.get(name, (3, 32, 32))
    return rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, 10, n)


def inputs(name: str, x: np.ndarray):
    return (x, torch.from_numpy(x)) if name == "gpt" else (tw.Tensor(x), torch.from_numpy(x))


@pytest.mark.parametrize("name", PARAMETERS)
def test_results_gradients_and_names_equal_pytorch(backend, name):
    ours, theirs = pair(name)
    assert sum(p.size for p in ours.parameters()) == PARAMETERS[name]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, y = batch(name, 3)
    a, b = inputs(name, x)
    logits, expected = ours(a), theirs(b)
    assert_close(logits, expected.detach())
    F.cross_entropy(logits, y).backward()
    TF.cross_entropy(expected.reshape(-1, expected.shape[-1]), torch.from_numpy(y).reshape(-1)).backward()
    grads = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        assert_close(p.grad, grads[key].grad, what=key)


@pytest.mark.parametrize("name", PARAMETERS)
def test_inference_with_fused_steps_equals_pytorch_in_eval_mode(backend, name):
    ours, theirs = pair(name)
    x, _ = batch(name, 2)
    a, b = inputs(name, x)
    ours(a), theirs(b)  # moves the running statistics of the batch norms
    ours.eval(), theirs.eval()
    with tw.no_grad(), torch.no_grad():
        assert_close(ours(a), theirs(b))


def learnable_batch(name: str, step: int):
    """Real digits, pictures with a pattern per class, or real text."""
    rng = np.random.default_rng(step)
    if name == "mlp":
        digits = data.digits().flat()
        rows = rng.integers(0, len(digits.x_train), 32)
        return digits.x_train[rows], digits.y_train[rows]
    if name == "gpt":
        return data.TextLoader(data.text().train % VOCAB, 4, 32, seed=step).next()
    y = rng.integers(0, 10, 8)
    patterns = np.kron(np.random.default_rng(9).standard_normal((10, 3, 2, 2)), np.ones((16, 16)))
    return (patterns[y] + 0.3 * rng.standard_normal((8, 3, 32, 32))).astype(np.float32), y


@pytest.mark.parametrize("name", ["mlp", "resnet8", "gpt"])
def test_fifty_training_steps_give_pytorchs_loss_curve(name):
    ours, theirs = pair(name)
    if name == "mlp":
        mine, reference = optim.SGD(ours.parameters(), 0.05, 0.9), torch.optim.SGD(theirs.parameters(), 0.05, 0.9)
    else:
        mine, reference = optim.AdamW(ours.parameters(), 1e-3), torch.optim.AdamW(theirs.parameters(), 1e-3)
    curves: tuple[list[float], list[float]] = ([], [])
    for step in range(50):
        x, y = learnable_batch(name, step)
        a, b = inputs(name, x)
        mine.zero_grad(), reference.zero_grad()
        loss = F.cross_entropy(ours(a), y)
        logits = theirs(b)
        expected = TF.cross_entropy(logits.reshape(-1, logits.shape[-1]), torch.from_numpy(y).reshape(-1))
        loss.backward(), expected.backward()
        mine.step(), reference.step()
        curves[0].append(loss.item())
        curves[1].append(expected.item())
    difference = np.abs(np.array(curves[0]) / np.array(curves[1]) - 1)
    assert curves[1][-1] < 0.7 * curves[1][0], "the loss must fall, or equal curves say little"
    assert difference.max() <= 1e-3, f"largest relative difference {difference.max():.2e} at step {difference.argmax()}"


def test_a_pytorch_state_dict_loads_and_a_foreign_one_is_refused_whole():
    ours, theirs = models.cnn(), torch_models.cnn()
    ours.load_state_dict(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        np.testing.assert_array_equal(ours.state_dict()[name], value)
    before = {k: np.array(v) for k, v in ours.state_dict().items()}
    theirs = torch_models.cnn()
    state = interop.from_torch(theirs)
    assert state.keys() == interop.from_torch(theirs.state_dict()).keys()
    wrong = [
        {k: v for k, v in state.items() if k != "0.bias"},
        state | {"more": tw.Tensor([1.0])},
        state | {"1.bias": tw.Tensor(np.zeros(3, np.float32))},
        state | {"1.num_batches_tracked": tw.Tensor(np.zeros((), np.float32))},
    ]
    for bad in wrong:
        with pytest.raises(TilewiseError) as caught:
            ours.load_state_dict(bad)
        assert "\n" not in str(caught.value)
    for key, value in ours.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("name", PARAMETERS)
def test_saved_models_load_bit_for_bit(tmp_path, name):
    model = getattr(models, name)(seed=1)
    tw.save(model, tmp_path / "model.safetensors")
    other = getattr(models, name)(seed=2)
    other.load_state_dict(tw.load(tmp_path / "model.safetensors"))
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[key], value)


def test_seeds_decide_the_initial_weights_and_bounds_are_pytorchs():
    same, again, other = models.mlp(seed=3), models.mlp(seed=3), models.mlp(seed=4)
    np.testing.assert_array_equal(same[0].weight, again[0].weight)
    assert not np.array_equal(same[0].weight, other[0].weight)
    weight = same[0].weight.data
    assert 0.99 * 0.125 < np.abs(weight).max() <= 0.125
    assert abs(weight.mean()) < 0.005
    embedding = models.gpt(seed=0).token_embedding.weight.data
    assert abs(embedding.std() - 1) < 0.05


def test_impossible_models_get_one_sentence():
    for call in (lambda: models.gpt("5x5"), lambda: models.cnn(size=3), lambda: models.gpt()(np.zeros((1, 257), int))):
        with pytest.raises(TilewiseError):
            call()


def test_the_cnn_takes_mnist_sizes():
    assert models.cnn(size=28)(tw.Tensor(np.zeros((2, 1, 28, 28), np.float32))).shape == (2, 10)


@pytest.mark.parametrize(
    "state",
    [
        {"0.weight": (1, 10**6), "0.bias": (256,), "4.weight": (10, 1)},
        {"0.weight": (1, 10**6, 3, 3), "12.weight": (10, 64)},
        {"fc.weight": (10**6, 1)},
        {"token_embedding.weight": (1, 2048), "position_embedding.weight": (10**6, 1), "blocks.0.x": (1,)},
        {"token_embedding.weight": (2, 64), "position_embedding.weight": (2, 64)}
        | {f"blocks.{n}.norm1.weight": (0,) for n in range(5000)},
    ],
)
def test_a_file_that_claims_a_larger_model_than_it_holds_costs_nothing(tmp_path, state):
    save({name: np.zeros(shape, np.float32) for name, shape in state.items()}, tmp_path / "x")
    for load in (load_saved, load_gpt):
        tracemalloc.start()
        with pytest.raises(FileFormatError):
            load(tmp_path / "x")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000_000


def test_a_tensor_with_other_axes_is_one_sentence(tmp_path):
    state = {name: np.asarray(tensor) for name, tensor in models.cnn().state_dict().items()}
    save(state | {"12.weight": np.zeros(2560, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(FileFormatError):
        load_saved(tmp_path / "x.safetensors")


@pytest.mark.parametrize("token", ["token_embedding.weight", "wte.weight"])
def test_a_gpt_file_without_positions_is_one_sentence(tmp_path, token):
    position = token.replace("token", "position").replace("wte", "wpe")
    save({token: np.ones((4, 8), np.float32), position: np.float32(1)}, tmp_path / "gpt.safetensors")
    with pytest.raises(FileFormatError, match="GPT"):
        load_gpt(tmp_path / "gpt.safetensors")
