"""Fourth stop: one CNN and one GPT, made faster step by step, each step on top of the ones before it.

All steps of a model are timed in turns, so that a busy minute of the machine hits them alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise import Tensor, data, models, no_grad
from tilewise._extension import native
from tilewise.backend import OptimizedBackend, use_backend
from tilewise.bench.build import retrain
from tilewise.bench.events import TinyMLPerf
from tilewise.generate import generate
from tilewise.nn import Module
from tilewise.profile import Timer
from tilewise.prune import shrink
from tilewise.quantize import quantize
from tilewise.tour.stops import Bars, Stop, Table, Visit

_BATCH = 64
_REMOVED = 0.3
_PROMPT = "The import statement"
_MEANING = (
    "Each step keeps the ones above it and adds one idea. The time is the median of runs taken in turns, so a busy "
    "moment hits all steps alike; the last column says what the step cost in quality."
)


@dataclass(frozen=True)
class Step:
    """A version of a model: how to run it once, what it weighs, and how good it is."""

    name: str
    run: Callable[[], Any]
    bytes_held: int
    quality: str


def cnn_stop(visit: Visit) -> Stop:
    """Plain, native, with chosen tiles, with fewer filters, in int8."""
    digits, model = data.digits(), models.pretrained("cnn").eval()
    batch = Tensor(digits.x_test[:_BATCH])
    visit.say("removing filters and training what is left")
    small = shrink(model, _REMOVED)
    retrain(small, TinyMLPerf.CNN_MARATHON, epochs=2 if visit.quick else 4, seed=0)
    visit.say("calibrating int8")
    int8: Any = quantize(small, [digits.x_train[:256]])
    steps = [
        Step(
            "plain (NumPy, float32)",
            _call(model, batch, OptimizedBackend(only="numpy")),
            held(model),
            right(model, digits),
        ),
        Step("accelerated", _call(model, batch, None), held(model), right(model, digits)),
    ]
    if native is None:
        del steps[1]
    else:
        steps.append(Step("tuned tiles", _call(model, batch, tuned_backend()), held(model), right(model, digits)))
    steps += [
        Step(f"pruned ({_REMOVED:.0%} of the filters)", _call(small, batch, None), held(small), right(small, digits)),
        Step("INT8", _call(int8, batch, None), int8.nbytes, right(int8, digits)),
    ]
    visit.say("timing all steps in turns")
    return _shown("A CNN on handwritten digits, 64 images", steps, "accuracy", 12 if visit.quick else 40)


def gpt_stop(visit: Visit) -> Stop:
    """Plain, native, with chosen tiles, with a cache, with int8 weights in it."""
    model, ids = models.pretrained("gpt").eval(), data.encode(_PROMPT)
    plain = OptimizedBackend(only="numpy")
    count = _affordable_tokens(model, ids, plain, 24 if visit.quick else 120)
    expected = list(generate(model, ids, count))

    def step(name: str, backend: OptimizedBackend | None, size: int, **how: Any) -> Step:
        def run() -> list[int]:
            with use_backend(backend) if backend is not None else nullcontext():
                return list(generate(model, ids, count, **how))

        same = sum(a == b for a, b in zip(run(), expected, strict=True)) / count
        return Step(name, run, size, f"{same:.0%}")

    visit.say(f"generating {count} tokens, step by step")
    weights = held(model)
    steps = [step("plain (NumPy, no cache)", plain, weights, use_cache=False)]
    if native is not None:
        steps += [
            step("accelerated", None, weights, use_cache=False),
            step("tuned tiles", tuned_backend(), weights, use_cache=False),
        ]
    steps.append(step("cached", None, weights))
    if native is not None:
        steps.append(step("cached, INT8 weights", None, _int8_bytes(model), weights="int8"))
    stop = _shown(f"A GPT that writes about Python, {count} tokens", steps, "tokens as plain", 12)
    sample = _PROMPT + data.decode(list(generate(model, ids, 120, temperature=0.6)))
    lines = [
        *stop.lines,
        "Pruning is left out here: the decoder has no sparse kernel, so zeros would save nothing.",
        f"What it writes: “{' '.join(sample.split())}”",
    ]
    return Stop(stop.title, stop.facts, lines, stop.tables, stop.charts, stop.meaning)


def _affordable_tokens(model: Any, ids: Any, plain: OptimizedBackend, most: int) -> int:
    """Fewer where a busy machine makes NumPy's library crawl: the slowest step has to end."""
    with use_backend(plain):
        list(generate(model, ids, 2, use_cache=False))
        start = time.perf_counter()
        list(generate(model, ids, 4, use_cache=False))
    seconds = (time.perf_counter() - start) / 4
    return most if seconds < 0.1 else min(most, 24) if seconds < 0.4 else 8


def _call(model: Module, batch: Tensor, backend: OptimizedBackend | None) -> Callable[[], Any]:
    @no_grad()
    def run() -> Any:
        if backend is None:
            return model(batch)
        with use_backend(backend):
            return model(batch)

    return run


def _shown(title: str, steps: list[Step], quality: str, runs: int) -> Stop:
    # On a busy machine a few rounds have to do: the tour goes on, and says so.
    functions = {step.name: step.run for step in steps}
    timed = Timer(time_limit=60.0).compare(functions, runs=runs, max_runs=runs, min_runs=2)
    seconds = {name: measured.p50 for name, measured in timed.measurements.items()}
    gains = {name: seconds[steps[0].name] / taken for name, taken in seconds.items()}
    rows = [
        (
            step.name,
            f"{seconds[step.name] * 1e3:,.2f} ms",
            f"{gains[step.name]:,.1f}×",
            f"{step.bytes_held / 1024:,.0f} KiB",
            step.quality,
        )
        for step in steps
    ]
    facts = {"seconds": seconds, "speedup": gains, "bytes": {step.name: step.bytes_held for step in steps}}
    facts["quality"] = {step.name: step.quality for step in steps}
    table = Table(("step, on top of those above", "median time", "faster than plain", "weights", quality), rows)
    lines = [*nothing_gained(seconds), *(f"Unsteady: {reason}." for reason in timed.reasons)]
    chart = Bars("Speed, plain = 1", "× plain", gains, log=max(gains.values()) > 30)
    return Stop(title, facts, lines, [table], [chart], _MEANING)


def nothing_gained(seconds: dict[str, float]) -> list[str]:
    """A sentence for each step that is no faster than the one before it."""
    names = list(seconds)
    return [
        f"“{after}” gains nothing over “{before}” here."
        for before, after in itertools.pairwise(names)
        if seconds[after] > 0.97 * seconds[before]
    ]


def tuned_backend() -> OptimizedBackend:
    """A backend that asks the tuner's choices and the shipped model for the tile of each shape."""
    from tilewise.tune.choose.chooser import make_chooser

    return OptimizedBackend(tile_chooser=make_chooser())


def right(model: Module, images: data.ImageData) -> str:
    with no_grad():
        answers = np.asarray(model(Tensor(images.x_test))).argmax(1)
    return f"{(answers == images.y_test).mean():.2%}"


def held(model: Module) -> int:
    return sum(t.data.nbytes for _, t in model.named_tensors())


def _int8_bytes(model: Module) -> int:
    """The decoder keeps matrices as int8 with a float scale for each row, everything else as it was."""
    total = 0
    for _, tensor in model.named_tensors():
        array = tensor.data
        total += array.size + 4 * array.shape[0] if array.ndim == 2 else array.nbytes
    return total
