"""Weights are read straight from the file, whatever else it holds; what is no message is left to the parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise.onnx
from tilewise.errors import TilewiseError
from tilewise.onnx.reader import read_graph
from tilewise.onnx.wire import read_skeleton

onnx = pytest.importorskip("onnx")


def network(**weights: np.ndarray) -> Any:
    """A sum of its input and all weights."""
    from onnx import TensorProto, helper, numpy_helper

    names = ["x", *weights]
    nodes = [
        helper.make_node("Add", [names[0] if i == 1 else f"s{i - 1}", names[i]], [f"s{i}"])
        for i in range(1, len(names))
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", f"s{len(weights)}")]
    arrays = [numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def written(folder: Path, model: Any) -> Path:
    path = folder / "network.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def test_large_weights_stay_in_the_file_and_small_ones_in_the_message(tmp_path: Path) -> None:
    large, small = np.arange(5000, dtype=np.float32), np.array([3], np.float32)
    path = written(tmp_path, network(large=large, small=small, half=large.astype(np.float16)))
    with path.open("rb") as stream:
        skeleton = read_skeleton(stream)
    assert skeleton is not None
    assert [place is None for place in skeleton.locations] == [False, True, False]
    assert len(skeleton.message) < 4096 < path.stat().st_size
    constants = read_graph(path).constants
    np.testing.assert_array_equal(constants["large"], large)
    np.testing.assert_array_equal(constants["small"], small)
    np.testing.assert_array_equal(constants["half"], large.astype(np.float16).astype(np.float32))
    assert constants["large"].flags.writeable


def test_a_file_whose_weights_do_not_fill_their_shape_is_refused(tmp_path: Path) -> None:
    model = network(large=np.zeros(5000, np.float32))
    model.graph.initializer[0].dims[0] = 5001
    with pytest.raises(TilewiseError, match="does not fill"):
        tilewise.onnx.load(written(tmp_path, model))


def test_of_weights_given_twice_the_last_count_as_in_any_message(tmp_path: Path) -> None:
    first, second = (np.full(2000, value, np.float32) for value in (1, 2))
    raw, both = network(w=first).SerializeToString(), network(w=second).SerializeToString()
    with written(tmp_path, raw + both).open("rb") as stream:
        skeleton = read_skeleton(stream)
    assert skeleton is not None and len(skeleton.locations) == 2  # messages one after the other are merged
    tensor = network(w=first).graph.initializer[0].SerializeToString()
    assert onnx.TensorProto.FromString(tensor + b"\x4a\x04abcd").raw_data == b"abcd"


@pytest.mark.parametrize("cut", [1, 10, 4000, 19_000])
def test_a_file_cut_short_is_left_to_the_parser(tmp_path: Path, cut: int) -> None:
    whole = network(large=np.zeros(5000, np.float32)).SerializeToString()
    path = written(tmp_path, whole[:-cut])
    with path.open("rb") as stream:
        assert read_skeleton(stream) is None
    with pytest.raises(TilewiseError):
        tilewise.onnx.load(path)


@pytest.mark.parametrize("operation", ["Identity", "Dropout", "Relu"])
def test_a_node_that_hands_a_missing_input_on_is_one_sentence(tmp_path: Path, operation: str) -> None:
    from onnx import TensorProto, helper

    nodes = [helper.make_node(operation, [""], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    with pytest.raises(TilewiseError):
        tilewise.onnx.load(written(tmp_path, model))(np.ones(2, np.float32))


def test_a_file_of_very_many_tiny_fields_is_left_to_the_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = network(large=np.zeros(5000, np.float32)).SerializeToString()
    path = written(tmp_path, whole + b"\x08\x09" * 400)  # ir_version, again and again
    monkeypatch.setattr("tilewise.onnx.wire._MOST_FIELDS", 300)
    with path.open("rb") as stream:
        assert read_skeleton(stream) is None
    assert read_graph(path).constants["large"].shape == (5000,)
