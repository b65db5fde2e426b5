"""`quantize(model, data)`: a float model in, a runnable int8 model out.

Steps that have integer kernels become integer layers and hand each other bytes; the rest stays in float, and the model
says which and why. With `accuracy_drop` the most damaged layers go back to float until the criterion holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError, DtypeError, ShapeError, TilewiseError
from tilewise.nn import Module
from tilewise.quantize.array import QuantizedArray, quantize_array
from tilewise.quantize.calibration import Calibration, calibrate, check_fits, check_model
from tilewise.quantize.graph import Graph, Step, run_float, trace
from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
from tilewise.quantize.plan import BytesResult, Product, Segment, segments
from tilewise.quantize.pooling import AvgPool, Flatten, GlobalPool, MaxPool
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
Value = QuantizedArray | Array
Evaluate = Callable[[Module], float]
_FOLLOWERS = ("max_pool", "avg_pool", "global_pool", "flatten")


@dataclass(frozen=True)
class StepReport:
    """What became of one step: its form, why it is float if it is, its bytes and signal-to-noise ratio in decibels."""

    name: str
    kind: str
    form: str  # "int8" or "float32"
    reason: str
    nbytes: int
    snr_db: float | None = None


class QuantizedModel(Module):
    """A model of integer layers. Takes and gives float32 Tensors; in between, bytes."""

    computes_in_int8 = True

    def __init__(
        self,
        graph: Graph,
        calibration: Calibration,
        keep_float: dict[str, str],
        stored: dict[int, dict[str, Array]] | None = None,
    ) -> None:
        """`stored` holds the arrays of a model read from a file, by step; without it weights come from the graph."""
        check_fits(calibration, graph)
        self._stored = stored
        self.graph, self.calibration, self.kept = graph, calibration, dict(keep_float)
        self.training = False
        self.integer: list[Any] = []
        for index in range(len(graph.steps)):
            self.integer.append(self._convert(index))
        for step, layer in zip(graph.steps, self.integer, strict=True):
            if layer is not None:  # no float copy of a weight is kept
                step.weight = step.bias = None
        self._stored = None
        self._parts: list[Segment | int] = segments(self)

    # --- running ---

    def forward(self, x: Any) -> Tensor:
        return Tensor(self.run(x.data if isinstance(x, Tensor) else np.asarray(x)))

    def run(self, x: Array, watch: Callable[[int, Value], None] | None = None) -> Array:
        """From floats to floats. With `watch`, which is shown every step's result, step by step: the same integers."""
        values = self._checked(x)
        try:
            if watch is not None:
                self._run_watched(values, watch)
            else:
                self._run_parts(values)
        except TilewiseError:
            raise
        except ValueError as error:
            raise ShapeError(f"this model cannot work on inputs of shape {x.shape}: {error}") from None
        return self._as_float(values[len(self.graph.steps) - 1])

    def products(self, x: Array) -> list[Product]:
        """The products of integers that the compiled kernels make of `x`, whose tiles can be chosen."""
        found: list[Product] = []
        values = self._checked(x)
        self._run_parts(values, lambda segment: found.extend(segment.products(values)))
        return found

    def _checked(self, x: Array) -> dict[int, Value]:
        """The input as the first step's result."""
        expected = self.calibration.shapes[0]
        if x.ndim != len(expected) + 1 or x.shape[1] != expected[0]:
            raise ShapeError(
                f"this model was calibrated on inputs of (N, {', '.join(map(str, expected))}), not {x.shape}"
            )
        if x.dtype.kind not in "fiub":
            raise DtypeError(f"this model takes numbers, not {x.dtype}")
        return {0: np.ascontiguousarray(x, np.float32)}

    def _run_parts(self, values: dict[int, Value], meet: Callable[[Segment], None] | None = None) -> None:
        """All parts; `meet` is shown each segment before it runs."""
        for part in self._parts:
            if isinstance(part, int):
                values[part] = self._step(part, values)
                continue
            if meet is not None:
                meet(part)
            part.run(values)

    def _run_watched(self, values: dict[int, Value], watch: Callable[[int, Value], None]) -> None:
        watch(0, values[0])
        for index in range(1, len(self.graph.steps)):
            values[index] = self._step(index, values)
            watch(index, values[index])

    def _step(self, index: int, values: dict[int, Value]) -> Value:
        step, layer = self.graph.steps[index], self.integer[index]
        inputs = [values[i] for i in step.inputs]
        if layer is None:
            with no_grad():
                return run_float(step, [self._as_float(v) for v in inputs])
        result: Value = layer(*[self._as_bytes(v, i) for v, i in zip(inputs, step.inputs, strict=True)])
        return result

    @staticmethod
    def _as_float(value: Value) -> Array:
        return value.dequantize() if isinstance(value, QuantizedArray) else value

    def _as_bytes(self, value: Value, source: int) -> QuantizedArray:
        if isinstance(value, QuantizedArray):
            return value
        return quantize_array(value, self.calibration.parameters[source], self.border_of(source))

    def check_input(self, layer: Any, source: int) -> None:
        """A layer made for other parameters than its input has would give wrong numbers without a word."""
        if getattr(layer, "input", None) not in (None, self.calibration.parameters[self._origin(source)]):
            raise ConfigurationError(f"a layer of this model reads {self.graph.steps[source].name} by another scale")

    def result_of(self, index: int) -> BytesResult | None:
        """How a step's result lies in memory as bytes; None where it is floats."""
        layer, step, shape = self.integer[index], self.graph.steps[index], self.calibration.shapes[index]
        if layer is None or (isinstance(layer, QuantizedLinear) and layer.output is None):
            return None
        parameters = self.calibration.parameters[self._origin(index)]
        if step.kind == "flatten":
            return BytesResult(parameters, shape[0], 0, self._image_before(step))
        return BytesResult(parameters, shape[0], getattr(layer, "out_border", 0), ())

    # --- converting ---

    def _convert(self, index: int) -> Any:
        step = self.graph.steps[index]
        stored = None if self._stored is None else self._stored.get(index, {})
        if step.kind == "input" or step.name in self.kept:
            if stored:
                step.weight, step.bias = stored["weight"], stored.get("bias")
            return None
        if step.kind in _FOLLOWERS and self.integer[step.inputs[0]] is None:
            self.kept[step.name] = "what it reads is float32"
            return None
        reason = self._obstacle(step)
        if reason is not None:
            self.kept[step.name] = reason
            return None
        try:
            return self._integer_step(index, step, stored)
        except ConfigurationError as error:
            self.kept[step.name] = str(error)
            return None

    def _integer_step(self, index: int, step: Step, stored: dict[str, Array] | None) -> Any:
        source = self.calibration.parameters[self._origin(step.inputs[0])]
        output, border = self.calibration.parameters[index], self.border_of(index)
        if step.kind == "conv":
            residual = self.calibration.parameters[self._origin(step.inputs[1])] if len(step.inputs) > 1 else None
            settings = (source, output, step.stride, step.padding, step.relu, residual, border)
            if stored is not None:
                return QuantizedConv2d.restored(stored["q"], stored["scale"], stored["offset"], *settings)
            assert step.weight is not None
            return QuantizedConv2d(step.weight, step.bias, *settings)
        if step.kind == "linear":
            result = None if index == len(self.graph.steps) - 1 else output
            if stored is not None:
                return QuantizedLinear.restored(
                    stored["q"], stored["scale"], stored.get("bias"), source, result, step.relu
                )
            return QuantizedLinear(self._channels_last(step), step.bias, source, result, step.relu)
        if step.kind in ("max_pool", "avg_pool"):
            pool = MaxPool if step.kind == "max_pool" else AvgPool
            return pool(step.kernel, step.stride, step.padding, border)
        return GlobalPool(source, output) if step.kind == "global_pool" else Flatten()

    def _obstacle(self, step: Step) -> str | None:
        if step.kind == "float":
            return f"{type(step.module).__name__} has no integer form"
        if step.kind == "linear" and len(self.calibration.shapes[step.inputs[0]]) != 1:
            return "its inputs are no rows of numbers, (N, K)"
        if step.groups != 1:
            return "a convolution with groups has no integer kernel"
        if step.weight is not None and not np.isfinite(step.weight).all():
            return "its weights hold NaN or infinity"
        return None

    def _origin(self, index: int) -> int:
        """Pooling and flattening of bytes keep the parameters of what they read."""
        while self.graph.steps[index].kind in ("max_pool", "avg_pool", "flatten") and self.integer[index] is not None:
            index = self.graph.steps[index].inputs[0]
        return index

    def border_of(self, index: int) -> int:
        """As wide as the padding of the convolutions that read this step's result."""
        return max((max(u.padding) for u in self.graph.users(index) if u.kind == "conv"), default=0)

    def _channels_last(self, step: Step) -> Array:
        """Weights of a linear layer behind a flattened image, in the order (H, W, C) that the bytes lie in."""
        assert step.weight is not None
        before = self.graph.steps[step.inputs[0]]
        shape = self._image_before(before) if before.kind == "flatten" else ()
        if not shape or self.integer[step.inputs[0]] is None:
            return step.weight
        return step.weight.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(len(step.weight), -1)

    def _image_before(self, flatten: Step) -> tuple[int, ...]:
        """The (C, H, W) that was flattened; () where it was rows all along."""
        while flatten.kind == "flatten" and len(self.calibration.shapes[flatten.inputs[0]]) != 3:
            flatten = self.graph.steps[flatten.inputs[0]]
        return self.calibration.shapes[flatten.inputs[0]] if flatten.kind == "flatten" else ()

    # --- what it is ---

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, biases and scales, integer and float."""
        return sum(report.nbytes for report in self.report())

    def report(self, x: Array | None = None, reference: Graph | None = None) -> list[StepReport]:
        """One entry per step; with an input and the float model's graph, also each result's signal-to-noise ratio."""
        ratios = {} if x is None or reference is None else signal_to_noise(self, reference, x)
        out = []
        for index, (step, layer) in enumerate(zip(self.graph.steps, self.integer, strict=True)):
            if step.kind == "input":
                continue
            form = "float32" if layer is None else "int8"
            size = layer.nbytes if hasattr(layer, "nbytes") else _float_bytes(step)
            out.append(StepReport(step.name, step.kind, form, self.kept.get(step.name, ""), size, ratios.get(index)))
        return out


def _float_bytes(step: Step) -> int:
    held = [a.nbytes for a in (step.weight, step.bias) if a is not None]
    if step.module is not None:
        held += [t.data.nbytes for _, t in step.module.named_tensors()]
    return int(sum(held))


def signal_to_noise(model: QuantizedModel, reference: Graph, x: Array) -> dict[int, float]:
    """Decibels per step: how far each result lies from the float model's."""
    exact: list[Array] = []
    reference.run(x.astype(np.float32, copy=False), lambda _, result: exact.append(result))
    ratios: dict[int, float] = {}

    def watch(index: int, value: Value) -> None:
        got = model._as_float(value)
        want = exact[index]
        noise = float(((got - want) ** 2).sum(dtype=np.float64))
        signal = float((want**2).sum(dtype=np.float64))
        ratios[index] = float("inf") if noise == 0 else 10 * np.log10(max(signal, 1e-300) / noise)

    model.run(x, watch)
    return ratios


