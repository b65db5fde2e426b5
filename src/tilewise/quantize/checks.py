"""Checks of a quantized model at conversion time: its integers, its error and its speed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import AccuracyError, TilewiseError
from tilewise.nn import Module
from tilewise.quantize.array import QuantizedArray
from tilewise.quantize.graph import FloatGraph
from tilewise.quantize.mixed_precision import STATED_SPREAD_PRIOR, measured_error, predicted_error
from tilewise.tensor import no_grad

if TYPE_CHECKING:
    from tilewise.quantize.convert import QuantizedModel

Array = npt.NDArray[Any]
Value = QuantizedArray | Array
_ROUNDS = 7  # interleaved timings of which the shortest counts; arbitrary
# Networks below this time are dominated by call overhead, and a slowdown within the noise of a timing is not reported.
_SHORTEST_SECONDS, _NOTABLE_SLOWDOWN = 2e-4, 1.1


def check_same_integers(model: QuantizedModel, x: Array) -> None:
    """Compare the native plan with the same integers computed layer by layer; AccuracyError if they differ."""
    stepwise: dict[int, Value] = {}
    model.run(x, lambda index, value: stepwise.__setitem__(index, value))
    planned = model._checked(x)
    for part in model._segments:
        if isinstance(part, int):
            planned[part] = model._step(part, planned)
            continue
        part.run(planned)
        for index, _ in part.results:
            if not np.array_equal(model._as_float(planned[index]), model._as_float(stepwise[index]), equal_nan=True):
                raise AccuracyError(
                    f"the native plan up to {model.graph.steps[index].name} gives other integers than NumPy; "
                    "set TILEWISE_NATIVE=0 to quantize without it, and please report this"
                )


def first_deviating_layer(model: QuantizedModel, reference: FloatGraph, x: Array, bound: float) -> str:
    """Name, in a clause, the first layer whose result deviates by more than `bound` of its largest value."""
    exact: list[Array] = []
    reference.run(x, lambda _, result: exact.append(result))
    clauses: list[str] = []

    def watch(index: int, value: Value) -> None:
        result, expected = model._unscaled(index, model._as_float(value)), exact[index]
        error = float(np.abs(result - expected).max(initial=0)) / max(float(np.abs(expected).max(initial=0)), 1e-30)
        if not clauses and (error > bound or not np.isfinite(error)):
            clauses.append(f"the first layer beyond it is {reference.steps[index].name}, off by {error:.2%}")

    model.run(x, watch)
    return clauses[0] if clauses else "each layer alone is within it on this image, but their errors add up"


def state_dynamic_error(quantized: Any, model: Module, x: Array, max_error: float | None) -> None:
    """Measure the error of a dynamically quantized model on a batch, store it, and warn if it is above `max_error`.

    Rows are quantized as they come, so no image is special: the batch stands for others (`stated_error`).
    """
    with no_grad():
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
