"""`tune --check`: on your own shapes, how good the tuner's choices are beside the exhaustive best, and what they cost.

For each problem, from an empty cache: the first choice without measuring, the choice after five measurements, the
analytical default, and the best of an exhaustive sweep. The sweep's leaders and these choices then run against each
other in turns, and only that run-off is reported: a ratio of 1 is the fastest of them all.
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
from tilewise.tune.measure.device import Device

MEASUREMENTS = 5
_FINALISTS = 8
Say = Callable[[str], None]


def check(
    problems: Sequence[Mapping[str, Value]],
    device: str | Device = "cpu",
    *,
    model: str | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Compare the choices on a list of problems: `problems`, a row each as `check_one` gives it, and the geometric
    means of their ratios; `time_ratio` is exhaustive seconds over seconds of five measurements."""
    if not problems:
        raise ConfigurationError("There is no problem to check.")
    with tempfile.TemporaryDirectory(prefix="tilewise-check-") as folder:
        heard: list[str] = []
        tuner = Tuner(device, model=model, cache=folder, say=heard.append)
        rows = []
        for number, spec in enumerate(problems, start=1):
            # Each from an empty cache: what one shape taught must not help the next.
            alone = Tuner(tuner.device, model=model, cache=f"{folder}/{number}")
            row = check_one(alone, alone.problem(spec))
            rows.append(row)
            say(
                f"{number}/{len(problems)} {row['problem']}: first {row['first']:.3f}, five {row['five']:.3f}, default "
                f"{row['default']:.3f}; {row['five_seconds']:.2f} s against {row['exhaustive_seconds']:.2f} s"
            )
    means = {way: _geometric([row[way] for row in rows]) for way in ("first", "five", "default")}
    ratio = _geometric([row["exhaustive_seconds"] / row["five_seconds"] for row in rows])
    about = {"device": tuner.device.kind, "machine": tuner.device.machine.identity}
    return {**about, "problems": rows, **means, "time_ratio": ratio, "notes": heard}


def check_one(tuner: Tuner, problem: Problem) -> dict[str, Any]:
    """One problem, from the tuner's empty cache: fastest / chosen for each choice (1 is the best), seconds to tune."""
    configs = list(tuner.device.configs(problem))
    first = tuner.choose(problem).config
    tuner.device.forget()
    start = time.perf_counter()
    five = tuner.tune(problem, budget=MEASUREMENTS).config
    five_seconds = time.perf_counter() - start
    swept, exhaustive_seconds = tuner.device.sweep(problem, configs)
    leaders = sorted(swept, key=swept.__getitem__)[:_FINALISTS]
    runtime = _in_turns(tuner.device, problem, list(dict.fromkeys([configs[0], first, five, *leaders])))
    best_ns = min(runtime.values())

    def ratio(config: Config) -> float:
        return best_ns / runtime[config] if config in runtime else 0.0

    chosen = {"first": ratio(first), "five": ratio(five), "default": ratio(configs[0])}
    seconds = {"five_seconds": five_seconds, "exhaustive_seconds": exhaustive_seconds}
    return {"problem": dict(problem), "configs": len(configs), "best_ns": best_ns, **chosen, **seconds}


def _in_turns(device: Device, problem: Problem, configs: Sequence[Config]) -> dict[Config, float]:
    """Runtimes of those that run, the default first."""
    with device.trial(problem, configs[0]) as trial:
        right = [config for config in configs if trial.measure(config).runtime_ns is not None]
        taken = trial.remeasure(right)
    return {config: ns for config, ns in zip(right, taken, strict=True) if ns is not None}


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(ratio, 1e-9)) for ratio in ratios) / len(ratios))
