"""`quantize(model, data)`: a float model in, a runnable int8 model out.

Steps that have integer kernels become integer layers and hand each other bytes; the rest stays in float, and the model
says which and why. With `accuracy_drop` the most damaged layers go back to float until the criterion holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import nn
from tilewise.errors import ConfigurationError, ShapeError
from tilewise.nn import Module
from tilewise.quantize import layers
from tilewise.quantize.array import QuantizedArray, quantize_array
from tilewise.quantize.calibration import Calibration, calibrate, check_fits
from tilewise.quantize.graph import Graph, Step, run_float, trace
from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
from tilewise.tensor import Tensor

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

    # --- running ---

    def forward(self, x: Any) -> Tensor:
        return Tensor(self.run(x.data if isinstance(x, Tensor) else np.asarray(x)))

    def run(self, x: Array, watch: Callable[[int, Value], None] | None = None) -> Array:
        expected = self.calibration.shapes[0]
        if x.ndim != len(expected) + 1 or (x.ndim == 4 and x.shape[1] != expected[0]):
            raise ShapeError(
                f"this model was calibrated on inputs of (N, {', '.join(map(str, expected))}), not {x.shape}"
            )
        values: list[Value] = []
        for index, step in enumerate(self.graph.steps):
            out = x.astype(np.float32, copy=False) if index == 0 else self._step(index, step, values)
            values.append(out)
            if watch is not None:
                watch(index, out)
        return self._as_float(values[-1])

    def _step(self, index: int, step: Step, values: list[Value]) -> Value:
        inputs = [values[i] for i in step.inputs]
        layer = self.integer[index]
        if layer is None:
            return run_float(step, [self._as_float(v) for v in inputs])
        sources = [self._as_bytes(v, i, step) for v, i in zip(inputs, step.inputs, strict=True)]
        result: Value = layer(*sources)
        return result

    @staticmethod
    def _as_float(value: Value) -> Array:
        return value.dequantize() if isinstance(value, QuantizedArray) else value

    def _as_bytes(self, value: Value, source: int, step: Step) -> QuantizedArray:
        if isinstance(value, QuantizedArray):
            return value
        border = max(step.padding) if step.kind == "conv" else 0
        return quantize_array(value, self.calibration.parameters[source], border)

    # --- converting ---

    def _convert(self, index: int) -> Any:
        step = self.graph.steps[index]
        stored = None if self._stored is None else self._stored.get(index, {})
        if step.kind == "input" or step.name in self.kept:
            if stored:
                step.weight, step.bias = stored["weight"], stored.get("bias")
            return None
        if step.kind in _FOLLOWERS and self.integer[step.inputs[0]] is None:
            return None  # pooling what is float stays float
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
        output, border = self.calibration.parameters[index], self._border(index)
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
            pool = layers.max_pool if step.kind == "max_pool" else layers.avg_pool
            return lambda x: pool(x, step.kernel, step.stride, step.padding, border)
        if step.kind == "global_pool":
            return lambda x: layers.global_pool(x, output)
        return layers.flatten

    def _obstacle(self, step: Step) -> str | None:
        if step.kind == "float":
            return f"{type(step.module).__name__} has no integer form"
        if step.groups != 1:
            return "a convolution with groups has no integer kernel"
        if step.weight is not None and not np.isfinite(step.weight).all():
            return "its weights hold NaN or infinity"
        return None

    def _origin(self, index: int) -> int:
        """Pooling and flattening keep the parameters of what they read."""
        while self.graph.steps[index].kind in ("max_pool", "avg_pool", "flatten"):
            index = self.graph.steps[index].inputs[0]
        return index

    def _border(self, index: int) -> int:
        return max((max(u.padding) for u in self.graph.users(index) if u.kind == "conv"), default=0)

    def _channels_last(self, step: Step) -> Array:
        """Weights of a linear layer behind a flattened image, in the order (H, W, C) that the bytes lie in."""
        assert step.weight is not None
        before = self.graph.steps[step.inputs[0]]
        if before.kind != "flatten" or self.integer[step.inputs[0]] is None:
            return step.weight
        shape = self.calibration.shapes[before.inputs[0]]
        if len(shape) != 3:
            return step.weight
        return step.weight.reshape(-1, *shape).transpose(0, 2, 3, 1).reshape(len(step.weight), -1)

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
        if model.graph.steps[index].kind == "flatten" and got.shape == want.shape and want.ndim == 2:
            return  # the same bytes in another order
        noise = float(((got - want) ** 2).sum(dtype=np.float64))
        signal = float((want**2).sum(dtype=np.float64))
        ratios[index] = float("inf") if noise == 0 else 10 * np.log10(max(signal, 1e-300) / noise)

    model.run(x, watch)
    return ratios


def quantize(
    model: Module,
    calibration_dataset: Iterable[Any] | Calibration,
    *,
    observer: str = "minmax",
    accuracy_drop: float | None = None,
    evaluate: Evaluate | None = None,
    keep_float: Iterable[str] = (),
    progress: bool = False,
) -> Module:
    """An int8 version of a trained model; the model itself is left as it is.

    `calibration_dataset` is any iterable of input batches, or a `Calibration` made before. Transformers need no data:
    their linear layers are quantized dynamically. With `accuracy_drop` (0.005 is half a point) and `evaluate`, a
    function from a model to its accuracy, layers go back to float32, the noisiest first, until the loss is within it.

    >>> from tilewise import models
    >>> data = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    >>> quantize(models.cnn(), [data])(Tensor(data)).shape
    (8, 10)
    """
    if isinstance(model, QuantizedModel):
        raise ConfigurationError("this model is quantized already")
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
        batches = calibration_dataset = list(calibration_dataset)
    calibration = (
        calibration_dataset
        if isinstance(calibration_dataset, Calibration)
        else calibrate(model, calibration_dataset, observer, progress)
    )
    if accuracy_drop is None:
        return QuantizedModel(graph, calibration, kept)
    if evaluate is None or batches is None:
        raise ConfigurationError(
            "accuracy_drop needs calibration batches and `evaluate`, a function that measures accuracy"
        )
    return _within_drop(model, calibration, kept, accuracy_drop, evaluate, batches)


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
