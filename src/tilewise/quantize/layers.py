"""Integer layers: int8 weights, uint8 activations, 32-bit sums; bias, activation, residual and requantization inside.

Where uint8 is too coarse, activations and the weights that read them are int16. A layer keeps no float copy of its
weights. Static layers take and return QuantizedArrays; a dynamic linear layer takes and returns floats, and quantizes
each row by its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tilewise._extension import native
from tilewise.backend import current_backend
from tilewise.backend.instance_methods import ExplainsMethods
from tilewise.errors import ConfigurationError, GradientError, ShapeError, type_name
from tilewise.nn import Conv2d, Linear, Module
from tilewise.ops.base import Grads, Operation
from tilewise.quantize.operators import accumulator_scale, output_stage, set_output_stage
from tilewise.quantize.parameters import (
    AffineParameters,
    INT8Quantizer,
    QuantizedArray,
    QuantizedWeights,
    affine_from_range,
    as_image,
    int16_weights,
    quantize_array,
    round_up,
)
from tilewise.quantize.reference import Four, NumpyInt8Layer
from tilewise.quantize.saturation import avx2_products, saturation_safe_weights
from tilewise.tensor import Array, Tensor, apply, is_grad_enabled, no_grad

Pair = tuple[int, int]
_LARGEST_BIAS = 2**30  # leaves half of 32 bits to the products
_LARGEST_SUM = 2**31 - 1  # int32 accumulators

INT32, FLOAT32, UINT8 = 0, 1, 2  # dtype of the result of a packed layer's linear()


@dataclass(frozen=True)
class Geometry:
    """Settings of a convolution besides its weights. Padding is (top, left, bottom, right)."""

    stride: Pair = (1, 1)
    padding: Four = (0, 0, 0, 0)
    groups: int = 1
    dilation: Pair = (1, 1)

    @property
    def is_plain(self) -> bool:
        """Tell whether the matrix product's kernel runs it: no groups, no dilation, the same padding on both sides."""
        return self.groups == 1 and self.dilation == (1, 1) and self.padding[:2] == self.padding[2:]


def packed_layer(
    weights: Array,
    offset: Array,
    scale: Array,
    bias: Array | None = None,
    geometry: Geometry | None = None,
    in_numpy: bool = False,
) -> Any:
    """Pack weights (O, kh, kw, C / groups), int8 or int16, into a layer object of the compiled kernels.

    `offset` and `scale` (O,) apply to each output channel's integer sum. `in_numpy` returns the NumPy reference
    instead, which is also used without the compiled extension.
    """
    g = geometry or Geometry()
    weights, scale = np.ascontiguousarray(weights), scale.astype(np.float32)
    settings: dict[str, Any] = {"groups": g.groups, "stride": g.stride, "padding": g.padding, "dilation": g.dilation}
    if native is None or in_numpy:
        return NumpyInt8Layer(weights, offset, scale, bias, **settings)
    # One compiled class per arithmetic: 16-bit products, the product of uint8 with int8, grouped convolutions.
    if weights.dtype == np.int16:
        return native.Int16Layer(weights, offset, scale, bias, **settings)
    if g.is_plain:
        return native.Int8Layer(weights, offset, scale, bias, g.stride, g.padding[:2])
    return native.Int8GroupedLayer(weights, offset, scale, **settings)


def integer_offset(q: Array, bias: Array | None, scales: Array, input: AffineParameters) -> Array:
    """Return the int32 that is added to each output channel's sum: its bias less the effect of the input's zero point.

    sum(q (x - zero)) + bias / scale = sum(q x) + (bias / scale - zero sum(q)).
    """
    rows = q.reshape(len(q), -1).astype(np.int64)
    bias_steps = np.zeros(len(q)) if bias is None else np.rint(bias.astype(np.float64) / scales)
    # The worst case: every activation has the largest magnitude and the sign of its weight.
    largest = np.abs(rows).sum(1) * input.largest + np.abs(bias_steps)
    if largest.max(initial=0) > _LARGEST_SUM and np.abs(bias_steps).max(initial=0) > _LARGEST_BIAS:
        raise ConfigurationError("its inputs are so small that its bias does not fit into 32 bits beside them")
    if largest.max(initial=0) > _LARGEST_SUM:
        raise ConfigurationError("it has so many inputs that a sum of them might not fit into 32 bits")
    total: Array = bias_steps.astype(np.int64) - input.zero_point * rows.sum(1)
    return total.astype(np.int32)  # an overflow here is undone when the products are added


