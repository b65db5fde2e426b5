"""Training on layout graphs: segments add up to the whole, memory is a segment's, runs repeat and go on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tilewise.costmodel.layout import LayoutDataset, load_layout_model, synthetic_graph, train_layouts  # noqa: E402
from tilewise.costmodel.layout import train as module  # noqa: E402
from tilewise.costmodel.layout.models import MODELS  # noqa: E402
from tilewise.costmodel.layout.segments import Scaling, split_graph, within_hops  # noqa: E402
from tilewise.costmodel.layout.trained import (  # noqa: E402
    build_layout_model,
    evaluate_layouts,
    score_graph,
)
from tilewise.costmodel.training.losses import parse_losses  # noqa: E402
from tilewise.errors import ConfigurationError, FileFormatError  # noqa: E402

SMALL = {"hidden": 8, "layers": 2, "op_embed": 4}


def graph(seed: int = 0, nodes: int = 40, configs: int = 24, source: str = "xla"):
    return synthetic_graph(f"g{seed}", seed, source=source, search="random", nodes=nodes, configs=configs)


def data(train: int = 6, valid: int = 2) -> LayoutDataset:
    instances = [graph(seed) for seed in range(train + valid)]
    return LayoutDataset("xla:random", instances[:train], instances[train:], [])


def model(name: str, scaling: Scaling, seed: int = 0):
    torch.manual_seed(seed)
    return build_layout_model(name, scaling.width, SMALL)[0]


def one_step(name: str, layout_graph, segments, through: int):
    """The gradients of one slate's loss, as one vector."""
    instances = model(name, Scaling.fit([layout_graph]))
    config = layout_graph.config_feat[np.arange(12)]
    scores = module.sample_scores(instances, segments, config, through)
    target = torch.from_numpy(layout_graph.target(np.arange(12)))
    loss = parse_losses("PairwiseHingeLoss")(scores[None], target[None].float(), torch.ones(1, 12, dtype=torch.bool))
    loss.backward()
    return (
        float(loss.detach()),
        torch.cat([p.grad.flatten() for p in instances.parameters() if p.grad is not None]),
        scores.detach(),
    )


def test_segments_hold_every_node_near_a_configurable_one_once():
    layout_graph = graph(nodes=200)
    scaling = Scaling.fit([layout_graph])
    segments = split_graph(layout_graph, scaling, hops=2, segment_nodes=30)
    assert (
        sum(len(segment.node) for segment in segments) == within_hops(layout_graph, 2).sum() == segments[0].graph_nodes
    )
    assert max(len(segment.node) for segment in segments) <= 30
    columns = np.concatenate([segment.columns for segment in segments])
    assert sorted(columns.tolist()) == list(range(len(layout_graph.config_ids)))
    assert sum(float(segment.share.sum()) for segment in segments) == pytest.approx(1.0, abs=1e-5)
    one = split_graph(layout_graph, scaling, hops=2, segment_nodes=10_000)[0]
    inside = within_hops(layout_graph, 2)
    assert len(one.edges) == inside[layout_graph.edge_index].all(axis=1).sum()
    assert sum(len(segment.edges) for segment in segments) > 0.7 * len(one.edges)


def test_nodes_are_left_out_by_their_distance():
    layout_graph = graph(nodes=100)
    reached = set(layout_graph.config_ids.tolist())
    for hops in range(4):
        assert set(np.flatnonzero(within_hops(layout_graph, hops)).tolist()) == reached
        reached |= {int(v) for u, v in layout_graph.edge_index if u in reached} | {
            int(u) for u, v in layout_graph.edge_index if v in reached
        }


@pytest.mark.parametrize("name", MODELS)
def test_one_segment_is_the_whole_graph(name):
    """Scores and gradients are those of plain autograd through everything."""
    layout_graph = graph()
    (whole,) = split_graph(layout_graph, Scaling.fit([layout_graph]), 3, 1000)
    loss, grads, scores = one_step(name, layout_graph, [whole], 0)
    instances = model(name, Scaling.fit([layout_graph]))
    config = instances.tensor(layout_graph.config_feat[np.arange(12)][:, whole.columns])
    plain = instances.score(instances.encode(whole, config))
    torch.testing.assert_close(plain, scores)
    assert np.isfinite(loss) and grads.abs().sum() > 0


