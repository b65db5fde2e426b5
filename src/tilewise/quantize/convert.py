"""`quantize(model, data)`: convert a float model to a quantized one within a bound on its error.

With `max_error`, activations get int16 and finally a few layers stay in float32 until the error is within it. With
`accuracy_drop`, the noisiest layers return to float32 until the loss of accuracy is within it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from tilewise import nn
from tilewise._extension import native
from tilewise.errors import AccuracyError, ConfigurationError, TilewiseError
from tilewise.nn import Module
from tilewise.nn.self_planning import layer_by_layer
from tilewise.quantize.calibration import Calibration, EvaluatedBatch, check_model, trace_and_calibrate
from tilewise.quantize.graph import FloatGraph, trace
from tilewise.quantize.lowering import IntegerLayerCache
from tilewise.quantize.mixed_precision import (
    HOLDOUT_IMAGES,
    STATED_SPREAD_PRIOR,
    PrecisionSearch,
    assign_precision,
    int16_parameters,
    measured_error,
    predicted_error,
    stated_error,
    validation_error,
)
from tilewise.quantize.model import QuantizedModel
from tilewise.quantize.parameters import QuantizedArray
from tilewise.quantize.plan import Segment
from tilewise.quantize.saturation import GptqRounding
from tilewise.tensor import Array, Tensor, no_grad

Evaluate = Callable[[Module], float]
# Ratios of the measured error to max_error, with 16 bits. Up to the first, layers are kept in float to reach max_error:
# beyond it there is a fault, which float layers would hide. Up to the second, a model is returned with a warning.
_LARGEST_FLOAT_EXCESS, _LARGEST_EXCESS = 10.0, 3.0
_FLOAT_LAYERS = (1, 2, 4, 8, 16)  # numbers of layers that are kept in float, one attempt after the other
_SENSITIVITY_IMAGES = 4  # images that layers are compared on; arbitrary
_ATTENTION = ("Softmax", "LayerNormalization", "LayerNorm", "RMSNorm")


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
    max_error: float | None = 0.01,
    progress: bool = False,
) -> Module:
    """Return an int8 version of a trained model, or one whose linear layers have four-bit weights.

    `calibration_dataset` is any iterable of input batches, or a `Calibration` made before. Transformers need no data:
    their linear layers are quantized dynamically, and their error is measured on the first batch.

    With `accuracy_drop` (0.005 is half a point) and `evaluate`, a function from a model to its accuracy, layers go back
    to float32, the noisiest first, until the loss is within it. Otherwise `max_error` is the largest error on held-out
    images, as a share of the largest result: activations get int16, the most sensitive for their cost first, and
    finally a few layers stay in float32, until it is reached. Up to three times as much is a warning, and more is an
    AccuracyError. The model's `stated_error` is what it promises on other images. `max_error=None` uses int8 only.

    With `bits=4` every linear layer gets four-bit weights in blocks of 32, `symmetric` around zero or with a minimum
    for each block; calibration data, if there is any, decides how they are rounded. Other layers stay float32.

    >>> from tilewise import models
    >>> data = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    >>> quantize(models.cnn(), [data])(Tensor(data)).shape
    (8, 10)
    """
    check_model(model)
    if max_error is not None and not 0 < max_error < np.inf:
        raise ConfigurationError("max_error must be a fraction of the largest result, such as 0.01, or None")
    if bits == 4:
        return _in_four_bits(model, calibration_dataset, symmetric, accuracy_drop is not None or bool(list(keep_float)))
    if bits != 8 or not symmetric:
        raise ConfigurationError("bits must be 8 or 4, and 4 with symmetric=False")
    # Activations of transformers have outliers, so their rows are quantized by their own scale.
    if is_transformer(model):
        return _dynamic(model, calibration_dataset, tuple(keep_float), max_error, accuracy_drop, evaluate)
    # Everything else is quantized statically: trace, calibrate, convert, check.
    float_reasons = dict.fromkeys(keep_float, "asked for")
    if not isinstance(calibration_dataset, Calibration) and accuracy_drop is not None:
        calibration_dataset = list(calibration_dataset or ())
    first: EvaluatedBatch | None = None
    holdout: EvaluatedBatch | None = None
    if isinstance(calibration_dataset, Calibration):
        calibration = calibration_dataset
        graph = trace(model, np.zeros((2, *calibration.shapes[0]), np.float32))
    else:
        batches = cast(Iterable[Any], calibration_dataset)  # trace_and_calibrate rejects anything else
        count = HOLDOUT_IMAGES if max_error is not None and accuracy_drop is None else 0
        graph, calibration, first, holdout = trace_and_calibrate(model, batches, observer, progress, count)
    unknown = set(float_reasons) - {step.name for step in graph.steps}
    if unknown:
        raise ConfigurationError(f"there is no layer {sorted(unknown)[0]!r} to keep in float")
    # Without calibration batches there is nothing to measure an error on.
    if accuracy_drop is None and first is None:
        return QuantizedModel(graph, calibration, float_reasons)
    if accuracy_drop is None:
        assert first is not None
        if max_error is None:
            quantized = QuantizedModel(graph.copy(), calibration, float_reasons)
        else:
            quantized = _within_error(graph, calibration, float_reasons, first, holdout, max_error)
        check_same_integers(quantized, first.x[:1])
        integers, layers = quantized.layer_counts()
        if layers and not integers:
            name, reason = next(iter(quantized.float_reasons.items()))
            warnings.warn(f"no layer computes in INT8, and the model stays float32: {name}: {reason}", stacklevel=2)
        warn_if_slower(quantized, model, first.x[:1])
        return quantized
    if evaluate is None or isinstance(calibration_dataset, Calibration):
        raise ConfigurationError(
            "accuracy_drop needs calibration batches and `evaluate`, a function that measures accuracy"
        )
    batches = cast(list[Any], calibration_dataset)
    return _within_drop(model, calibration, float_reasons, accuracy_drop, evaluate, batches)


def _dynamic(
    model: Module,
    data: Any,
    keep_float: tuple[str, ...],
    max_error: float | None,
    accuracy_drop: float | None,
    evaluate: Evaluate | None,
) -> Module:
    """Quantize every linear layer dynamically: int8 weights, and activations by the range of each row.

    If `data` has an array, the error on it is measured and its first two inputs are stored for `save_quantized`. Raises
    AccuracyError if `evaluate` loses more than `accuracy_drop`.
    """
    from tilewise.quantize.dynamic import quantize_dynamic

    quantized = quantize_dynamic(model, keep_float)
    first = data[0] if isinstance(data, list | tuple) and data else None
    if isinstance(first, np.ndarray | Tensor):
        array = first.data if isinstance(first, Tensor) else first
        quantized.quantization_example = array[:2].copy()
        state_dynamic_error(quantized, model, array, max_error if accuracy_drop is None else None)
        warn_if_slower(quantized, model, array[:1], stacklevel=4)
    if accuracy_drop is not None and evaluate is not None:
        drop = evaluate(model) - evaluate(quantized)
        if drop > accuracy_drop:
            raise AccuracyError(
                f"INT8 loses {drop:.4f} of the accuracy, more than accuracy_drop={accuracy_drop:g} allows; "
                "name layers in keep_float, or allow more"
            )
    return quantized


def _in_four_bits(model: Module, data: Any, symmetric: bool, has_int8_options: bool) -> Module:
    """Quantize linear layers to four bits, rounded by GPTQ on calibration `data` if any; reject int8 options."""
    from tilewise.quantize.four_bits import quantize_four_bits

    if isinstance(data, Calibration):
        raise ConfigurationError("bits=4 needs batches of inputs: a Calibration has only their ranges")
    if has_int8_options:
        raise ConfigurationError("accuracy_drop and keep_float are for bits=8")
    return quantize_four_bits(model, [data] if hasattr(data, "__array__") else data, symmetric)


def _within_error(
    graph: FloatGraph,
    calibration: Calibration,
    float_reasons: dict[str, str],
    first: EvaluatedBatch,
    holdout: EvaluatedBatch | None,
    bound: float,
) -> QuantizedModel:
    """Return a model whose measured error on held-out images is at most `bound`.

    Activations get 16 bits first; then the layers that harm the result most stay in float. If the error is still above
    the bound, a warning states it up to `_LARGEST_EXCESS` times the bound, and beyond that AccuracyError is raised.
    """
    search = PrecisionSearch(graph, calibration, float_reasons, first, holdout)
    images, layers = search.at_hand, IntegerLayerCache()

    def build(
        int16_reasons: Mapping[int, str], rounding: GptqRounding | None, reach_scale: float = 1.0
    ) -> QuantizedModel:
        """Convert the graph with the activations in `int16_reasons` (group to reason) as int16 and the others as uint8.

        `rounding` rounds the weights by GPTQ; a `reach_scale` above 1 widens the int16 ranges.
        """
        return QuantizedModel(
            graph.copy(),
            calibration,
            float_reasons,
            int16_reasons=int16_reasons,
            rounding=rounding,
            int16_by_group=int16_parameters(graph, calibration, int16_reasons, reach_scale),
            layers=layers,
        )

    model: QuantizedModel = assign_precision(search, bound, build)
    # Precision to spare widens int16 ranges by one bit, so that values of other images do not saturate.
    if model.int16_reasons:
        wider = build(model.int16_reasons, search.rounding, 2.0)
        model = wider if validation_error(wider, search.check) <= bound else model
    error = measured_error(model.run(images.x), images.result)
    if bound < error <= _LARGEST_FLOAT_EXCESS * bound:
        error, model = _with_float_layers(model, graph, images, bound)
    if not np.isfinite(images.result).all():  # nothing can be promised about infinities
        return model
    if not error <= _LARGEST_EXCESS * bound:
        layer = first_deviating_layer(model, graph, images.x[:1], bound)
        raise AccuracyError(
            f"INT8 is off by {error:.2%} of the largest result, more than max_error={bound:g} allows; {layer}; "
            "pass more calibration images, a larger max_error, or max_error=None for no bound"
        )
    if error > bound:
        warnings.warn(
            f"INT8 is off by {error:.2%} of the largest result on held-out images, more than max_error={bound:g}, "
            "although activations are int16 and the most sensitive layers stay in float",
            stacklevel=3,
        )
    model.measured_error, model.stated_error = error, max(error, bound, stated_error(model, search.check))
    return model


def _with_float_layers(
    model: QuantizedModel, graph: FloatGraph, images: EvaluatedBatch, bound: float
) -> tuple[float, QuantizedModel]:
    """Keep as few of the most sensitive layers in float as bring the error on `images` within `bound`.

    Returns (measured error, model): the best one tried, or `model` itself if float layers do not help.
    """
    sensitivities, rounding = _layer_sensitivities(model, graph, images), GptqRounding(graph, images.x)
    best = measured_error(model.run(images.x), images.result), model
    for count in _FLOAT_LAYERS:
        most_sensitive = sensitivities[:count]
        reasons = {name: f"results are off by {error:.2%} by it alone, in 16 bits" for name, error in most_sensitive}
        candidate = QuantizedModel(
            graph.copy(),
            model.calibration,
            model.float_reasons | reasons,
            int16_reasons=model.int16_reasons,
            rounding=rounding,
            int16_by_group=model.int16_by_group,
        )
        error = measured_error(candidate.run(images.x), images.result)
        if error < best[0]:
            best = error, candidate
        if error <= bound or count >= len(sensitivities):
            break
    return best


def _layer_sensitivities(model: QuantizedModel, graph: FloatGraph, images: EvaluatedBatch) -> list[tuple[str, float]]:
    """Return (layer name, error) for each integer convolution and linear layer, the largest error first.

    The error is that of the network's result on `images` if only this layer computes in integers.
    """
    x, sensitivities = images.x[:_SENSITIVITY_IMAGES], []
    exact, rounded = graph.results(x), model.results(x)
    for index, step in enumerate(graph.steps):
        if model.integer[index] is None or step.kind not in ("conv", "linear"):
            continue
        # The layer's own rounding error is its integer result less the float result for the same inputs. Add it to the
        # float result, and run the steps that depend on it again.
        with no_grad():
            noise = rounded[index] - graph.run_float(step, [rounded[i] for i in step.inputs], len(x))
            changed = {index: exact[index] + noise}
            for later in range(index + 1, len(graph.steps)):
                reads = graph.steps[later].inputs
                if any(i in changed for i in reads):
                    values = [changed.get(i, exact[i]) for i in reads]
                    changed[later] = graph.run_float(graph.steps[later], values, len(x))
        result = changed.get(len(graph.steps) - 1, exact[-1])
        sensitivities.append((step.name, measured_error(result, exact[-1])))
    return sorted(sensitivities, key=lambda entry: -entry[1])


def _within_drop(
    model: Module,
    calibration: Calibration,
    float_reasons: dict[str, str],
    accuracy_drop: float,
    evaluate: Evaluate,
    batches: list[Any],
) -> QuantizedModel:
    """Keep the layers with the lowest signal-to-noise ratio in float until the loss of accuracy is within the limit."""
    baseline = evaluate(model)
    x = np.asarray(batches[0].data if isinstance(batches[0], Tensor) else batches[0], np.float32)
    while True:
        candidate = QuantizedModel(trace(model, x), calibration, float_reasons)
        drop = baseline - evaluate(candidate)
        noisy = [r for r in candidate.report(x, trace(model, x)) if r.form == "int8" and r.kind in ("conv", "linear")]
        if drop <= accuracy_drop or not noisy:
            return candidate
        # Return the noisiest layer to float, and convert again.
        worst = min(noisy, key=lambda r: r.snr_db if r.snr_db is not None else np.inf)
        reason = f"lowest signal-to-noise ratio ({worst.snr_db:.1f} dB) while accuracy fell by {drop:.4f}"
        float_reasons[worst.name] = reason


def is_transformer(model: Module) -> bool:
    """Tell whether a model has attention and most weights in linear layers; these are quantized dynamically."""
    layers = list(model.modules())
    attends = any(isinstance(m, nn.MultiHeadAttention) or type(m).__name__ in _ATTENTION for m in layers)
    linear = sum(
        t.data.nbytes for m in layers if isinstance(m, nn.Linear | nn.MultiHeadAttention) for _, t in m.named_tensors()
    )
    convolved = sum(t.data.nbytes for m in layers if isinstance(m, nn.Conv2d) for _, t in m.named_tensors())
    return attends and linear > convolved


# --- checks of a quantized model: its integers, its error and its speed ---


Value = QuantizedArray | Array
_ROUNDS = 7  # interleaved timings of which the shortest counts; arbitrary
# Networks below this time are dominated by call overhead, and a slowdown within the noise of a timing is not reported.
_SHORTEST_SECONDS, _NOTABLE_SLOWDOWN = 2e-4, 1.1


def check_same_integers(model: QuantizedModel, x: Array) -> None:
    """Run the native plan and the layers one by one on `x`; raise AccuracyError if integers differ."""
    # The native plan, segment by segment, next to the same model with one call per step.
    stepwise: dict[int, Value] = {}
    model.run(x, lambda index, value: stepwise.__setitem__(index, value))
    planned = model._checked_input(x)

    def compare(segment: Segment) -> None:
        """Raise AccuracyError if a segment's results differ from those of the single layers."""
        for index, _ in segment.results:
            if not np.array_equal(model._as_float(planned[index]), model._as_float(stepwise[index]), equal_nan=True):
                raise AccuracyError(
                    f"the native plan up to {model.graph.steps[index].name} gives other integers than NumPy; "
                    "set TILEWISE_NATIVE=0 to quantize without it, and please report this"
                )

    model.run_segments(planned, compare)


