"""Figures of a model, and of two models against each other, all by the harness's clock, data and seeds.

`benchmark_model` measures one; `compute_speedup` says how much better the second of two is. A fair ratio needs both
interleaved in the same run: `measure_together` does that through `Timer.compare`, with samples of equal length on
both sides, so that a load on the machine slows both by the same share. It makes the figures that scores are made of.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from tilewise import models, optim
from tilewise._extension import native
from tilewise._wording import with_interval
from tilewise.bench.events import Event, TinyMLPerf
from tilewise.bench.runner import Runner, runner_for
from tilewise.errors import ConfigurationError, TilewiseError, TooNoisy, type_name
from tilewise.io import save
from tilewise.nn import Module
from tilewise.nn import functional as F
from tilewise.profile import Comparison, Measurement, MemoryProfiler, ProfilerContext, TimeLimitError, Timer
from tilewise.tensor import Tensor, enable_grad

Array = npt.NDArray[Any]
_MAX_LOG_HALF_WIDTH = 50.0  # of the log of a ratio; its exponential is still a finite float
_TIMED_CALLS = 8  # different inputs that timed calls cycle through


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement. The defaults are the competition's; tests use fewer and shorter samples."""

    sample_seconds: float = 0.05
    runs: int | None = None  # the event's
    most_runs: int | None = None  # four times as many, while the interval is wide
    widest_interval: float = 0.05  # half of the 95 % interval of a speed-up; beyond it nothing is scored
    time_limit: float = 300.0
    run_seconds: float = 900.0  # of the whole run, with building and checking; arbitrary, far above the slowest event
    practice: bool = False  # score however noisy the machine is; such a score is never ranked
    drawn_inputs: int = 512
    images: str | None = None  # an npz of images and classes that only the teacher has; judged like the held-out ones
    truth: str | None = None  # TILE_OLYMPIAD: a collection to score against; None is the practice split
    seed: int | None = None  # None draws fresh randomness, which is the rule; a seed is for tests

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Benchmark:
    """Costs and quality of one model: seconds, bytes, shares."""

    event: str
    latency: Measurement
    throughput: float  # images or tokens a second
    memory_bytes: int  # weights held, and the most that one call takes beyond them
    file_bytes: int
    dtypes: tuple[str, ...]
    accuracy: float | None = None
    training_step_s: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        facts = {name: getattr(self, name) for name in ("event", "throughput", "memory_bytes", "file_bytes", "dtypes")}
        facts |= {"accuracy": self.accuracy, "training_step_s": self.training_step_s, "notes": self.notes}
        return facts | {"latency_s": _latency_data(self.latency)}


def _latency_data(latency: Measurement) -> dict[str, Any]:
    """Convert a latency measurement to JSON data: percentiles in seconds, interval, reasons for doubt."""
    interval = latency.intervals["p50"]
    figures = {name: getattr(latency, name) for name in ("p50", "p95", "p99")}
    return figures | {"interval": [interval.low, interval.high], "reasons": latency.reasons}


