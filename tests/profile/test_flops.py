"""Promises of FLOPCounter: PyTorch's FlopCounterMode to the last digit, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise import Tensor, models, nn
from tilewise.backend import use_backend
from tilewise.errors import ConfigurationError
from tilewise.profile import FLOPCounter
from tilewise.profile.flops import Cost

torch = pytest.importorskip("torch")
F = torch.nn.functional


def torch_mlp():
    t = torch.nn
    return t.Sequential(t.Linear(64, 256), t.ReLU(), t.Linear(256, 128), t.ReLU(), t.Linear(128, 10))


def torch_vgg6():
    t, layers, channels = torch.nn, [], 3
    for filters in (64, 64, 0, 128, 128, 0, 256):
        layers += [t.Conv2d(channels, filters, 3, padding=1), t.ReLU()] if filters else [t.MaxPool2d(2)]
        channels = filters or channels
    return t.Sequential(*layers, t.AdaptiveAvgPool2d(1), t.Flatten(), t.Linear(256, 10))


class TorchBlock(torch.nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, filters, 3, stride, 1)
        self.conv2 = torch.nn.Conv2d(filters, filters, 3, 1, 1)
        self.skip = torch.nn.Conv2d(channels, filters, 1, stride) if stride != 1 or channels != filters else None

    def forward(self, x):
        shortcut = x if self.skip is None else self.skip(x)
        return F.relu(self.conv2(F.relu(self.conv1(x))) + shortcut)


def torch_resnet8():
    t = torch.nn
    blocks = [TorchBlock(16, 16, 1), TorchBlock(16, 32, 2), TorchBlock(32, 64, 2)]
    stem = [t.Conv2d(3, 16, 3, 1, 1), t.ReLU()]
    return t.Sequential(*stem, *blocks, t.AdaptiveAvgPool2d(1), t.Flatten(), t.Linear(64, 10))


class TorchGPTBlock(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        t = torch.nn
        self.heads = heads
        self.norm1, self.norm2 = t.LayerNorm(width), t.LayerNorm(width)
        self.qkv, self.out = t.Linear(width, 3 * width), t.Linear(width, width)
        self.up, self.down = t.Linear(width, 4 * width), t.Linear(4 * width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (c // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TorchGPT(torch.nn.Module):
    def __init__(self, layers=4, width=128, heads=4, vocab=65, context=256):
        super().__init__()
        t = torch.nn
        self.tokens, self.positions = t.Embedding(vocab, width), t.Embedding(context, width)
        self.blocks = t.Sequential(*(TorchGPTBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = t.LayerNorm(width), t.Linear(width, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))))


RNG = np.random.default_rng(0)
CASES = {
    "mlp": (models.mlp, torch_mlp, RNG.random((7, 64), dtype=np.float32)),
    "vgg6": (models.vgg6, torch_vgg6, RNG.random((1, 3, 32, 32), dtype=np.float32)),
    "resnet8": (models.resnet8, torch_resnet8, RNG.random((3, 3, 32, 32), dtype=np.float32)),
    "gpt": (models.gpt, TorchGPT, RNG.integers(0, 65, (2, 19))),
}


def torch_flops(model, x, backward=False):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as mode:
        y = model(torch.from_numpy(x))
        if backward:
            y.sum().backward()
    return mode.get_total_flops()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("name", CASES)
def test_flops_equal_pytorchs_counter(name, backward):
    ours, theirs, x = CASES[name]
    counts = FLOPCounter().count_ops(ours(), x, backward=backward)
    assert counts.total == torch_flops(theirs(), x, backward)
    assert sum(counts.by_layer.values()) == sum(counts.by_op.values()) == counts.total
    assert (counts.backward.flops > 0) == backward


def test_counts_do_not_depend_on_the_backend_or_on_what_is_fused():
    model, x = models.resnet8(), CASES["resnet8"][2]
    with use_backend("numpy"):
        plain = FLOPCounter().count_ops(model, x)
    assert FLOPCounter().count_ops(model, x).total == plain.total
    assert FLOPCounter().count_ops(model, x, backward=True).forward.flops == plain.total


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_with_stride_and_groups_equal_pytorchs(groups, stride):
    x = RNG.random((2, 8, 9, 7), dtype=np.float32)
    ours = nn.Conv2d(8, 12, 3, stride, padding=1, groups=groups)
    theirs = torch.nn.Conv2d(8, 12, 3, stride, 1, groups=groups)
    for backward in (False, True):
        assert FLOPCounter().count_ops(ours, x, backward).total == torch_flops(theirs, x, backward)


def test_products_of_any_rank_equal_pytorchs():
    for a, b in [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((6, 1, 3, 4), (2, 4, 5))]:
        x, y = RNG.random(a, dtype=np.float32), RNG.random(b, dtype=np.float32)
        ours = FLOPCounter().count_ops(lambda t, y=y: t @ Tensor(y), x)
        assert ours.total == torch_flops(lambda t, y=y: t @ torch.from_numpy(y), x)


def test_layers_are_named_as_in_the_state_dict():
    counts = FLOPCounter().count_ops(models.gpt(), CASES["gpt"][2])
    assert {"blocks.0.linear1", "blocks.3.self_attn.out_proj", "head"} <= counts.by_layer.keys()
    assert counts.by_layer["head"] == 2 * 2 * 19 * 128 * 65
    assert set(counts.by_op) == {"matmul", "attention"}


def test_elementwise_work_and_bytes_are_counted_apart():
    x = np.ones((10, 20), np.float32)
    counts = FLOPCounter().count_ops(lambda t: (t + t).relu().sum(), x)
    assert counts.total == 0
    assert counts.elementwise == 200 + 200 + 200
    assert counts.bytes_moved == (3 + 2 + 1) * 800 + 4
    assert counts.intensity == pytest.approx(600 / counts.bytes_moved)


def test_views_move_nothing():
    counts = FLOPCounter().count_ops(lambda t: t.reshape(4, 5).transpose()[1:], np.ones((2, 10), np.float32))
    assert counts.bytes_moved == 0


def test_counting_leaves_no_recorder_and_no_gradients_behind():
    model = models.mlp()
    FLOPCounter().count_ops(model, CASES["mlp"][2], backward=True)
    with pytest.raises(tilewise.errors.TilewiseError):
        FLOPCounter().count_ops(model, np.ones((2, 3), np.float32))
    assert tilewise._events.recorders == []
    assert all(p.grad is None for p in model.parameters())


def test_something_that_is_no_model_is_refused():
    with pytest.raises(ConfigurationError):
        FLOPCounter().count_ops(3, np.ones(3))
    with pytest.raises(ConfigurationError):
        FLOPCounter().count_ops(lambda x: 3, np.ones(3, np.float32), backward=True)


def test_costs_add_up():
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    assert Cost().intensity == 0.0
