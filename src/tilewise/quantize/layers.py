"""Integer layers: int8 weights, uint8 activations, 32-bit sums; bias, ReLU, residual and rounding inside the kernel.

A layer keeps no float copy of its weights. Static layers take and give QuantizedArrays; a dynamic linear layer takes
floats, chooses a scale per row as they come, and gives floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.errors import ConfigurationError, GradientError, ShapeError
from tilewise.nn import Conv2d, Linear, Module
from tilewise.ops.base import Grads, Operation
from tilewise.quantize.array import QuantizedArray, as_image, quantize_array, round_up
from tilewise.quantize.elementwise import accumulator_scale, finish_for, set_finish
from tilewise.quantize.parameters import (
    AffineParameters,
    INT8Quantizer,
    QuantizedWeights,
    affine_from_range,
    wide_weights,
)
from tilewise.quantize.reference import Four, NumpyInt8Layer
from tilewise.quantize.saturation import avx2_products, saturation_safe_weights
from tilewise.tensor import Tensor, apply, is_grad_enabled, no_grad

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_LARGEST_BIAS = 2**30  # that leaves half of 32 bits to the products
_LARGEST_SUM = 2**31 - 1

INT32, FLOAT32, UINT8 = 0, 1, 2  # what a kernel's linear() gives


def new_kernel(
    weights: Array, offset: Array, scale: Array, bias: Array | None, stride: Pair = (1, 1), padding: Pair = (0, 0)
) -> Any:
    """The compiled layer, or NumPy's where there is none. weights (O, kh, kw, C) int8, or int16 for 16-bit inputs."""
    if weights.dtype == np.int16:
        return new_wide_kernel(weights, offset, scale, bias, Geometry(stride, four(padding)))
    kind = NumpyInt8Layer if native is None else native.Int8Layer
    return kind(np.ascontiguousarray(weights), offset, scale.astype(np.float32), bias, stride, padding)


@dataclass(frozen=True)
class Geometry:
    """Of a convolution, besides its weights. Padding: top, left, bottom, right."""

    stride: Pair = (1, 1)
    padding: Four = (0, 0, 0, 0)
    groups: int = 1
    dilation: Pair = (1, 1)

    @property
    def is_plain(self) -> bool:
        """Whether the product's own kernel does it: no groups, taps side by side, even padding."""
        return self.groups == 1 and self.dilation == (1, 1) and self.padding[:2] == self.padding[2:]


def new_conv_kernel(weights: Array, offset: Array, scale: Array, g: Geometry) -> Any:
    """The compiled convolution for this geometry, or NumPy's. weights (O, kh, kw, C / groups) int8."""
    if weights.dtype == np.int16:
        return new_wide_kernel(weights, offset, scale, None, g)
    if g.is_plain:
        return new_kernel(weights, offset, scale, None, g.stride, (g.padding[0], g.padding[1]))
    weights, scale = np.ascontiguousarray(weights), scale.astype(np.float32)
    if native is None:
        return NumpyInt8Layer(weights, offset, scale, None, g.stride, g.padding, g.groups, g.dilation)
    return native.Int8GroupedLayer(weights, offset, scale, g.groups, g.stride, g.padding, g.dilation)


def new_wide_kernel(weights: Array, offset: Array, scale: Array, bias: Array | None, g: Geometry) -> Any:
    """The same for inputs of 16 bits. weights (O, kh, kw, C / groups) int16."""
    weights, scale = np.ascontiguousarray(weights), scale.astype(np.float32)
    if native is None:
        return NumpyInt8Layer(weights, offset, scale, bias, g.stride, g.padding, g.groups, g.dilation)
    return native.Int16Layer(weights, offset, scale, bias, g.groups, g.stride, g.padding, g.dilation)


