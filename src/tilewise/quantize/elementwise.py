"""Integer operations without weights, except pooling: add, multiply, scale per channel, and data movement.

Each operation takes QuantizedArrays, as layers with weights do, and can add itself to a native plan (`add_to`).
Called by itself it computes in NumPy with the arithmetic of the compiled kernels, so the integers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewise.quantize.array import QuantizedArray, as_image, pixels_of
from tilewise.quantize.parameters import AffineParameters
from tilewise.quantize.reference import Finish, WideFinish, by_fractions, is_curved

Array = npt.NDArray[Any]
F = np.float32


def finish_for(activation: str, output: AffineParameters) -> Finish | WideFinish:
    """Return the output stage (requantization and activation) for `output`; ReLU and ReLU6 are clamps."""
    zero, (low, high) = output.zero_point, output.limits
    if activation == "relu6":
        high = min(high, zero + round(6 / output.scale))
    if activation in ("relu", "relu6"):
        low = zero
    bends, inverse = activation if is_curved(activation) else "", float(F(1) / F(output.scale))
    return WideFinish(bends, inverse, low, high) if output.is_int16 else Finish(bends, inverse, zero, low, high)


def set_finish(kernel: Any, finish: Finish | WideFinish) -> None:
    """Set the output stage (requantization and activation) of a packed layer."""
    (kernel.set_wide_finish if isinstance(finish, WideFinish) else kernel.set_finish)(finish.native())


def accumulator_scale(finish: Finish | WideFinish, output: AffineParameters) -> float:
    """What values are counted in before they are finished: steps of the output, parts of them, or real numbers."""
    return 1.0 if finish.is_table else output.scale / finish.units


@dataclass(frozen=True)
class ElementwiseOp:
    """What these steps know: the parameters of what they give, and the frame it gets."""

    output: AffineParameters
    out_border: int = 0

    def _image(self, pixels: Array, like: QuantizedArray) -> QuantizedArray:
        """(N, H, W, C) bytes as a result; rows where `like` is rows."""
        made = QuantizedArray(_padded(pixels, self.output.zero_point), self.output, pixels.shape[3])
        if like.data.ndim == 2:
            return replace(made, data=made.data.reshape(len(pixels), -1))
        return made.with_border(self.out_border)


def _padded(pixels: Array, zero: int) -> Array:
    """A C-contiguous copy of (N, H, W, C) with channels up to a multiple of four, as the kernels read them."""
    extra = -pixels.shape[3] % 4
    copy = np.pad(pixels, ((0, 0), (0, 0), (0, 0), (0, extra)), constant_values=zero) if extra else pixels.copy()
    return np.ascontiguousarray(copy)  # np.pad and copy keep the memory order of what they copy


@dataclass(frozen=True)
class QuantizedAdd(ElementwiseOp):
    activation: str = ""

    second_sign: ClassVar[int] = 1

    def __call__(self, a: QuantizedArray, b: QuantizedArray) -> QuantizedArray:
        finish = finish_for(self.activation, self.output)
        values = [_real(x, scale) for x, scale in zip((a, b), self._scales(a.parameters, b.parameters), strict=True)]
        return self._image(finish.bytes(values[0] + values[1]), a)

    def _scales(self, first: AffineParameters, second: AffineParameters) -> tuple[float, float]:
        unit = accumulator_scale(finish_for(self.activation, self.output), self.output)
        return first.scale / unit, self.second_sign * second.scale / unit

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        finish = finish_for(self.activation, self.output).native()
        return int(plan.add(*inputs, *self._scales(*parameters), finish, self.out_border))


class QuantizedSubtract(QuantizedAdd):
    """a - b: a sum in which the second scale is negative."""

    second_sign = -1


def _real(x: QuantizedArray, scale: float) -> Array:
    return (pixels_of(x).astype(np.int32) - x.parameters.zero_point).astype(F) * F(scale)


@dataclass(frozen=True)
class QuantizedMultiply(ElementwiseOp):
    activation: str = ""

    def __call__(self, a: QuantizedArray, b: QuantizedArray) -> QuantizedArray:
        if pixels_of(a).shape[1:3] != pixels_of(b).shape[1:3] and pixels_of(a).shape[1:3] == (1, 1):
            a, b = b, a
        whole = [pixels_of(x).astype(np.int32) - x.parameters.zero_point for x in (a, b)]
        fraction = self._fraction([a.parameters, b.parameters])
        if fraction and whole[1].shape[1:3] == (1, 1):
            return self._image(by_fractions(whole[0], whole[1].astype(F) * F(fraction), *self._limits), a)
        value = (whole[0] * whole[1]).astype(F) * F(self._scale([a.parameters, b.parameters]))
        return self._image(finish_for(self.activation, self.output).bytes(value), a)

    def _scale(self, sides: list[AffineParameters]) -> float:
        unit = accumulator_scale(finish_for(self.activation, self.output), self.output)
        return sides[0].scale * sides[1].scale / unit

    @property
    def _limits(self) -> tuple[int, int]:
        finish = finish_for(self.activation, self.output)
        return finish.low, finish.high

    def _fraction(self, sides: list[AffineParameters]) -> float:
        """What a step of a gate, one pixel for all, makes of 32768: its channels are parts of 16 bits, where nothing
        that it can be is more than 1 and what it is multiplied with has 16 bits. Else 0."""
        straight = not finish_for(self.activation, self.output).activation
        whole = sides[0].is_int16 and self.output.is_int16 and straight
        largest = self._scale(sides) * max(abs(end - sides[1].zero_point) for end in sides[1].limits)
        return 32768 * self._scale(sides) if whole and largest <= 32767 / 32768 else 0.0

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        finish = finish_for(self.activation, self.output).native()
        scale, fraction = self._scale(parameters), self._fraction(parameters)
        return int(plan.mul(*inputs, scale, fraction, finish, self.out_border))


@dataclass(frozen=True)
class Affine(ElementwiseOp):
    """x * scale + shift by channel, then the activation."""

    scale: Array | None = None
    shift: Array | None = None
    activation: str = ""

    def _numbers(self, source: AffineParameters, channels: int) -> tuple[Array, Array]:
        unit = accumulator_scale(finish_for(self.activation, self.output), self.output)
        by = np.ones(channels) if self.scale is None else self.scale.astype(np.float64)
        plus = np.zeros(channels) if self.shift is None else self.shift.astype(np.float64)
        return (by * source.scale / unit).astype(F), (plus / unit).astype(F)

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        by, plus = self._numbers(x.parameters, x.channels)
        whole = (pixels_of(x).astype(np.int32) - x.parameters.zero_point).astype(F)
        return self._image(finish_for(self.activation, self.output).bytes(whole * by + plus), x)

    def add_to(self, plan: Any, inputs: list[int], parameters: list[AffineParameters]) -> int:
        channels = len(self.scale) if self.scale is not None else len(self.shift) if self.shift is not None else 0
        by, plus = self._numbers(parameters[0], channels)
        finish = finish_for(self.activation, self.output).native()
        return int(plan.affine(inputs[0], by.tolist(), plus.tolist(), finish, self.out_border))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.scale, self.shift) if a is not None)


# --- bytes that move ---


@dataclass(frozen=True)
class Concat(ElementwiseOp):
    """Parts beside each other; all have this step's parameters already."""

    def __call__(self, *parts: QuantizedArray) -> QuantizedArray:
        return self._image(np.concatenate([pixels_of(p) for p in parts], 3), parts[0])

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.concat(inputs, self.out_border))


