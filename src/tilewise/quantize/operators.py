"""Integer operators without weights: elementwise arithmetic, data movement, pooling and flattening.

Each operator takes QuantizedArrays, as layers with weights do, and can add itself to a native plan (`add_to`). Called
by itself it computes in NumPy with the arithmetic of the native plan: the integers are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilewise.graph.ir import Array, Op
from tilewise.graph.op_specs.layers import mean_divisor, pool_windows
from tilewise.graph.ops import NATIVE_OPS, EmitContext
from tilewise.quantize.parameters import AffineParameters, QuantizedArray, as_image, image_values, round_up
from tilewise.quantize.reference import Int16OutputStage, Uint8OutputStage, is_curved, multiply_by_fractions

OutputStage = Uint8OutputStage | Int16OutputStage
F = np.float32


def output_stage(activation: str, output: AffineParameters) -> OutputStage:
    """Return the output stage (requantization and activation) for `output`; ReLU and ReLU6 are clamps."""
    zero, (low, high) = output.zero_point, output.limits
    # Clamps in integers: the zero point stands for 0, and the nearest step to 6 for 6.
    if activation == "relu6":
        high = min(high, zero + round(6 / output.scale))
    if activation in ("relu", "relu6"):
        low = zero
    function, inverse = activation if is_curved(activation) else "", float(F(1) / F(output.scale))
    if output.is_int16:
        return Int16OutputStage(function, inverse, low, high)
    return Uint8OutputStage(function, inverse, zero, low, high)


def set_output_stage(kernel: Any, stage: OutputStage) -> None:
    """Set the output stage (requantization and activation) of a packed layer."""
    (kernel.set_int16_stage if isinstance(stage, Int16OutputStage) else kernel.set_uint8_stage)(stage.native())


def accumulator_scale(stage: OutputStage, output: AffineParameters) -> float:
    """Return the scale of the accumulators that an output stage expects, given its output's parameters."""
    return 1.0 if stage.takes_real_values else output.scale / stage.units_per_step


def centred(x: QuantizedArray) -> Array:
    """Subtract the zero point from the integers (N, H, W, C); returns int32."""
    return np.asarray(image_values(x).astype(np.int32) - x.parameters.zero_point)


@dataclass(frozen=True)
class IntegerOp:
    """The quantization parameters of an operator's result, the padding that its readers need, and its float form."""

    output: AffineParameters
    out_padding: int = 0
    op: Op = field(default_factory=lambda: Op("identity", (), ()))

    def _result(self, values: Array, is_row: bool) -> QuantizedArray:
        """Wrap integers (N, H, W, C) as this operator's result: padded images, or rows (N, C) if `is_row`."""
        result = QuantizedArray(_fill_channels(values, self.output.zero_point), self.output, values.shape[3])
        if is_row:
            return replace(result, data=result.data.reshape(len(values), -1))
        return result.with_padding(self.out_padding)


def _fill_channels(values: Array, zero: int) -> Array:
    """Copy (N, H, W, C) to contiguous memory with C padded by `zero` to a multiple of four."""
    extra = -values.shape[3] % 4
    copy = np.pad(values, ((0, 0), (0, 0), (0, 0), (0, extra)), constant_values=zero) if extra else values.copy()
    return np.ascontiguousarray(copy)  # np.pad and copy keep the memory order of their input


# --- arithmetic ---


class ArithmeticOp(IntegerOp):
    """An operator whose result passes an output stage."""

    @property
    def stage(self) -> OutputStage:
        return output_stage(self.op.activation, self.output)

    @property
    def accumulator(self) -> float:
        """The scale of the accumulator that the output stage reads."""
        return accumulator_scale(self.stage, self.output)