def quantize(
    model: Module,
    calibration_dataset: Iterable[Any] | Calibration | None = None,
    *,
    bits: int = 8,
    symmetric: bool = True,
    observer: str = "minmax",
    accuracy_drop: float | None = None,
    evaluate: Evaluate | None = None,
    keep_float: Iterable[str] = (),
    progress: bool = False,
) -> Module:
    """An int8 version of a trained model, or one whose linear layers have four-bit weights; the model is left as it is.

    `calibration_dataset` is any iterable of input batches, or a `Calibration` made before. Transformers need no data:
    their linear layers are quantized dynamically. With `accuracy_drop` (0.005 is half a point) and `evaluate`, a
    function from a model to its accuracy, layers go back to float32, the noisiest first, until the loss is within it.

    With `bits=4` every linear layer gets four-bit weights in blocks of 32, `symmetric` around zero or with a minimum
    for each block; calibration data, if there is any, decides how they are rounded. Other layers stay float32.

    >>> from tilewise import models
    >>> data = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    >>> quantize(models.cnn(), [data])(Tensor(data)).shape
    (8, 10)
    """
    check_model(model)
    if bits == 4:
        return _in_four_bits(model, calibration_dataset, symmetric, accuracy_drop is not None or bool(list(keep_float)))
    if bits != 8 or not symmetric:
        raise ConfigurationError("bits is 8 or 4, and weights with a minimum (symmetric=False) have four bits")
    graph = trace(model)
    if _is_transformer(graph):
        from tilewise.quantize.dynamic import quantize_dynamic

        return quantize_dynamic(model)
    kept = dict.fromkeys(keep_float, "asked for")
    unknown = set(kept) - {step.name for step in graph.steps}
    if unknown:
        raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to keep in float")
    batches = None
    if not isinstance(calibration_dataset, Calibration) and accuracy_drop is not None:
        batches = calibration_dataset = list(calibration_dataset or ())
    calibration = (
        calibration_dataset
        if isinstance(calibration_dataset, Calibration)
        else calibrate(model, cast(Iterable[Any], calibration_dataset), observer, progress)
    )
    if accuracy_drop is None:
        return QuantizedModel(graph, calibration, kept)
    if evaluate is None or batches is None:
        raise ConfigurationError(
            "accuracy_drop needs calibration batches and `evaluate`, a function that measures accuracy"
        )
    return _within_drop(model, calibration, kept, accuracy_drop, evaluate, batches)


