"""`tilewise calibrate`: a minute of tuning on this machine, of shapes of one's own or of a few dozen kernels.

The built-in list has one kernel for each regime in which a default is decided otherwise: products from a few rows to
matrices beyond the caches, some with leading sizes where rows evict each other; convolutions of the first, middle and
last layers of a network; integer products. Each is tuned as `tilewise tune` would, with one thread and with all. What
was chosen then runs in turns with the default once more, on other operands, and only what wins again is kept.

Choices lie in a folder of their own beside the tuner's, and are used wherever nothing else was tuned. They are written
one by one: a run that was stopped, killed or out of disk goes on where it was.
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
from tilewise.tune.choose.kept import CALIBRATED
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.measure.trial import CpuTrial

Progress = Callable[[int, int, str], None]
_WORTH = 0.005  # what a tile must gain over the default once more


def built_in_problems(tuner: Tuner, threads: int | None = None) -> list[Problem]:
    """The list with one thread and with so many (all, unless told), the regimes mixed from the start."""
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
    """Tune problems for about so many minutes, those of the built-in list if none are given. Of each family and number
    of threads a line says how many `kernels` were tuned, of how many the default was `replaced`, and how much faster
    all of them are: `speedup`, the geometric mean of default / chosen, and the `worst` and `best` of them."""
    if not 0 < minutes < 1e4:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    start = time.perf_counter()
    tuner = Tuner("cpu", cache=(folder or cache_folder()) / CALIBRATED)
    with tuner.memory.open_store():  # before anything is measured: whether what is measured can be kept
        pass
    every = list(problems) if problems is not None else built_in_problems(tuner, threads)
    gains: dict[Problem, float] = {}
    for number, problem in enumerate(every, start=1):
        if time.perf_counter() - start > 60 * minutes:
            break
        progress(number, len(every), _words(problem))
        gains[problem] = _gain(tuner, problem, seed)
    lines, known = _lines(gains), {choice.problem for choice in tuner.choices.all()}
    return {
        "machine": tuner.device.machine.identity, "path": str(tuner.choices.path), "kernels": len(gains),
        "replaced": sum(line["replaced"] for line in lines), "left": sum(problem not in known for problem in every),
        "seconds": time.perf_counter() - start, "lines": lines,
    }  # fmt: skip


def forget(folder: Path | None) -> bool:
    """Remove a calibration; whether there was any."""
    place = (folder or cache_folder()) / CALIBRATED
    existed = place.exists()
    if existed:
        shutil.rmtree(place)
    return existed


def _gain(tuner: Tuner, problem: Problem, seed: int) -> float:
    """Log of default / chosen; 0 where the default stays, as it does where a tile does not win twice."""
    found, default = tuner.tune(problem), tuner.device.default(problem)
    if found.config == default:
        return 0.0
    timed = CpuTrial(problem, default, seed).measure(found.config)
    gain = math.log(timed.default_ns / timed.runtime_ns) if timed.runtime_ns and timed.default_ns else -math.inf
    if gain < _WORTH:
        tuner.choices.put(replace(found, config=default, runtime_ns=timed.default_ns or 1.0, sure=False))
    return gain if gain >= _WORTH else 0.0


def _lines(gains: dict[Problem, float]) -> list[dict[str, Any]]:
    """The report's, one a family and thread count."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for problem, gain in gains.items():
        groups[problem.family, problem.threads].append(gain)
    return [
        {
            "family": family, "threads": threads, "kernels": len(own), "replaced": sum(gain > 0 for gain in own),
            "speedup": math.exp(sum(own) / len(own)), "worst": math.exp(min(own)), "best": math.exp(max(own)),
        }
        for (family, threads), own in sorted(groups.items())
    ]  # fmt: skip


def _words(problem: Problem) -> str:
    names = ("batch", "channels", "height", "filters", "kernel", "m", "n", "k")
    sizes = "x".join(str(problem[name]) for name in names if name in problem)
    return f"{problem.family} {sizes}, {problem.threads} thread{'s' if problem.threads > 1 else ''}"