class QuantizedAdd(ArithmeticOp):
    """a + b, or a - b; each input is scaled to the accumulator first."""

    def __call__(self, a: QuantizedArray, b: QuantizedArray) -> QuantizedArray:
        # (qa - za) sa + (qb - zb) sb, with both scales divided by that of the accumulator
        first, second = self._scales(a.parameters, b.parameters)
        total = centred(a).astype(F) * F(first) + centred(b).astype(F) * F(second)
        return self._result(self.stage.requantize(total), a.data.ndim == 2)

    def _scales(self, first: AffineParameters, second: AffineParameters) -> tuple[float, float]:
        """Return each operand's scale divided by the accumulator's."""
        sign = {"add": 1, "sub": -1}[self.op.kind]
        return first.scale / self.accumulator, sign * second.scale / self.accumulator

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        return int(plan.add(*inputs, *self._scales(*parameters), self.stage.native(), self.out_padding))


class QuantizedMultiply(ArithmeticOp):
    """a * b, where b may be a gate: one value per channel for the whole image."""

    def __call__(self, a: QuantizedArray, b: QuantizedArray) -> QuantizedArray:
        """Multiply; a gate may be either operand."""
        if image_values(a).shape[1:3] != image_values(b).shape[1:3] and image_values(a).shape[1:3] == (1, 1):
            a, b = b, a
        first, second = centred(a), centred(b)
        fraction = self._fraction([a.parameters, b.parameters])
        # The native plan multiplies int16 images by a gate in 16-bit fractions.
        if fraction and second.shape[1:3] == (1, 1):
            limits = self.stage.low, self.stage.high
            return self._result(multiply_by_fractions(first, second.astype(F) * F(fraction), *limits), a.data.ndim == 2)
        value = (first * second).astype(F) * F(self._scale([a.parameters, b.parameters]))
        return self._result(self.stage.requantize(value), a.data.ndim == 2)

    def _scale(self, operands: list[AffineParameters]) -> float:
        """Return the scale of the integer product divided by the accumulator's."""
        return operands[0].scale * operands[1].scale / self.accumulator

    def _fraction(self, operands: list[AffineParameters]) -> float:
        """Return the gate's scale as a multiple of 1/32768 of the output's scale; 0 if int16 fractions do not apply.

        They apply if input and result are int16, there is no activation, and no gate value can exceed 1.
        """
        is_int16 = operands[0].is_int16 and self.output.is_int16 and not self.stage.activation
        largest = self._scale(operands) * max(abs(end - operands[1].zero_point) for end in operands[1].limits)
        return 32768 * self._scale(operands) if is_int16 and largest <= 32767 / 32768 else 0.0

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        scale, fraction = self._scale(parameters), self._fraction(parameters)
        return int(plan.mul(*inputs, scale, fraction, self.stage.native(), self.out_padding))


@dataclass(frozen=True)
class Affine(ArithmeticOp):
    """x * scale + shift by channel, then the activation."""

    scale: Array | None = None
    shift: Array | None = None

    def _coefficients(self, source: AffineParameters, channels: int) -> tuple[Array, Array]:
        """Return the scale and shift of each channel (C,), divided by the accumulator's scale."""
        # Computed in float64 and rounded once, as the native plan receives them.
        scale = np.ones(channels) if self.scale is None else self.scale.astype(np.float64)
        shift = np.zeros(channels) if self.shift is None else self.shift.astype(np.float64)
        return (scale * source.scale / self.accumulator).astype(F), (shift / self.accumulator).astype(F)

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        scale, shift = self._coefficients(x.parameters, x.channels)
        return self._result(self.stage.requantize(centred(x).astype(F) * scale + shift), x.data.ndim == 2)

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        """Add this op to the native plan and return its value number; `inputs` are value numbers."""
        channels = len(self.scale) if self.scale is not None else len(self.shift) if self.shift is not None else 0
        scale, shift = self._coefficients(parameters[0], channels)
        return int(plan.affine(inputs[0], scale.tolist(), shift.tolist(), self.stage.native(), self.out_padding))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.scale, self.shift) if a is not None)


# --- data movement ---


