"""Loading ONNX files: networks run, train and keep their layers; files that lie are one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewise
import tilewise.onnx
from tilewise import nn, no_grad, optim
from tilewise._extension import native
from tilewise.errors import (
    ConfigurationError,
    DtypeError,
    FileFormatError,
    GradientError,
    ShapeError,
    TilewiseError,
    UnavailableError,
)
from tilewise.nn.self_planning import layer_by_layer
from tilewise.onnx import reader

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def written(
    path: Path,
    nodes: list[Any],
    weights: dict[str, np.ndarray] | None = None,
    shape: Any = ("N", 4),
    output: str = "y",
    opset: int = 17,
    output_shape: Any = None,
) -> Path:
    """A file with one float input x and one output."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, output_shape)],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "m.onnx"


def test_a_loaded_network_runs_once_to_be_planned(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, runs = tilewise.onnx.load(small_cnn(place)), []
    forward = tilewise.onnx.Network.forward
    monkeypatch.setattr(
        tilewise.onnx.Network, "forward", lambda self, *args: runs.append(args[0].shape) or forward(self, *args)
    )
    x = normal(1, 3, 8, 8)
    planned = tilewise.compile(network, x)(x)
    assert len(runs) == 1
    with no_grad(), layer_by_layer():
        np.testing.assert_allclose(planned, network(x).data, rtol=1e-4, atol=1e-5)


def test_a_network_that_reads_numbers_of_its_input_is_not_planned(place: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    network, x = tilewise.onnx.load(written(place, nodes)), normal(2, 4)
    with pytest.raises(ConfigurationError, match="cannot be planned"):
        tilewise.compile(network, x)
    with no_grad():
        assert np.abs(network(3 * x).data - 3 * x).max() <= 3 * np.ptp(x) / 255


def test_a_fixed_batch_whose_images_would_be_merged_is_refused(place: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("ReduceMean", ["r"], ["y"], axes=[2], keepdims=0),
    ]
    path = written(place, nodes, {"shape": np.array([1, 4, -1])}, (1, 4, 6, 6), output_shape=(1, 4))
    network = tilewise.onnx.load(path)
    assert network(normal(1, 4, 6, 6)).shape == (1, 4)
    with pytest.raises(ShapeError, match=r"fixes dimension 0 of the input 'x' at 1, .* would merge the images"):
        network(normal(8, 4, 6, 6))


def small_cnn(place: Path) -> Path:
    weights = {
        "w": normal(8, 3, 3, 3), "scale": normal(8) + 2, "shift": normal(8), "mean": normal(8),
        "var": np.abs(normal(8)) + 1, "fc": normal(8, 5), "bias": normal(5),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"], "/stem/norm"),
        helper.make_node("Relu", ["b"], ["c"], "/stem/relu"),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], "pool"),
        helper.make_node("Flatten", ["d"], ["e"], "flat"),
        helper.make_node("MatMul", ["e", "fc"], ["f"], "product"),
        helper.make_node("Add", ["bias", "f"], ["y"], "bias"),
    ]
    return written(place, nodes, weights, ("N", 3, 8, 8))


def test_nodes_that_nn_has_are_layers_of_nn(place: Path) -> None:
    network = tilewise.onnx.load(small_cnn(place))
    stem = getattr(network, "stem.Conv")
    assert [type(layer) for layer in stem] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]
    assert isinstance(network.product, nn.Linear) and network.product.bias is not None
    assert not network.training


def test_a_network_loaded_trains(place: Path) -> None:
    network = tilewise.onnx.load(small_cnn(place)).train()
    x, targets = normal(16, 3, 8, 8), RNG.integers(0, 5, 16)
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_folding_without_gradients_gives_what_the_layers_give(place: Path) -> None:
    network = tilewise.onnx.load(small_cnn(place))
    x = normal(2, 3, 8, 8)
    layer_by_layer = network(x).data
    with no_grad():
        np.testing.assert_allclose(network(x).data, layer_by_layer, rtol=1e-4, atol=1e-5)


def test_what_has_no_gradient_says_so(place: Path) -> None:
    network = tilewise.onnx.load(written(place, [helper.make_node("Floor", ["x"], ["y"])]))
    x = tilewise.Tensor(normal(2, 4), requires_grad=True)
    with pytest.raises(GradientError, match="Floor has no gradient"):
        network(x).sum().backward()


def test_inputs_come_in_order_or_by_name_and_several_outputs_are_a_dict(place: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Add", ["a", "b"], ["s"])],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in "ab"],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in "ds"],
    )
    place.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    network = tilewise.onnx.load(place)
    a, b = normal(3), normal(3)
    for output in (network(a, b), network(b=b, a=a)):
        np.testing.assert_array_equal(output["d"].data, a - b)
        np.testing.assert_array_equal(output["s"].data, a + b)
    with pytest.raises(ShapeError, match="takes the inputs a, b"):
        network(a)