def integer_offset(q: Array, bias: Array | None, scales: Array, input: AffineParameters) -> Array:
    """What is added to the sums of a channel: the bias in units of the sums, and the input's zero point taken out."""
    rows = q.reshape(len(q), -1).astype(np.int64)
    steps = np.zeros(len(q)) if bias is None else np.rint(bias.astype(np.float64) / scales)
    largest = np.abs(rows).sum(1) * input.largest + np.abs(steps)
    if largest.max(initial=0) > _LARGEST_SUM and np.abs(steps).max(initial=0) > _LARGEST_BIAS:
        raise ConfigurationError("its inputs are so small that its bias does not fit into 32 bits beside them")
    if largest.max(initial=0) > _LARGEST_SUM:
        raise ConfigurationError("it has so many inputs that a sum of them might not fit into 32 bits")
    total: Array = steps.astype(np.int64) - input.zero_point * rows.sum(1)
    return total.astype(np.int32)  # what wraps here wraps back when the products are added


def scales_for(weights: QuantizedWeights, input: AffineParameters, output: AffineParameters) -> Array:
    """The weights' scales, but for a channel of zeros, where any will do, one that leaves its bias its precision."""
    empty = ~weights.q.reshape(len(weights.q), -1).any(1)
    fine = np.float32(output.scale / input.scale / 4096)
    usable = np.isfinite(fine) and fine > 0
    return np.where(empty, fine, weights.scale).astype(np.float32) if usable else weights.scale


def _check_layer_size(layer: str, *sizes: Any) -> None:
    """Raise ConfigurationError if a constructor received a weight or a layer instead of its sizes."""
    if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ConfigurationError(
            f"Quantized{layer}(...) takes the sizes of a new layer, as nn.{layer} does; use "
            f"Quantized{layer}.from_float(layer) for a trained layer and Quantized{layer}.from_weights(...) for arrays"
        )


