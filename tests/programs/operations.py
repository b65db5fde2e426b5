"""The kinds of operations that programs are made of: each as a layer, and as ONNX nodes.

A kind is a pair of functions. The first builds the layer from an operation's settings and the shapes it reads; the
second writes the same computation with `onnx_file.Graph`, in the form that other frameworks export, with the weights of
that layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.programs.program import Array
from tilewise import Tensor, nn
from tilewise.nn import functional as F
from tilewise.nn.recurrent import GATES, Recurrent
from tilewise.tensor import apply, cat

if TYPE_CHECKING:
    from tests.programs.onnx_file import Graph

Shape = tuple[int, ...]
Settings = dict[str, Any]
MakeLayer = Callable[..., nn.Module]  # (settings, *shapes of the inputs)
WriteNodes = Callable[..., str]  # (graph, settings, layer, *names of the inputs) gives the name of the result


@dataclass(frozen=True)
class Kind:
    layer: MakeLayer
    onnx: WriteNodes | None  # None where there is no usual form


class Function(nn.Module):
    """A function of Tensors as a layer; `constant`, where there is one, is a saved tensor."""

    def __init__(self, function: Callable[..., Tensor], constant: Array | None = None) -> None:
        self.function = function
        if constant is not None:
            self.constant = Tensor(constant)

    def forward(self, *inputs: Tensor) -> Tensor:
        constants = [self.constant] if hasattr(self, "constant") else []
        return self.function(*inputs, *constants)


def numbers(settings: Settings, *shape: int) -> Array:
    """Normal numbers from the operation's seed."""
    return np.random.default_rng(settings.get("seed", 0)).standard_normal(shape, dtype=np.float32)


def with_weights(layer: Any, settings: Settings, fan_in: int) -> nn.Module:
    """Weights that keep the variance of what is multiplied, and biases that do not drown it."""
    weight = numbers(settings, *layer.weight.shape) / np.float32(math.sqrt(fan_in))
    if "zeros" in settings:  # at least the first weight of every filter stays
        is_zero = np.random.default_rng(settings.get("seed", 0)).random(weight.shape) < settings["zeros"]
        is_zero.reshape(len(weight), -1)[:, 0] = False
        weight[is_zero] = 0
    layer.weight.data = weight
    if layer.bias is not None:
        layer.bias.data = np.float32(0.2) * numbers(settings, *layer.bias.shape)
    return layer


# --- convolutions ---


def _conv(s: Settings, x: Shape) -> nn.Module:
    groups, kernel = s.get("groups", 1), tuple(s.get("kernel", (1, 1)))
    groups = x[1] if groups == "depthwise" else groups
    out = x[1] * s.get("multiplier", 1) if s.get("groups") == "depthwise" else s["out"]
    layer = nn.Conv2d(
        x[1],
        out,
        kernel,
        stride=tuple(s.get("stride", (1, 1))),
        padding=tuple(s.get("padding", (0, 0))),
        groups=groups,
        bias=s.get("bias", True),
        rng=0,
        dilation=tuple(s.get("dilation", (1, 1))),
    )
    return with_weights(layer, s, math.prod(layer.weight.shape[1:]))


def _conv_onnx(g: Graph, _s: Settings, layer: Any, x: str) -> str:
    return g.node(
        "Conv",
        x,
        *g.weights(layer.weight, layer.bias),
        strides=layer.stride,
        pads=_four_sides(layer.padding),
        group=layer.groups,
        dilations=layer.dilation,
    )


def _four_sides(padding: tuple[int, ...]) -> list[int]:
    """Top, left, bottom, right."""
    return [*padding, *padding][:4]


def _conv_transpose(s: Settings, x: Shape) -> nn.Module:
    kernel = tuple(s.get("kernel", (2, 2)))
    stride, padding = tuple(s.get("stride", kernel)), tuple(s.get("padding", (0, 0)))
    layer = nn.ConvTranspose2d(x[1], s["out"], kernel, stride, padding, tuple(s.get("output_padding", (0, 0))), rng=0)
    return with_weights(layer, s, x[1])


def _conv_transpose_onnx(g: Graph, _s: Settings, layer: Any, x: str) -> str:
    return g.node(
        "ConvTranspose",
        x,
        *g.weights(layer.weight, layer.bias),
        strides=layer.stride,
        pads=_four_sides(layer.padding),
        output_padding=layer.output_padding,
    )


# --- products over the last axis ---


def _linear(s: Settings, x: Shape) -> nn.Module:
    return with_weights(nn.Linear(x[-1], s["out"], bias=s.get("bias", True), rng=0), s, x[-1])