@dataclass(frozen=True)
class Slice(ElementwiseOp):
    first: int = 0
    count: int = 0

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        return self._image(pixels_of(x)[..., self.first : self.first + self.count], x)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.slice(inputs[0], self.first, self.count, self.out_border))


@dataclass(frozen=True)
class GatherChannels(ElementwiseOp):
    channels: tuple[int, ...] = ()

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        return self._image(pixels_of(x)[..., list(self.channels)], x)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.gather_channels(inputs[0], list(self.channels), self.out_border))


@dataclass(frozen=True)
class QuantizedUpsample(ElementwiseOp):
    by: tuple[int, int] = (1, 1)

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        return self._image(pixels_of(x).repeat(self.by[0], 1).repeat(self.by[1], 2), x)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.upsample(inputs[0], *self.by, self.out_border))


@dataclass(frozen=True)
class QuantizedDepthToSpace(ElementwiseOp):
    """Runs of channels become pixels."""

    by: tuple[int, int] = (1, 1)

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        (by_h, by_w), pixels = self.by, pixels_of(x)
        n, h, w, c = pixels.shape
        parts = pixels.reshape(n, h, w, by_h, by_w, c // (by_h * by_w)).transpose(0, 1, 3, 2, 4, 5)
        return self._image(np.ascontiguousarray(parts).reshape(n, h * by_h, w * by_w, -1), x)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.depth_to_space(inputs[0], *self.by, self.out_border))


@dataclass(frozen=True)
class Same(ElementwiseOp):
    """One pixel seen as a row, or a row as one pixel."""

    rows: bool = False

    def __call__(self, x: QuantizedArray) -> QuantizedArray:
        if not self.rows:
            return as_image(x).with_border(self.out_border)
        pixels = _padded(pixels_of(x), x.parameters.zero_point)
        return QuantizedArray(pixels.reshape(len(pixels), -1), x.parameters, x.channels)

    def add_to(self, plan: Any, inputs: list[int], _parameters: list[AffineParameters]) -> int:
        return int(plan.pixel_as_row(inputs[0], self.rows, self.out_border))