def _in_four_bits(model: Module, data: Any, symmetric: bool, more: bool) -> Module:
    from tilewise.quantize.four_bits import quantize_four_bits

    if isinstance(data, Calibration):
        raise ConfigurationError("four bits are rounded by batches of inputs; a Calibration holds only their ranges")
    if more:
        raise ConfigurationError("accuracy_drop and keep_float are for bits=8")
    return quantize_four_bits(model, data, symmetric)


def _within_drop(
    model: Module,
    calibration: Calibration,
    kept: dict[str, str],
    accuracy_drop: float,
    evaluate: Evaluate,
    batches: list[Any],
) -> QuantizedModel:
    baseline = evaluate(model)
    x = np.asarray(batches[0].data if isinstance(batches[0], Tensor) else batches[0], np.float32)
    while True:
        candidate = QuantizedModel(trace(model), calibration, kept)
        drop = baseline - evaluate(candidate)
        noisy = [r for r in candidate.report(x, trace(model)) if r.form == "int8" and r.kind in ("conv", "linear")]
        if drop <= accuracy_drop or not noisy:
            return candidate
        worst = min(noisy, key=lambda r: r.snr_db if r.snr_db is not None else np.inf)
        kept[worst.name] = f"lowest signal-to-noise ratio ({worst.snr_db:.1f} dB) while accuracy fell by {drop:.4f}"


def _is_transformer(graph: Graph) -> bool:
    """One opaque step with attention or linear layers inside: nothing to calibrate, all to gain from dynamic int8."""
    if len(graph.steps) != 2 or graph.steps[1].kind != "float" or graph.steps[1].module is None:
        return False
    return any(isinstance(m, nn.Linear | nn.MultiHeadAttention) for m in graph.steps[1].module.modules())