class QuantizedConv2d(Module):
    """A convolution on uint8 activations with int8 weights, with a fused activation and residual addition.

    `QuantizedConv2d(3, 8, 3)` draws weights as nn.Conv2d does, `from_float` converts a trained layer, and
    `from_weights` takes arrays. Where the ranges of inputs and outputs are not given, the first batch sets them.
    """

    computes_in_int8 = True
    _uncalibrated: Any = None  # the float layer until the first batch sets the ranges

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 0,
        kernel_size: int | Pair = 3,
        stride: int | Pair = 1,
        padding: int | tuple[int, ...] = 0,
        *,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        rng: Any = None,
    ) -> None:
        _check_layer_size("Conv2d", in_channels, out_channels)
        sizes = in_channels, out_channels, kernel_size
        self._await_ranges(Conv2d(*sizes, stride, padding, groups=groups, bias=bias, dilation=dilation, rng=rng))

    def _await_ranges(self, conv: Any) -> None:
        """Keep a float layer until the first batch; it is not a submodule."""
        vars(self)["_uncalibrated"] = conv

    def _calibrate(self, x: Array) -> None:
        """Set the ranges of inputs and outputs from one batch (N, C, H, W), and quantize the weights."""
        conv = self._uncalibrated
        with no_grad():
            ranges = [affine_from_range(float(v.min()), float(v.max())) for v in (x, conv(Tensor(x)).data)]
        vars(self).update(vars(type(self).from_float(conv, *ranges)), _uncalibrated=None)

    @classmethod
    def from_weights(
        cls,
        weight: Array,
        bias: Array | None,
        input: AffineParameters,
        output: AffineParameters,
        stride: Pair = (1, 1),
        padding: tuple[int, ...] = (0, 0),
        relu: bool = False,
        residual: AffineParameters | None = None,
        out_border: int = 0,
        *,
        activation: str = "",
        groups: int = 1,
        dilation: Pair = (1, 1),
        means: Array | None = None,
        rounded: QuantizedWeights | None = None,
    ) -> Self:
        """Create a layer from a float32 weight (O, C / groups, kh, kw) and the affine parameters of input and output.

        `means` of the input's channels correct the bias for the rounding of the weights; `rounded` are the int8
        weights if they were rounded before.
        """
        geometry = Geometry(stride, four(padding), groups, dilation)
        read = read_as(input, output, geometry)
        weights = _conv_weights(weight, bias, read, groups) if rounded is None or read.is_int16 else rounded
        scale = scales_for(weights, read, output)
        if means is not None:
            bias = corrected_bias(weight, weights.dequantize(), bias, np.asarray(means), groups)
        q = np.ascontiguousarray(weights.q.transpose(0, 2, 3, 1))  # (O, kh, kw, C / groups)
        offset = integer_offset(q, bias, read.scale * scale.astype(np.float64), read)
        activation = "relu" if relu else activation
        return cls.restored(q, scale, offset, input, output, geometry, activation, residual, out_border)

    @classmethod
    def from_float(
        cls, conv: Any, input: AffineParameters | None = None, output: AffineParameters | None = None, **options: Any
    ) -> Self:
        """Convert an nn.Conv2d; without `input` and `output` the first batch sets the ranges."""
        if not isinstance(conv, Conv2d):
            raise ConfigurationError(f"QuantizedConv2d.from_float takes an nn.Conv2d, not a {type(conv).__name__}")
        if input is None or output is None:
            layer = cls.__new__(cls)
            layer._await_ranges(conv)
            return layer
        bias = None if conv.bias is None else conv.bias.data
        options = {"groups": conv.groups, "dilation": getattr(conv, "dilation", (1, 1)), **options}
        return cls.from_weights(conv.weight.data, bias, input, output, conv.stride, conv.padding, **options)

    @classmethod
    def restored(cls, *parts: Any) -> Self:
        """From integers: the arguments of `_set_up`."""
        layer = cls.__new__(cls)
        layer._set_up(*parts)
        return layer

    def _set_up(
        self,
        q: Array,
        scale: Array,
        offset: Array,
        input: AffineParameters,
        output: AffineParameters,
        geometry: Geometry,
        activation: str,
        residual: AffineParameters | None,
        out_border: int,
    ) -> None:
        self.weight_scale, self.offset, self.input, self.output = scale, offset, input, output
        self.geometry, self.activation, self.read = geometry, activation, read_as(input, output, geometry)
        residual_is_wider = residual is not None and residual.is_int16 and not output.is_int16
        if (q.dtype == np.int16) != self.read.is_int16 or residual_is_wider:
            raise ConfigurationError("its weights or what is added have other bits than its inputs and outputs ask for")
        self.residual, self.out_border, self.out_channels = residual, out_border, len(q)
        finish = finish_for(activation, output)
        unit = accumulator_scale(finish, output)
        self.kernel = new_conv_kernel(q, offset, self.read.scale * scale.astype(np.float64) / unit, geometry)
        set_finish(self.kernel, finish)
        self._widens = self.read.is_int16 and not input.is_int16  # its bytes, in a step before
        if self._widens and q.shape[3] == 1 and len(q) == geometry.groups and native is not None:
            self.kernel.set_bytes_read(input.zero_point)
            self._widens = False
        if residual is not None:
            is_int16 = (True,) if residual.is_int16 else (False,) if self.read.is_int16 else ()
            self.kernel.set_residual(residual.scale / unit, residual.zero_point, *is_int16)

    @property
    def relu(self) -> bool:
        return self.activation == "relu"

    @property
    def avx2(self) -> str:
        """How AVX2 multiplies its bytes. Depthwise convolutions widen them, and those in groups that are not proven."""
        weights = self.kernel.weights()
        if self.read.is_int16:
            return "16-bit products"
        way = avx2_products(weights)
        aligned = weights.shape[3] % 4 == 0 and way.endswith("proven")
        return way if self.geometry.is_plain or aligned else "16-bit products"

    @property
    def nbytes(self) -> int:
        """Bytes of weights, offsets and scales, the copies for saving included."""
        return int(self.kernel.nbytes + self.weight_scale.nbytes + self.offset.nbytes)

    def forward(self, x: Any, residual: QuantizedArray | None = None) -> QuantizedArray:
        if self._uncalibrated is not None:
            self._calibrate(_float(x))
        border = max(self.geometry.padding)
        if not isinstance(x, QuantizedArray):
            x = quantize_array(_float(x), self.input, border)
        _check_parameters(x, self.input)
        if (residual is None) != (self.residual is None):
            raise ConfigurationError("this layer was made with a residual, or without one, and must be called so")
        x = _widened(as_image(x).with_border(border), self.read)
        kernel = self._reference() if self.read.is_int16 or self.output.is_int16 else self.kernel
        try:
            if residual is None:
                data = kernel.conv(x.data, x.border, None, 0, self.out_border)
            else:
                residual = as_image(residual)
                data = kernel.conv(x.data, x.border, residual.data, residual.border, self.out_border)
        except ValueError as error:
            raise ShapeError(f"QuantizedConv2d cannot work on shape {x.shape}: {error}") from None
        return QuantizedArray(data, self.output, self.out_channels, self.out_border)

    def _reference(self) -> NumpyInt8Layer:
        """The layer in NumPy: numbers of 16 bits are made by compiled code inside plans only."""
        g, finish = self.geometry, finish_for(self.activation, self.output)
        unit = accumulator_scale(finish, self.output)
        scale = (self.read.scale * self.weight_scale.astype(np.float64) / unit).astype(np.float32)
        settings = (scale, None, g.stride, g.padding, g.groups, g.dilation)
        made = NumpyInt8Layer(self.kernel.weights(), self.offset, *settings)
        set_finish(made, finish)
        if self.residual is not None:
            made.set_residual(self.residual.scale / unit, self.residual.zero_point)
        return made

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        """Put this layer into a native plan: it reads the values `inputs`; returns the value it gives."""
        if self._widens:
            inputs = [_add_widening(plan, inputs[0], self), *inputs[1:]]
        return int(plan.conv(self.kernel, inputs, self.out_border))