def test_names_that_are_alike_or_methods_stay_apart(place: Path) -> None:
    names = ["a/b", "a.b", "a b", "forward", "eval", "weights", "steps", "parameters", "_run", ""]
    values = {f"{name}": normal(4) for name in names[:-1]}
    nodes, value = [], "x"
    for index, name in enumerate(values):
        nodes.append(helper.make_node("Mul", [value, name], [f"v{index}"], name))
        value = f"v{index}"
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    network = tilewise.onnx.load(written(place, nodes, values))
    x = normal(2, 4)
    np.testing.assert_allclose(network(x).data, x * np.prod(list(values.values()), axis=0), rtol=1e-5)
    assert len(network.state_dict()) == len(values)


def test_half_precision_weights_are_read_as_float32(place: Path) -> None:
    values = np.array([1.5, -2.25, 3.0, 0.125], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    weights = [
        helper.make_tensor("half", TensorProto.FLOAT16, [4], values.astype(np.float16).tobytes(), raw=True),
        helper.make_tensor("brain", TensorProto.BFLOAT16, [4], bits.tobytes(), raw=True),
    ]
    nodes = [helper.make_node("Add", ["x", "half"], ["a"]), helper.make_node("Add", ["a", "brain"], ["y"])]
    written(place, nodes)
    model = onnx.load(place)
    model.graph.initializer.extend(weights)
    place.write_bytes(model.SerializeToString())
    x = normal(2, 4)
    np.testing.assert_array_equal(tilewise.onnx.load(place)(x).data, x + values + values)


def external(place: Path, location: str, size: int = 16, offset: int = 0) -> Path:
    written(place, [helper.make_node("Add", ["x", "w"], ["y"])])
    model = onnx.load(place)
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": str(offset), "length": str(size)}.items():
        tensor.external_data.add(key=key, value=value)
    place.write_bytes(model.SerializeToString())
    return place


def test_external_data_beside_the_file_is_read(place: Path) -> None:
    values = normal(8)
    (place.parent / "w.bin").write_bytes(values.tobytes())
    x = normal(1, 4)
    network = tilewise.onnx.load(external(place, "w.bin", offset=16))
    np.testing.assert_array_equal(network(x).data, x + values[4:])


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", "", "c:\\x", "x\0y", "link"])
def test_external_data_elsewhere_is_refused(place: Path, location: str) -> None:
    (place.parent.parent / "w.bin").write_bytes(bytes(16))
    (place.parent / "link").symlink_to(place.parent.parent / "w.bin")
    with pytest.raises(FileFormatError, match="points at"):
        tilewise.onnx.load(external(place, location))


@pytest.mark.parametrize(("size", "offset"), [(16, 8), (1 << 40, 0), (16, -1), (15, 0)])
def test_external_data_outside_its_file_is_refused(place: Path, size: int, offset: int) -> None:
    (place.parent / "w.bin").write_bytes(bytes(16))
    with pytest.raises(FileFormatError):
        tilewise.onnx.load(external(place, "w.bin", size, offset))


def test_all_operations_that_are_missing_are_named_at_once(place: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["a"], "first"),
        helper.make_node("Foo", ["a"], ["b"], "second", domain="com.example"),
        helper.make_node("Det", ["b"], ["y"], "third"),
    ]
    with pytest.raises(UnavailableError, match=r"Det \(first, third\); com.example.Foo \(second\)"):
        tilewise.onnx.load(written(place, nodes))


@pytest.mark.parametrize("opset", [7, 12, 10_000])
def test_other_versions_of_the_operations_are_refused(place: Path, opset: int) -> None:
    with pytest.raises(FileFormatError, match=f"version {opset} of the operations; 13 to"):
        tilewise.onnx.load(written(place, [helper.make_node("Relu", ["x"], ["y"])], opset=opset))


