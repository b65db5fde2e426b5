"""`tune --check`: compare the tuner's choices on given shapes with an exhaustive search, in quality and in time.

Each problem starts from an empty cache and yields four configurations: the first choice without measuring, the choice
after five measurements, the analytical default, and the best of an exhaustive sweep. The leaders of the sweep and these
choices then run interleaved, and only this final comparison is reported. A ratio of 1 means the fastest of all.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.store.problem import Config, Problem, Value
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.measure.device import TuningDevice

MEASUREMENTS = 5  # the budget that the report calls "five"
_FINALISTS = 8  # leaders of the sweep that are timed again; arbitrary
Say = Callable[[str], None]


def check(
    problems: Sequence[Mapping[str, Value]],
    device: str | TuningDevice = "cpu",
    *,
    model: str | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Compare the tuner's choices with an exhaustive search on a list of problems.

    The result has `problems` (one row each, see `check_one`), the geometric means of their ratios, and `time_ratio`:
    seconds of the exhaustive search divided by seconds of five measurements.
    """
    if not problems:
        raise ConfigurationError("There is no problem to check.")
    with tempfile.TemporaryDirectory(prefix="tilewise-check-") as folder:
        notes: list[str] = []
        tuner = Tuner(device, model=model, cache=folder, say=notes.append)
        rows = []
        for number, spec in enumerate(problems, start=1):
            # Each problem starts from an empty cache, so that no shape profits from measurements of another.
            fresh_tuner = Tuner(tuner.device, model=model, cache=f"{folder}/{number}")
            row = check_one(fresh_tuner, fresh_tuner.problem(spec))
            rows.append(row)
            say(
                f"{number}/{len(problems)} {row['problem']}: first {row['first']:.3f}, five {row['five']:.3f}, default "
                f"{row['default']:.3f}; {row['five_seconds']:.2f} s against {row['exhaustive_seconds']:.2f} s"
            )
    means = {kind: _geometric_mean([row[kind] for row in rows]) for kind in ("first", "five", "default")}
    ratio = _geometric_mean([row["exhaustive_seconds"] / row["five_seconds"] for row in rows])
    device_info = {"device": tuner.device.kind, "machine": tuner.device.machine.identity}
    return {**device_info, "problems": rows, **means, "time_ratio": ratio, "notes": notes}


def check_one(tuner: Tuner, problem: Problem) -> dict[str, Any]:
    """Check one problem with a tuner whose cache is empty: fastest / chosen for each choice, and seconds of tuning."""
    configs = list(tuner.device.configs(problem))
    first = tuner.choose(problem).config
    tuner.device.forget()
    start = time.perf_counter()
    five = tuner.tune(problem, budget=MEASUREMENTS).config
    five_seconds = time.perf_counter() - start
    sweep_ns, exhaustive_seconds = tuner.device.sweep(problem, configs)
    leaders = sorted(sweep_ns, key=sweep_ns.__getitem__)[:_FINALISTS]
    runtime = _interleaved_runtimes(tuner.device, problem, list(dict.fromkeys([configs[0], first, five, *leaders])))
    best_ns = min(runtime.values())

    def ratio(config: Config) -> float:
        return best_ns / runtime[config] if config in runtime else 0.0

    ratios = {"first": ratio(first), "five": ratio(five), "default": ratio(configs[0])}
    seconds = {"five_seconds": five_seconds, "exhaustive_seconds": exhaustive_seconds}
    return {"problem": dict(problem), "configs": len(configs), "best_ns": best_ns, **ratios, **seconds}


def _interleaved_runtimes(device: TuningDevice, problem: Problem, configs: Sequence[Config]) -> dict[Config, float]:
    """Interleaved runtimes of the configurations that run; the first one is the default."""
    with device.trial(problem, configs[0]) as trial:
        runnable = [config for config in configs if trial.measure(config).runtime_ns is not None]
        runtimes = trial.remeasure(runnable)
    return {config: ns for config, ns in zip(runnable, runtimes, strict=True) if ns is not None}


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(ratio, 1e-9)) for ratio in ratios) / len(ratios))
