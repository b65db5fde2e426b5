"""TileRanker's training step by the compiled kernels: loss, scores and gradients of the plain way, whatever the sizes,
the instruction set and the number of threads."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tilewise._extension import native  # noqa: E402
from tilewise.costmodel.features.inputs import ModelInputs  # noqa: E402
from tilewise.costmodel.models.torch import build_model  # noqa: E402
from tilewise.costmodel.models.torch.ragged import collate  # noqa: E402
from tilewise.costmodel.models.torch.ranker import TileRanker  # noqa: E402
from tilewise.costmodel.training.losses import parse_losses  # noqa: E402

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not here")

GLOBAL = 3
CASES = [  # nodes of each kernel, configurations, width, members, blocks, layers of the graph network
    ((4, 1, 9), 20, 96, 4, 2, 2),
    ((2,), 3, 5, 1, 1, 1),
    ((40, 130), 7, 16, 3, 0, 0),  # more nodes than the network is wide
    ((3, 3, 3, 3, 3), 33, 24, 2, 3, 3),
]
LOSS = parse_losses("FastestFirst:1,LogMSE:0.3")


def batch_of(nodes, configs, seed=0):
    rng = np.random.default_rng(seed)
    parts = []
    for number, count in enumerate(nodes):
        edges = rng.integers(0, count, (count + 1, 2)).astype(np.int32)
        config = rng.standard_normal((max(1, configs - number), GLOBAL + 11)).astype(np.float32)
        node = rng.standard_normal((count, 6)).astype(np.float32)
        parts.append(ModelInputs(node, rng.integers(0, 121, count), edges, config))
    return collate(parts, [rng.uniform(1, 3, len(part.config)) for part in parts])


def network(width, members, blocks, gnns):
    torch.manual_seed(0)
    sizes = {"hidden_dim": width, "members": members, "num_blocks": blocks, "num_gnns": gnns}
    model = build_model("TileRanker", 6, GLOBAL + 11, sizes | {"dropout": 0.0, "global_width": GLOBAL})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def learned(model, batch):
    """Loss, scores and gradients."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # it is added to
    loss, scores = model.learn(batch, LOSS)
    return [np.array(loss), scores.numpy(), *(parameter.grad.numpy() - 1 for parameter in model.parameters())]


def plainly(model, batch):
    model = copy.deepcopy(model)
    scores = model(batch)
    members = scores.shape[1]
    target, mask = (part.repeat_interleave(members, 0) for part in (batch.target, batch.mask))
    loss = LOSS(scores.flatten(0, 1), target, mask)
    loss.backward()
    return [
        loss.detach().numpy(),
        scores.detach().numpy(),
        *(parameter.grad.numpy() for parameter in model.parameters()),
    ]


@pytest.fixture(params=native.supported_isas() if native else [])
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@pytest.mark.parametrize(("nodes", "configs", "width", "members", "blocks", "gnns"), CASES)
def test_loss_scores_and_gradients_are_those_of_autograd(nodes, configs, width, members, blocks, gnns, isa):
    model, batch = network(width, members, blocks, gnns), batch_of(nodes, configs)
    for ours, plain in zip(learned(model, batch), plainly(model, batch), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=5e-5 * max(1.0, float(np.abs(plain).max())))


def test_dropout_leaves_the_mean_and_follows_the_seed():
    model, batch = network(16, 2, 1, 1), batch_of((3, 4), 6)
    without, model.dropout = learned(model, batch)[1], 0.3
    positions = []
    for seed in [*range(200), 0]:
        torch.manual_seed(seed)
        positions.append(learned(model, batch)[1])
    assert np.array_equal(positions[0], positions[-1]) and not np.array_equal(positions[0], positions[1])
    assert np.abs(np.mean(positions, axis=0) - without).mean() < 0.5 * np.std(positions, axis=0).mean()


def test_the_number_of_threads_changes_no_bit():
    model, batch = network(32, 4, 2, 2), batch_of((5, 2, 7), 40)
    threads, results = native.num_threads(), []
    for count in (1, 2, 3):
        native.set_num_threads(count)
        results.append(learned(model, batch))
    native.set_num_threads(threads)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


class Halved(TileRanker):
    """A user's own, made from ours."""

    def forward(self, batch):
        return super().forward(batch) / 2


def test_a_class_made_from_it_learns_by_its_own_forward():
    assert TileRanker(6, 5).compiled and not Halved(6, 5).compiled


def arguments():
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 5), (4, 12), (2, 6), (4, 6), (4,), (4, 6), (2, 6, 6), (2, 6), (12, 2))
    config, wide, first, keys, offsets, values, weight, bias, last = (
        rng.standard_normal(shape).astype(np.float32) for shape in shapes
    )
    return [config, 1, wide, first, np.array([0, 1, 4]), keys, offsets, values, [weight], [bias], last]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (1, 5),
        (1, -1),
        (2, np.zeros((4, 11), np.float32)),
        (4, np.array([0, 1, 5])),
        (4, np.array([0, 0, 4])),
        (4, np.array([0, 4])),
        (6, np.zeros(3, np.float32)),
        (8, []),
        (9, [np.zeros((2, 5), np.float32)]),
        (10, np.zeros((12, 3), np.float32)),
    ],
)
def test_what_does_not_fit_is_refused(place, wrong):
    native.ranker_rows_forward(*arguments())
    with pytest.raises(ValueError, match=r"\w+"):
        native.ranker_rows_forward(*[wrong if i == place else value for i, value in enumerate(arguments())])
