"""EarlyJoinSAGE by the compiled kernels: the function and the gradients of the plain one, whatever the sizes, the
instruction set and the number of threads."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tilewise._extension import native  # noqa: E402
from tilewise.costmodel.features.inputs import ModelInputs  # noqa: E402
from tilewise.costmodel.models.numpy import baselines as numpy_baselines  # noqa: E402
from tilewise.costmodel.models.torch import build_model, score_inputs  # noqa: E402
from tilewise.costmodel.models.torch.ragged import collate  # noqa: E402

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not here")

CASES = [
    (64, 3, 10, (40, 30, 1, 50)),
    (30, 2, 3, (5, 9)),
    (7, 1, 4, (3, 600)),  # a graph that is cut into several tasks
    (64, 4, 1, (12,)),
    (16, 3, 300, (4, 2)),
]


def graph(nodes: int, configs: int, rng: np.random.Generator) -> ModelInputs:
    """With repeated edges and edges from a node to itself."""
    edges = rng.integers(0, nodes, (nodes + 3, 2)).astype(np.int32)
    node, config = rng.random((nodes, 9)).astype(np.float32), rng.random((configs, 5)).astype(np.float32)
    return ModelInputs(node, rng.integers(0, 121, nodes), edges, config)


def network(width: int, depth: int):
    torch.manual_seed(0)
    model = build_model("EarlyJoinSAGE", 9, 5, {"hidden_dim": width, "num_gnns": depth})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def scores_and_gradients(model, batch):
    model = copy.deepcopy(model)
    scores = model(batch)
    (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    return [scores.detach().numpy(), *(parameter.grad.numpy() for parameter in model.parameters())]


@pytest.fixture
def plainly(monkeypatch):
    def without_kernels(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr("tilewise.costmodel.models.torch.baselines.available", lambda name: False)
            return scores_and_gradients(*arguments)

    return without_kernels


@pytest.mark.parametrize("isa", native.supported_isas() if native is not None else [])
@pytest.mark.parametrize(("width", "depth", "configs", "sizes"), CASES)
def test_scores_and_gradients_are_those_of_autograd(isa, width, depth, configs, sizes, plainly):
    rng, before = np.random.default_rng(width), native.isa()
    batch, model = collate([graph(n, configs, rng) for n in sizes]), network(width, depth)
    expected = plainly(model, batch)
    native.set_isa(isa)
    try:
        results = scores_and_gradients(model, batch)
    finally:
        native.set_isa(before)
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * max(1.0, float(np.abs(theirs).max())))


def test_results_do_not_depend_on_the_number_of_threads():
    rng, before = np.random.default_rng(0), native.num_threads()
    batch, model = collate([graph(n, 20, rng) for n in (40, 33, 90, 7)]), network(64, 3)
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_num_threads(threads)
            results.append(scores_and_gradients(model, batch))
    finally:
        native.set_num_threads(before)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_numpy_scorer_gives_the_same_as_the_kernels():
    rng, model = np.random.default_rng(1), network(64, 3).eval()
    weights, part = {k: v.numpy() for k, v in model.state_dict().items()}, graph(31, 70, rng)
    scores = numpy_baselines.score("EarlyJoinSAGE", weights, {}, part)
    np.testing.assert_allclose(scores, score_inputs(model, part), rtol=2e-5, atol=2e-5)


def test_a_node_without_length_keeps_its_gradient_finite(plainly):
    model, rng = network(8, 2), np.random.default_rng(2)
    with torch.no_grad():
        for parameter in model.gnn.parameters():
            parameter.mul_(1e-9)
    batch = collate([graph(6, 3, rng)])
    for ours, theirs in zip(scores_and_gradients(model, batch), plainly(model, batch), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


def test_neighbour_lists_hold_both_ends_of_every_edge():
    rng = np.random.default_rng(0)
    parts = [graph(n, 1, rng) for n in (4, 1, 6)]
    batch = collate(parts)
    first_node, first, neighbours = batch.neighbour_lists
    assert first_node.tolist() == [0, 4, 5, 11] and first[-1] == len(neighbours)
    for start, part in zip(first_node, parts, strict=False):
        for node in range(len(part.node)):
            expected = [v for u, v in part.edges if u == node] + [u for u, v in part.edges if v == node]
            own = neighbours[first[start + node] : first[start + node + 1]]
            assert sorted(own.tolist()) == sorted(expected)


@pytest.mark.parametrize("damage", ["neighbour", "edges", "nodes", "width", "layer"])
def test_tables_that_do_not_fit_are_refused(damage):
    first_node, first_edge, near = np.array([0, 2]), np.array([0, 1, 2]), np.array([1, 0], np.int32)
    nodes, configs, bias = np.ones((2, 8), np.float32), np.ones((1, 3, 8), np.float32), np.ones(4, np.float32)
    kernels, biases = [np.ones((8, 4), np.float32)], [bias]
    if damage == "neighbour":
        near = np.array([2, 0], np.int32)
    if damage == "edges":
        first_edge = np.array([0, 5, 2])
    if damage == "nodes":
        first_node = np.array([0, 3])
    if damage == "width":
        configs = configs[..., :6].copy()
    if damage == "layer":
        kernels = [np.ones((4, 4), np.float32)]
    with pytest.raises(ValueError, match=r"\w"):
        native.sage_forward(nodes, configs, bias, kernels, biases, first_node, first_edge, near, False)
