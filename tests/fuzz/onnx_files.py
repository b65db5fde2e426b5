"""ONNX files for the fuzzer: three small networks that use most operations, and damage to what such a file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import Rng
from fuzz.targets import Target, target

_NUMBERS = (0, 1, -1, 2, 3, 7, 255, -5, 65536, 1 << 24, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63))
_WORDS = ("", "x", "../x", "SAME_UPPER", "NOTSET", "linear", "cubic", "é", "a" * 300, "\n", "input", "wrap", "...ii->i")


def in_onnx(content: bytes, rng: Rng) -> bytes:
    """The same network with one thing in it odd: a node, a setting, a shape, a type, a name."""
    import onnx

    model = onnx.ModelProto.FromString(content)
    changes = (_node, _node, _attribute, _attribute, _attribute, _weight, _weight, _wiring, _wiring, _ports, _version)
    changes[int(rng.integers(len(changes)))](model, rng)
    return bytes(model.SerializeToString())


def _pick(items: Any, rng: Rng) -> Any:
    return items[int(rng.integers(len(items)))]


def _number(rng: Rng) -> int:
    return int(_pick(_NUMBERS, rng))


def _node(model: Any, rng: Rng) -> None:
    from tilewise.onnx.operators import TABLE

    node, kind = _pick(model.graph.node, rng), int(rng.integers(5))
    if kind == 0:
        node.op_type = str(_pick(sorted(TABLE), rng))
    elif kind == 1:
        model.graph.node.remove(node)
    elif kind == 2:
        model.graph.node.append(node)
    elif kind == 3:
        node.output.append("extra")
    else:
        node.op_type = str(_pick(("If", "Loop", "Nothing", "Constant"), rng))


def _attribute(model: Any, rng: Rng) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    node = _pick(nodes or model.graph.node, rng)
    if not node.attribute:
        return
    attribute, kind = _pick(node.attribute, rng), int(rng.integers(7))
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        attribute.type = int(rng.integers(0, 15))
    elif kind == 2 and attribute.ints:
        attribute.ints[int(rng.integers(len(attribute.ints)))] = _number(rng)
    elif kind == 3:
        attribute.ints.append(_number(rng))
    elif kind == 4:
        attribute.f = float(_pick((0.0, -1.0, 1e30, float("nan"), float("inf")), rng))
    elif kind == 5:
        attribute.s = str(_pick(_WORDS, rng)).encode()
    else:
        attribute.i = _number(rng)


def _weight(model: Any, rng: Rng) -> None:
    weight, kind = _pick(model.graph.initializer, rng), int(rng.integers(7))
    if kind == 0 and weight.dims:
        weight.dims[int(rng.integers(len(weight.dims)))] = _number(rng)
    elif kind == 1:
        weight.dims.append(_number(rng))
    elif kind == 2:
        weight.data_type = int(rng.integers(0, 25))
    elif kind == 3 and weight.raw_data:
        data = bytearray(weight.raw_data)
        at = int(rng.integers(len(data)))
        data[at : at + 8] = int(_pick(_NUMBERS, rng) % 2**63).to_bytes(8, "little")[: len(data) - at]
        weight.raw_data = bytes(data)
    elif kind == 4:
        weight.raw_data = weight.raw_data[: int(rng.integers(0, len(weight.raw_data) + 1))]
    elif kind == 5:
        weight.data_location = 1
        for key, value in (("location", str(_pick(_WORDS, rng))), ("length", str(_number(rng)))):
            weight.external_data.add(key=key, value=value)
    elif weight.raw_data and len(weight.dims) > 1:
        size = int(np.prod(weight.dims))
        del weight.dims[:]
        weight.dims.append(size)


def _wiring(model: Any, rng: Rng) -> None:
    node = _pick(model.graph.node, rng)
    names = [name for other in model.graph.node for name in (*other.input, *other.output)]
    side = node.input if node.input and rng.random() < 0.7 else node.output
    if not side:
        return
    place = int(rng.integers(len(side)))
    if rng.random() < 0.2:
        del side[place]
    else:
        side[place] = str(_pick([*names, "", "nowhere"], rng))


def _ports(model: Any, rng: Rng) -> None:
    tensor = _pick([*model.graph.input, *model.graph.output], rng).type.tensor_type
    kind = int(rng.integers(4))
    if kind == 0:
        tensor.elem_type = int(rng.integers(0, 25))
    elif kind == 1 and tensor.shape.dim:
        _pick(tensor.shape.dim, rng).dim_value = _number(rng)
    elif kind == 2:
        tensor.shape.dim.add().dim_value = _number(rng)
    elif tensor.shape.dim:
        del tensor.shape.dim[int(rng.integers(len(tensor.shape.dim)))]


def _version(model: Any, rng: Rng) -> None:
    model.opset_import[0].version = _pick((12, 13, 14, 18, 21, 23, 99, -1, 2**40), rng)


def _use(path: Path) -> None:
    import tilewise.onnx
    from tilewise import no_grad

    network = tilewise.onnx.load(path)
    with no_grad():
        network(*network.example(batch=2))


def _of(model: Any, folder: Path, example: Any) -> Target:
    import tilewise.onnx

    place = folder / "x.onnx"
    tilewise.onnx.save(model, place, example)
    return Target(place, _use, (in_onnx,))


@target
def onnx_images(folder: Path) -> Target:
    from tilewise import nn
    from tilewise.models.zoo.blocks import SqueezeExcite, conv_norm

    rng = np.random.default_rng(0)
    layers = [*conv_norm(3, 8, 3, 2, "hardswish", rng=rng), SqueezeExcite(8, 4, rng), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Conv2d(8, 8, 3, 1, 1, groups=8, rng=rng), nn.SiLU(), nn.ConvTranspose2d(8, 4, 2, 2, rng=rng)]
    layers += [nn.BatchNorm2d(4), nn.LeakyReLU(), nn.Upsample(2, "bilinear"), nn.AvgPool2d(2), nn.GroupNorm(2, 4)]
    model = nn.Sequential(*layers, nn.GlobalAvgPool(), nn.Linear(4, 5, rng=rng), nn.Softmax())
    return _of(model, folder, np.zeros((2, 3, 16, 16), np.float32))


@target
def onnx_tokens(folder: Path) -> Target:
    from tilewise.models.zoo.attention import Bert

    return _of(Bert(1, 8, 2, 12, 6, np.random.default_rng(0)), folder, np.zeros((2, 6), np.int64))


def in_places(content: bytes, rng: Rng) -> bytes:
    """The same network with another word on where a weight lies in the file beside it."""
    import onnx

    model = onnx.ModelProto.FromString(content)
    entry = _pick(_pick([w for w in model.graph.initializer if w.external_data], rng).external_data, rng)
    words = ("x.bin", "X.bin", "./x.bin", "/dev/zero", "x.bin/", "0x10", "1e3", " 1", "-0", "9" * 5000)
    entry.value = str(_pick((*words, *_WORDS, *_NUMBERS), rng))
    return bytes(model.SerializeToString())


@target
def onnx_external(folder: Path) -> Target:
    """Weights in a file of their own, as models of more than 2 GiB have them."""
    import onnx
    from onnx.external_data_helper import convert_model_to_external_data

    from tilewise import nn

    file = _of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), folder, np.zeros((2, 6), np.float32))
    model = onnx.load(file.place)
    convert_model_to_external_data(model, location="x.bin", size_threshold=0)
    onnx.save(model, file.place)
    return Target(file.place, _use, (in_onnx, in_places, in_places))


@target
def onnx_shapes(folder: Path) -> Target:
    """Arithmetic of shapes, resizing and bytes, as exporters write them."""
    from onnx import TensorProto, helper, numpy_helper

    def node(op: str, inputs: str, output: str, **settings: Any) -> Any:
        return helper.make_node(op, inputs.split(), [output], **settings)

    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n zero1", "n1"),
        node("Concat", "n1 minus", "to", axis=0), node("Reshape", "x to", "flat"), node("Slice", "flat a b one", "cut"),
        node("Range", "zero n step", "r"), node("Cast", "r", "rf", to=1), node("Unsqueeze", "rf one", "column"),
        node("Expand", "column to2", "wide"), node("Mul", "cut scale", "m"), node("Resize", "x none scales", "up"),
        node("Pad", "up pads", "padded", mode="reflect"), node("ReduceMean", "padded", "mean", axes=[2, 3], keepdims=0),
        node("Tile", "mean times", "t"), node("Where", "yes t t", "w"), node("Clip", "w low high", "c"),
        node("QuantizeLinear", "c scale zp", "q"), node("DequantizeLinear", "q scale zp", "dq"),
        node("Einsum", "dq dq", "e", equation="ij,kj->ik"), node("Trilu", "e", "tri"), node("CumSum", "tri zero", "cs"),
        node("Conv", "x k", "conv", auto_pad="SAME_UPPER", dilations=[2, 2]),
        node("ReduceSum", "conv", "all", keepdims=0),
        node("Add", "cs all", "added"), node("ArgMax", "m", "best", axis=1), node("OneHot", "best depth onoff", "hot"),
        node("ReduceSum", "hot", "hots", keepdims=0), node("Add", "added hots", "y"),
        node("ReduceSum", "wide", "unused"),
    ]  # fmt: skip
    nodes[11].input[1] = ""
    integers = {
        "zero": 0, "zero1": [0], "minus": [-1], "a": [1], "b": [9], "one": [1], "step": 1, "to2": [2, 3],
        "pads": [0, 0, 1, 1, 0, 0, 1, 1], "times": [1, 2], "depth": 8,
    }  # fmt: skip
    floats = {
        "scale": 0.05, "scales": [1, 1, 2, 1.5], "low": -1.0, "high": 1.0, "onoff": [0.0, 1.0],
        "k": np.ones((2, 1, 3, 3)),
    }  # fmt: skip
    arrays = {name: np.array(value, np.int64) for name, value in integers.items()}
    arrays |= {name: np.array(value, np.float32) for name, value in floats.items()}
    arrays |= {"zp": np.array(128, np.uint8), "yes": np.array([True, False])}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "x.onnx").write_bytes(model.SerializeToString())
    return Target(folder / "x.onnx", _use, (in_onnx,))