def read_as(input: AffineParameters, output: AffineParameters, geometry: Geometry) -> AffineParameters:
    """What a convolution's products read: bytes in groups are widened where 16 bits are to come out of them."""
    return input.exactly_widened() if output.is_int16 and not geometry.is_plain else input


def _conv_weights(weight: Array, bias: Array | None, read: AffineParameters, groups: int) -> QuantizedWeights:
    return wide_weights(weight, bias, read) if read.is_int16 else rounded_conv_weights(weight, groups)


def rounded_conv_weights(weight: Array, groups: int) -> QuantizedWeights:
    """Weights (O, C / groups, kh, kw) of a convolution of bytes."""
    depthwise = groups > 1 and weight.shape[1:2] == (1,)  # widens its bytes
    return INT8Quantizer().quantize_weights(weight) if depthwise else saturation_safe_weights(weight)


def _widened(x: QuantizedArray, read: AffineParameters) -> QuantizedArray:
    """Bytes as numbers of 16 bits, exactly."""
    if x.parameters.is_int16 or not read.is_int16:
        return x
    return QuantizedArray(x.data.astype(np.int16) - np.int16(x.parameters.zero_point), read, x.channels, x.border)


def _add_widening(plan: Any, source: int, layer: QuantizedConv2d) -> int:
    channels = layer.kernel.weights().shape[3] * layer.geometry.groups
    finish, border = finish_for("", layer.read).native(), max(layer.geometry.padding)
    return int(plan.affine(source, [1.0] * channels, [0.0] * channels, finish, border))


def four(padding: tuple[int, ...]) -> Four:
    """Top, left, bottom, right; two stand for both sides."""
    top, left, bottom, right = (*padding, *padding)[:4]
    return top, left, bottom, right