def _linear_onnx(g: Graph, s: Settings, layer: Any, x: str) -> str:
    if s.get("gemm", False):
        return g.node("Gemm", x, *g.weights(layer.weight, layer.bias), transB=1)
    product = g.node("MatMul", x, g.constant(layer.weight.data.T))
    return product if layer.bias is None else g.node("Add", product, g.constant(layer.bias.data))


def _attention(s: Settings, x: Shape) -> nn.Module:
    return nn.MultiHeadAttention(x[2], s.get("heads", 1), causal=s.get("causal", False), rng=s.get("seed", 0))


def _recurrent(s: Settings, x: Shape) -> nn.Module:
    """One direction of a recurrent layer over tokens (B, T, C)."""
    kind, out, reverse = s["name"], s["out"], s.get("reverse", False)
    gates, rng = GATES[kind] * out, np.random.default_rng(s["seed"])
    shapes = ((gates, x[2]), (gates, out), (2 * gates,))
    weights = [
        Tensor(rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[-1]))) for shape in shapes
    ]

    def run(tokens: Tensor) -> Tensor:
        hidden = apply(Recurrent, tokens.permute(1, 0, 2), *weights, kind=kind, reverse=reverse)
        return hidden[: tokens.shape[1]].permute(1, 0, 2)

    layer = Function(run)
    layer.weights = weights
    return layer


def _recurrent_onnx(g: Graph, s: Settings, layer: Any, x: str) -> str:
    op, settings = {"lstm": "LSTM", "gru": "GRU"}.get(s["name"], "RNN"), {"hidden_size": s["out"]}
    settings |= {"linear_before_reset": 1} if op == "GRU" else {}
    settings |= {"activations": ["Relu"]} if s["name"] == "rnn_relu" else {}
    settings |= {"direction": "reverse"} if s.get("reverse", False) else {}
    weights = [g.constant(weight.data[None]) for weight in layer.weights]
    hidden = g.node(op, g.node("Transpose", x, perm=(1, 0, 2)), *weights, **settings)
    return g.node("Transpose", g.node("Squeeze", hidden, g.integers(1)), perm=(1, 0, 2))


# --- norms ---


def _batch_norm(s: Settings, x: Shape) -> nn.Module:
    layer = nn.BatchNorm2d(x[1])
    weight, bias, mean, var = numbers(s, 4, x[1])
    layer.weight.data, layer.bias.data = 1 + np.float32(0.3) * weight, np.float32(0.3) * bias
    layer.running_mean.data, layer.running_var.data = np.float32(0.3) * mean, np.exp(np.float32(0.3) * var)
    return layer


def _batch_norm_onnx(g: Graph, _s: Settings, layer: Any, x: str) -> str:
    tensors = g.weights(layer.weight, layer.bias, layer.running_mean, layer.running_var)
    return g.node("BatchNormalization", x, *tensors, epsilon=layer.eps)


def _scaled_norm(layer: Any, s: Settings) -> nn.Module:
    weight, bias = numbers(s, 2, *layer.weight.shape)
    layer.weight.data, layer.bias.data = 1 + np.float32(0.3) * weight, np.float32(0.3) * bias
    return layer


def _layer_norm(s: Settings, x: Shape) -> nn.Module:
    return _scaled_norm(nn.LayerNorm(x[-1]), s)


def _layer_norm_onnx(g: Graph, _s: Settings, layer: Any, x: str) -> str:
    return g.node("LayerNormalization", x, *g.weights(layer.weight, layer.bias), axis=-1, epsilon=layer.eps)


def _group_norm(s: Settings, x: Shape) -> nn.Module:
    return _scaled_norm(nn.GroupNorm(s.get("groups", 1), x[1]), s)


def _group_norm_onnx(g: Graph, _s: Settings, layer: Any, x: str) -> str:
    """As PyTorch exports it: an instance norm over rows of whole groups."""
    groups = layer.num_groups
    rows = g.node("Reshape", x, g.integers(0, groups, -1))
    ones, zeros = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    normed = g.node("InstanceNormalization", rows, g.constant(ones), g.constant(zeros), epsilon=layer.eps)
    image = g.node("Reshape", normed, g.node("Shape", x))
    by_channel = (layer.num_channels, 1, 1)
    scaled = g.node("Mul", image, g.constant(layer.weight.data.reshape(by_channel)))
    return g.node("Add", scaled, g.constant(layer.bias.data.reshape(by_channel)))


# --- pooling and resampling ---


