"""`tilewise calibrate`: tune a few dozen common kernels, or a user's own shapes, on this machine in a minute.

The built-in list has one kernel for each regime of the analytical default: products from a few rows to matrices larger
than the caches, some with leading dimensions that cause cache conflicts; convolutions of the first, middle and last
layers of a network; integer products. Each is tuned as by `tilewise tune`, with one thread and with all. A choice is
kept only if it wins again in other processes, on other operands (`measure/confirm.py`).

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
from importlib.resources import files
from pathlib import Path
from typing import Any

from tilewise._system import real_cores
from tilewise.errors import ConfigurationError
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import cache_folder
from tilewise.tune.choose.tuned_table import CALIBRATED
from tilewise.tune.choose.tuner import Tuner

Progress = Callable[[int, int, str], None]


def built_in_problems(tuner: Tuner, threads: int | None = None) -> list[Problem]:
    """List the built-in problems, each for one thread and for `threads` (default: all cores)."""
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
    `replaced`, and their `speedup` (geometric mean of default / chosen) with the `worst` and `best` single one. `busy`
    is the number of choices that were confirmed or refused while other programs used the CPU.
    """
    if not 0 < minutes < 1e4:
        raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
    start = time.perf_counter()
    tuner = Tuner("cpu", cache=(folder or cache_folder()) / CALIBRATED)
    tuner.device.confirmation_seed = seed
    with tuner.memory.open_store():  # fail before measuring if nothing could be stored
        pass
    selected = list(problems) if problems is not None else built_in_problems(tuner, threads)
    gains: dict[Problem, float] = {}
    busy = 0
    for number, problem in enumerate(selected, start=1):
        if time.perf_counter() - start > 60 * minutes:
            break
        progress(number, len(selected), _problem_label(problem))
        decision = tuner.tune(problem)
        config_changed, gain = decision.config != tuner.device.default(problem), decision.gain
        if config_changed and gain is None:  # a stored choice of an earlier run
            gain = tuner.device.confirm(problem, decision.config)
        gains[problem] = math.log(gain.ratio) if gain is not None and config_changed else 0.0
        busy += gain is not None and gain.on_busy_machine
    lines, tuned_problems = _summary_rows(gains), {choice.problem for choice in tuner.choices.all()}
    return {
        "machine": tuner.device.machine.identity, "path": str(tuner.choices.path), "kernels": len(gains),
        "replaced": sum(line["replaced"] for line in lines), "busy": busy,
        "left": sum(problem not in tuned_problems for problem in selected),
        "seconds": time.perf_counter() - start, "lines": lines,
    }  # fmt: skip


def forget(folder: Path | None) -> bool:
    """Delete the calibration in a folder; return False if there was none."""
    path = (folder or cache_folder()) / CALIBRATED
    existed = path.exists()
    if existed:
        shutil.rmtree(path)
    return existed


def _summary_rows(gains: dict[Problem, float]) -> list[dict[str, Any]]:
    """Return a summary row per kernel family and thread count; `gains` has default / chosen time by problem."""
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for problem, gain in gains.items():
        groups[problem.family, problem.threads].append(gain)
    return [
        {
            "family": family, "threads": threads, "kernels": len(group), "replaced": sum(gain != 0 for gain in group),
            "speedup": math.exp(sum(group) / len(group)), "worst": math.exp(min(group)), "best": math.exp(max(group)),
        }
        for (family, threads), group in sorted(groups.items())
    ]  # fmt: skip


def _problem_label(problem: Problem) -> str:
    """Describe a problem's family and sizes in a few words, for a progress line."""
    names = ("batch", "channels", "height", "filters", "kernel", "m", "n", "k")
    sizes = "x".join(str(problem[name]) for name in names if name in problem)
    return f"{problem.family} {sizes}, {problem.threads} thread{'s' if problem.threads > 1 else ''}"