def scales_for(weights: QuantizedWeights, input: AffineParameters, output: AffineParameters) -> Array:
    """Return the weights' scales (O,), with a fine scale for output channels whose weights are all zero.

    Any scale represents zeros; a fine one keeps the rounding error of the bias negligible.
    """
    is_zero = ~weights.q.reshape(len(weights.q), -1).any(1)
    # With a 4096th of an output step as unit, rounding the bias costs nothing.
    fine = np.float32(output.scale / input.scale / 4096)
    usable = np.isfinite(fine) and fine > 0
    return np.where(is_zero, fine, weights.scale).astype(np.float32) if usable else weights.scale


def corrected_bias(weight: Array, rounded: Array, bias: Array | None, means: Array, groups: int = 1) -> Array:
    """Return the bias minus the mean error of the outputs: rounding error of the weights times the input `means`.

    Weights (O, C / groups, ...) are rounded once, so their errors do not average out over pixels as those of
    activations do (Nagel et al. 2019, section 4.2).
    """
    errors = (weight.astype(np.float64) - rounded).reshape(*weight.shape[:2], -1).sum(2)  # (O, C / groups)
    # Each filter reads the channels of its group: (O, C / groups).
    group_means = means.reshape(groups, -1).repeat(len(weight) // groups, 0)
    shift = (errors * group_means).sum(1)
    corrected: Array = (shift if bias is None else bias + shift).astype(np.float32)
    return corrected


class IntegerLayer(Module):
    """A layer whose packed weights are in `kernel`."""

    computes_in_int8 = True
    kernel: Any
    activation: str

    @classmethod
    def from_integers(cls, *arrays: Array | None, **settings: Any) -> Self:
        """Create a layer from quantized arrays, such as those of a file: the arguments of `_set_up`."""
        layer = cls.__new__(cls)
        layer._set_up(*arrays, **settings)
        return layer

    def _set_up(self, *arrays: Any, **settings: Any) -> None:
        """Build the layer from stored arrays and settings; each subclass implements it."""
        raise NotImplementedError

    @property
    def relu(self) -> bool:
        return self.activation == "relu"

    @staticmethod
    def _check_sizes(layer: str, *sizes: Any) -> None:
        """Raise ConfigurationError if a constructor received a weight or a layer instead of its sizes."""
        if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            raise ConfigurationError(
                f"Quantized{layer}(...) takes the sizes of a new layer, as nn.{layer} does; use "
                f"Quantized{layer}.from_float(layer) for a trained layer and Quantized{layer}.from_weights(...) for "
                "arrays"
            )


class QuantizedConv2d(IntegerLayer, metaclass=ExplainsMethods):
    """A convolution on uint8 activations with int8 weights, with a fused activation and residual addition.

    `QuantizedConv2d(3, 8, 3)` draws weights as nn.Conv2d does, `from_float` converts a trained layer, and
    `from_weights` takes arrays. Where the ranges of inputs and outputs are not given, the first batch sets them.
    """

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
        self._check_sizes("Conv2d", in_channels, out_channels)
        sizes = in_channels, out_channels, kernel_size
        self._await_ranges(Conv2d(*sizes, stride, padding, groups=groups, bias=bias, dilation=dilation, rng=rng))

    def _await_ranges(self, conv: Any) -> None:
        """Store a float layer to convert when the first batch arrives; it is not a submodule."""
        vars(self)["_uncalibrated"] = conv

    def _calibrate(self, x: Array) -> None:
        """Set the ranges of inputs and outputs from one batch (N, C, H, W), and quantize the weights."""
        conv = self._uncalibrated
        with no_grad():
            # One batch is all there is: the ranges are its own and those of its float result.
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
        out_padding: int = 0,
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
        top, left, bottom, right = (*padding, *padding)[:4]
        geometry = Geometry(stride, (top, left, bottom, right), groups, dilation)
        operand = product_input(input, output, geometry)
        # int16 products need int16 weights; weights that GPTQ rounded before are int8.
        if operand.is_int16:
            weights = int16_weights(weight, bias, operand)
        else:
            weights = rounded_conv_weights(weight, groups) if rounded is None else rounded
        scale = scales_for(weights, operand, output)
        if means is not None:
            bias = corrected_bias(weight, weights.dequantize(), bias, np.asarray(means), groups)
        q = np.ascontiguousarray(weights.q.transpose(0, 2, 3, 1))  # (O, kh, kw, C / groups)
        offset = integer_offset(q, bias, operand.scale * scale.astype(np.float64), operand)
        return cls.from_integers(
            q,
            scale,
            offset,
            input=input,
            output=output,
            geometry=geometry,
            activation="relu" if relu else activation,
            residual=residual,
            out_padding=out_padding,
        )

    @classmethod
    def from_float(
        cls, conv: Any, input: AffineParameters | None = None, output: AffineParameters | None = None, **options: Any
    ) -> Self:
        """Convert an nn.Conv2d; without `input` and `output` the first batch sets the ranges."""
        if not isinstance(conv, Conv2d):
            raise ConfigurationError(f"QuantizedConv2d.from_float takes an nn.Conv2d, not a {type_name(conv)}")
        if input is None or output is None:
            layer = cls.__new__(cls)
            layer._await_ranges(conv)
            return layer
        bias = None if conv.bias is None else conv.bias.data
        options = {"groups": conv.groups, "dilation": getattr(conv, "dilation", (1, 1)), **options}
        return cls.from_weights(conv.weight.data, bias, input, output, conv.stride, conv.padding, **options)

    def _set_up(
        self,
        q: Array,
        scale: Array,
        offset: Array,
        *,
        input: AffineParameters,
        output: AffineParameters,
        geometry: Geometry,
        activation: str,
        residual: AffineParameters | None,
        out_padding: int,
    ) -> None:
        """Pack weights `q` (O, kh, kw, C / groups) with the scale and the integer offset of each output channel."""
        self.weight_scale, self.offset, self.input, self.output = scale, offset, input, output
        self.geometry, self.activation, self.operand = geometry, activation, product_input(input, output, geometry)
        self.residual, self.out_padding, self.out_channels = residual, out_padding, len(q)
        int16_residual_in_uint8 = residual is not None and residual.is_int16 and not output.is_int16
        if (q.dtype == np.int16) != self.operand.is_int16 or int16_residual_in_uint8:
            raise ConfigurationError("its weights or its residual have another dtype than its inputs and outputs need")
        self.kernel = self._pack(q)
        # uint8 inputs of an int16 product are converted by an operator before, or by a depthwise kernel itself.
        self._needs_conversion = self.operand.is_int16 and not input.is_int16
        if self._needs_conversion and q.shape[3] == 1 and len(q) == geometry.groups and native is not None:
            self.kernel.set_bytes_read(input.zero_point)
            self._needs_conversion = False

    def _pack(self, q: Array, in_numpy: bool = False) -> Any:
        """Create the packed layer for weights `q`, with its output stage and the scale of its residual."""
        stage = output_stage(self.activation, self.output)
        unit = accumulator_scale(stage, self.output)
        scale = self.operand.scale * self.weight_scale.astype(np.float64) / unit
        kernel = packed_layer(q, self.offset, scale, geometry=self.geometry, in_numpy=in_numpy)
        set_output_stage(kernel, stage)
        if self.residual is not None:
            # Only int16 kernels, and the plain uint8 kernel, can read an int16 residual.
            is_int16 = (True,) if self.residual.is_int16 else (False,) if self.operand.is_int16 else ()
            kernel.set_residual(self.residual.scale / unit, self.residual.zero_point, *is_int16)
        return kernel

    @property
    def avx2(self) -> str:
        """Describe how AVX2 without VNNI multiplies; depthwise and unsafe grouped convolutions use 16-bit products."""
        if self.operand.is_int16:
            return "16-bit products"
        weights = self.kernel.weights()
        products = avx2_products(weights)
        is_safe = weights.shape[3] % 4 == 0 and products.endswith("saturation-safe")
        return products if self.geometry.is_plain or is_safe else "16-bit products"

    @property
    def nbytes(self) -> int:
        """Bytes of weights, offsets and scales, the copies for saving included."""
        return int(self.kernel.nbytes + self.weight_scale.nbytes + self.offset.nbytes)

    def forward(self, x: Any, residual: QuantizedArray | None = None) -> QuantizedArray:
        """Convolve a QuantizedArray, or floats (N, C, H, W), which are quantized first."""
        if self._uncalibrated is not None:
            self._calibrate(_float_values(x))
        padding = max(self.geometry.padding)
        if not isinstance(x, QuantizedArray):
            x = quantize_array(_float_values(x), self.input, padding)
        _check_parameters(x, self.input)
        # The residual's scale is part of the packed layer.
        if (residual is None) != (self.residual is None):
            raise ConfigurationError("this layer must be called with a residual if it was made with one, and only then")
        x = _to_int16(as_image(x).with_padding(padding), self.operand)
        # Compiled code computes int16 inside native plans only.
        needs_numpy = self.operand.is_int16 or self.output.is_int16
        kernel = self._pack(self.kernel.weights(), in_numpy=True) if needs_numpy else self.kernel
        skip = (None, 0) if residual is None else (as_image(residual).data, as_image(residual).padding)
        try:
            data = kernel.conv(x.data, x.padding, *skip, self.out_padding)
        except ValueError as error:
            raise ShapeError(f"QuantizedConv2d cannot work on shape {x.shape}: {error}") from None
        return QuantizedArray(data, self.output, self.out_channels, self.out_padding)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        """Add this layer to a native plan and return the value number of its result; `inputs` are value numbers."""
        if self._needs_conversion:
            # An identity with a scale per channel converts uint8 to int16.
            channels = self.kernel.weights().shape[3] * self.geometry.groups
            stage, padding = output_stage("", self.operand).native(), max(self.geometry.padding)
            converted = int(plan.affine(inputs[0], [1.0] * channels, [0.0] * channels, stage, padding))
            inputs = [converted, *inputs[1:]]
        return int(plan.conv(self.kernel, inputs, self.out_padding))


def product_input(input: AffineParameters, output: AffineParameters, geometry: Geometry) -> AffineParameters:
    """Return the quantization parameters that a convolution's kernel reads: `input`, or int16 ones converted from them.

    Grouped convolutions with an int16 result compute in int16, so their uint8 inputs are converted.
    """
    return input.to_exact_int16() if output.is_int16 and not geometry.is_plain else input


def rounded_conv_weights(weight: Array, groups: int) -> QuantizedWeights:
    """Round weights (O, C / groups, kh, kw) to int8 for a convolution whose activations are uint8."""
    is_depthwise = groups > 1 and weight.shape[1:2] == (1,)  # computes 16-bit products, which cannot saturate
    return INT8Quantizer().quantize_weights(weight) if is_depthwise else saturation_safe_weights(weight)


def _to_int16(x: QuantizedArray, operand: AffineParameters) -> QuantizedArray:
    """Convert a uint8 array to int16 without loss if `operand`, the parameters a kernel reads, is int16."""
    if x.parameters.is_int16 or not operand.is_int16:
        return x
    return QuantizedArray(x.data.astype(np.int16) - np.int16(x.parameters.zero_point), operand, x.channels, x.padding)


class QuantizedLinear(IntegerLayer, metaclass=ExplainsMethods):
    """y = x @ weight.T + bias with int8 weights.

    With `output` it returns a QuantizedArray, without it floats. Without `input` it is dynamic: it takes floats and
    quantizes each row by its own scale.
    """

    def __init__(self, in_features: int, out_features: int = 0, bias: bool = True, *, rng: Any = None) -> None:
        """Draw weights as nn.Linear does; the layer is dynamic. `from_float` converts a trained layer."""
        self._check_sizes("Linear", in_features, out_features)
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
        """Create a layer from a float32 weight (out, in); `input` and `output` are quantization parameters."""
        is_int16 = input is not None and input.is_int16
        weights = int16_weights(weight, bias, input) if input and is_int16 else INT8Quantizer().quantize_weights(weight)
        scale = weights.scale if input is None or output is None else scales_for(weights, input, output)
        activation = "relu" if relu else activation
        return cls.from_integers(weights.q, scale, bias, input=input, output=output, activation=activation)

    @classmethod
    def from_float(cls, linear: Any, **options: Any) -> Self:
        """Convert an nn.Linear; dynamic unless `input` is given."""
        if not isinstance(linear, Linear):
            raise ConfigurationError(f"QuantizedLinear.from_float takes an nn.Linear, not a {type_name(linear)}")
        return cls.from_weights(linear.weight.data, None if linear.bias is None else linear.bias.data, **options)

    def _set_up(
        self,
        q: Array,
        scale: Array,
        bias: Array | None,
        *,
        input: AffineParameters | None = None,
        output: AffineParameters | None = None,
        activation: str = "",
    ) -> None:
        """Pack weights `q` (out, in) with the scale of each output and the float bias."""
        self.weight_scale, self.input, self.output, self.activation = scale, input, output, activation
        self.out_features, self.in_features = q.shape
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        if (q.dtype == np.int16) != self._reads_int16:
            raise ConfigurationError("its weights have another dtype than its inputs need")
        self.kernel = self._pack(q)

    def _pack(self, q: Array, in_numpy: bool = False) -> Any:
        """Create the packed layer for weights `q` (out, in).

        With an integer result the bias is part of the integer offset; with a float result it is added at the end.
        """
        input = self.input or AffineParameters(1.0, 128)  # dynamic rows are int8 with 128 added
        scale = input.scale * self.weight_scale.astype(np.float64)
        if self.output is None:
            offset = integer_offset(q, None, scale, input)
            return packed_layer(q[:, None, None, :], offset, scale, self.float_bias, in_numpy=in_numpy)
        offset = integer_offset(q, self.float_bias, scale, input)
        stage = output_stage(self.activation, self.output)
        scale = scale / accumulator_scale(stage, self.output)
        kernel = packed_layer(q[:, None, None, :], offset, scale, in_numpy=in_numpy)
        set_output_stage(kernel, stage)
        return kernel

    def holds_weights(self) -> bool:
        """Return True: this layer has weights, although they are in the packed kernel and not in tensors."""
        return True

    @property
    def avx2(self) -> str:
        """Describe how AVX2 without VNNI multiplies."""
        return "16-bit products" if self._reads_int16 else avx2_products(self.kernel.weights())

    @property
    def _reads_int16(self) -> bool:
        return self.input is not None and self.input.is_int16

    @property
    def nbytes(self) -> int:
        """Bytes of weights, offsets, biases and scales, the copies for saving included."""
        bias = 0 if self.float_bias is None else self.float_bias.nbytes
        return int(self.kernel.nbytes + self.weight_scale.nbytes + bias)

    def forward(self, x: Any, activation: str | None = None, residual: Any = None) -> Any:
        """Multiply a QuantizedArray, or floats, which are quantized first; a dynamic layer takes floats (..., in)."""
        if self.input is None:
            return self._dynamic(x, activation, residual)
        if not isinstance(x, QuantizedArray):
            x = quantize_array(_float_values(x), self.input)
        _check_parameters(x, self.input)
        if x.data.ndim != 2 or x.channels != self.in_features:
            raise ShapeError(f"QuantizedLinear takes (N, {self.in_features}), not {x.shape}")
        if self.output is None:
            return self._product(x.data, FLOAT32, None, self.relu)
        return QuantizedArray(self._product(x.data, UINT8, None, False), self.output, self.out_features)

    def _product(self, x: Array, kind: int, row_scale: Array | None, relu: bool) -> Array:
        """Multiply integer rows (M, in) by the packed weights.

        `kind` is the dtype of the result: INT32, FLOAT32 or UINT8. `row_scale` (M,) has the scale of each row of a
        dynamic layer.
        """
        if self._reads_int16 or (self.output is not None and self.output.is_int16):
            # Compiled code computes int16 inside native plans only.
            reference: NumpyInt8Layer = self._pack(self.kernel.weights()[:, 0, 0], in_numpy=True)
            return reference.linear(x, kind, row_scale, relu)
        # The table is passed only if there is one: NumPy's layer takes no tiles.
        tiles = current_backend().tiles
        chosen_tiles = () if tiles is None else (None, tiles)
        return np.asarray(self.kernel.linear(x, kind, row_scale, relu, *chosen_tiles))

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        """Add this layer to a native plan and return the value number of its result; it reads the value `inputs[0]`."""
        if self._reads_int16:
            return int(plan.conv(self.kernel, inputs, 0, self.output is None and self.relu))
        return int(plan.linear(self.kernel, inputs[0], self.output is None, self.relu))

    def _dynamic(self, x: Any, activation: str | None, residual: Any) -> Tensor:
        """Check the input and apply the dynamic layer as a traced operation; returns (..., out)."""
        if is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            raise GradientError("an int8 layer has no gradient; run it under no_grad()")
        values = _float_values(x)
        if values.shape[-1:] != (self.in_features,):
            raise ShapeError(f"QuantizedLinear takes (..., {self.in_features}), not {values.shape}")
        skip = None if residual is None else _float_values(residual)
        tensor = x if isinstance(x, Tensor) and x.dtype == np.float32 else Tensor(values)
        return apply(DynamicLinear, tensor, layer=self, activation=activation, residual=skip)

    def dynamic_product(self, values: Array, activation: str | None, residual: Array | None) -> Array:
        """Multiply float32 (..., in_features) to (..., out_features); every row is quantized by its own scale."""
        rows = np.ascontiguousarray(values.reshape(-1, self.in_features), np.float32)
        q, scales = quantize_rows(rows)
        # ReLU can be fused into the product unless a residual is added before it.
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
        """Apply a linear layer whose input is quantized with its own range at each call."""
        return layer.dynamic_product(x, activation, residual)

    def backward(self, grad: Array) -> Grads:
        raise GradientError("an int8 layer has no gradient; run it under no_grad()")


def quantize_rows(rows: Array) -> tuple[Array, Array]:
    """Quantize float32 (M, K) row by row to int8 with 128 added; return uint8 (M, K) and the scales (M,)."""
    if native is not None:
        q, scales = native.int8_quantize_rows(rows)
        return q, scales
    # The arithmetic of the compiled kernel: NaN counts as 0, and a row without a usable scale becomes zeros.
    largest = np.where(np.isnan(rows), np.float32(0), np.abs(rows)).max(1, initial=0)
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        inverse = np.where((largest > 0) & np.isfinite(inverse), inverse, np.float32(0))  # denormal rows become zeros
        scaled = np.nan_to_num(rows * inverse[:, None])
    q = np.full((len(rows), round_up(rows.shape[1])), 128, np.uint8)
    q[:, : rows.shape[1]] = np.rint(scaled).astype(np.int32) + 128
    return q, largest / np.float32(127)


def _float_values(x: Any) -> Array:
    """Return the values of a tensor or array as float32; they are copied only if they are not float32."""
    # Not `data`: reading it counts as a computation outside of tensors, which a plan could not follow.
    values = x._array if isinstance(x, Tensor) else np.asarray(x)
    return values if values.dtype == np.float32 else values.astype(np.float32)


def _check_parameters(x: QuantizedArray, expected: AffineParameters) -> None:
    if x.parameters != expected:
        raise ConfigurationError("this input has another scale or zero point than the layer was made for")