@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_drawn_segments_average_to_those_through_all(name):
    layout_graph = graph(nodes=60)
    segments = split_graph(layout_graph, Scaling.fit([layout_graph]), 3, 12)
    assert len(segments) > 3
    gradient_steps = [one_step(name, layout_graph, segments, through) for through in range(len(segments))]
    for loss, _, scores in gradient_steps:  # the loss sees the whole graph whichever segment was drawn
        assert loss == pytest.approx(gradient_steps[0][0], rel=1e-5)
        torch.testing.assert_close(scores, gradient_steps[0][2], rtol=1e-4, atol=1e-5)
    instances = model(name, Scaling.fit([layout_graph]))
    config = layout_graph.config_feat[np.arange(12)]
    pooled = sum(instances.encode(s, instances.tensor(config[:, s.columns])) for s in segments)
    target = torch.from_numpy(layout_graph.target(np.arange(12))).float()
    loss = parse_losses("PairwiseHingeLoss")(instances.score(pooled)[None], target[None], torch.ones(1, 12).bool())
    loss.backward()
    full = torch.cat([p.grad.flatten() for p in instances.parameters() if p.grad is not None])
    mean = torch.stack([grads for _, grads, _ in gradient_steps]).mean(0)
    torch.testing.assert_close(mean, full, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_keeps_for_its_backward_pass_does_not_grow_with_the_graph(name):
    """Counted in bytes: everything that autograd saves."""
    saved = []
    for nodes in (60, 600):
        layout_graph = graph(nodes=nodes, configs=12)
        segments = split_graph(layout_graph, Scaling.fit([layout_graph]), 3, 50)
        bytes_of: dict[int, int] = {}

        def note(tensor, bytes_of=bytes_of):
            bytes_of[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        instances = model(name, Scaling.fit([layout_graph]))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module.sample_scores(instances, segments, layout_graph.config_feat[np.arange(12)], 0)
        saved.append(sum(bytes_of.values()))
    assert saved[1] < 1.5 * saved[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_score_does_not_depend_on_what_it_was_computed_with(name, monkeypatch):
    layout_graph = graph(configs=50)
    segments = split_graph(layout_graph, Scaling.fit([layout_graph]), 3, 20)
    instances = model(name, Scaling.fit([layout_graph])).eval()
    every = score_graph(instances, layout_graph, segments)
    monkeypatch.setattr("tilewise.costmodel.layout.trained.CHUNK_CONFIGS", 7)
    np.testing.assert_allclose(score_graph(instances, layout_graph, segments), every, rtol=1e-4, atol=1e-5)
    some = np.array([41, 3, 17])
    np.testing.assert_allclose(score_graph(instances, layout_graph, segments, some), every[some], rtol=1e-4, atol=1e-5)


SETTINGS = {"epochs": 2, "configs": 8, "least_steps": 2, "eval_every": 1, "model_kwargs": SMALL, "segment_nodes": 15}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_repeats_by_its_seed_and_is_read_back(name, tmp_path):
    runs = [train_layouts(data(), name, progress=False, device="cpu", seed=3, **SETTINGS) for _ in range(2)]
    layout_graph = graph(99)
    np.testing.assert_array_equal(runs[0].score(layout_graph), runs[1].score(layout_graph))
    runs[0].save(tmp_path / "m.safetensors")
    loaded = load_layout_model(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.score(layout_graph), runs[0].score(layout_graph))
    assert loaded.record["collection"] == "xla:random" and loaded.record["segment_nodes"] == 15


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(tmp_path, capsys):
    whole = train_layouts(data(), progress=False, device="cpu", **SETTINGS)

    def stop(row):
        if row["epoch"] == 0:
            raise KeyboardInterrupt

    # The checkpoint of an epoch is written after its report: so the first one of the stopped run is of its second try.
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_layouts(data(), out_dir=tmp_path, report=stop, device="cpu", **SETTINGS)
    later = lambda row: None if row["epoch"] < 1 else stop({"epoch": 0})  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        train_layouts(data(), out_dir=tmp_path, report=later, device="cpu", **SETTINGS)
    assert (tmp_path / "checkpoint.safetensors").is_file()
    resumed = train_layouts(data(), out_dir=tmp_path, device="cpu", **SETTINGS)
    assert "resumed after epoch 1" in capsys.readouterr().err
    np.testing.assert_array_equal(resumed.score(graph(99)), whole.score(graph(99)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


@pytest.mark.filterwarnings("error")
def test_graphs_with_one_configuration_or_one_runtime_are_trained_on_without_a_word(tmp_path):
    alike = dataclasses.replace(graph(1), runtime=np.full(24, 7, np.int64))
    split = LayoutDataset("", [graph(0, configs=1), alike, graph(2)], [alike, graph(3, configs=1)], [])
    trained = train_layouts(split, progress=False, device="cpu", out_dir=tmp_path, **SETTINGS)
    assert trained.record["best_epoch"] >= 0 and load_layout_model(tmp_path).score(alike).shape == (24,)


def test_what_cannot_be_trained_is_one_sentence():
    with pytest.raises(ConfigurationError, match="train and valid"):
        train_layouts(LayoutDataset("", [graph()], [], []), progress=False)
    with pytest.raises(ConfigurationError, match="no layout model"):
        train_layouts(data(), "LayoutSage", progress=False)
    with pytest.raises(ConfigurationError, match="cannot be built"):
        train_layouts(data(), progress=False, model_kwargs={"hidden": 0})
    with pytest.raises(ConfigurationError, match="segment"):
        train_layouts(data(), progress=False, segment_nodes=0)


def test_a_file_that_is_no_layout_model_is_one_sentence(tmp_path):
    from tilewise.costmodel.models.file_writer import write_tensors

    write_tensors(tmp_path / "m.safetensors", {"a": np.ones(3, np.float32)}, {"format": "other", "model": "x"})
    with pytest.raises(FileFormatError, match="not a layout model"):
        load_layout_model(tmp_path / "m.safetensors")


@pytest.mark.slow
def test_both_models_beat_chance_on_graphs_they_have_not_seen():
    """Over 8 graphs with 60 configurations chance stays below 0.15 but once in thousands of times."""
    instances = [graph(seed, configs=60) for seed in range(32)]
    split = LayoutDataset("xla:random", instances[:20], instances[20:24], instances[24:])
    for name in MODELS:
        trained = train_layouts(split, name, progress=False, device="cpu", epochs=8, configs=16, eval_every=4)
        assert evaluate_layouts({name: trained}, split.test)[name]["tau"].mean > 0.2


def test_looking_farther_than_a_graph_reaches_takes_no_longer():
    layout_graph = graph(nodes=60)
    np.testing.assert_array_equal(within_hops(layout_graph, 1 << 30), within_hops(layout_graph, 60))


@pytest.mark.parametrize("kwargs", [{"layers": True}, {"hidden": 2.5}, {"op_embed": 5000}])
def test_a_number_that_is_no_size_is_one_sentence(kwargs):
    with pytest.raises(ConfigurationError, match="must be an integer from 1 to 4096"):
        build_layout_model("LayoutMPNN", Scaling.fit([graph()]).width, SMALL | kwargs)