@dataclass(frozen=True)
class Gain:
    """Ratio above 1 if the optimized model is better, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return with_interval(f"{self.ratio:.2f}×", f"{self.low:.2f}", f"{self.high:.2f}")


@dataclass(frozen=True)
class Speedup:
    """Ratios of one benchmark to another."""

    latency: Gain
    throughput: Gain
    memory: Gain
    size: Gain
    training_step: Gain | None = None
    points_lost: float | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Benchable = Module | Runner | Event | str


def benchmark_model(
    model: Benchable,
    profiler: Timer | ProfilerContext | None = None,
    *,
    event: Event | str | None = None,
    settings: Settings | None = None,
    training: bool = True,
) -> Benchmark:
    """Measure latency and throughput of inference, a training step, peak memory, file size and accuracy of `model`.

    `model` is one of the shipped models in any form (quantized, pruned, shrunk), its name, an event (its shipped model)
    or a `Runner`; the event is recognised by what the model takes, or named. With a `Timer`, its settings are used; a
    `ProfilerContext` also records one call, so that its report says where the time goes.

    >>> from tilewise import models
    >>> benchmark_model(models.pretrained("mlp"), Timer(sample_seconds=1e-4)).accuracy > 0.97
    True
    """
    if not isinstance(profiler, Timer | ProfilerContext | None):
        raise ConfigurationError(f"profiler must be a Timer or a ProfilerContext, not a {type_name(profiler)}")
    settings = settings or Settings()
    runner = _as_runner(model, event)
    timer = profiler if isinstance(profiler, Timer) else Timer(time_limit=settings.time_limit)
    inputs = runner.event.timed_inputs(settings.rng(), _TIMED_CALLS)
    memory = memory_bytes(runner, inputs[0])
    with runner.active():
        latency = timer.measure(_cycle_inputs(runner, inputs)[0], runs=settings.runs or runner.event.runs)
        if isinstance(profiler, ProfilerContext):
            with profiler:
                runner.call(inputs[0])
    return Benchmark(
        event=runner.event.name,
        latency=latency,
        throughput=runner.event.units_per_call / latency.p50,
        memory_bytes=memory,
        file_bytes=file_bytes(runner),
        dtypes=stored_dtypes(runner),
        accuracy=accuracy(runner),
        training_step_s=_training_step(runner) if training else None,
        notes=list(latency.notes),
    )


def _as_runner(model: Benchable, event: Event | str | None) -> Runner:
    """Return the runner of a model, or of the shipped model of an event or name."""
    if isinstance(model, Runner):
        return model
    if isinstance(model, str):
        model = _named_model(model)
    if isinstance(model, Event):
        event, model = event or model, model.model()
    if not isinstance(model, Module):
        raise ConfigurationError(f"a benchmark needs a model or an event, not a {type_name(model)}")
    if event is not None:
        return runner_for(model, TinyMLPerf.event(event))
    for candidate in TinyMLPerf.events():
        if candidate.kind != "tiles" and _accepts_inputs(model, candidate):
            return runner_for(model, candidate)
    raise ConfigurationError("this model takes the inputs of none of the events; name one with event=")


def _named_model(name: str) -> Event | Module:
    """Return the event or the shipped model called `name`."""
    events = [event.name for event in TinyMLPerf.events()]
    return TinyMLPerf.event(name) if name.upper() == name or name.upper() in events else models.load_model(name)


def _accepts_inputs(model: Module, event: Event) -> bool:
    """Tell whether a model accepts the inputs of an event."""
    if event.kind == "text":
        return isinstance(model, models.pretrained("gpt").__class__)
    try:
        answer = runner_for(model, event).answer(np.zeros((1, *event.input_shape), np.float32))
    except (TilewiseError, ValueError, TypeError, AttributeError):
        return False
    return answer.shape == (1, 10)


def _cycle_inputs(runner: Runner, inputs: list[Array]) -> tuple[Callable[[], None], dict[int, Array]]:
    """Return a function that runs the next of `inputs` at each call, and a dict of its latest answers by index."""
    answers: dict[int, Array] = {}
    turn = itertools.cycle(enumerate(inputs))
    call = runner.call

    def run() -> None:
        at, x = next(turn)
        answers[at] = call(x)

    return run, answers


# --- the figures that do not vary ---


def accuracy(runner: Runner) -> float | None:
    """Return the share of public images that are classified correctly; None for text."""
    if runner.event.kind != "images":
        return None
    return float((runner.answer(runner.event.public_inputs()).argmax(1) == runner.event.public_labels()).mean())


def memory_bytes(runner: Runner, inputs: Array) -> int:
    """Return the bytes of the weights plus the peak memory of a call beyond them, including cached buffers.

    Call this before the runner's first call: kernels cache packed weights, plans and buffers between calls, and these
    must count. A call on the smallest input comes first, so that Python's own first-time costs do not count.
    """
    smallest = _smallest(runner)
    warm = np.ones((512, 512), np.float32)
    np.matmul(warm, warm)  # NumPy's library takes its own buffers at its first large product: not the model's doing
    with runner.active():
        before = _native_bytes()
        smallest.call(inputs[:1] if runner.event.kind == "images" else inputs)
        cached = max(_native_bytes() - before, 0)
        profile = MemoryProfiler().profile(lambda: runner.call(inputs), sites=False, leaks=False)
    return runner.bytes_held + cached + profile.peak_bytes


def _smallest(runner: Runner) -> Runner:
    return runner if runner.event.kind == "images" else replace(runner, event=replace(runner.event, new_tokens=1))


def _native_bytes() -> int:
    """Return the bytes that the native library has allocated."""
    return 0 if native is None else int(native.memory_in_use())


def file_bytes(runner: Runner) -> int:
    """Return the size of a file with everything that the entry stores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(runner.stored_arrays(), path)
        return path.stat().st_size