def _pool(layer: type[nn.MaxPool2d]) -> MakeLayer:
    def make(s: Settings, _x: Shape) -> nn.Module:
        kernel = tuple(s.get("kernel", (2, 2)))
        return layer(kernel, tuple(s.get("stride", kernel)), tuple(s.get("padding", (0, 0))))

    return make


def _pool_onnx(g: Graph, s: Settings, layer: Any, x: str) -> str:
    average = {"count_include_pad": 1} if isinstance(layer, nn.AvgPool2d) else {}
    return g.node(
        "AveragePool" if average else "MaxPool",
        x,
        kernel_shape=layer.kernel_size,
        strides=layer.stride,
        pads=_four_sides(layer.padding),
        **average,
    )


def _global_pool(s: Settings, _x: Shape) -> nn.Module:
    return Function(lambda x: x.mean((2, 3), keepdims=True)) if s.get("keepdims", False) else nn.GlobalAvgPool()


def _global_pool_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    pooled = g.node("GlobalAveragePool", x)
    return pooled if s.get("keepdims", False) else g.node("Flatten", pooled, axis=1)


def _upsample(s: Settings, _x: Shape) -> nn.Module:
    return nn.Upsample(s.get("scale", 2), s.get("mode", "nearest"))


def _upsample_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    scales = g.constant(np.array([1, 1, s.get("scale", 2), s.get("scale", 2)], np.float32))
    if s.get("mode", "nearest") == "nearest":
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        how = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    return g.node("Resize", x, "", scales, **how)


# --- activations ---

ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], WriteNodes]] = {
    "relu": (nn.ReLU, lambda g, x: g.node("Relu", x)),
    "relu6": (nn.ReLU6, lambda g, x: g.node("Clip", x, g.scalar(0), g.scalar(6))),
    "leaky_relu": (lambda: nn.LeakyReLU(0.1), lambda g, x: g.node("LeakyRelu", x, alpha=0.1)),
    "elu": (nn.ELU, lambda g, x: g.node("Elu", x, alpha=1.0)),
    "gelu": (nn.GELU, lambda g, x: _gelu_onnx(g, x)),
    "gelu_tanh": (lambda: Function(F.gelu_tanh), lambda g, x: g.node("Gelu", x, approximate="tanh")),
    "silu": (nn.SiLU, lambda g, x: g.node("Mul", x, g.node("Sigmoid", x))),
    "sigmoid": (nn.Sigmoid, lambda g, x: g.node("Sigmoid", x)),
    "tanh": (nn.Tanh, lambda g, x: g.node("Tanh", x)),
    "hard_swish": (nn.Hardswish, lambda g, x: g.node("HardSwish", x)),
    "hard_sigmoid": (nn.Hardsigmoid, lambda g, x: g.node("HardSigmoid", x, alpha=1 / 6, beta=0.5)),
    "softplus": (lambda: Function(F.softplus), lambda g, x: g.node("Softplus", x)),
    "clip": (
        lambda: Function(lambda x: x.clip(-0.5, 1.0)),
        lambda g, x: g.node("Clip", x, g.scalar(-0.5), g.scalar(1)),
    ),
    "softmax": (nn.Softmax, lambda g, x: g.node("Softmax", x, axis=-1)),
}


def _gelu_onnx(g: Graph, x: str) -> str:
    erf = g.node("Erf", g.node("Div", x, g.scalar(math.sqrt(2))))
    return g.node("Mul", g.node("Mul", x, g.node("Add", erf, g.scalar(1))), g.scalar(0.5))


def _activation(s: Settings, _x: Shape) -> nn.Module:
    return ACTIVATIONS[s["name"]][0]()


def _activation_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    return ACTIVATIONS[s["name"]][1](g, x)


# --- shapes ---


def _merge(s: Settings, x: Shape) -> nn.Module:
    """Axes `axis` and the next one as one."""
    axis = s["axis"]
    return Function(lambda t: t.reshape(*t.shape[:axis], t.shape[axis] * t.shape[axis + 1], *t.shape[axis + 2 :]))


