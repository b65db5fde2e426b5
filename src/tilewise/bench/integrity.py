"""Checks the clock and the baseline in the same run as the measurement.

The clock's function is taken when this module is imported and compared with the system's raw monotonic clock over the
whole run. The baseline is compared with its own arithmetic: the bare matrix products that its model needs, straight
through NumPy. A baseline that has been slowed down no longer keeps its distance to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend import OptimizedBackend
from tilewise.bench.events import Event
from tilewise.bench.runner import Runner
from tilewise.errors import Rejected, TooNoisy
from tilewise.nn import GPT, Conv2d, Linear
from tilewise.profile.flops import FLOPCounter
from tilewise.profile.timing import clock
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", getattr(time, "CLOCK_MONOTONIC", None))
_raw_ns = time.clock_gettime_ns
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "clock_gettime_ns")
_LARGEST_DRIFT = 0.01
_TRIES = 3
_SLOWEST = 3.0  # times the usual distance between the baseline and its arithmetic


def _timer_clock() -> Callable[[], int]:
    """Return the clock function that the timed loop currently reads."""
    reading: Callable[[], int] = vars(clock)["perf_counter_ns"]
    return reading


@dataclass
class ClockWatch:
    """Detects tampering with the clock: two clocks are read at the start and must agree at the end."""

    started: int = field(default_factory=lambda: _timer_clock()())
    started_raw: int = field(default_factory=lambda: _raw_ns(_RAW) if _RAW is not None else 0)

    def check(self) -> None:
        """Reject the measurement if the process's clock was replaced or ran at another speed."""
        for name in _CLOCKS:
            if not isinstance(getattr(time, name), BuiltinFunctionType):
                raise Rejected("changed clock", f"time.{name} is not the system's clock in this process")
        if not isinstance(_timer_clock(), BuiltinFunctionType):
            raise Rejected("changed clock", "the timer does not use the system's clock in this process")
        if _RAW is None:
            return
        passed, raw = _timer_clock()() - self.started, _raw_ns(_RAW) - self.started_raw
        if raw > 50_000_000 and abs(passed / raw - 1) > _LARGEST_DRIFT:
            raise Rejected(
                "changed clock",
                f"the clock says {passed / 1e9:.3f} s passed where the system's raw clock says {raw / 1e9:.3f} s",
            )


def check_numpy_backend(backend: OptimizedBackend) -> None:
    """Reject the measurement unless the baseline's operations are the package's own functions."""
    for op in backend.operations():
        for implementation in backend.implementations(op):
            module = getattr(implementation.run, "__module__", "")
            if not str(module).startswith("tilewise.backend."):
                raise Rejected(
                    "slowed baseline",
                    f"the baseline's {op} is not tilewise's own but {module or 'another'}'s",
                )


def check_baseline_speed(event: Event, baseline: Runner, inputs: Array, under_load: bool = False) -> float:
    """Return the baseline's time over that of its bare matrix products; reject a ratio far above the usual one.

    Both are timed interleaved, a call at a time, and the quickest of each counts, by wall-clock and CPU time. Time that
    a call waited for a core, as the kernel counts it, is excluded: a busy machine interrupts every long call and few
    short ones. With `under_load` only CPU time counts, and a failure is blamed on the machine (TooNoisy).
    """
    limit = _SLOWEST * event.baseline_over_arithmetic
    for _ in range(_TRIES):
        ratio = _baseline_over_products(event, baseline, inputs, under_load)
        if ratio <= limit:
            return ratio
    message = (
        f"the baseline took {ratio:.1f} times as long as its own matrix products in plain NumPy, where "
        f"{event.baseline_over_arithmetic:g} is usual and {limit:g} the limit"
    )
    if under_load:
        raise TooNoisy(f"not scored: {message}; other processes load this machine")
    raise Rejected("slowed baseline", f"{message}: something slows it down")


def _baseline_over_products(event: Event, baseline: Runner, inputs: Array, under_load: bool) -> float:
    """Return the ratio of the baseline's quickest call to its quickest bare products, timed interleaved."""
    products = _products(event, baseline)
    passes = event.new_tokens if event.kind == "text" else 1
    calls, bare = [], []
    with baseline.active():
        for _ in range(3 if event.kind == "text" else 25):
            calls.append(_wall_and_cpu(lambda: baseline.call(inputs)))
            bare.append(_wall_and_cpu(lambda: [product() for product in products]))
    wall, cpu = (min(c[i] for c in calls) / (min(b[i] for b in bare) * passes) for i in range(2))
    return cpu if under_load else max(wall, cpu)


def _wall_and_cpu(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall-clock ns of a call, without its wait for a core, and its CPU ns."""
    waited, own = waiting_ns("thread-self"), time.thread_time_ns()
    cpu, wall = time.process_time_ns(), _timer_clock()()
    run()
    wall, cpu = _timer_clock()() - wall, time.process_time_ns() - cpu
    own, waited = time.thread_time_ns() - own, waiting_ns("thread-self") - waited
    # it may have waited just before or after the call, so no more is taken off than leaves what this thread computed
    return max(wall - waited, min(own, wall), 1), max(cpu, 1)


def waiting_ns(process: int | str) -> int:
    """Return the ns that a process's first thread has waited for a core; 0 if the kernel does not count them."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _products(event: Event, baseline: Runner) -> list[Callable[[], Any]]:
    """Return one function per matrix product of a baseline's call, on operands of the same sizes."""
    rng = np.random.default_rng(0)
    shapes = _text_shapes(event, baseline) if event.kind == "text" else _image_shapes(event, baseline)
    pairs = [(rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)) for m, n, k in shapes]
    return [partial(np.matmul, a, b) for a, b in pairs]


def _image_shapes(event: Event, baseline: Runner) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of each linear layer's and convolution's matrix product."""
    flops = FLOPCounter().count_ops(baseline.model, Tensor(np.zeros((event.batch, *event.input_shape), np.float32)))
    shapes = []
    for name, module in baseline.model.named_modules():
        if isinstance(module, Linear):
            shapes.append((event.batch, module.out_features, module.in_features))
        elif isinstance(module, Conv2d):
            k = int(module.weight.data[0].size)
            rows = int(flops.by_layer.get(name, 0)) // max(2 * k * module.out_channels, 1)
            shapes.append((rows or event.batch * 64, module.out_channels, k))
    return shapes


def _text_shapes(event: Event, baseline: Runner) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) of each matrix product in a GPT's forward pass, at the event's mean length."""
    assert isinstance(baseline.model, GPT)
    length, width = event.prompt_tokens + event.new_tokens // 2, baseline.model.token_embedding.weight.shape[1]
    block = [(length, n, k) for n, k in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))]
    return block * len(baseline.model.blocks) + [(length, baseline.model.vocab, width)]