def stored_dtypes(runner: Runner) -> tuple[str, ...]:
    return tuple(sorted({array.dtype.name for array in runner.stored_arrays().values()}))


def _training_step(runner: Runner) -> float | None:
    """Return the seconds of a training step on one batch; None if the entry cannot be trained."""
    import copy

    parameters = [p for p in runner.model.parameters() if p.dtype == np.float32]
    if not parameters or any(hasattr(m, "kernel") or hasattr(m, "_kernel") for m in runner.model.modules()):
        return None
    try:
        return _timed_step(copy.deepcopy(runner.model), runner)
    except TilewiseError:
        return None


def _timed_step(model: Module, runner: Runner) -> float:
    """Return the seconds of forward, backward and AdamW on one batch of training data."""
    event = runner.event
    if event.kind == "images":
        x, y = (part[: event.batch] for part in event.training_images())
        model_input: Any = Tensor(x)
    else:
        window = event.public_inputs()
        model_input, y = window[:, :-1], window[:, 1:]
    optimizer = optim.AdamW(list(model.parameters()), lr=1e-4)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(model_input), y).backward()
        optimizer.step()

    with runner.active(), enable_grad():
        return Timer().measure(step, warmup=1, runs=10).p50


# --- two models ---


@overload
def compute_speedup(baseline: float, optimized: float, *, settings: Settings | None = None) -> float: ...
@overload
def compute_speedup(baseline: Measurement, optimized: Measurement, *, settings: Settings | None = None) -> Gain: ...
@overload
def compute_speedup(
    baseline: Benchmark | Benchable, optimized: Benchmark | Benchable, *, settings: Settings | None = None
) -> Speedup: ...
def compute_speedup(baseline: Any, optimized: Any, *, settings: Settings | None = None) -> Speedup | Gain | float:
    """Compute the ratios of `baseline` to `optimized`, with intervals.

    Two numbers are seconds, and the result is their ratio; two measurements of a `Timer` give a `Gain`.

    Two models or runners are timed interleaved in this call, which is the fair way. Two benchmarks made earlier are
    compared by what they hold; their intervals are then those of two separate measurements, and a note says so.
    """
    if isinstance(baseline, Benchmark) and isinstance(optimized, Benchmark):
        return _from_benchmarks(baseline, optimized)
    if isinstance(baseline, Measurement) and isinstance(optimized, Measurement):
        return _latency_gain(baseline, optimized)
    if isinstance(baseline, int | float | np.number) and isinstance(optimized, int | float | np.number):
        if not (baseline > 0 and optimized > 0):
            raise ConfigurationError(f"times must be positive seconds, not {baseline} and {optimized}")
        return float(baseline / optimized)
    results = Benchmark | Measurement | int | float | np.number
    if isinstance(baseline, results) or isinstance(optimized, results):
        raise ConfigurationError("compare two models, two benchmarks, two measurements or two times; not one of each")
    after = _as_runner(optimized, None)
    before = _as_runner(baseline, after.event)
    return measure_together({"baseline": before, "entry": after}, settings or Settings()).speedup("entry")


def _from_benchmarks(baseline: Benchmark, optimized: Benchmark) -> Speedup:
    """Return the ratios of two benchmarks that were measured separately, with wider intervals."""
    if baseline.event != optimized.event:
        raise ConfigurationError(f"a benchmark of {baseline.event} does not compare with one of {optimized.event}")
    latency = _latency_gain(baseline.latency, optimized.latency)
    steps = (baseline.training_step_s, optimized.training_step_s)
    step = None if None in steps else _exact(steps[0] / steps[1])  # type: ignore[operator]
    points_lost = None
    if baseline.accuracy is not None and optimized.accuracy is not None:
        points_lost = 100 * (baseline.accuracy - optimized.accuracy)
    return Speedup(
        latency=latency,
        throughput=latency,
        memory=_exact(baseline.memory_bytes / optimized.memory_bytes),
        size=_exact(baseline.file_bytes / optimized.file_bytes),
        training_step=step,
        points_lost=points_lost,
        notes=["measured one after the other, not interleaved"],
    )