def test_a_circle_is_refused(place: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(FileFormatError, match="circle"):
        tilewise.onnx.load(written(place, nodes, output="b"))


def test_nodes_in_any_order_run(place: Path) -> None:
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Relu", ["x"], ["a"])]
    x = normal(2, 4)
    np.testing.assert_array_equal(tilewise.onnx.load(written(place, nodes))(x).data, -np.maximum(x, 0))


BOMBS = {
    "ConstantOfShape": [helper.make_node("ConstantOfShape", ["size"], ["y"])],
    "Expand": [helper.make_node("Expand", ["x", "size"], ["y"])],
    "Range": [helper.make_node("Range", ["zero", "many", "one"], ["r"]), helper.make_node("Cast", ["r"], ["y"], to=1)],
    "Tile": [helper.make_node("Tile", ["x", "times"], ["y"])],
    "Pad": [helper.make_node("Pad", ["x", "pads"], ["y"])],
    "Resize": [helper.make_node("Resize", ["x", "", "scales"], ["y"])],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_cannot_ask_for_endless_memory(place: Path, name: str) -> None:
    weights = {
        "size": np.array([1 << 20, 1 << 12, 4]), "zero": np.array(0), "many": np.array(1 << 40), "one": np.array(1),
        "times": np.array([1 << 20, 1 << 20]), "pads": np.array([0, 0, 1 << 40, 0]),
        "scales": np.array([1e6, 1e6], np.float32),
    }  # fmt: skip
    network = tilewise.onnx.load(written(place, BOMBS[name], weights))
    with pytest.raises(UnavailableError, match="many times larger"):
        network(normal(1, 4))


def test_many_results_that_fit_alone_do_not_fill_the_memory(place: Path) -> None:
    weights = {"size": np.array([1 << 10, 1 << 13])}
    nodes = [helper.make_node("Expand", ["row", "size"], ["v0"])]
    nodes += [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(40)]
    nodes += [helper.make_node("Sum", ["x", *(f"v{i}" for i in range(41))], ["y"])]
    nodes.insert(0, helper.make_node("ReduceSum", ["x"], ["row"]))
    network = tilewise.onnx.load(written(place, nodes, weights, ("N", 1)))
    with pytest.raises(UnavailableError, match="at a time, which is too much"):
        network(normal(1, 1))


def test_doubling_again_and_again_stops(place: Path) -> None:
    nodes, value = [], "x"
    for index in range(40):
        nodes.append(helper.make_node("Concat", [value, value], [f"v{index}"], axis=0))
        value = f"v{index}"
    network = tilewise.onnx.load(written(place, nodes, output="v39"))
    with pytest.raises(UnavailableError, match=r"larger|at a time"):
        network(normal(1, 4))


def test_inputs_that_do_not_fit_are_one_sentence(place: Path) -> None:
    network = tilewise.onnx.load(small_cnn(place))
    for wrong in (normal(2, 4, 8, 8), normal(3, 8, 8), normal(2, 3, 9, 8)):
        with pytest.raises(ShapeError, match=r"takes shape|the file fixes dimension"):
            network(wrong)
    with pytest.raises(TilewiseError):
        network("no numbers")


def test_types_that_do_not_fit_are_one_sentence(place: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "n"], ["y"])]
    network = tilewise.onnx.load(written(place, nodes, {"n": np.arange(4)}))
    with pytest.raises(DtypeError, match="must be the same"):
        network(normal(1, 4))


@pytest.mark.parametrize("content", [b"", b"not onnx", b"\x08\x07", bytes(100)])
def test_what_is_no_onnx_file_is_one_sentence(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    with pytest.raises(FileFormatError):
        tilewise.onnx.load(place)


def nested(depth: int) -> bytes:
    """A graph whose node If holds a graph whose node If holds ... as bytes, since the package writes no deep ones."""

    def field(number: int, content: bytes) -> bytes:
        length, size = b"", len(content)
        while size >= 128:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(depth):
        attribute = field(1, b"then_branch") + b"\xa0\x01\x05" + field(6, graph)
        graph = field(1, field(1, b"x") + field(2, b"y") + field(4, b"If") + field(5, attribute))
    return field(8, b"\x10\x11") + field(7, graph + field(12, field(1, b"y")))


@pytest.mark.parametrize("depth", [3, 30, 5000])
def test_deep_subgraphs_are_one_sentence(place: Path, depth: int) -> None:
    place.write_bytes(nested(depth))
    with pytest.raises(TilewiseError) as caught:
        tilewise.onnx.load(place)
    assert "\n" not in str(caught.value)


def test_without_the_onnx_package_a_sentence_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    reader._messages.cache_clear()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UnavailableError, match=r"pip install 'tilewise\[onnx\]'"):
        tilewise.onnx.load(place)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_with_entries_of_an_image_is_native_and_follows_the_batch(place: Path, mode: str) -> None:
    pads = np.array([0, 0, 1, 2, 0, 0, 0, 3])
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Pad", ["a", "pads"], ["b"], mode=mode),
        helper.make_node("Conv", ["b", "v"], ["y"]),
    ]
    weights = {"w": normal(6, 2, 1, 1), "pads": pads, "v": normal(3, 6, 2, 2)}
    network = tilewise.onnx.load(written(place, nodes, weights, shape=("N", 2, 5, 7)))
    x = normal(3, 2, 5, 7)
    expected = np.concatenate([network(image[None]).numpy() for image in x])
    if native is not None:
        plan = tilewise.compile(network, x)
        assert np.allclose(plan(x), expected, atol=1e-5)
        assert (plan.native_calls, plan.operations_outside) == (1, 0)
    inner = np.pad(np.einsum("nchw,oc->nohw", x, weights["w"][:, :, 0, 0]), [(0, 0), (0, 0), (1, 0), (2, 3)], mode)  # type: ignore[call-overload]
    windows = np.lib.stride_tricks.sliding_window_view(inner, (2, 2), (2, 3))
    assert np.allclose(expected, np.einsum("nchwij,ocij->nohw", windows, weights["v"]), atol=1e-4)
