"""Dilated and unevenly padded convolutions of ONNX files run as layers of nn and are written back as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tilewise.onnx
from tests.onnx_reference import reference
from tilewise import Tensor, nn, no_grad, plan
from tilewise._extension import native
from tilewise.backend import use_backend
from tilewise.errors import TilewiseError
from tilewise.quantize import QuantizedConv2d, QuantizedModel, load_quantized, quantize, save_quantized


class Case(NamedTuple):
    channels: int
    filters: int
    groups: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int, int, int]  # top, left, bottom, right


CASES = {
    "as in DeepLab": Case(8, 16, 1, (33, 33), (3, 3), (1, 1), (6, 6), (6, 6, 6, 6)),
    "taps beyond the image": Case(8, 8, 1, (9, 9), (3, 3), (1, 1), (18, 18), (18, 18, 18, 18)),
    "unpadded": Case(5, 7, 1, (20, 23), (3, 3), (1, 1), (4, 2), (0, 0, 0, 0)),
    "stride": Case(6, 10, 1, (31, 17), (3, 5), (2, 3), (3, 2), (3, 4, 3, 4)),
    "uneven": Case(6, 10, 1, (12, 13), (3, 3), (1, 2), (2, 3), (4, 0, 1, 5)),
    "uneven and dense": Case(3, 8, 1, (15, 15), (3, 3), (2, 2), (1, 1), (0, 0, 1, 1)),
    "depthwise": Case(16, 16, 16, (14, 15), (3, 3), (1, 1), (2, 2), (2, 2, 2, 2)),
    "depthwise, twice as many": Case(8, 16, 8, (14, 15), (5, 3), (2, 1), (2, 3), (1, 3, 4, 3)),
    "groups": Case(12, 18, 3, (11, 16), (3, 2), (1, 1), (2, 5), (2, 1, 2, 4)),
    "points": Case(12, 9, 1, (7, 6), (1, 1), (2, 2), (5, 5), (0, 0, 0, 0)),
    "a column": Case(4, 8, 2, (19, 6), (3, 1), (1, 1), (7, 1), (7, 0, 7, 0)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def written(path: Path, case: Case, **attributes: Any) -> Path:
    """A file with the convolution alone, its bias and a ReLU behind it."""
    shape = (case.filters, case.channels // case.groups, *case.kernel)
    weights = {"w": normal(*shape, seed=1), "b": normal(case.filters, seed=2)}
    settings: dict[str, Any] = {"strides": case.stride, "dilations": case.dilation, "group": case.groups}
    settings |= attributes or {"pads": case.pads}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["z"], "conv", **settings),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", case.channels, *case.size))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def assert_near(ours: np.ndarray, want: np.ndarray, relative: float = 1e-5) -> None:
    assert ours.shape == want.shape
    assert np.abs(ours - want).max() <= relative * np.abs(want).max()


def planned(network: nn.Module, x: np.ndarray) -> np.ndarray:
    """What the network's plan gives; the network itself where there are no compiled kernels to plan for."""
    return (network if native is None else plan.compile(network, x))(x).data


def convolution(path: Path) -> onnx.NodeProto:
    return next(node for node in onnx.load(path).graph.node if node.op_type == "Conv")


@every_case
def test_the_file_becomes_a_layer_that_gives_what_onnx_runtime_gives(case: Case, tmp_path: Path) -> None:
    path, x = written(tmp_path / "m.onnx", case), normal(2, case.channels, *case.size)
    want, network = reference(path, x), tilewise.onnx.load(path)
    layer = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    assert layer.weight.shape[2:] == case.kernel and layer.dilation == case.dilation
    with no_grad():
        assert_near(network(x).data, want)
        assert_near(planned(network, x), want)
        with use_backend("numpy"):
            assert_near(network(x).data, want)


@every_case
def test_it_is_written_back_with_its_dilations(case: Case, tmp_path: Path) -> None:
    path, again, x = written(tmp_path / "m.onnx", case), tmp_path / "again.onnx", normal(2, case.channels, *case.size)
    tilewise.onnx.save(tilewise.onnx.load(path), again)
    settings = {a.name: tuple(a.ints) for a in convolution(again).attribute if a.ints}
    assert settings["dilations"] == case.dilation and settings["pads"] == case.pads
    assert_near(reference(again, x), reference(path, x))


@every_case
def test_it_runs_in_int8_and_keeps_its_integers_in_a_file(case: Case, tmp_path: Path) -> None:
    path, x = written(tmp_path / "m.onnx", case), normal(4, case.channels, *case.size)
    model = quantize(tilewise.onnx.load(path), [x])
    assert isinstance(model, QuantizedModel) and any(isinstance(layer, QuantizedConv2d) for layer in model.integer)
    ours = model(Tensor(x)).data
    assert_near(ours, reference(path, x), 0.02)
    save_quantized(model, tmp_path / "m.npz")
    np.testing.assert_array_equal(load_quantized(tmp_path / "m.npz")(Tensor(x)).data, ours)
    tilewise.onnx.save(model, tmp_path / "int8.onnx")
    assert_near(reference(tmp_path / "int8.onnx", x), ours, 0.02)


def same_padding(case: Case, upper: bool) -> tuple[int, int, int, int]:
    """Pads that give an output of ceil(input / stride); the odd one goes below and right, or above and left."""
    before, after = [], []
    for size, k, s, d in zip(case.size, case.kernel, case.stride, case.dilation, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        before.append(total // 2 if upper else total - total // 2)
        after.append(total - before[-1])
    return before[0], before[1], after[0], after[1]


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@every_case
def test_automatic_padding_counts_the_dilation(case: Case, auto: str, tmp_path: Path) -> None:
    # ONNX Runtime refuses dilated windows with automatic padding: it gets the same pads as numbers.
    pads = (0, 0, 0, 0) if auto == "VALID" else same_padding(case, auto == "SAME_UPPER")
    path, x = written(tmp_path / "m.onnx", case, auto_pad=auto), normal(2, case.channels, *case.size)
    if any(n + pads[i] + pads[i + 2] < (case.kernel[i] - 1) * case.dilation[i] + 1 for i, n in enumerate(case.size)):
        with pytest.raises(TilewiseError, match="does not fit"):
            tilewise.onnx.load(path)(x)
        return
    want, network = reference(written(tmp_path / "numbers.onnx", case._replace(pads=pads)), x), tilewise.onnx.load(path)
    with no_grad():
        assert_near(network(x).data, want)
        assert_near(planned(network, x), want)


def test_lines_are_dilated_too(tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[3, 1], dilations=[3], strides=[2])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 4, 25))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(normal(6, 4, 3), "w")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    x = normal(2, 4, 25)
    with no_grad():
        assert_near(tilewise.onnx.load(path)(x).data, reference(path, x))


def test_a_window_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    case = Case(2, 2, 1, (8, 8), (3, 3), (1, 1), (1 << 30, 1 << 30), (0, 0, 0, 0))
    with pytest.raises(TilewiseError, match="does not fit"):
        tilewise.onnx.load(written(tmp_path / "m.onnx", case))(normal(1, 2, 8, 8))


def test_a_dilated_model_without_an_example_is_saved_for_the_size_it_takes(tmp_path: Path) -> None:
    convs = [nn.Conv2d(1, 4, 3, padding=1, dilation=2, rng=0), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*convs, nn.Linear(4 * 10 * 10, 3, rng=1)).eval()  # 12 by 12 images become 10 by 10
    tilewise.onnx.save(model, tmp_path / "m.onnx")
    x = normal(2, 1, 12, 12)
    assert_near(reference(tmp_path / "m.onnx", x), model(Tensor(x)).data)
