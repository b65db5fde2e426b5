"""`tune --check`: on your own shapes, how good the tuner's choices are beside the exhaustive best, and what they cost.

For each problem, from an empty cache: the first choice without measuring, the choice after five measurements, the
analytical default, the unmeasured choice of this machine's calibration where there is one, and the best of an
exhaustive sweep. The sweep's leaders and these choices then run against each other in turns, and only that run-off is
reported: a ratio of 1 is the fastest of them all.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tilewise.errors import ConfigurationError
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.measure.device import Device
from tilewise.tune.problem import Config, Problem, Value

MEASUREMENTS = 5
_FINALISTS = 8
Say = Callable[[str], None]
# How a device measures every configuration, roughly: runtimes, and the seconds that tuning exhaustively takes.
Sweep = Callable[[Problem, Sequence[Config]], tuple[dict[Config, float], float]]

if TYPE_CHECKING:
    from tilewise.tune.choose.calibration.calibrated import Calibrated


@dataclass(frozen=True)
class Checked:
    """One problem: fastest / chosen for each choice (1 is the best), and seconds to tune."""

    problem: dict[str, Value]
    configs: int
    best_ns: float
    first: float
    five: float
    default: float
    five_seconds: float
    exhaustive_seconds: float
    calibrated: float | None = None  # this machine's calibration, unmeasured; None where there is none


@dataclass(frozen=True)
class Check:
    """All problems, and the geometric means of the ratios."""

    device: str
    machine: str
    problems: list[Checked]
    first: float
    five: float
    default: float
    time_ratio: float  # exhaustive seconds over seconds of five measurements
    notes: list[str]
    calibrated: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(
    problems: Sequence[Mapping[str, Value]],
    device: str | Device = "cpu",
    *,
    model: str | None = None,
    sweep: Sweep | None = None,
    say: Say = lambda line: None,
    calibrated: Calibrated | None = None,
) -> Check:
    """Compare the choices on a list of problems; `calibrated` in place of this machine's stored calibration."""
    if not problems:
        raise ConfigurationError("There is no problem to check.")
    with tempfile.TemporaryDirectory(prefix="tilewise-check-") as folder:
        heard: list[str] = []
        tuner = Tuner(device, model=model, cache=folder, say=heard.append)
        if calibrated is None and model is None:
            calibrated = _calibrated(tuner, heard)
        chosen = sweep or _sweep(tuner.device)
        rows = []
        for number, spec in enumerate(problems, start=1):
            # Each from an empty cache: what one shape taught must not help the next.
            alone = Tuner(tuner.device, model=model, cache=f"{folder}/{number}")
            row = check_one(alone, chosen, alone.problem(spec), calibrated)
            rows.append(row)
            say(
                f"{number}/{len(problems)} {row.problem}: first {row.first:.3f}, five {row.five:.3f}, default "
                f"{row.default:.3f}{said(row.calibrated, ', calibrated ')}; {row.five_seconds:.2f} s against "
                f"{row.exhaustive_seconds:.2f} s"
            )
    return Check(
        tuner.device.kind,
        tuner.device.machine.identity,
        rows,
        _geometric([row.first for row in rows]),
        _geometric([row.five for row in rows]),
        _geometric([row.default for row in rows]),
        _geometric([row.exhaustive_seconds / row.five_seconds for row in rows]),
        heard,
        None if calibrated is None else _geometric([row.calibrated or 0.0 for row in rows]),
    )


def _calibrated(tuner: Tuner, heard: list[str]) -> Calibrated | None:
    """This machine's own calibration, which the empty caches do not hold."""
    if tuner.device.kind != "cpu":
        return None
    from tilewise._extension import native
    from tilewise.tune.choose.calibration.calibrated import find_calibration, model_scores

    found, notes = find_calibration(native, None, model_scores())
    heard += notes or ([] if found else ["this machine is not calibrated; `tilewise calibrate` takes about a minute"])
    return found


def said(ratio: float | None, before: str = "") -> str:
    return "" if ratio is None else f"{before}{ratio:.3f}"


def check_one(tuner: Tuner, sweep: Sweep, problem: Problem, calibrated: Calibrated | None = None) -> Checked:
    """One problem, from the tuner's empty cache."""
    configs = list(tuner.device.configs(problem))
    first = tuner.choose(problem).config
    taught = None if calibrated is None else calibrated.choose(problem, configs) or configs[0]
    tuner.device.forget()
    start = time.perf_counter()
    five = tuner.tune(problem, budget=MEASUREMENTS).config
    five_seconds = time.perf_counter() - start
    swept, exhaustive_seconds = sweep(problem, configs)
    leaders = sorted(swept, key=swept.__getitem__)[:_FINALISTS]
    contenders = [configs[0], first, five, *([] if taught is None else [taught]), *leaders]
    runtime = _in_turns(tuner.device, problem, configs[0], list(dict.fromkeys(contenders)))
    best_ns = min(runtime.values())

    def ratio(config: Config) -> float:
        return best_ns / runtime[config] if config in runtime else 0.0

    return Checked(
        dict(problem),
        len(configs),
        best_ns,
        ratio(first),
        ratio(five),
        ratio(configs[0]),
        five_seconds,
        exhaustive_seconds,
        None if taught is None else ratio(taught),
    )


def _in_turns(device: Device, problem: Problem, default: Config, configs: Sequence[Config]) -> dict[Config, float]:
    with device.trial(problem, default) as trial:
        right = [config for config in configs if trial.measure(config).runtime_ns is not None]
        taken = trial.remeasure(right)
    return {config: ns for config, ns in zip(right, taken, strict=True) if ns is not None}


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(ratio, 1e-9)) for ratio in ratios) / len(ratios))


def _sweep(device: Device) -> Sweep:
    if device.kind == "cpu":
        from tilewise.tune.measure.cpu.sweep import sweep

        return sweep
    from tilewise.tune.measure.triton.device import TritonDevice, TritonSweeper

    assert isinstance(device, TritonDevice)
    return TritonSweeper(device).sweep
