"""`tilewise calibrate`: a minute of measuring on this machine, and what is kept of it.

Every kernel of the list is measured at its default and at a few dozen tiles, in turns. A correction is fitted to each
family; the tiles that it then expects to be best are measured too, and it is fitted again. What it may promise is
decided on kernels left out, and once more by the clock: the tiles that it takes for kernels it was not told of are
remeasured in turns with the default, and if they do not win the family keeps its defaults.

Kernels that were measured are in a file as soon as they are, so a run that was stopped, killed or out of disk goes on
where it was; the calibration itself appears whole, at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import __version__
from tilewise._files import read_input
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.tune.choose.cache import ELSEWHERE, Choice, Choices, cache_folder
from tilewise.tune.choose.calibration.calibrated import (
    SHARED,
    Scores,
    calibration_file,
    family_of,
    model_scores,
    write_calibration,
)
from tilewise.tune.choose.calibration.correction import Correction, Promise, promise_of, squashed
from tilewise.tune.choose.calibration.features import FAMILIES, joined, rows_of
from tilewise.tune.choose.calibration.kernels import calibration_kernels
from tilewise.tune.choose.kept import machine_name
from tilewise.tune.choose.near import near_products
from tilewise.tune.measure.cpu.clock import require_native
from tilewise.tune.measure.cpu.device import CpuDevice
from tilewise.tune.measure.cpu.sweep import beside_default, in_turns
from tilewise.tune.measure.trial import CpuTrial
from tilewise.tune.problem import Config, Problem
from tilewise.tune.search.gaussian_process import Numbers

Progress = Callable[[int, int, str], None]
_TILES, _BEST = 26, 6  # tiles of a kernel in the first round; those of the second, by what the first one taught
_ROUNDS = (3, 11)
_DISTURBED = 0.06
_SHARES = (0.62, 0.2, 0.18)  # of the time: first round, second, remeasuring
_MOST_BYTES = 1 << 26  # of measurements to go on with
_LEAST_KERNELS = 5  # of a family, to fit anything
_WORTH = 0.005
_MOST_ROWS = 22  # of a kernel in the fit: the fastest, and some of the rest


@dataclass(frozen=True)
class Report:
    """What a calibration found and where it is kept. A line is of a family at a thread count, on kernels that its
    choices were made without: `replaced` defaults of so many `kernels`, `speedup` the geometric mean over all of
    default / calibrated in turns, `worst` the least, `best` the same as `speedup` for the fastest tile measured."""

    machine: str
    path: Path
    kernels: int
    tiles: int
    seconds: float
    lines: list[dict[str, Any]]
    promises: dict[str, Promise | None]
    choices: int  # tiles kept for shapes of one's own
    disturbed: int  # kernels whose readings scattered too much to be used

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": str(self.path)}


class Calibration:
    """One run. `problems` are the user's own shapes, whose best tiles are kept too; without them the built-in list.
    `scores` are another cost model's than the shipped one's."""

    def __init__(
        self,
        problems: Sequence[Problem] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        minutes: float = 1.0,
        threads: int | None = None,
        seed: int = 0,
        progress: Progress = lambda done, total, text: None,
        scores: Scores | None = None,
    ) -> None:
        if not 0 < minutes < 1e4:
            raise ConfigurationError(f"minutes must be a positive number, not {minutes}.")
        self.native, self.device = require_native(), CpuDevice()
        self.folder = Path(folder).expanduser() if folder is not None else cache_folder()
        self.own = problems is not None
        self.problems = list(problems) if problems is not None else calibration_kernels(threads)
        self.seconds, self.seed, self._progress = 60 * minutes, seed, progress
        self.path = calibration_file(self.native, self.folder)
        self.part = self.path.with_suffix(".part.jsonl")
        self.measured: dict[Problem, dict[Config, float]] = {}  # log runtime of tiles over the default's
        self._default = functools.cache(self.device.default)
        self._scores: Scores | None = scores or model_scores()
        self.disturbed = 0
        self._rng = np.random.default_rng(seed)

    def check_enough(self) -> None:
        """Before anything is measured: whether there are kernels enough to learn from."""
        most = max(Counter(map(family_of, self.problems)).values(), default=0)
        if most < _LEAST_KERNELS:
            raise ConfigurationError(
                f"a calibration learns from {_LEAST_KERNELS} or more shapes of one family, not from {most}; "
                "`tilewise tune` finds the tile of a single shape."
            )

    def check_folder(self) -> None:
        """Before anything is measured: whether what is measured can be kept."""
        try:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            if self.part.exists() and not self.part.is_file():
                raise UnavailableError(f"{self.part} is not a file.")
            with self.part.open("ab"):
                pass
        except OSError as error:
            raise UnavailableError(
                f"{self.part} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error

    def run(self) -> Report:
        start = time.perf_counter()
        self.check_enough()
        self.check_folder()
        self._resume()
        self._measure(self.problems, self._first_tiles, _SHARES[0], "measuring")
        families = self._fit()
        self._measure(
            self.problems, lambda problem: self._best_tiles(problem, families), _SHARES[1], "the best of them"
        )
        families = self._fit()
        if not families:
            raise UnavailableError(
                f"only {len(self.measured)} of {len(self.problems)} kernels could be measured steadily in time, "
                "too few; run it again when the machine is less busy, and it goes on with what is missing."
            )
        lines = self._remeasure(families)
        about: dict[str, Any] = {
            "machine": machine_name(self.native), "version": __version__, "kernels": len(self.measured),
            "seed": self.seed, "taken": round(time.time()), "lines": lines,
        }  # fmt: skip
        write_calibration(self.path, families, about)
        kept = self._keep_own() if self.own else 0
        with contextlib.suppress(OSError):
            self.part.unlink()
        tiles = sum(map(len, self.measured.values()))
        promises = {name: fitted.promise for name, fitted in families.items()}
        seconds = time.perf_counter() - start
        return Report(
            about["machine"], self.path, len(self.measured), tiles, seconds, lines, promises, kept, self.disturbed
        )

    # Measuring

    def _measure(
        self, problems: Sequence[Problem], tiles: Callable[[Problem], Sequence[Config]], share: float, text: str
    ) -> None:
        """Each problem's tiles in turns with its default, within a share of the time."""
        seconds = share * self.seconds / max(1, len(problems))
        until = time.perf_counter() + 1.1 * share * self.seconds
        for number, problem in enumerate(problems, start=1):
            if time.perf_counter() > until:  # a busy machine takes longer; what is measured by then has to do
                break
            self._progress(number, len(problems), f"{text}: {_words(problem)}")
            chosen = tiles(problem)
            if chosen:
                found = self._in_turns(problem, chosen, seconds)
                if found:
                    self.measured.setdefault(problem, {}).update(found)
                    self._append(problem, found)

    def _first_tiles(self, problem: Problem) -> list[Config]:
        """Tiles with one change first, as they tell changes apart, then some with two; none where they are known."""
        if problem in self.measured:
            return []
        every = self._candidates(problem)
        single = near_products(self.native, problem, 1)[1:] if problem.family == "matmul" else []
        rest = [config for config in every if config not in set(single)]
        some = [rest[i] for i in self._rng.permutation(len(rest))]
        single = [single[i] for i in self._rng.permutation(len(single))[: _TILES * 2 // 3]]
        return [*single, *some][:_TILES]

    def _best_tiles(self, problem: Problem, families: Mapping[str, Correction]) -> list[Config]:
        """What the first fit expects to be fastest and is not measured yet."""
        fitted, known = families.get(family_of(problem)), self.measured.get(problem)
        if fitted is None or known is None:
            return []
        every = [config for config in self._candidates(problem) if config not in known]
        if not every:
            return []
        mean, deviation = fitted.predict(self._rows(problem, every))
        return [every[i] for i in np.argsort(mean - 0.5 * deviation, kind="stable")[:_BEST]]

    def _candidates(self, problem: Problem) -> list[Config]:
        if problem.family == "matmul":
            return near_products(self.native, problem)[1:]
        return list(self.device.configs(problem))[1:]

    def _in_turns(self, problem: Problem, tiles: Sequence[Config], seconds: float) -> dict[Config, float]:
        """Medians; nothing where readings of one tile scatter so much that they tell no tiles apart."""
        ratios = beside_default(problem, self._default(problem), tiles, seconds, _ROUNDS)
        logs = {tile: np.log(own) for tile, own in ratios.items()}
        medians = {tile: float(np.median(own)) for tile, own in logs.items()}
        scatter = statistics.median(float(np.median(np.abs(own - medians[tile]))) for tile, own in logs.items())
        self.disturbed += scatter > _DISTURBED
        return {} if scatter > _DISTURBED else medians

    # Fitting

    def _rows(self, problem: Problem, tiles: Sequence[Config]) -> Any:
        score, default = None, self._default(problem)
        if self._scores is not None:
            every = self._scores(problem, [default, *tiles])
            score = every[1:] - every[0]
        return rows_of(problem, tiles, default, score)

    def _fit(self) -> dict[str, Correction]:
        families = {}
        for name in (f"{family}{shared}" for family in FAMILIES for shared in ("", SHARED)):
            members = self._members(name)
            if len(members) < _LEAST_KERNELS:
                continue
            tiles = [self._fitted(one) for one in members]
            rows = joined([self._rows(one, some) for one, some in zip(members, tiles, strict=True)])
            ratios = np.array([self.measured[one][t] for one, some in zip(members, tiles, strict=True) for t in some])
            group = np.repeat(np.arange(len(members)), [len(some) for some in tiles])
            families[name] = Correction(rows, squashed(ratios), group)
            families[name].promise = promise_of(*families[name].left_out(), ratios, group)
        return families

    def _members(self, name: str) -> list[Problem]:
        return [problem for problem, ratios in self.measured.items() if family_of(problem) == name and ratios]

    def _fitted(self, problem: Problem) -> list[Config]:
        """The fastest tiles of a kernel, and some of the others."""
        ratios = self.measured[problem]
        order = sorted(ratios, key=ratios.__getitem__)
        half = _MOST_ROWS // 2
        rest = order[half:]
        step = max(1, math.ceil(len(rest) / half))
        return [*order[:half], *rest[::step]]

    # Remeasuring

    def _remeasure(self, families: Mapping[str, Correction]) -> list[dict[str, Any]]:
        """Choices for kernels left out, against the default in turns; a family that does not win keeps its defaults."""
        lines: list[dict[str, Any]] = []
        until = time.perf_counter() + _SHARES[2] * self.seconds
        for name, fitted in families.items():
            members = self._members(name)
            gains = self._gains(members, fitted, until)
            if sum(gains.values()) <= 0 or min(gains.values()) <= -0.02:
                fitted.promise, gains = None, dict.fromkeys(gains, 0.0)
            lines += self._lines_of(members, gains)
        return lines

    def _gains(self, members: Sequence[Problem], fitted: Correction, until: float) -> dict[Problem, float]:
        """Log of default / choice of each kernel; 0 where the default stays or time was up."""
        promise, gains = fitted.promise, dict.fromkeys(members, 0.0)
        if promise is None:
            return gains
        mean, deviation = fitted.left_out()
        bound = mean + promise.deviations * deviation
        for number, one in enumerate(members):
            mine = np.flatnonzero(fitted.group == number)
            pick = int(np.argmin(bound[mine]))
            if bound[mine][pick] < -promise.margin and time.perf_counter() < until:
                self._progress(number + 1, len(members), f"against the default: {_words(one)}")
                gains[one] = self._against_default(one, self._fitted(one)[pick])
        return gains

    def _against_default(self, problem: Problem, tile: Config) -> float:
        timed = CpuTrial(problem, self._default(problem), self.seed).measure(tile)
        if timed.runtime_ns is None or timed.default_ns is None:
            return -1.0  # a tile that fails is worse than any
        return math.log(timed.default_ns / timed.runtime_ns)

    def _keep_own(self) -> int:
        """The best tiles of one's own shapes, as `tilewise tune` keeps them, where they beat the default once more."""
        choices = Choices(self.folder, self.device.machine.identity, self.device.version)
        kept = 0
        for one, ratios in self.measured.items():
            order = sorted(ratios, key=ratios.__getitem__)[:3]
            gains = {tile: self._against_default(one, tile) for tile in order if ratios[tile] < -_WORTH}
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best] < _WORTH or not self._holds_elsewhere(one, best):
                continue
            default = self._default(one)
            default_ns = min(in_turns(one, [default], 3, 1.0)[default])
            choices.put(Choice(one, best, default_ns * math.exp(-gains[best]), len(ratios), False))
            kept += 1
        return kept

    def _holds_elsewhere(self, one: Problem, tile: Config) -> bool:
        return all(self._against_default(*other) >= -_WORTH for other in self.device.elsewhere(one, tile))

    # Going on

    def _append(self, problem: Problem, found: Mapping[Config, float]) -> None:
        """A kernel's measurements, in the file when this returns."""
        line = {
            "version": __version__, "machine": machine_name(self.native), "problem": dict(problem),
            "default": dict(self._default(problem)),
            "log_ratio": [[dict(tile), ratio] for tile, ratio in found.items()],
        }  # fmt: skip
        try:
            self.part.parent.mkdir(parents=True, exist_ok=True)
            with self.part.open("ab") as stream:
                stream.write(json.dumps(line).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise UnavailableError(
                f"{self.part} cannot be written ({error.strerror or error}); {ELSEWHERE}."
            ) from error

    def _resume(self) -> None:
        """What an earlier run measured and did not bring to an end."""
        for line in read_input(self.part, _MOST_BYTES).split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._take(json.loads(line))

    def _take(self, line: Any) -> None:
        if line["version"] != __version__ or line["machine"] != machine_name(self.native):
            return
        problem, default = Problem(line["problem"]), Config(line["default"])
        if problem not in self.problems or default != self._default(problem):
            return
        found = {Config(tile): float(ratio) for tile, ratio in line["log_ratio"]}
        if all(math.isfinite(ratio) for ratio in found.values()):
            self.measured.setdefault(problem, {}).update(found)

    def _lines_of(self, members: Iterable[Problem], gains: Mapping[Problem, float]) -> list[dict[str, Any]]:
        """The report's, one a thread count."""
        by_threads: dict[int, list[Problem]] = {}
        for problem in members:
            by_threads.setdefault(problem.size("threads"), []).append(problem)
        lines = []
        for threads, some in sorted(by_threads.items()):
            own: Numbers = np.array([gains[problem] for problem in some])
            best = float(np.mean([max(0.0, -min(self.measured[problem].values())) for problem in some]))
            line = {"family": some[0].family, "threads": threads, "kernels": len(some)}
            ratios = {"speedup": own.mean(), "worst": own.min(), "best": best}
            speeds = {name: math.exp(float(value)) for name, value in ratios.items()}
            lines.append({**line, "replaced": int((own != 0).sum()), **speeds})
        return lines


def _words(problem: Problem) -> str:
    names = ("batch", "channels", "height", "filters", "kernel", "m", "n", "k")
    sizes = "x".join(str(problem[name]) for name in names if name in problem)
    threads = problem.size("threads")
    return f"{problem.family} {sizes}, {threads} thread{'s' if threads > 1 else ''}"
