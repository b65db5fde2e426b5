"""Modules: PyTorch's names and states, modes, fusing, and the transformer block with and without a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_reference import assert_close

import tilewise as tw
from tilewise import nn
from tilewise.errors import TilewiseError


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


LAYERS = {
    "Linear": (lambda: nn.Linear(5, 3, rng=0), lambda: torch.nn.Linear(5, 3), (4, 5)),
    "Conv2d": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), groups=2, bias=False, rng=0),
        lambda: torch.nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), groups=2, bias=False),
        (2, 4, 7, 8),
    ),
    "Conv2d same": (
        lambda: nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2), rng=0),
        lambda: torch.nn.Conv2d(2, 3, (4, 3), padding="same", dilation=(1, 2)),
        (2, 2, 7, 8),
    ),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), lambda: torch.nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm((3, 4)), lambda: torch.nn.LayerNorm((3, 4)), (2, 3, 4)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), lambda: torch.nn.MaxPool2d(3, 2, 1), (2, 3, 7, 7)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, 2, 1), lambda: torch.nn.AvgPool2d(3, 2, 1), (2, 3, 7, 7)),
    "Flatten": (nn.Flatten, torch.nn.Flatten, (2, 3, 4)),
    "ReLU": (nn.ReLU, torch.nn.ReLU, (2, 3)),
    "GELU": (nn.GELU, torch.nn.GELU, (2, 3)),
    "Sequential": (
        lambda: nn.Sequential(nn.Linear(5, 7, rng=0), nn.GELU(), nn.Linear(7, 2, rng=1), nn.ReLU()),
        lambda: torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 2), torch.nn.ReLU()),
        (3, 5),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_pytorch_in_training_and_inference(backend, name):
    make_ours, make_theirs, shape = LAYERS[name]
    ours, theirs = make_ours(), make_theirs()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = normal(*shape)
    assert_close(ours(tw.Tensor(x)), theirs(torch.from_numpy(x)).detach())
    for key, value in ours.state_dict().items():  # batch norm's running statistics moved alike
        np.testing.assert_allclose(value, theirs.state_dict()[key], rtol=1e-5, atol=1e-6)
    ours.eval(), theirs.eval()
    with tw.no_grad():
        assert_close(ours(tw.Tensor(x)), theirs(torch.from_numpy(x)).detach())


def test_the_block_equals_pytorchs_encoder_layer_with_its_own_weights(backend):
    theirs = torch.nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
    ours = nn.TransformerBlock(16, 4)
    ours.load_state_dict(theirs.state_dict())
    x = normal(2, 5, 16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    expected = theirs(torch.from_numpy(x), src_mask=mask, is_causal=True).detach()
    assert_close(ours(tw.Tensor(x)), expected)
    with tw.no_grad():
        assert_close(ours(tw.Tensor(x)), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention_equals_pytorchs(backend, causal):
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    ours = nn.MultiHeadAttention(12, 3, causal=causal)
    ours.load_state_dict(theirs.state_dict())
    x = torch.from_numpy(normal(2, 6, 12))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6) if causal else None
    assert_close(ours(tw.Tensor(x.numpy())), theirs(x, x, x, attn_mask=mask, need_weights=False)[0].detach())


class ListCache:
    """The simplest thing a block may be handed as one layer's cache."""

    def __init__(self) -> None:
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def append(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.keys.append(np.array(k))
        self.values.append(np.array(v))
        return np.concatenate(self.keys, axis=2), np.concatenate(self.values, axis=2)


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 1, 2, 1]])
def test_a_model_fed_piece_by_piece_with_a_cache_gives_the_same_logits(backend, pieces):
    model = nn.GPT(2, 16, 4, vocab=11, context=8, rng=0)
    ids = np.random.default_rng(0).integers(0, 11, (2, 7))
    with tw.no_grad():
        whole = model(ids).data
        caches, at, parts = [ListCache(), ListCache()], 0, []
        for n in pieces:
            parts.append(model(ids[:, at : at + n], caches, position=at).data)
            at += n
    assert_close(np.concatenate(parts, axis=1), whole)


def test_sequential_folds_batch_norm_only_in_inference():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, rng=0), nn.BatchNorm2d(3), nn.ReLU())
    x = tw.Tensor(normal(4, 2, 6, 6))
    model(x)
    tracked = int(model[1].num_batches_tracked)
    model.eval()
    recorded = model(x)
    assert recorded.requires_grad
    with tw.no_grad():
        assert_close(model(x), recorded)
    assert int(model[1].num_batches_tracked) == tracked == 1


def test_changing_weights_shows_in_the_next_fused_inference():
    model = nn.Sequential(nn.Conv2d(1, 1, 1, rng=0), nn.BatchNorm2d(1), nn.ReLU()).eval()
    x = tw.Tensor(np.ones((1, 1, 1, 1), np.float32))
    with tw.no_grad():
        model(x)
        np.asarray(model[0].weight)[...] = 5
        np.asarray(model[0].bias)[...] = 0
        assert model(x).item() == pytest.approx(5, rel=1e-4)


def test_modules_list_what_is_inside_them_once():
    shared = nn.Linear(2, 2, rng=0)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    assert len(model) == 3
    assert len(model[:2]) == 2
    model[1] = nn.GELU()
    assert isinstance(model[1], nn.GELU)


def test_modes_and_gradients_reach_every_module():
    model = nn.Sequential(nn.Linear(2, 2, rng=0), nn.Dropout(0.5, rng=0))
    assert model[1].training
    assert not model.eval()[1].training
    assert model.train()[1].training
    model(tw.Tensor(normal(3, 2))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert model.astype(np.float64)(tw.Tensor(normal(3, 2).astype(np.float64))).dtype == np.float64


def test_impossible_layers_get_one_sentence():
    for call in (
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.Conv2d(3, 4, 3, stride=2, padding="same"),
        lambda: nn.MultiHeadAttention(10, 3),
        lambda: nn.MultiHeadAttention(4, 2)(tw.Tensor(normal(3, 4))),
        lambda: nn.BatchNorm2d(2)(tw.Tensor(normal(3, 2))),
        lambda: nn.Linear(3, 2)(tw.Tensor(normal(4, 5))),
    ):
        with pytest.raises(TilewiseError):
            call()