def _latency_gain(before: Measurement, after: Measurement) -> Gain:
    """Return the ratio of two median times, whose interval combines both measurements' intervals."""
    half_width = min(math.hypot(_relative_half_width(before), _relative_half_width(after)), _MAX_LOG_HALF_WIDTH)
    ratio = before.p50 / after.p50
    return Gain(ratio, ratio * math.exp(-half_width), ratio * math.exp(half_width))


def _relative_half_width(measurement: Measurement) -> float:
    interval = measurement.intervals["p50"]
    return (interval.high - interval.low) / (2 * measurement.p50)


def _exact(ratio: float) -> Gain:
    return Gain(ratio, ratio, ratio)


@dataclass(frozen=True)
class Together:
    """Several runners timed interleaved; the first one is the baseline."""

    comparison: Comparison
    benchmarks: Mapping[str, Benchmark]
    inputs: list[Array]
    answers: Mapping[str, dict[int, Array]]

    def speedup(self, name: str) -> Speedup:
        """Return how much better the runner `name` is than the baseline."""
        first = next(iter(self.benchmarks))
        relative_time = self.comparison.ratios[name]
        interval = relative_time.interval
        latency = Gain(1 / relative_time.ratio, 1 / interval.high, 1 / interval.low)
        plain = _from_benchmarks(self.benchmarks[first], self.benchmarks[name])
        return replace(plain, latency=latency, throughput=latency, notes=list(self.comparison.reasons))

    def check_noise(self, name: str, widest: float) -> None:
        """Raise TooNoisy if the interval of a runner's speed-up is wider than `widest`."""
        gain = self.speedup(name).latency
        half = (gain.high - gain.low) / (2 * gain.ratio)
        if half > widest:
            why = "; ".join(self.comparison.reasons) or "the samples scatter"
            raise TooNoisy(
                f"not scored: the speed-up of {gain.ratio:.2f} is only known to within ±{100 * half:.1f} %, "
                f"and a score needs ±{100 * widest:.0f} % or better ({why})"
            )


def measure_together(
    runners: Mapping[str, Runner],
    settings: Settings,
    rng: np.random.Generator | None = None,
    memory: Mapping[str, int] | None = None,
) -> Together:
    """Time runners of one event interleaved on random inputs, and measure their memory unless `memory` has it."""
    rng = rng or settings.rng()
    event = next(iter(runners.values())).event
    inputs = event.timed_inputs(rng, _TIMED_CALLS)
    memory = memory or weigh(runners, inputs[0])
    functions, answers = {}, {}
    for name, runner in runners.items():
        functions[name], answers[name] = _cycle_inputs_on_backend(runner, inputs)
    timer = Timer(time_limit=settings.time_limit, sample_seconds=5 * settings.sample_seconds)  # compare takes a fifth
    comparison = _retry_unsteady(
        lambda: timer.compare(
            functions,
            runs=settings.runs or event.runs,
            max_runs=settings.most_runs,
            min_effect=settings.widest_interval / 2,
        )
    )
    benchmarks = {
        name: Benchmark(
            event=event.name,
            latency=comparison.measurements[name],
            throughput=event.units_per_call / comparison.measurements[name].p50,
            memory_bytes=memory[name],
            file_bytes=file_bytes(runner),
            dtypes=stored_dtypes(runner),
            accuracy=accuracy(runner),
        )
        for name, runner in runners.items()
    }
    return Together(comparison, benchmarks, inputs, answers)


def _retry_unsteady(compare: Callable[[], Comparison]) -> Comparison:
    """Run a comparison, once more if the clock frequency changed; raise TooNoisy if its time limit ended it."""
    try:
        comparison = compare()
        return compare() if any(reason.startswith("frequency") for reason in comparison.reasons) else comparison
    except TimeLimitError as error:
        raise TooNoisy(f"not scored: {error}") from None


def weigh(runners: Mapping[str, Runner], inputs: Array) -> dict[str, int]:
    """Return each runner's memory in bytes, measured from the last one: calls warm up models that they share."""
    return {name: memory_bytes(runners[name], inputs) for name in reversed(list(runners))}


def _cycle_inputs_on_backend(runner: Runner, inputs: list[Array]) -> tuple[Callable[[], None], dict[int, Array]]:
    """Do the same as `_cycle_inputs`, with the runner's backend activated around every call."""
    run, answers = _cycle_inputs(runner, inputs)
    active = runner.active

    def run_timed() -> None:
        with active():
            run()

    return run_timed, answers
