"""The models against their definitions written out plainly, pair by pair, and the NumPy scorer against torch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from costmodel.simulated import simulated_kernels  # noqa: E402
from tilewise.costmodel.data.dataset import dataset_from_kernels  # noqa: E402
from tilewise.costmodel.features.inputs import ModelInputs  # noqa: E402
from tilewise.costmodel.features.ranker import RankerFeatures  # noqa: E402
from tilewise.costmodel.features.scaling import MinMax  # noqa: E402
from tilewise.costmodel.models.numpy import baselines as numpy_baselines  # noqa: E402
from tilewise.costmodel.models.numpy import ranker as numpy_ranker  # noqa: E402
from tilewise.costmodel.models.torch import (  # noqa: E402
    MODELS,
    build_model,
    score_inputs,
)
from tilewise.costmodel.models.torch.ragged import collate, sparse_matrix  # noqa: E402
from tilewise.costmodel.training.config import parse_kwargs  # noqa: E402
from tilewise.errors import ConfigurationError  # noqa: E402

BASELINES = [name for name in MODELS if name != "TileRanker"]


@pytest.fixture(scope="module")
def data():
    kernels = simulated_kernels(10, seed=3, n_configs=30)
    return dataset_from_kernels(kernels[:8], kernels[8:])


def graph(n: int, c: int, seed: int = 0, width: int = 9, config_width: int = 5) -> ModelInputs:
    rng = np.random.default_rng(seed)
    edges = np.array([[i, rng.integers(i)] for i in range(1, n)] + [[i, rng.integers(i)] for i in range(2, n, 3)])
    return ModelInputs(
        rng.random((n, width), np.float32),
        rng.integers(0, 121, n),
        edges.reshape(-1, 2).astype(np.int32),
        rng.random((c, config_width), np.float32),
    )


def written_out(name: str, model: torch.nn.Module, part: ModelInputs) -> np.ndarray:
    """The published definition, one configuration at a time with dense matrices."""
    w = {k: v.double() for k, v in model.state_dict().items()}
    n = len(part.node)
    a = torch.zeros(n, n, dtype=torch.float64)
    for u, v in part.edges:
        a[v, u] += 1

    def act(x):
        return torch.nn.functional.leaky_relu(x, 0.2)

    def stack(prefix, x):
        for depth in range(sum(k.startswith(f"{prefix}.layers") for k in w) // 2):
            x = act(x) if depth else x
            x = x @ w[f"{prefix}.layers.{depth}.kernel"] + w[f"{prefix}.layers.{depth}.bias"]
        return x

    hat = (a + torch.eye(n)) / (a + torch.eye(n)).sum(1, keepdim=True)
    scores = []
    for config in torch.from_numpy(part.config).double():
        x = torch.cat([torch.from_numpy(part.node).double(), w["embedding.table"][part.opcode]], 1)
        if name.startswith("Early"):
            x = torch.cat([x, config.expand(n, -1)], 1)
        if name.endswith("SAGE"):
            for depth in range(3):
                z = torch.cat([(a + a.T) @ x, x], 1) @ w[f"gnn.{depth}.kernel"] + w[f"gnn.{depth}.bias"]
                x = torch.nn.functional.normalize(act(z), dim=1)
        elif name.endswith("GCN"):
            x = stack("prenet", x)
            for depth in range(3):
                y = act(x)
                x = x + stack(f"gnn.{depth}", hat @ y + hat.T @ y + y)
            x = act(x)
        pooled = x.sum(0)
        scores.append(stack("head", pooled if name.startswith("Early") else torch.cat([pooled, config])))
    return torch.cat(scores).numpy()


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_computes_its_published_definition(name):
    torch.manual_seed(0)
    model = build_model(name, 9, 5)
    for n, c in ((1, 1), (2, 3), (17, 6)):
        part = graph(n, c, seed=n)
        np.testing.assert_allclose(score_inputs(model, part), written_out(name, model, part), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_of_the_fused_layers_are_those_of_autograd(name):
    torch.manual_seed(0)
    model = build_model(name, 9, 5, {"hidden_dim": 8, "op_embed_dim": 4})
    batch = collate([graph(7, 4, 1), graph(3, 2, 2), graph(1, 4, 3)])
    model(batch)[batch.mask].square().sum().backward()
    for parameter in model.parameters():
        index = tuple(int(i) for i in np.unravel_index(int(parameter.grad.abs().argmax()), parameter.shape))
        step = 1e-2 * max(0.1, abs(float(parameter.data[index])))
        values = []
        for sign in (1, -1):
            parameter.data[index] += sign * step
            values.append(float(model(batch)[batch.mask].double().square().sum()))
            parameter.data[index] -= sign * step
        numeric = (values[0] - values[1]) / (2 * step)
        assert numeric == pytest.approx(float(parameter.grad[index]), rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_mixed_precision_gives_finite_gradients(name):
    torch.manual_seed(0)
    model = build_model(name, 9, 5, {"global_width": 2} if name == "TileRanker" else {})
    batch = collate([graph(7, 4, 1), graph(3, 4, 2)])
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(batch)
    scores.float().square().sum().backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_numpy_scores_equal_torch(name, data):
    torch.manual_seed(1)
    preparation = (RankerFeatures if name == "TileRanker" else MinMax).fit(data.train)
    kwargs = {"global_width": preparation.global_width} if name == "TileRanker" else {}
    model = build_model(name, preparation.node_width, preparation.config_width, kwargs).eval()
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    for kernel in data.valid:
        part = preparation.apply(kernel)
        expected = score_inputs(model, part)
        if name == "TileRanker":
            folded = numpy_ranker.fold(weights, kwargs)
            scores = numpy_ranker.score_rows(folded, numpy_ranker.encode(folded, part), part.config)
        else:
            scores = numpy_baselines.forward(name, weights, kwargs, part)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("MLP", {"reduction": "mean", "mlp_layers": 1}),
        ("MLP", {"reduction": "max", "hidden_activation": "gelu"}),
        ("EarlyJoinSAGE", {"hidden_activation": "tanh", "num_gnns": 2}),
        ("EarlyJoinSAGE", {"num_gnns": 0}),
        ("EarlyJoinResGCN", {"directed": True, "reduction": "mean", "num_gnns": 1}),
        ("LateJoinResGCN", {"directed": True, "mlp_layers": 1, "reduction": "max"}),
    ],
)
def test_every_keyword_means_the_same_in_numpy(name, kwargs):
    torch.manual_seed(2)
    model, part = build_model(name, 9, 5, kwargs).eval(), graph(6, 4)
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    scores = numpy_baselines.forward(name, weights, kwargs, part)
    np.testing.assert_allclose(scores, score_inputs(model, part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_chunks_or_company(name, monkeypatch):
    torch.manual_seed(0)
    kwargs = {"global_width": 2} if name == "TileRanker" else {}
    model, part = build_model(name, 9, 5, kwargs).eval(), graph(5, 90)
    part.config[:, :2] = part.config[0, :2]
    whole = score_inputs(model, part)
    monkeypatch.setattr("tilewise.costmodel.models.torch.MAX_CHUNK", 7)
    np.testing.assert_allclose(score_inputs(model, part), whole, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        together = model(collate([graph(9, 40, 5), part, graph(2, 1, 6)]))[1].numpy()
    np.testing.assert_allclose(together, whole, rtol=1e-5, atol=1e-6)


def test_numpy_graphs_too_large_for_dense_matrices_agree():
    torch.manual_seed(0)
    model, part = build_model("LateJoinResGCN", 9, 5).eval(), graph(400, 3)
    weights = {k: v.numpy() for k, v in model.state_dict().items()}
    scores = numpy_baselines.forward("LateJoinResGCN", weights, {}, part)
    np.testing.assert_allclose(scores, score_inputs(model, part), rtol=1e-4)


def test_a_user_class_is_built_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def __init__(self, node_width, config_width, depth=1):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(config_width, 1)\n"
        "    def forward(self, batch):\n"
        "        return self.layer(batch.config).squeeze(-1)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert score_inputs(build_model("mine:Mine", 9, 5, '{"depth": 2}'), graph(3, 4)).shape == (4,)


@pytest.mark.parametrize("name", ["Nope", "no.such:Thing", "os:path", "json:dumps", ":"])
def test_an_unknown_model_is_one_sentence(name):
    with pytest.raises(ConfigurationError):
        build_model(name, 3, 3)


@pytest.mark.parametrize("kwargs", ["[1]", "{", '{"no_such": 1}', '{"hidden_dim": "wide"}', '{"hidden_dim": -1}'])
def test_bad_arguments_are_one_sentence(kwargs):
    with pytest.raises(ConfigurationError):
        build_model("MLP", 3, 3, kwargs)
    assert parse_kwargs("") == {}


def test_adam_matches_pytorch_and_keeps_no_denormals():
    from tilewise.costmodel.training.optimizer import FlatAdam

    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    flat = FlatAdam(ours.parameters(), 0.01, weight_decay=0.1)
    peer = torch.optim.AdamW(theirs.parameters(), 0.01, weight_decay=0.1, eps=1e-7)
    for step in range(20):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        for model, optimizer in ((ours, flat), (theirs, peer)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-4, atol=1e-5)
    flat.zero_grad()
    for _ in range(1000):
        flat.step()
    assert not ((flat.mean != 0) & (flat.mean.abs() < 1e-37)).any()


def test_clipping_is_per_tensor():
    from tilewise.costmodel.training.optimizer import FlatAdam

    parameters = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2))]
    optimizer = FlatAdam(parameters, clip_norm=1.0)
    parameters[0].grad.fill_(3.0)
    parameters[1].grad.fill_(0.1)
    optimizer.step()
    assert float(parameters[0].grad.norm()) == pytest.approx(1.0) and float(parameters[1].grad[0]) == pytest.approx(0.1)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("entries", "shape"), [(13, (3, 3)), (40, (5, 7)), (0, (2, 2)), (1, (1, 1))])
def test_entries_of_equal_places_are_summed(entries, shape, dense, monkeypatch):
    monkeypatch.setattr("tilewise.costmodel.models.torch.ragged._MAX_DENSE_ENTRIES", 100 if dense else -1)
    rng = np.random.default_rng(entries)
    rows, columns = (rng.integers(0, size, entries) for size in shape)
    values = rng.standard_normal(entries)
    whole = np.zeros(shape)
    np.add.at(whole, (rows, columns), values)
    matrix = sparse_matrix(rows, columns, values, shape, "cpu")
    for side, expected in ((matrix.forward, whole), (matrix.transposed, whole.T)):
        assert (side.layout == torch.strided) is dense
        np.testing.assert_allclose(side.to_dense().numpy(), expected, rtol=1e-6, atol=1e-6)
