"""A machine's calibration: what `tilewise calibrate` kept of it, and the tile that follows for any shape, unmeasured.

For each family a `Correction`: a Gaussian process over tiles near the default, and its promise: how many deviations it
must be sure of, and how much it must expect, before a tile replaces the default. The promise is the one that gained
most on kernels that the correction was not told of while losing on none; a family without one keeps its defaults.

A product must not change a bit with the number of threads. So a tile that cuts the sum over k otherwise than the
default is taken only where it is expected to win both with one thread and with all, and then at every thread count.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import __version__
from tilewise._system import real_cores
from tilewise.errors import FileFormatError, TilewiseError
from tilewise.tune.choose.cache import cache_folder
from tilewise.tune.choose.calibration.correction import Correction, Promise, Rows
from tilewise.tune.choose.calibration.features import rows_of
from tilewise.tune.choose.kept import machine_name
from tilewise.tune.choose.near import default_product, near_products
from tilewise.tune.families.cpu.tiles import product_config, product_tile
from tilewise.tune.problem import Config, Problem
from tilewise.tune.search.gaussian_process import Hyperparameters, Numbers

Scores = Callable[[Problem, Sequence[Config]], Numbers]  # log runtime up to a constant, lower is faster
FORMAT = 2
# The hyperparameters' names in the file.
_SAVED = {
    "signal": "signal", "length_sizes": "task_length_scale", "length_config": "length_scale", "noise": "noise",
    "slope": "coefficient",
}  # fmt: skip
SHARED = "+"  # behind a family's name: kernels that several threads share, whose tiles are another matter


def family_of(problem: Problem) -> str:
    """What a problem is fitted with."""
    return problem.family + (SHARED if problem.size("threads") > 1 else "")


class Calibrated:
    """The calibration of this machine; `scores` is the cost model's, asked only where it proved to help."""

    hyper = Hyperparameters(1.0, 0.3, 0.05, 1.0, 0.03, 0.015, far=0.0, near=0.0)  # of measuring on from it
    margin = float("inf")

    def __init__(self, module: Any, families: Mapping[str, Correction], scores: Scores | None = None) -> None:
        self._native, self.families, self._scores = module, dict(families), scores

    def covers(self, family: str) -> bool:
        """Whether tiles of a family are chosen without measuring."""
        return any(found.promise is not None for name, found in self.families.items() if name.rstrip(SHARED) == family)

    def knows(self, problem: Problem) -> bool:
        """Whether its tiles were measured: a problem of that family, shared by threads or not."""
        return family_of(problem) in self.families

    def expected(self, problem: Problem, configs: Sequence[Config], default: Config) -> tuple[Numbers, Numbers]:
        """Mean and deviation of log runtime over the default's."""
        found = self.families[family_of(problem)]
        return found.predict(self._rows(problem, configs, default, found.hyper.coefficient != 0.0))

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        """The mean, to start measuring from; the default is the first of the list."""
        return self.expected(problem, configs, configs[0])[0]

    def _rows(self, problem: Problem, configs: Sequence[Config], default: Config, scored: bool) -> Rows:
        score = None
        if scored and self._scores is not None:
            every = self._scores(problem, [default, *configs])
            score = every[1:] - every[0]
        return rows_of(problem, configs, default, score)

    def choose(self, problem: Problem, configs: Sequence[Config] | None = None) -> Config | None:
        """The tile to use in place of the default; None to stay with it. `configs` are all, the default first, of a
        family whose neighbours of the default are not known."""
        if not self.covers(problem.family):
            return None
        if problem.family == "matmul":
            return self._product(problem)
        if not configs:
            return None
        best, bound = self._best(problem, configs[1:], configs[0])
        return best if bound < 0 else None

    def _best(self, problem: Problem, configs: Sequence[Config], default: Config) -> tuple[Config | None, float]:
        """The tile of the lowest bound, and how far the bound lies above what must be promised."""
        bounds = self._bounds(problem, configs, default)
        if not len(bounds):
            return None, 0.0
        return configs[int(np.argmin(bounds))], float(bounds.min())

    def _bounds(self, problem: Problem, configs: Sequence[Config], default: Config) -> Numbers:
        fitted = self.families.get(family_of(problem))
        if fitted is None or fitted.promise is None or not configs:
            return np.zeros(len(configs))
        promise = fitted.promise
        mean, deviation = self.expected(problem, configs, default)
        return mean + promise.deviations * deviation + promise.margin

    def _product(self, problem: Problem) -> Config | None:
        path, tile = default_product(self._native, problem)
        default, most = product_config(tile), Problem({**problem, "threads": max(2, real_cores())})
        configs = near_products(self._native, problem)[1:]
        shared = default_product(self._native, most)[1]
        if shared.threads_m * shared.threads_n > 1:  # at some thread count it is shared, and its bits must not change
            at_all = self._at_all_thread_counts(problem, most)
            if at_all is not None:
                grid = {"threads_m": tile.threads_m, "threads_n": tile.threads_n}
                return Config({**at_all, **grid})
            depth = min(tile.kc, problem.size("k"))
            same = [each for each in configs if min(each.size("block_k"), problem.size("k")) == depth]
            configs = same if path == "tiled" else []
        best, bound = self._best(problem, configs, default)
        return best if bound < 0 else None

    def _at_all_thread_counts(self, problem: Problem, most: Problem) -> Config | None:
        """A tile that sums in another order than the default, and is promised to win with one thread and with all."""
        one = Problem({**problem, "threads": 1})
        path, tile = default_product(self._native, one)
        depth = min(tile.kc, problem.size("k"))
        configs = [
            each
            for each in near_products(self._native, one)[1:]
            if path != "tiled" or min(each.size("block_k"), problem.size("k")) != depth
        ]
        bounds = self._bounds(one, configs, product_config(tile))
        if real_cores() > 1 and configs:
            shared = default_product(self._native, most)[1]
            grid = {"threads_m": shared.threads_m, "threads_n": shared.threads_n}
            there = [product_config(replace(product_tile(each), **grid)) for each in configs]
            bounds = np.maximum(bounds, self._bounds(most, there, product_config(shared)))
        return configs[int(np.argmin(bounds))] if len(bounds) and bounds.min() < 0 else None


