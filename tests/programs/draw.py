"""Draws programs: from a seed, motifs of networks (blocks, residuals, gates, branches, reshapes) one after the other.

Each operation is run on the program's own input while it is drawn, so that a motif sees the shapes that there are and
what does not fit is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.programs.network import NUMPY, Network, amplification, run_eagerly
from tests.programs.operations import ACTIVATIONS, KINDS
from tests.programs.program import Array, Op, Program
from tilewise import Tensor, no_grad
from tilewise.backend import use_backend
from tilewise.errors import TilewiseError

_LARGEST_VALUE = 12_000  # numbers: larger tensors cost time and find nothing that small ones do not
_LARGEST_NUMBER = 1e3  # above, or below its inverse, results say nothing about INT8 with scales per tensor
_ROUNDING = 2e-6  # of the largest result: float32 itself, in NumPy, may be off by this much (a fifth of the bound)
_NOISE, _LARGEST_AMPLIFICATION = 1e-3, 10.0  # a share of every value; one program in 200 amplifies it more
_LEAST_SPREAD = 0.05  # standard deviation of what a norm divides by, as a share of the largest number


class DoesNotFit(Exception):
    """An operation does not fit the values there are."""


class Sketch:
    """A program while it is drawn: the operations so far and, for the program's input, all their values."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...], seed: int) -> None:
        self.rng, self.shape, self.seed = rng, shape, seed
        self.ops: list[Op] = []
        self.values: list[Tensor] = [Tensor(Program(shape, (), seed).example())]

    @property
    def last(self) -> int:
        return len(self.ops)

    def shape_of(self, value: int) -> tuple[int, ...]:
        return self.values[value].shape

    def program(self) -> Program:
        return Program(self.shape, tuple(self.ops), self.seed)

    def add(self, kind: str, *inputs: int, **settings: Any) -> int:
        """Append an operation; returns the number of its value. Settings that are None are left out."""
        options = {name: value for name, value in settings.items() if value is not None}
        if kind in ("conv", "conv_transpose", "linear") and self.chance(0.25):
            options["zeros"] = self.one_of(0.6, 0.8, 0.95)  # which lets a plan skip them
        tensors = [self.values[i] for i in inputs]
        try:
            layer = KINDS[kind].layer(options, *(t.shape for t in tensors)).eval()
            with no_grad(), use_backend(NUMPY):
                result = layer(*tensors)
        except (TilewiseError, ValueError, IndexError) as error:
            raise DoesNotFit(str(error)) from None
        if not 0 < result.size <= _LARGEST_VALUE or not np.isfinite(result.data).all():
            raise DoesNotFit(f"{kind} gives {result.shape}")
        self.ops.append(Op(kind, inputs, options))
        self.values.append(result)
        return self.last

    # --- draws ---

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def whole(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def new_seed(self) -> int:
        return self.whole(1, 9999)

    def activation(self, value: int, *names: str) -> int:
        return self.add("activation", value, name=self.one_of(*(names or _USUAL_ACTIVATIONS)))


_USUAL_ACTIVATIONS = [name for name in ACTIVATIONS if name != "softmax"]
Motif = Callable[[Sketch, int], None]


# --- images ---


def conv(s: Sketch, x: int, out: int | None = None, same_size: bool = False) -> int:
    """A convolution with drawn geometry; with `same_size` the image keeps its size."""
    channels = s.shape_of(x)[1]
    kernel = s.one_of([1, 1], [1, 1], [3, 3], [3, 3], [3, 3], [5, 5], [1, 3], [3, 2], [2, 2])
    dilation = s.one_of(None, None, None, [2, 2], [1, 3], [2, 1])
    reach = [(k - 1) * d for k, d in zip(kernel, dilation or [1, 1], strict=True)]
    if same_size:
        padding = [reach[0] // 2, reach[1] // 2, reach[0] - reach[0] // 2, reach[1] - reach[1] // 2]
    else:
        padding = [s.whole(0, max(reach[i % 2], 1)) for i in range(s.one_of(2, 4))]
    settings: dict[str, Any] = {"kernel": kernel, "dilation": dilation, "padding": padding, "seed": s.new_seed()}
    settings["stride"] = None if same_size else s.one_of(None, None, None, [2, 2], [2, 1], [3, 3])
    settings["bias"] = None if s.chance(0.7) else False
    if out is None and s.chance(0.25):
        return s.add("conv", x, groups="depthwise", multiplier=s.one_of(None, None, None, 2), **settings)
    out = out or s.one_of(1, 2, 3, 4, 5, 6, 8, 8, 12, 16, 16, 20, 33)
    shared = [g for g in (2, 3, 4, 8) if channels % g == 0 and out % g == 0]
    return s.add("conv", x, out=out, groups=s.one_of(*shared) if shared and s.chance(0.3) else None, **settings)


def _block(s: Sketch, x: int) -> None:
    """Convolution, norm, activation."""
    y = conv(s, x)
    if s.chance(0.7):
        y = s.add("batch_norm", y, seed=s.new_seed())
    s.activation(y)


def _separable(s: Sketch, x: int) -> None:
    y = s.add("conv", x, groups="depthwise", kernel=[3, 3], padding=[1, 1], seed=s.new_seed())
    y = s.activation(y)
    y = s.add("conv", y, out=s.one_of(4, 7, 8, 16, 24), seed=s.new_seed())
    if s.chance(0.5):
        s.activation(y)


def _residual(s: Sketch, x: int) -> None:
    channels = s.shape_of(x)[1]
    y = conv(s, x, out=s.one_of(channels, 4, 8), same_size=True)
    y = s.activation(y) if s.chance(0.7) else y
    y = conv(s, y, out=channels, same_size=True)
    y = s.add("batch_norm", y, seed=s.new_seed()) if s.chance(0.4) else y
    pair = (x, y) if s.chance(0.5) else (y, x)
    y = s.add(s.one_of("add", "add", "add", "sub"), *pair)
    if s.chance(0.6):
        s.activation(y)


def _squeeze_excite(s: Sketch, x: int) -> None:
    """Channels multiplied by a gate that is computed from their means."""
    channels = s.shape_of(x)[1]
    y = s.add("global_pool", x, keepdims=True)
    y = s.add("conv", y, out=s.one_of(2, 4, channels), seed=s.new_seed())
    y = s.activation(y, "relu", "silu", "hard_swish")
    y = s.add("conv", y, out=channels, seed=s.new_seed())
    y = s.activation(y, "sigmoid", "hard_sigmoid", "tanh")
    y = s.add("mul", *((x, y) if s.chance(0.7) else (y, x)))
    if s.chance(0.4):  # the gate may not have overwritten its input
        s.add("add", x, y)


def _branches(s: Sketch, x: int) -> None:
    """Two or three branches of one value beside each other, some of them the value itself or a pool."""
    ends = []
    for _ in range(s.whole(2, 3)):
        kind = s.one_of("conv", "conv", "conv", "pool", "self")
        if kind == "conv":
            y = conv(s, x, out=s.one_of(1, 3, 4, 5, 6, 8), same_size=True)
            ends.append(s.activation(y) if s.chance(0.5) else y)
        elif kind == "pool":
            pool = s.one_of("max_pool", "avg_pool")
            ends.append(s.add(pool, x, kernel=[3, 3], stride=[1, 1], padding=[1, 1]))
        else:
            ends.append(x)
    y = s.add("concat", *(ends[i] for i in s.rng.permutation(len(ends))))
    if s.chance(0.3):
        s.activation(y)


def _pool(s: Sketch, x: int) -> None:
    kernel = s.one_of([2, 2], [3, 3], [2, 3], [1, 2], [5, 5])
    padding = s.one_of(None, [kernel[0] // 2, kernel[1] // 2])
    s.add(
        s.one_of("max_pool", "avg_pool"),
        x,
        kernel=kernel,
        stride=s.one_of(None, [1, 1], [2, 2], [2, 1]),
        padding=padding,
    )


def _upsample(s: Sketch, x: int) -> None:
    s.add("upsample", x, scale=s.one_of(None, 3), mode=s.one_of(None, None, "bilinear"))


def _large_maps(s: Sketch, x: int) -> None:
    """Maps of more than half a small L2 between layers of few weights, which INT8 plans compute row by row."""
    y = s.add("upsample", x, scale=3)
    y = s.add("conv", y, out=16, seed=s.new_seed())
    y = s.activation(y) if s.chance(0.3) else y  # without one, the zero point and so the padding is not 0
    stride = s.one_of(None, [2, 2])
    z = s.add("conv", y, groups="depthwise", kernel=[3, 3], padding=[1, 1], stride=stride, seed=s.new_seed())
    again = s.one_of("", "", "", "residual", "residual first", "slice", "concat", "softmax")
    if again == "" or s.shape_of(z) != s.shape_of(y):
        s.add("conv", z, out=s.one_of(4, 8), seed=s.new_seed())
    elif again == "slice":  # the map between the layers, or a part of it, is read again
        s.add("concat", s.add("conv", z, out=4, seed=s.new_seed()), s.add("slice", y, axis=1, stop=s.one_of(4, 7)))
    elif again == "concat":
        s.add("conv", s.add("concat", y, z), out=4, seed=s.new_seed())
    elif again == "softmax":  # by an operation that INT8 runs in Python
        z = s.add("conv", z, out=16, seed=s.new_seed())
        s.add("add", z, s.activation(y, "softmax"))
    else:
        z = s.add("conv", z, out=16, seed=s.new_seed())
        s.add("add", *((z, y) if again == "residual" else (y, z)))


def _conv_transpose(s: Sketch, x: int) -> None:
    settings = s.one_of(
        {"kernel": [2, 2]},
        {"kernel": [3, 3], "stride": [2, 2], "padding": [1, 1], "output_padding": [1, 1]},
        {"kernel": [2, 3], "stride": [1, 2]},
        {"kernel": [4, 4], "stride": [2, 2], "padding": [1, 1]},
    )
    y = s.add("conv_transpose", x, out=s.one_of(1, 4, 8, 16), seed=s.new_seed(), **settings)
    if s.chance(0.3):
        s.activation(y)


def _batch_norm(s: Sketch, x: int) -> None:
    y = s.add("batch_norm", x, seed=s.new_seed())
    if s.chance(0.5):
        s.activation(y)


def _group_norm(s: Sketch, x: int) -> None:
    channels = s.shape_of(x)[1]
    groups = s.one_of(*(g for g in (1, 2, 3, 4, channels) if channels % g == 0))
    _refuse_equal_numbers(s.values[x].data.reshape(s.shape_of(x)[0] * groups, -1))
    s.add("group_norm", x, groups=groups, seed=s.new_seed())


def _padded(s: Sketch, x: int) -> None:
    """An explicit border before a layer that may take it over."""
    border = [s.whole(0, 2) for _ in range(4)]
    x = s.activation(x, "relu") if s.chance(0.3) else x
    y = s.add("pad", x, padding=border, value=s.one_of(None, None, 1.0))
    if s.chance(0.6):
        conv(s, y)
    else:
        s.add("max_pool", y, kernel=[3, 3], stride=s.one_of([1, 1], [2, 2]))


def _shuffle(s: Sketch, x: int) -> None:
    """Channels of two groups in turn, as ShuffleNet has them."""
    y = s.add("split", x, axis=1, by=s.one_of(2, 3, 4))
    y = s.add("transpose", y, axes=[0, 2, 1, 3, 4])
    s.add("merge", y, axis=1)


def _channel_slice(s: Sketch, x: int) -> None:
    """A part of the channels; sometimes both parts, one of them worked on, beside each other again."""
    at = s.whole(1, max(1, s.shape_of(x)[1] - 1))
    left = s.add("slice", x, axis=1, stop=at)
    if s.chance(0.6):
        right = s.add("slice", x, axis=1, start=at)
        right = conv(s, right, same_size=True)
        s.add("concat", left, right)


def _joined_slices(s: Sketch, x: int) -> None:
    """Parts of the channels, joined again: as they were, swapped, one twice, some of them, or parts of two values."""
    channels = s.shape_of(x)[1]
    if channels < 3:
        raise DoesNotFit("too few channels for three parts")
    x = s.activation(x) if s.chance(0.5) else x  # else it may be the program's input
    first, second = sorted(int(i) + 1 for i in s.rng.permutation(channels - 1)[:2])
    other = conv(s, x, out=channels, same_size=True) if s.chance(0.3) else x
    bounds = ((0, first, x), (first, second, other), (second, None, x))
    parts = [s.add("slice", value, axis=1, start=start, stop=stop) for start, stop, value in bounds]
    y = s.add("concat", *(parts[i] for i in s.one_of((0, 1, 2), (0, 1), (1, 2), (2, 1), (1, 1), (0, 1, 0))))
    if s.chance(0.4):
        y = s.add("concat", *((y, x) if s.chance(0.5) else (x, y)))
    if s.chance(0.4):
        conv(s, y)


def _detour(s: Sketch, x: int) -> None:
    """A slice or a norm beside an operation that INT8 runs in Python: the next native call reads an earlier one's."""
    y = conv(s, x, out=s.one_of(4, 6, 8), same_size=True)
    if s.chance(0.3):  # what an operation in Python reads is a part of a concatenation before it
        z = s.add("concat", y, conv(s, y, out=4, same_size=True))
        s.add("concat", conv(s, z, out=4, same_size=True), s.activation(y, "softmax"))
        return
    beside = s.activation(y, "softmax")
    if s.chance(0.5):
        z = s.add("slice", y, axis=1, start=s.whole(0, s.shape_of(y)[1] - 1))
    else:
        _group_norm(s, y)
        z = conv(s, s.last, same_size=True)
    s.add("concat", beside, z)


def _global_pool(s: Sketch, x: int) -> None:
    s.add("global_pool", x, keepdims=s.one_of(None, True))


def _to_tokens(s: Sketch, x: int) -> None:
    y = s.add("merge", x, axis=2)
    s.add("transpose", y, axes=[0, 2, 1])


def _channels_last(s: Sketch, x: int) -> None:
    """As ConvNeXt does it: the channels behind, a norm and a layer over them, and back."""
    y = s.add("transpose", x, axes=[0, 2, 3, 1])
    if s.chance(0.5):
        _refuse_equal_numbers(s.values[y].data)
        y = s.add("layer_norm", y, seed=s.new_seed())
    y = s.add("linear", y, out=s.one_of(s.shape_of(y)[3], 5, 8), seed=s.new_seed())
    y = s.activation(y) if s.chance(0.5) else y
    s.add("transpose", y, axes=[0, 3, 1, 2])


def _classifier(s: Sketch, x: int) -> None:
    """The end of most networks: little between wide layers, which INT8 plans run for many images at once."""
    y = s.add("conv", x, out=s.one_of(64, 128), seed=s.new_seed())
    if s.chance(0.5):
        y = s.add("constant", y, name="mul", along=s.one_of([], [1]), seed=s.new_seed())
    pooled = s.one_of("pixel", "rows", "window")
    if pooled == "pixel":
        y = s.add("global_pool", y, keepdims=True)
    elif pooled == "rows":  # as ONNX files have it: rows that are seen as images of one pixel
        y = s.add("global_pool", y)
        for _ in range(2):
            y = s.add("split", y, axis=1, by=s.shape_of(y)[1])
    else:  # a few pixels, around which the next layer reads padding
        height, width = s.shape_of(y)[2:]
        y = s.add(s.one_of("max_pool", "avg_pool"), y, kernel=[max(1, height // 2), max(1, width // 2)])
    between = s.one_of(_as_it_is, _as_it_is, _scaled, _halves, _twice)(s, y)
    if pooled == "window" and s.chance(0.6):
        settings = {"out": s.one_of(48, 96), "kernel": [3, 3], "padding": [1, 1]}
    else:
        settings = {"out": s.one_of(192, 320)}
    wide = s.add("conv", between, seed=s.new_seed(), **settings)
    y = s.activation(wide, "relu", "hard_swish", "silu") if s.chance(0.7) else wide
    if s.chance(0.3):  # read again after the activation, which may not have overwritten it
        y = s.add("add", y, wide)
    y = s.add("flatten", y)
    outputs = s.one_of(10, 96)
    y = s.add("linear", y, out=outputs, seed=s.new_seed())
    if s.chance(0.15):  # an operation in Python reads what lies between the stages
        beside = s.add("flatten", s.activation(between, "softmax"))
        s.add("add", y, s.add("linear", beside, out=outputs, seed=s.new_seed()))


def _as_it_is(_s: Sketch, x: int) -> int:
    return x


def _scaled(s: Sketch, x: int) -> int:
    """An operation that may run in place, alone or several in a row; or one whose input is read again."""
    y = s.activation(x, "hard_swish", "sigmoid", "tanh", "leaky_relu")
    if s.chance(0.5):
        y = s.add("constant", y, name="add", along=[1], seed=s.new_seed())
    return s.add("add", y, x) if s.chance(0.4) else y


def _halves(s: Sketch, x: int) -> int:
    """Both halves of the channels, one of them worked on, swapped or as they were: values that share a buffer."""
    at = s.shape_of(x)[1] // 2
    left, right = s.add("slice", x, axis=1, stop=at), s.add("slice", x, axis=1, start=at)
    left = s.activation(left, "relu", "hard_swish") if s.chance(0.6) else left
    return s.add("concat", *((right, left) if s.chance(0.5) else (left, right)))


def _twice(s: Sketch, x: int) -> int:
    """The value beside a layer of it: a concatenation of which one part is read twice."""
    y = s.add("conv", x, out=s.one_of(8, 18), seed=s.new_seed())
    return s.add("concat", *((x, y) if s.chance(0.5) else (y, x)))


# --- values of any rank ---


def _activation(s: Sketch, x: int) -> None:
    s.activation(x)


def _softmax(s: Sketch, x: int) -> None:
    s.activation(x, "softmax")


def _self_gate(s: Sketch, x: int) -> None:
    gate = s.activation(x, "sigmoid", "sigmoid", "hard_sigmoid", "tanh")
    s.add("mul", *((x, gate) if s.chance(0.5) else (gate, x)))


def _constant(s: Sketch, x: int) -> None:
    rank = len(s.shape_of(x))
    along = s.one_of([], [1], [1], [rank - 1], [axis for axis in range(1, rank) if s.chance(0.5)])
    s.add("constant", x, name=s.one_of("mul", "add"), along=along, seed=s.new_seed())


def _flatten(s: Sketch, x: int) -> None:
    """Rows of an image; often an activation before the layer that reads them."""
    y = s.add("flatten", x)
    y = s.activation(y) if s.chance(0.5) else y
    if s.chance(0.7):
        s.add("linear", y, out=s.one_of(1, 3, 8, 10, 17), gemm=s.one_of(None, True), seed=s.new_seed())


def _join(s: Sketch, x: int) -> None:
    """The value and an earlier one of a shape that fits."""
    shape = s.shape_of(x)
    alike = [i for i in range(s.last) if s.shape_of(i) == shape]
    beside = [i for i in range(s.last) if s.shape_of(i)[:1] + s.shape_of(i)[2:] == shape[:1] + shape[2:]]
    if alike and s.chance(0.6):
        s.add(s.one_of("add", "add", "mul", "sub"), x, s.one_of(*alike))
    elif beside and len(shape) > 1:
        s.add("concat", *((x, s.one_of(*beside)) if s.chance(0.5) else (s.one_of(*beside), x)))
    else:
        raise DoesNotFit("no value to join")


def _merge(s: Sketch, x: int) -> None:
    s.add("merge", x, axis=s.whole(1 if s.chance(0.9) else 0, len(s.shape_of(x)) - 2))


def _split(s: Sketch, x: int) -> None:
    shape = s.shape_of(x)
    axis = s.whole(1, len(shape) - 1)
    factors = [by for by in (2, 3, 4, 5) if shape[axis] % by == 0]
    if not factors or len(shape) > 4:
        raise DoesNotFit("no axis to split")
    s.add("split", x, axis=axis, by=s.one_of(*factors))


def _transpose(s: Sketch, x: int) -> None:
    rank = len(s.shape_of(x))
    axes = [0, *(int(a) + 1 for a in s.rng.permutation(rank - 1))]
    if s.chance(0.15):
        axes = [int(a) for a in s.rng.permutation(rank)]
    s.add("transpose", x, axes=axes)


def _any_slice(s: Sketch, x: int) -> None:
    axis = s.whole(1, len(s.shape_of(x)) - 1)
    size = s.shape_of(x)[axis]
    if len(s.shape_of(x)) > 2 and s.chance(0.4):
        s.add("select", x, axis=axis, index=s.whole(0, size - 1))
    else:
        s.add("slice", x, axis=axis, start=s.whole(0, size // 2), step=s.one_of(None, None, 2))


def _layer_norm(s: Sketch, x: int) -> None:
    _refuse_equal_numbers(s.values[x].data)
    s.add("layer_norm", x, seed=s.new_seed())


def _linear(s: Sketch, x: int) -> None:
    gemm = True if len(s.shape_of(x)) == 2 and s.chance(0.5) else None
    bias = None if s.chance(0.7) else False
    y = s.add("linear", x, out=s.one_of(1, 2, 5, 8, 16, 17, 32), bias=bias, gemm=gemm, seed=s.new_seed())
    if s.chance(0.5):
        s.activation(y)


def _perceptron(s: Sketch, x: int) -> None:
    """A residual of two linear layers, with a norm before."""
    width = s.shape_of(x)[-1]
    y = x
    if s.chance(0.5):
        _refuse_equal_numbers(s.values[x].data)
        y = s.add("layer_norm", x, seed=s.new_seed())
    y = s.add("linear", y, out=s.one_of(4, 16, 2 * width), seed=s.new_seed())
    y = s.activation(y, "gelu", "gelu_tanh", "relu", "silu")
    y = s.add("linear", y, out=width, seed=s.new_seed())
    s.add("add", x, y)


def _attention(s: Sketch, x: int) -> None:
    width = s.shape_of(x)[2]
    heads = s.one_of(*(h for h in (1, 2, 3, 4) if width % h == 0))
    y = s.add("attention", x, heads=heads, causal=s.one_of(None, True), seed=s.new_seed())
    if s.chance(0.5):
        s.add("add", x, y)


def _recurrent(s: Sketch, x: int) -> None:
    kind = s.one_of("lstm", "gru", "rnn_tanh", "rnn_relu")
    s.add("recurrent", x, name=kind, out=s.one_of(1, 5, 8, 17), reverse=s.one_of(None, True), seed=s.new_seed())


def _mean_of_tokens(s: Sketch, x: int) -> None:
    s.add("mean", x, axis=1, keepdims=s.one_of(None, True))


# By the rank of a value: motifs, and how often each is drawn compared with the others.
_ANY: dict[Motif, float] = {
    _activation: 2, _self_gate: 1, _constant: 2, _join: 2, _transpose: 0.7, _any_slice: 0.5, _softmax: 0.2
}  # fmt: skip
_IMAGE: dict[Motif, float] = {
    _block: 8, _separable: 3, _residual: 4, _squeeze_excite: 2, _branches: 4, _pool: 3, _upsample: 1.5,
    _conv_transpose: 1, _batch_norm: 2, _group_norm: 1, _padded: 1, _shuffle: 1, _channel_slice: 2, _joined_slices: 1,
    _detour: 0.5, _large_maps: 2, _global_pool: 1, _to_tokens: 1, _channels_last: 1, _classifier: 2, _flatten: 2.5,
    _merge: 0.3, _split: 0.3, _layer_norm: 0.3, _linear: 0.5,
}  # fmt: skip
_TOKENS: dict[Motif, float] = {
    _linear: 3, _layer_norm: 1, _perceptron: 2, _attention: 1, _recurrent: 0.7, _mean_of_tokens: 1, _merge: 1, _split: 1
}  # fmt: skip
_ROWS: dict[Motif, float] = {_linear: 5, _perceptron: 1, _layer_norm: 0.5, _split: 0.7}
_MANY_AXES: dict[Motif, float] = {_merge: 6}
_BY_RANK = {2: _ROWS, 3: _TOKENS, 4: _IMAGE}


def _refuse_equal_numbers(rows: Array) -> None:
    """A norm over numbers that are nearly equal divides rounding errors by almost nothing."""
    if (rows.std(-1) <= _LEAST_SPREAD * np.abs(rows).max()).any():
        raise DoesNotFit("the numbers of a norm are nearly equal")


def _input_shape(rng: np.random.Generator) -> tuple[int, ...]:
    batch = int(rng.choice([1, 1, 2, 2, 3]))  # all of them are calibrated on: of four images, quantize holds one out
    kind = rng.random()
    if kind < 0.08:
        return batch, int(rng.integers(2, 40))
    if kind < 0.18:
        return batch, int(rng.integers(1, 12)), int(rng.integers(2, 20))
    channels = int(rng.choice([1, 2, 3, 3, 4, 5, 8, 16]))
    return batch, channels, int(rng.integers(1, 13)), int(rng.integers(1, 13))


def _draw_once(rng: np.random.Generator, seed: int) -> Program:
    sketch = Sketch(rng, _input_shape(rng), seed)
    for _ in range(int(rng.integers(2, 8))):
        motifs = {**_ANY, **_BY_RANK.get(len(sketch.shape_of(sketch.last)), _MANY_AXES)}
        weights = np.array(list(motifs.values()))
        motif = list(motifs)[rng.choice(len(motifs), p=weights / weights.sum())]
        before = len(sketch.ops)
        try:
            motif(sketch, sketch.last)
        except DoesNotFit:
            del sketch.ops[before:], sketch.values[before + 1 :]
    return sketch.program()


def is_well_conditioned(program: Program, network: Network) -> bool:
    """Whether float32 and INT8 can be expected to get the result right.

    NumPy's float32 must be near its float64, no result extreme, and noise on any value not amplified: a sum whose terms
    cancel, or a norm of almost equal numbers, would say more about rounding than about tilewise.
    """
    x = program.example()
    exact = run_eagerly(network, x.astype(np.float64), NUMPY)
    largest = float(np.abs(exact).max(initial=0))
    if not 1 / _LARGEST_NUMBER < largest < _LARGEST_NUMBER:
        return False
    rounding = np.abs(run_eagerly(network, x, NUMPY) - exact).max()
    return bool(rounding <= _ROUNDING * largest and amplification(network, x, exact, _NOISE) <= _LARGEST_AMPLIFICATION)


def draw(seed: int) -> Program:
    """The program of a seed: at least one operation, well conditioned."""
    rng = np.random.default_rng(seed)
    while True:
        program = _draw_once(rng, seed)
        if program.ops and is_well_conditioned(program, Network(program)):
            return program
