"""Reading layout graphs: what is accepted, what is refused with a sentence, and how much memory it takes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tilewise.costmodel.data.npz_stream import stream_npz
from tilewise.costmodel.data.schema import LAYOUT_FEATURES, NODE_FEATURES
from tilewise.costmodel.layout import LayoutGraph, open_graph, open_layouts, synthetic_graph, write_graph
from tilewise.costmodel.layout.synthetic import write_synthetic
from tilewise.costmodel.metrics import kendall_tau
from tilewise.errors import ConfigurationError, FileFormatError, UnavailableError

FIELDS = ("node_feat", "node_opcode", "edge_index", "config_ids", "config_feat", "runtime")


def small(configs: int = 12, seed: int = 0, search: str = "random") -> LayoutGraph:
    return synthetic_graph("toy", seed, source="xla", search=search, nodes=30, configs=configs)


def arrays(graph: LayoutGraph) -> dict[str, np.ndarray]:
    return {
        "node_feat": graph.node_feat,
        "node_opcode": graph.node_opcode,
        "edge_index": graph.edge_index.astype(np.int64),
        "node_config_ids": graph.config_ids.astype(np.int64),
        "node_config_feat": graph.config_feat.astype(np.float32),
        "node_splits": np.array([[0, graph.n_nodes]]),
        "config_runtime": graph.runtime,
    }


def test_a_graph_reads_back_what_was_written_in_the_names_and_types_of_the_dataset(tmp_path):
    graph = small()
    write_graph(tmp_path / "g.npz", graph)
    with np.load(tmp_path / "g.npz", allow_pickle=False) as stored:
        assert {name: (stored[name].dtype.str, stored[name].ndim) for name in stored.files} == {
            "node_feat": ("<f4", 2), "node_opcode": ("|u1", 1), "edge_index": ("<i8", 2), "node_config_ids": ("<i8", 1),
            "node_config_feat": ("<f4", 3), "node_splits": ("<i8", 2), "config_runtime": ("<i8", 1),
        }  # fmt: skip
        assert stored["node_feat"].shape[1] == len(NODE_FEATURES) == 140
        assert stored["node_config_feat"].shape[2] == len(LAYOUT_FEATURES) == 18
    reopened = open_graph(tmp_path / "g.npz", tmp_path / "cache")
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(reopened, field), getattr(graph, field))
    assert isinstance(reopened.config_feat, np.memmap) and reopened.config_feat.dtype == np.int8


def test_a_file_is_converted_once_and_again_when_it_changed(tmp_path, monkeypatch):
    write_graph(tmp_path / "g.npz", small())
    open_graph(tmp_path / "g.npz", tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.costmodel.layout.graph.stream_npz", lambda *a, **k: pytest.fail("converted twice"))
        open_graph(tmp_path / "g.npz", tmp_path / "cache")
    write_graph(tmp_path / "g.npz", small(configs=20))
    assert open_graph(tmp_path / "g.npz", tmp_path / "cache").n_configs == 20


def test_reading_takes_little_memory_however_many_configurations_there_are(tmp_path):
    """The numbers of this file take 115 MB; counted are the bytes that NumPy and Python allocate."""
    graph = small()
    many = 100_000
    ids = np.arange(16, dtype=np.int64)
    wide = np.zeros((many, 16, 18), np.float32)
    wide[:, :, 0] = np.arange(many)[:, None] % 6
    changes = {"node_config_feat": wide, "node_config_ids": ids, "config_runtime": np.arange(1, many + 1)}
    np.savez_compressed(tmp_path / "g.npz", **(arrays(graph) | changes))
    del wide, changes
    tracemalloc.start()
    reopened = open_graph(tmp_path / "g.npz", tmp_path / "cache")
    few = np.asarray(reopened.config_feat[np.array([3, 99_999])])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reopened.config_feat.shape == (many, 16, 18)
    assert few[:, 5, 0].tolist() == [3, 99_999 % 6]
    assert peak < 24 << 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node_feat", np.zeros((30, 139), np.float32)),
        ("node_feat", np.full((1, 140), np.nan, np.float32)),
        ("node_opcode", np.full(3, 200, np.uint8)),
        ("edge_index", np.array([[0, 99]])),
        ("edge_index", np.array([0, 1])),
        ("node_config_ids", np.array([99])),
        ("node_config_ids", np.zeros(0, np.int64)),
        ("node_config_feat", np.zeros((12, 1, 17), np.float32)),
        ("node_config_feat", np.zeros((2, 1, 18), np.float32)),
        ("config_runtime", np.array([0, 5, 7])),
        ("config_runtime", np.array([-1])),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, key, value):
    np.savez_compressed(tmp_path / "g.npz", **(arrays(small()) | {key: value}))
    with pytest.raises(FileFormatError) as caught:
        open_graph(tmp_path / "g.npz", tmp_path / "cache")
    assert "\n" not in str(caught.value) and not list((tmp_path / "cache").glob("*/index.json"))


@pytest.mark.parametrize("value", [0.5, 1e9, np.nan, -np.inf, 300])
def test_layouts_are_small_whole_numbers(tmp_path, value):
    feat = arrays(small())["node_config_feat"]
    feat[-1, -1, -1] = value
    np.savez_compressed(tmp_path / "g.npz", **(arrays(small()) | {"node_config_feat": feat}))
    with pytest.raises(FileFormatError, match="not the number of a dimension"):
        open_graph(tmp_path / "g.npz", tmp_path / "cache")


def test_a_file_that_lacks_an_array_or_holds_objects_is_refused(tmp_path):
    have = arrays(small())
    for key in ("node_config_feat", "node_config_ids"):
        np.savez(tmp_path / "g.npz", **{name: array for name, array in have.items() if name != key})
        with pytest.raises(FileFormatError, match=f"lacks {key}"):
            open_graph(tmp_path / "g.npz", tmp_path / "cache")
    np.savez(tmp_path / "g.npz", **(have | {"node_config_feat": np.array([{}], dtype=object)}))
    with pytest.raises(FileFormatError, match="plain numbers"):
        open_graph(tmp_path / "g.npz", tmp_path / "cache")


def test_no_disk_that_is_too_small_is_written_full(tmp_path, monkeypatch):
    write_graph(tmp_path / "g.npz", small())
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("tilewise.costmodel.layout.graph.shutil.disk_usage", lambda path: usage)
    with pytest.raises(UnavailableError, match="cache_dir"):
        open_graph(tmp_path / "g.npz", tmp_path / "cache")


def test_a_cut_member_is_noticed_at_its_end(tmp_path):
    np.savez(tmp_path / "g.npz", x=np.arange(12.0))
    assert np.concatenate(list(stream_npz(tmp_path / "g.npz", "x", (12,)))).tolist() == list(range(12))
    with pytest.raises(FileFormatError, match="where"):
        list(stream_npz(tmp_path / "g.npz", "x", (13,)))
    content = bytearray((tmp_path / "g.npz").read_bytes())
    at = content.index(np.float64(7.0).tobytes())
    content[at + 6] ^= 1
    (tmp_path / "g.npz").write_bytes(bytes(content))
    with pytest.raises(FileFormatError, match="not a readable npz"):  # its checksum
        list(stream_npz(tmp_path / "g.npz", "x", (12,)))


def test_a_collection_is_known_by_its_folders(tmp_path):
    counts = {"train": 2, "valid": 1, "test": 1}
    paths = write_synthetic(tmp_path, "nlp:default", counts, seed=0, nodes=20, configs=4)
    assert {str(path.parent.relative_to(tmp_path)) for path in paths} == {
        f"npz/layout/nlp/default/{split}" for split in counts
    }
    layouts = open_layouts(tmp_path / "npz/layout/nlp/default", cache_dir=tmp_path / "cache", progress=False)
    assert layouts.name == "nlp:default" and [len(layouts.split(split)) for split in counts] == [2, 1, 1]
    assert open_layouts(paths[0].parents[1], splits=["test"], cache_dir=tmp_path / "cache").train == []
    with pytest.raises(ConfigurationError, match="no layout collection"):
        open_layouts(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match="no npz files"):
        open_layouts(tmp_path)


@pytest.mark.parametrize("search", ["random", "default"])
def test_synthetic_runtimes_are_repeatable_and_hang_on_neighbours(search):
    graph = small(configs=300, search=search)
    np.testing.assert_array_equal(graph.runtime, small(configs=300, search=search).runtime)
    assert graph.labelled and graph.target().min() == 1.0 and len(np.unique(graph.runtime)) > 200
    # The sum over nodes of the best single-node guess, made from the very runtimes, leaves pairs in the wrong order.
    logs = np.log(graph.runtime)
    alone = np.zeros(300)
    for place in range(len(graph.config_ids)):
        _, kind = np.unique(graph.config_feat[:, place], axis=0, return_inverse=True)
        means = np.bincount(kind, logs) / np.bincount(kind)
        alone += means[kind]
    assert 0.1 < kendall_tau(graph.runtime, alone) < 0.95


def test_kendall_tau_is_scipys_with_ties_on_either_side():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    for n, kinds in ((2, 2), (7, 3), (1000, 5), (1000, 10**6)):
        for _ in range(5):
            target, scores = rng.integers(0, kinds, n), rng.integers(0, kinds, n) / 7
            expected = stats.kendalltau(target, scores).statistic
            np.testing.assert_allclose(kendall_tau(target, scores), expected, equal_nan=True)


def test_a_graph_without_runtimes_is_read_but_has_no_targets(tmp_path: Path):
    np.savez_compressed(tmp_path / "g.npz", **(arrays(small()) | {"config_runtime": np.zeros(12, np.int64)}))
    graph = open_graph(tmp_path / "g.npz", tmp_path / "cache")
    assert not graph.labelled
    with pytest.raises(FileFormatError, match="unlabelled"):
        graph.target()