# The file


def calibration_file(module: Any, folder: str | os.PathLike[str] | None = None) -> Path:
    """Where this machine's calibration lies."""
    name = hashlib.sha256(f"{machine_name(module)} {__version__}".encode()).hexdigest()[:12]
    return (Path(folder).expanduser() if folder is not None else cache_folder()) / f"calibration-{name}.safetensors"


def write_calibration(path: Path, families: Mapping[str, Correction], about: Mapping[str, Any]) -> None:
    """All of it in one file, whole or not at all."""
    from tilewise.io import save

    arrays: dict[str, npt.NDArray[Any]] = {}
    told: dict[str, Any] = {"format": FORMAT, **about, "families": {}}
    for name, correction in families.items():
        for field in Rows.__slots__:
            arrays[f"{name}.{field}"] = getattr(correction.rows, field)
        arrays[f"{name}.log_ratio"], arrays[f"{name}.group"] = correction.log_ratio, correction.group
        promise = None if correction.promise is None else dataclasses.asdict(correction.promise)
        hyper = {key: getattr(correction.hyper, field) for key, field in _SAVED.items()}
        told["families"][name] = {"hyper": hyper, "promise": promise}
    path.parent.mkdir(parents=True, exist_ok=True)
    save(arrays, path, {"calibration": json.dumps(told)})


def _parts(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    from tilewise.io import load_arrays

    arrays, metadata = load_arrays(path)
    try:
        told = json.loads(metadata["calibration"])
        if not isinstance(told, dict) or told["format"] != FORMAT or not isinstance(told["families"], dict):
            raise ValueError("its format is another's")
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} is not a calibration: {error}.") from None
    return arrays, told


def read_calibration(module: Any, path: Path, scores: Scores | None = None) -> Calibrated:
    """The calibration in a file; one sentence where it is none."""
    arrays, told = _parts(path)
    try:
        families = {str(name): _correction(arrays, str(name), parts) for name, parts in told["families"].items()}
    except (KeyError, ValueError, TypeError, AttributeError, np.linalg.LinAlgError) as error:
        raise FileFormatError(f"{path} is not a calibration: {error}.") from None
    return Calibrated(module, families, scores)


def _correction(arrays: Mapping[str, npt.NDArray[Any]], name: str, parts: Mapping[str, Any]) -> Correction:
    rows = Rows(*(np.asarray(arrays[f"{name}.{field}"], np.float64) for field in Rows.__slots__))
    log_ratio = np.asarray(arrays[f"{name}.log_ratio"], np.float64)
    group = np.asarray(arrays[f"{name}.group"], np.int64)
    saved: dict[str, Any] = {field: float(parts["hyper"][key]) for key, field in _SAVED.items()}
    hyper = Hyperparameters(**saved)
    promise = None if parts["promise"] is None else Promise(**{k: float(v) for k, v in parts["promise"].items()})
    numbers = [getattr(rows, field) for field in Rows.__slots__]
    if not all(np.isfinite(array).all() and len(array) == len(rows) for array in (*numbers, log_ratio, group)):
        raise ValueError("its numbers mean nothing")
    if [array.ndim for array in (*numbers, log_ratio, group)] != [2, 2, 2, 1, 1, 1]:
        raise ValueError("its numbers have other axes")
    return Correction(rows, log_ratio, group, hyper, promise)


def find_calibration(
    module: Any, folder: str | os.PathLike[str] | None = None, scores: Scores | None = None
) -> tuple[Calibrated | None, list[str]]:
    """This machine's calibration, if there is one, and what is to be said where it cannot be read."""
    path = calibration_file(module, folder)
    if not path.exists():
        return None, []
    try:
        return read_calibration(module, path, scores), []
    except (TilewiseError, OSError) as error:
        return None, [f"{error} It is left alone; `tilewise calibrate` makes a new one."]


@functools.cache
def model_scores() -> Scores | None:
    """The shipped cost model's scores on this CPU; None where there is no model for it."""
    from tilewise.tune.choose.scores import shipped_scores
    from tilewise.tune.measure.cpu.device import CpuDevice

    device = CpuDevice()
    model, _ = shipped_scores(device.collection, device.machine.identity)
    if model is None:
        return None
    return lambda problem, configs: model.hyper.coefficient * model.scores(problem, configs)
