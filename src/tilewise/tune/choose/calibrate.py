"""`tilewise calibrate`: tune a few dozen common kernels, or a user's own shapes, on this machine in a minute.

The built-in list has one kernel for each regime of the analytical default: products from a few rows to matrices larger
than the caches, some with leading dimensions that cause cache conflicts; convolutions of the first, middle and last
layers of a network; integer products. Each is tuned as by `tilewise tune`, with one thread and with all. The choice
then runs interleaved with the default once more, on different operands, and is used only if it wins again.

Choices are stored in a separate folder and used for shapes that the tuner itself has not tuned. They are written one at
a time, so a run that was stopped, killed or ran out of disk space continues where it ended.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewise._system import real_cores
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import cache_folder
from tilewise.tune.choose.tuned_table import CALIBRATED
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.measure.trial import CpuTrial

Progress = Callable[[int, int, str], None]
_MIN_GAIN = 0.005  # log runtime a tile must save in the second comparison; smaller gains cannot be told from noise


def built_in_problems(tuner: Tuner, threads: int | None = None) -> list[Problem]:
    """Problems of the built-in list, each with one thread and with `threads` (default: all cores)."""
    content = files("tilewise.tune.workloads").joinpath("calibration.json").read_bytes()
    counts = (1, threads or real_cores())
    return list(dict.fromkeys(tuner.problem({**spec, "threads": n}) for spec in json.loads(content) for n in counts))


def calibrate(
    problems: Sequence[Problem] | None = None,
    *,
    folder: Path | None = None,
    minutes: float = 1.0,
    threads: int | None = None,
    seed: int = 1,
    progress: Progress = lambda done, total, text: None,
) -> dict[str, Any]:
    """Tune problems (default: the built-in list) for about `minutes` and return a report.

    The report has one line per family and thread count: the number of `kernels` tuned, the number whose default was
    `replaced`, and their `speedup` (geometric mean of default / chosen) with the `worst` and `best` single one.
    """
    if not 0 < minutes < 1e4:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    start = time.perf_counter()
    tuner = Tuner("cpu", cache=(folder or cache_folder()) / CALIBRATED)
    with tuner.memory.open_store():  # fail before measuring if nothing could be stored
        pass
    selected = list(problems) if problems is not None else built_in_problems(tuner, threads)
    gains: dict[Problem, float] = {}
    for number, problem in enumerate(selected, start=1):
        if time.perf_counter() - start > 60 * minutes:
            break
        progress(number, len(selected), _problem_label(problem))
        gains[problem] = _confirmed_gain(tuner, problem, seed)
    lines, tuned_problems = _lines(gains), {choice.problem for choice in tuner.choices.all()}
    return {
        "machine": tuner.device.machine.identity, "path": str(tuner.choices.path), "kernels": len(gains),
        "replaced": sum(line["replaced"] for line in lines),
        "left": sum(problem not in tuned_problems for problem in selected),
        "seconds": time.perf_counter() - start, "lines": lines,
    }  # fmt: skip


def forget(folder: Path | None) -> bool:
    """Remove a calibration; return False if there was none."""
    path = (folder or cache_folder()) / CALIBRATED
    existed = path.exists()
    if existed:
        shutil.rmtree(path)
    return existed


def _confirmed_gain(tuner: Tuner, problem: Problem, seed: int) -> float:
    """Tune a problem and return log(default / chosen), or 0 if the tile does not beat the default a second time."""
    decision, default = tuner.tune(problem), tuner.device.default(problem)
    if decision.config == default:
        return 0.0
    rerun = CpuTrial(problem, default, seed).measure(decision.config)
    gain = math.log(rerun.default_ns / rerun.runtime_ns) if rerun.runtime_ns and rerun.default_ns else -math.inf
    if gain < _MIN_GAIN:
        tuner.choices.put(replace(decision, config=default, runtime_ns=rerun.default_ns or 1.0, sure=False))
    return gain if gain >= _MIN_GAIN else 0.0


def _lines(gains: dict[Problem, float]) -> list[dict[str, Any]]:
    """Summarize the gains per family and thread count."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for problem, gain in gains.items():
        groups[problem.family, problem.threads].append(gain)
    return [
        {
            "family": family, "threads": threads, "kernels": len(group), "replaced": sum(gain > 0 for gain in group),
            "speedup": math.exp(sum(group) / len(group)), "worst": math.exp(min(group)), "best": math.exp(max(group)),
        }
        for (family, threads), group in sorted(groups.items())
    ]  # fmt: skip


def _problem_label(problem: Problem) -> str:
    """Describe a problem in a progress line."""
    names = ("batch", "channels", "height", "filters", "kernel", "m", "n", "k")
    sizes = "x".join(str(problem[name]) for name in names if name in problem)
    return f"{problem.family} {sizes}, {problem.threads} thread{'s' if problem.threads > 1 else ''}"