class Movement(IntegerOp):
    """An operator that only moves or compares values: the reference of its record, applied to integers."""

    def __call__(self, *inputs: QuantizedArray) -> QuantizedArray:
        """Apply the operator's NumPy reference to the integers, and wrap the result."""
        reference = NATIVE_OPS[self.op.kind].reference
        assert reference is not None
        planes = reference(self.op, *(image_values(x).transpose(0, 3, 1, 2) for x in inputs))
        planes = planes.reshape(*planes.shape[:2], *(planes.shape[2:] or (1, 1)))
        return self._result(planes.transpose(0, 2, 3, 1), is_row=len(self.op.shape) == 2)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        context = EmitContext(plan, padding=self.out_padding, is_integer=True)
        return NATIVE_OPS[self.op.kind].emit(context, self.op, inputs)


@dataclass(frozen=True)
class QuantizedFlatten:
    """(N, C, H, W) to rows (N, C H W).

    Images are stored with channels last. `image` is the (C, H, W) being flattened. With `keeps_channels_last` the row
    keeps the stored order (H, W, C), which costs nothing, and whoever reads it must know; otherwise the row is
    reordered to the module's (C, H, W).
    """

    image: tuple[int, ...] = ()  # () if the input is a row already
    keeps_channels_last: bool = False

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        """Flatten images; return rows unchanged."""
        if x.data.ndim == 2:
            return x
        values = image_values(x)  # (N, H, W, C)
        if not self.keeps_channels_last:
            values = values.transpose(0, 3, 1, 2)
        rows = np.ascontiguousarray(values).reshape(len(values), math.prod(values.shape[1:]))
        width = rows.shape[1]
        # Rows, like images, are stored with a multiple of four values.
        if width % 4:
            rows = np.pad(rows, ((0, 0), (0, round_up(width) - width)), constant_values=x.parameters.zero_point)
        return QuantizedArray(rows, x.parameters, width, image=x.shape[1:] if self.keeps_channels_last else ())

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.flatten(inputs[0], not self.keeps_channels_last))


# --- pooling ---


class AvgPool(Movement):
    """The mean of each window, with padding counted as zeros or not at all, in the input's quantization parameters."""

    def __call__(self, *inputs: QuantizedArray) -> QuantizedArray:
        """Pool; sums are exact, and divided in the precision of the native plan."""
        (x,), op, count_padding = inputs, self.op, self.op.options.get("count_padding", True)
        values = image_values(x).transpose(0, 3, 1, 2)
        sums = pool_windows(op, values, x.parameters.zero_point if count_padding else 0).astype(np.int32).sum((4, 5))
        precision = np.float32 if x.parameters.is_int16 else np.float64
        mean = np.rint(sums.astype(precision) / np.asarray(mean_divisor(op, values), precision)).astype(values.dtype)
        return self._result(mean.transpose(0, 2, 3, 1), is_row=False)


class GlobalPool(IntegerOp):
    """The mean of each channel, requantized to `output`."""

    @property
    def gives_rows(self) -> bool:
        return len(self.op.shape) == 2

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        rows = self._mean(x)
        return rows if self.gives_rows else as_image(rows).with_padding(self.out_padding)

    def _mean(self, x: QuantizedArray) -> QuantizedArray:
        """Average images over their pixels; returns quantized rows (N, C)."""
        p, out, (_, _, h, w) = x.parameters, self.output, x.shape
        # The mean of the integers, converted to a real number and requantized.
        sums = x.inside().sum((1, 2), dtype=np.int64)
        mean = (sums.astype(np.float32) / np.float32(h * w) - np.float32(p.zero_point)) * np.float32(p.scale)
        q = out.quantize(mean)
        q[:, x.channels :] = out.zero_point  # channels that fill up a multiple of four
        return QuantizedArray(q, out, x.channels)

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        scales = (parameters[0].scale, self.output.scale, self.output.zero_point, self.output.int16_limit)
        return int(plan.global_mean(inputs[0], *scales, self.gives_rows, self.out_padding))
