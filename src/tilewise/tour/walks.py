"""Fourth stop: a CNN and a GPT, made faster step by step; each step adds to the ones before it.

Timings of all steps of a model are interleaved, so that load on the machine affects them alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewise import Tensor, data, models, no_grad
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.bench.build import retrain
from tilewise.bench.events import TinyMLPerf
from tilewise.errors import UnavailableError
from tilewise.generate import generate, make_engine
from tilewise.graph.plan import compile
from tilewise.nn import Module
from tilewise.profile import MeasurementError, Timer
from tilewise.prune import shrink
from tilewise.quantize import quantize
from tilewise.tour.stops import Bars, Stop, Table, Visit

_BATCH = 64  # images per timed call, as in `tilewise quantize` and `prune`
_REMOVED_FILTERS = 0.3  # share of filters; arbitrary
_PROMPT = "The import statement"
_MEANING = (
    "Each step keeps the ones above it and adds one idea. The time is the median of interleaved runs, so a busy "
    "moment affects all steps alike; the last column says what the step cost in quality."
)
_NO_DIFFERENCE = 0.03  # share of a time; smaller differences are not called faster or slower


@dataclass(frozen=True)
class ModelVersion:
    """A version of a model: a function that runs it once, the bytes of its weights, and its quality."""

    name: str
    run: Callable[[], Any]
    weight_bytes: int
    quality: str


def cnn_stop(visit: Visit) -> Stop:
    """Measure a CNN in steps: native kernels, one native call, fewer filters, int8."""
    digits, model = data.digits(), models.pretrained("cnn").eval()
    batch = Tensor(digits.x_test[:_BATCH])
    visit.say("removing filters and retraining")
    small = shrink(model, _REMOVED_FILTERS)
    retrain(small, TinyMLPerf.CNN_MARATHON, epochs=2 if visit.quick else 4, seed=0)
    visit.say("calibrating int8")
    int8: Any = quantize(small, [digits.x_train[:256]])

    def step(name: str, run: Any, version: Module, size: int, backend: OptimizedBackend | None) -> ModelVersion:
        return ModelVersion(name, _forward_call(run, batch, backend), size, accuracy_text(version, digits))

    size, small_size = weight_bytes(model), weight_bytes(small)
    steps = [step("plain (NumPy, float32)", model, model, size, OptimizedBackend(only="numpy"))]
    planned: Any = small
    if native is not None:
        planned = compile(small, batch)
        steps += [
            step("accelerated (layer by layer)", model, model, size, OptimizedBackend()),  # its own backend: no plan
            step("planned (one native call)", compile(model, batch), model, size, None),
        ]
    pruned = f"pruned ({_REMOVED_FILTERS:.0%} of the filters)"
    steps += [
        step(pruned, planned, small, small_size, None),
        step("INT8", int8, int8, int8.nbytes, None),
    ]
    visit.say("timing all steps, interleaved")
    return _timed_stop("A CNN on handwritten digits, 64 images", steps, "accuracy", 12 if visit.quick else 40)


def gpt_stop(visit: Visit) -> Stop:
    """Measure a GPT in steps: native kernels, a KV cache, int8 weights."""
    model, ids = models.pretrained("gpt").eval(), data.encode(_PROMPT)
    plain = OptimizedBackend(only="numpy")
    count = _affordable_tokens(model, ids, plain, 24 if visit.quick else 120)
    expected = list(generate(model, ids, count))

    def step(name: str, backend: OptimizedBackend | None, size: int, **options: Any) -> ModelVersion:
        """Return a version of the GPT that generates text on this backend with these options of `generate`."""

        def run() -> list[int]:
            with use_backend(backend) if backend is not None else nullcontext():
                return list(generate(model, ids, count, **options))

        agreement = sum(a == b for a, b in zip(run(), expected, strict=True)) / count
        return ModelVersion(name, run, size, f"{agreement:.0%}")

    visit.say(f"generating {count} tokens, step by step")
    weights = weight_bytes(model)
    steps = [step("plain (NumPy, no cache)", plain, weights, use_cache=False)]
    if native is not None:
        steps.append(step("accelerated", None, weights, use_cache=False))
    steps.append(step("cached", None, weights))
    if native is not None:
        int8_bytes: int = make_engine(model, "int8").weight_bytes  # type: ignore[union-attr]
        steps.append(step("cached, INT8 weights", None, int8_bytes, weights="int8"))
    stop = _timed_stop(f"A GPT that writes about Python, {count} tokens", steps, "tokens as plain", 12)
    note = "Pruning is left out here, because fine-tuning takes minutes: `tilewise prune gpt` shows it."
    return replace(stop, lines=[*stop.lines, note])


def _affordable_tokens(model: Any, ids: Any, plain: OptimizedBackend, max_tokens: int) -> int:
    """Return the number of tokens to generate, reduced if the slowest version takes too long here."""
    with use_backend(plain):
        list(generate(model, ids, 2, use_cache=False))
        start = time.perf_counter()
        list(generate(model, ids, 4, use_cache=False))
    seconds = (time.perf_counter() - start) / 4
    return max_tokens if seconds < 0.1 else min(max_tokens, 24) if seconds < 0.4 else 8


def _forward_call(model: Any, batch: Tensor, backend: OptimizedBackend | None) -> Callable[[], Any]:
    """Return a function that runs the model on a batch with `backend` (None: the default)."""

    @no_grad()
    def run() -> Any:
        """Run the model without gradients on the backend."""
        if backend is None:
            return model(batch)
        with use_backend(backend):
            return model(batch)

    return run


def _timed_stop(title: str, steps: list[ModelVersion], quality: str, runs: int) -> Stop:
    """Time all versions of a model, interleaved, and return them as a stop of the tour."""
    # The time limit allows fewer rounds on a busy machine; `timing.reasons` reports that.
    functions = {step.name: step.run for step in steps}
    try:
        timing = Timer(time_limit=60.0).compare(functions, runs=runs, max_runs=runs, min_runs=2)
    except MeasurementError:
        sentence = "this machine is too busy to time it; close other programs and take the tour again"
        raise UnavailableError(sentence) from None
    seconds = {name: measurement.p50 for name, measurement in timing.measurements.items()}
    gains = {name: seconds[steps[0].name] / time_s for name, time_s in seconds.items()}
    rows = [
        (
            step.name,
            f"{seconds[step.name] * 1e3:,.2f} ms",
            f"{gains[step.name]:,.1f}×",
            f"{step.weight_bytes / 1024:,.0f} KiB",
            step.quality,
        )
        for step in steps
    ]
    facts = {"seconds": seconds, "speedup": gains, "bytes": {step.name: step.weight_bytes for step in steps}}
    facts["quality"] = {step.name: step.quality for step in steps}
    table = Table(("step, on top of those above", "median time", "faster than plain", "weights", quality), rows)
    # On a busy machine, a median may be slower by chance.
    lines = [f"Unsteady: {reason}." for reason in timing.reasons] or step_sentences(seconds)
    chart = Bars("Speed, plain = 1", "× plain", gains, log=True)
    return Stop(title, facts, lines, [table], [chart], _MEANING)


def step_sentences(seconds: dict[str, float]) -> list[str]:
    """Return a sentence for each step that is not faster than the one before it."""
    sentences = []
    for (before, old), (after, new) in itertools.pairwise(seconds.items()):
        if new > (1 + _NO_DIFFERENCE) * old:
            sentences.append(f"“{after}” is {new / old - 1:.0%} slower than “{before}” on this machine.")
        elif new > (1 - _NO_DIFFERENCE) * old:
            sentences.append(f"“{after}” is as fast as “{before}” on this machine.")
    return sentences


def accuracy_text(model: Module, images: data.ImageData) -> str:
    """Return the accuracy on the test images as a percentage."""
    with no_grad():
        answers = np.asarray(model(Tensor(images.x_test))).argmax(1)
    return f"{(answers == images.y_test).mean():.2%}"


def weight_bytes(model: Module) -> int:
    return sum(t.data.nbytes for _, t in model.named_tensors())