def corrected_bias(weight: Array, rounded: Array, bias: Array | None, means: Array, groups: int = 1) -> Array:
    """The bias, moved by what rounding the weights (O, C / groups, ...) takes from a channel's mean result.

    Weights are rounded once, so their errors do not average out over pixels as those of activations do.
    """
    lost = (weight.astype(np.float64) - rounded).reshape(*weight.shape[:2], -1).sum(2)  # (O, C / groups)
    of_group = means.reshape(groups, -1).repeat(len(weight) // groups, 0)
    shift = (lost * of_group).sum(1)
    corrected: Array = (shift if bias is None else bias + shift).astype(np.float32)
    return corrected


class QuantizedLinear(Module):
    """y = x @ weight.T + bias on bytes. With `output` it gives a QuantizedArray, without it floats; without `input` it
    is dynamic: floats in, a scale per row as they come."""

    computes_in_int8 = True

    def __init__(
        self,
        in_features: int,
        out_features: int = 0,
        bias: bool = True,
        *,
        rng: Any = None,
    ) -> None:
        """Draw weights as nn.Linear does; the layer is dynamic. `from_float` converts a trained layer."""
        _check_layer_size("Linear", in_features, out_features)
        linear = Linear(in_features, out_features, bias, rng)
        vars(self).update(vars(type(self).from_float(linear)))

    @classmethod
    def from_weights(
        cls,
        weight: Array,
        bias: Array | None,
        input: AffineParameters | None = None,
        output: AffineParameters | None = None,
        relu: bool = False,
        *,
        activation: str = "",
    ) -> Self:
        """Create a layer from a float32 weight (out, in)."""
        is_int16 = input is not None and input.is_int16
        weights = wide_weights(weight, bias, input) if input and is_int16 else INT8Quantizer().quantize_weights(weight)
        scale = weights.scale if input is None or output is None else scales_for(weights, input, output)
        return cls.restored(weights.q, scale, bias, input, output, relu, activation)

    @classmethod
    def from_float(cls, linear: Any, **options: Any) -> Self:
        """Convert an nn.Linear; dynamic unless `input` is given."""
        if not isinstance(linear, Linear):
            raise ConfigurationError(f"QuantizedLinear.from_float takes an nn.Linear, not a {type(linear).__name__}")
        return cls.from_weights(linear.weight.data, None if linear.bias is None else linear.bias.data, **options)

    @classmethod
    def restored(cls, *parts: Any) -> Self:
        """From integers: the arguments of `_set_up`."""
        layer = cls.__new__(cls)
        layer._set_up(*parts)
        return layer

    def _set_up(
        self,
        q: Array,
        scale: Array,
        bias: Array | None,
        input: AffineParameters | None,
        output: AffineParameters | None,
        relu: bool,
        activation: str = "",
    ) -> None:
        self.weight_scale, self.input, self.output = scale, input, output
        self.activation = "relu" if relu else activation
        self.out_features, self.in_features = q.shape
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        read = AffineParameters(1.0, 128) if input is None else input
        if (q.dtype == np.int16) != read.is_int16:
            raise ConfigurationError("its weights have other bits than its inputs ask for")
        combined = read.scale * scale.astype(np.float64)
        whole = integer_offset(q, bias if output is not None else None, combined, read)
        kernel_bias = None if output is not None else self.float_bias
        finish = None if output is None else finish_for(self.activation, output)
        if output is not None and finish is not None:
            combined = combined / accumulator_scale(finish, output)
        self.kernel = new_kernel(q[:, None, None, :], whole, combined, kernel_bias)
        if finish is not None:
            set_finish(self.kernel, finish)

    def holds_weights(self) -> bool:
        """Count as a layer when a module decides whether to plan itself; the weights are in the kernel."""
        return True

    @property
    def relu(self) -> bool:
        return self.activation == "relu"

    @property
    def avx2(self) -> str:
        """How AVX2 multiplies its bytes."""
        return "16-bit products" if self._reads_wide else avx2_products(self.kernel.weights())

    @property
    def _reads_wide(self) -> bool:
        return self.input is not None and self.input.is_int16

    @property
    def nbytes(self) -> int:
        """Bytes of weights, offsets, biases and scales, the copies for saving included."""
        bias = 0 if self.float_bias is None else self.float_bias.nbytes
        return int(self.kernel.nbytes + self.weight_scale.nbytes + bias)

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Any:
        if self.input is None:
            return self._dynamic(x, activation, residual)
        if not isinstance(x, QuantizedArray):
            x = quantize_array(_float(x), self.input)
        _check_parameters(x, self.input)
        if x.data.ndim != 2 or x.channels != self.in_features:
            raise ShapeError(f"QuantizedLinear takes (N, {self.in_features}), not {x.shape}")
        if self.output is None:
            return self._product(x.data, FLOAT32, None, self.relu)
        return QuantizedArray(self._product(x.data, UINT8, None, False), self.output, self.out_features)

    def _product(self, x: Array, kind: int, row_scale: Array | None, relu: bool) -> Array:
        """The kernel's product, with the tile that was kept for it where a tile chooser is in force."""
        if self._reads_wide or (self.output is not None and self.output.is_int16):
            return self._reference().linear(x, kind, row_scale, relu)
        tiles = current_backend().tiles
        if tiles is None:
            out: Array = self.kernel.linear(x, kind, row_scale, relu)
        else:
            out = self.kernel.linear(x, kind, row_scale, relu, None, tiles)
        return out

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        """Put this layer into a native plan: it reads the value `inputs[0]`; returns the value it gives."""
        if self._reads_wide:
            return int(plan.conv(self.kernel, inputs, 0, self.output is None and self.relu))
        return int(plan.linear(self.kernel, inputs[0], self.output is None, self.relu))

    def _reference(self) -> NumpyInt8Layer:
        """The layer in NumPy: numbers of 16 bits are made by compiled code inside plans only."""
        assert self.input is not None
        weights, scale = self.kernel.weights(), self.input.scale * self.weight_scale.astype(np.float64)
        gives_floats = self.output is None
        whole = integer_offset(weights[:, 0, 0], None if gives_floats else self.float_bias, scale, self.input)
        finish = None if self.output is None else finish_for(self.activation, self.output)
        if self.output is not None and finish is not None:
            scale = scale / accumulator_scale(finish, self.output)
        bias = self.float_bias if gives_floats else None
        made = NumpyInt8Layer(weights, whole, scale.astype(np.float32), bias, (1, 1), (0, 0))
        if finish is not None:
            set_finish(made, finish)
        return made

    def _dynamic(self, x: Any, activation: str | None, residual: Any) -> Tensor:
        if is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise GradientError("an int8 layer has no gradient; run it under no_grad()")
        values = _float(x)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"QuantizedLinear takes (..., {self.in_features}), not {values.shape}")
        added = None if residual is None else _float(residual)
        tensor = x if isinstance(x, Tensor) and x.dtype == np.float32 else Tensor(values)
        return apply(DynamicLinear, tensor, layer=self, activation=activation, residual=added)

    def dynamic_product(self, values: Array, activation: str | None, residual: Array | None) -> Array:
        """float32 (..., in_features) to (..., out_features); every row is quantized by its own scale."""
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features), np.float32)
        q, scales = quantize_rows(rows)
        out = self._product(q, FLOAT32, scales, self.relu or (activation == "relu" and residual is None))
        out = out.reshape(*values.shape[:-1], self.out_features)
        if residual is not None:
            out += residual
        if activation == "gelu" or (activation == "relu" and residual is not None):
            out = current_backend().dispatch(activation, out)
        return out