def first_deviating_layer(model: QuantizedModel, reference: FloatGraph, x: Array, bound: float) -> str:
    """Describe, as part of an error message, the first layer whose result is off by more than `bound`.

    A layer's deviation is relative to the largest value of the float model's result for the same layer.
    """
    for step, result, expected in zip(reference.steps, model.results(x), reference.results(x), strict=True):
        error = float(np.abs(result - expected).max(initial=0)) / max(float(np.abs(expected).max(initial=0)), 1e-30)
        if error > bound or not np.isfinite(error):
            return f"the first layer beyond it is {step.name}, off by {error:.2%}"
    return "each layer alone is within it on this image, but their errors add up"


def state_dynamic_error(quantized: Any, model: Module, x: Array, max_error: float | None) -> None:
    """Measure the error of a dynamically quantized model on a batch and store it in the model.

    Sets `measured_error` (the worst image of the batch) and `stated_error` (predicted for other images; the batch
    stands for them, because ranges are not calibrated), and warns if the first exceeds `max_error`. A model whose
    result is not one array gets no errors.
    """
    with no_grad(), layer_by_layer():
        try:
            result, exact = (np.asarray(m.eval()(x).data, np.float32) for m in (quantized, model))
        except (AttributeError, TypeError):  # several results, or inputs of another kind: nothing to compare
            return
    if not np.isfinite(exact).all():
        return
    rows, expected = (a.reshape(len(a), -1) for a in (result, exact))
    quantized.measured_error = measured_error(rows, expected)
    quantized.stated_error = max(quantized.measured_error, predicted_error(rows, expected, STATED_SPREAD_PRIOR))
    if max_error is not None and quantized.measured_error > max_error:
        warnings.warn(
            f"INT8 is off by {quantized.measured_error:.2%} of the largest result, more than max_error={max_error:g}: "
            "transformers are quantized row by row, without a finer precision; name layers in keep_float to reduce it",
            stacklevel=4,
        )


def warn_if_slower(quantized: Module, model: Module, x: Array, stacklevel: int = 3) -> None:
    """Time the float plan and the quantized model on one image, interleaved, and warn if INT8 is slower."""
    from tilewise.plan import compile

    if native is None:
        return
    try:
        run_float: Callable[[Array], Any] = compile(model, x)
        run_integers: Callable[[Array], Any] = getattr(quantized, "run", None) or compile(quantized, x)
        seconds = [float("inf"), float("inf")]
        for _ in range(_ROUNDS):
            for which, run in enumerate((run_float, run_integers)):
                started = time.perf_counter()
                run(x)
                seconds[which] = min(seconds[which], time.perf_counter() - started)
    except TilewiseError:  # a network that cannot be planned has no float plan to lose against
        return
    if seconds[0] > _SHORTEST_SECONDS and seconds[1] > _NOTABLE_SLOWDOWN * seconds[0]:
        warnings.warn(
            f"INT8 is slower than float32 here ({1e3 * seconds[1]:.2f} ms against {1e3 * seconds[0]:.2f} ms for one "
            "input): keep the float32 network for speed, or pass a larger max_error",
            stacklevel=stacklevel,
        )