def _split(s: Settings, x: Shape) -> nn.Module:
    """One axis as two, of which the first has `by` entries."""
    axis, by = s["axis"], s["by"]
    return Function(lambda t: t.reshape(*t.shape[:axis], by, t.shape[axis] // by, *t.shape[axis + 1 :]))


def _reshape_onnx(g: Graph, _s: Settings, _layer: Any, x: str) -> str:
    """To the shape that the module had; the batch, where it stays in front, is copied from the input."""
    before, after = g.shape_of(x), g.result_shape
    return g.node("Reshape", x, g.integers(0 if before[0] == after[0] else after[0], *after[1:]))


def _transpose(s: Settings, _x: Shape) -> nn.Module:
    return Function(lambda t: t.permute(*s["axes"]))


def _slice(s: Settings, _x: Shape) -> nn.Module:
    index = (slice(None),) * s["axis"] + (slice(s.get("start", 0), s.get("stop"), s.get("step", 1)),)
    return Function(lambda t: t[index])


def _slice_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    stop = s.get("stop") if s.get("stop") is not None else 1 << 31
    bounds = (s.get("start", 0), stop, s["axis"], s.get("step", 1))
    return g.node("Slice", x, *(g.integers(n) for n in bounds))


def _select(s: Settings, _x: Shape) -> nn.Module:
    """One entry along an axis, which is gone afterwards."""
    index = (slice(None),) * s["axis"] + (s.get("index", 0),)
    return Function(lambda t: t[index])


def _select_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    return g.node("Gather", x, g.constant(np.array(s.get("index", 0), np.int64)), axis=s["axis"])


def _pad(s: Settings, _x: Shape) -> nn.Module:
    top, left, bottom, right = s["padding"]
    return Function(lambda t: t.pad(((0, 0), (0, 0), (top, bottom), (left, right)), s.get("value", 0.0)))


def _pad_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    top, left, bottom, right = s["padding"]
    return g.node("Pad", x, g.integers(0, 0, top, left, 0, 0, bottom, right), g.scalar(s.get("value", 0.0)))


# --- several values, and constants ---

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def _arithmetic(name: str) -> Kind:
    return Kind(
        lambda _s, *_shapes: Function(_ARITHMETIC[name]),
        lambda g, _s, _layer, a, b: g.node(name.capitalize(), a, b),
    )


def _constant(s: Settings, x: Shape) -> nn.Module:
    """The input times or plus numbers that are constant along the axes that `along` leaves out."""
    shape = [size if axis in s["along"] else 1 for axis, size in enumerate(x)]
    values = numbers(s, *shape)
    product = s["name"] == "mul"
    values = 1 + np.float32(0.4) * values if product else np.float32(0.5) * values
    return Function(_ARITHMETIC[s["name"]], values)


def _constant_onnx(g: Graph, s: Settings, layer: Any, x: str) -> str:
    return g.node(s["name"].capitalize(), x, g.constant(layer.constant.data))


def _concat(s: Settings, *_shapes: Shape) -> nn.Module:
    return Function(lambda *values: cat(values, s.get("axis", 1)))


def _mean(s: Settings, _x: Shape) -> nn.Module:
    return Function(lambda x: x.mean(s["axis"], keepdims=s.get("keepdims", False)))


def _mean_onnx(g: Graph, s: Settings, _layer: Any, x: str) -> str:
    return g.node("ReduceMean", x, g.integers(s["axis"]), keepdims=int(s.get("keepdims", False)))


KINDS: dict[str, Kind] = {
    "conv": Kind(_conv, _conv_onnx),
    "conv_transpose": Kind(_conv_transpose, _conv_transpose_onnx),
    "linear": Kind(_linear, _linear_onnx),
    "attention": Kind(_attention, None),
    "recurrent": Kind(_recurrent, _recurrent_onnx),
    "batch_norm": Kind(_batch_norm, _batch_norm_onnx),
    "layer_norm": Kind(_layer_norm, _layer_norm_onnx),
    "group_norm": Kind(_group_norm, _group_norm_onnx),
    "max_pool": Kind(_pool(nn.MaxPool2d), _pool_onnx),
    "avg_pool": Kind(_pool(nn.AvgPool2d), _pool_onnx),
    "global_pool": Kind(_global_pool, _global_pool_onnx),
    "upsample": Kind(_upsample, _upsample_onnx),
    "activation": Kind(_activation, _activation_onnx),
    "flatten": Kind(lambda _s, _x: nn.Flatten(), lambda g, _s, _layer, x: g.node("Flatten", x, axis=1)),
    "merge": Kind(_merge, _reshape_onnx),
    "split": Kind(_split, _reshape_onnx),
    "transpose": Kind(_transpose, lambda g, s, _layer, x: g.node("Transpose", x, perm=s["axes"])),
    "slice": Kind(_slice, _slice_onnx),
    "select": Kind(_select, _select_onnx),
    "pad": Kind(_pad, _pad_onnx),
    "mean": Kind(_mean, _mean_onnx),
    "constant": Kind(_constant, _constant_onnx),
    "concat": Kind(_concat, lambda g, s, _layer, *values: g.node("Concat", *values, axis=s.get("axis", 1))),
    **{name: _arithmetic(name) for name in _ARITHMETIC},
}