class DynamicLinear(Operation):
    """A dynamic QuantizedLinear as an operation, so that networks of them can be traced, planned and saved."""

    def forward(
        self, x: Array, *, layer: QuantizedLinear, activation: str | None = None, residual: Array | None = None
    ) -> Array:
        return layer.dynamic_product(x, activation, residual)

    def backward(self, grad: Array) -> Grads:
        raise GradientError("an int8 layer has no gradient; run it under no_grad()")


def quantize_rows(rows: Array) -> tuple[Array, Array]:
    """float32 (M, K) to bytes with 128 added, each row by its own scale."""
    if native is not None:
        q, scales = native.int8_quantize_rows(rows)
        return q, scales
    largest = np.where(np.isnan(rows), np.float32(0), np.abs(rows)).max(1, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        inverse = np.where((largest > 0) & np.isfinite(inverse), inverse, np.float32(0))  # too small to tell from zero
        scaled = np.nan_to_num(rows * inverse[:, None])
    q = np.full((len(rows), round_up(rows.shape[1])), 128, np.uint8)
    q[:, : rows.shape[1]] = np.rint(scaled).astype(np.int32) + 128
    return q, largest / np.float32(127)


def _float(x: Any) -> Array:
    # Not `data`: reading it counts as a computation outside of tensors, which a plan could not follow.
    values = x._array if isinstance(x, Tensor) else np.asarray(x)
    return values if values.dtype == np.float32 else values.astype(np.float32)


def _check_parameters(x: QuantizedArray, wanted: AffineParameters) -> None:
    if x.parameters != wanted:
        raise ConfigurationError("these bytes have another scale or zero point than the layer was made for")
