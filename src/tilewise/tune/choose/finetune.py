"""`--learn`: the cost model fine-tuned on what the tuner measured on this machine.

Few measurements must not undo what many taught, so a network gets a correction beside it, as `tilewise tiles adapt`
makes one, and the CPU's model is fitted to its collection and the new measurements together. The result is kept only
if it orders measurements it was not trained on (every fourth problem) better than before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import find_collection
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.metrics import opa
from tilewise.costmodel.models.ridge import NAME
from tilewise.costmodel.models.scorer import ridge_scorer
from tilewise.costmodel.models.shipped import shipped_file
from tilewise.costmodel.models.trained import read_model_file
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.store import Store
from tilewise.tune.choose.memory import measurements
from tilewise.tune.choose.scores import as_kernel, file_scores
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.families.registry import find_family
from tilewise.tune.search.calibration import load_calibration, save_calibration

LEAST_CONFIGS, LEAST_PROBLEMS = 3, 8
_OWN_COUNT = 8  # a kernel of this machine counts for so many of the collection's


@dataclass(frozen=True)
class Learned:
    """What became of fine-tuning: the share of pairs ordered rightly, before and after, on problems held out."""

    problems: int
    measurements: int
    before: float
    after: float
    kept: bool
    path: Path

    def __str__(self) -> str:
        what = f"{self.measurements} measurements of {self.problems} problems"
        change = f"{self.before:.3f} of the held-out pairs in the right order before, {self.after:.3f} after"
        return f"learned from {what}: {change}; " + (f"kept as {self.path}" if self.kept else "not kept")


def learn(tuner: Tuner, say: Callable[[str], None] = lambda line: None) -> Learned:
    """Fine-tune the model of a tuner's machine on everything its store holds."""
    source = _source(tuner)
    current = tuner.learned_file if tuner.learned_file.is_file() else source
    kernels = measured_kernels(tuner)
    if len(kernels) < LEAST_PROBLEMS:
        raise ConfigurationError(
            f"There are {len(kernels)} problems with at least {LEAST_CONFIGS} measured configurations; learning needs "
            f"{LEAST_PROBLEMS}. Tune more shapes first."
        )
    held = kernels[3::4]
    own = [kernel for index, kernel in enumerate(kernels) if index % 4 != 3]
    say(f"learning from {len(own)} problems, checking on {len(held)}")
    trained = _refit(source, own) if read_model_file(source).record["model"] == NAME else _adapted(source, own)
    before, after = (_right_pairs(model, held) for model in (file_scores(current, tuner.device.kind).model, trained))
    kept = after > before
    if kept:
        trained.save(tuner.learned_file)
        hyper = load_calibration(source)
        if hyper is not None:
            save_calibration(tuner.learned_file, hyper)
    total = sum(kernel.n_configs for kernel in kernels)
    return Learned(len(kernels), total, before, after, kept, tuner.learned_file)


def _source(tuner: Tuner) -> Path:
    """The shipped model: what is learned of all measurements starts from it every time."""
    if tuner.device.collection is None:
        raise UnavailableError(
            f"No model is shipped for {tuner.device.machine.identity}, so there is none to fine-tune; "
            "`tilewise collect` and `tilewise tiles train` make one."
        )
    return shipped_file(tuner.device.collection)


def measured_kernels(tuner: Tuner) -> list[Kernel]:
    """Every problem in the tuner's store with enough configurations, as a kernel with runtimes."""
    if tuner.model is None or not tuner.store_file.is_file():
        return []
    kernels = []
    own = tuner.model.columns[24:]
    with Store(tuner.store_file) as store:
        for family in sorted({kernel.problem.family for kernel in store.kernels()}):
            for problem, times in measurements(store, family).items():
                if len(times) >= LEAST_CONFIGS:
                    default, machine = tuner.device.default(problem), tuner.model.machine
                    kernel = as_kernel(
                        find_family(tuner.device.kind, family), problem, list(times), own, machine, default
                    )
                    runtime = np.array([max(1, round(ns)) for ns in times.values()], np.int64)
                    normalizer = np.full_like(runtime, runtime.min())
                    kernels.append(dataclasses.replace(kernel, runtime=runtime, normalizer=normalizer))
    return kernels


def _right_pairs(model: Any, kernels: Sequence[Kernel]) -> float:
    values = [opa(kernel.runtime.astype(np.float64), model.score(kernel)) for kernel in kernels]
    return float(np.nanmean(values)) if values else float("nan")


def _refit(source: Path, kernels: Sequence[Kernel]) -> Any:
    """The CPU's model fitted anew to what it was taught on and to these, each of which counts several times."""
    record, collection = read_model_file(source).record, read_collection(find_collection("cpu"))
    taught = [measured.kernel for split in ("train", "valid") for measured in collection.splits[split]]
    model = ridge_scorer([*taught, *list(kernels) * _OWN_COUNT], collection.schema, int(record.get("seed", 0)))
    model.record = {**record, "learned": len(kernels)}
    return model


def _adapted(source: Path, kernels: Sequence[Kernel]) -> Any:
    from tilewise.costmodel.models.adapted import adapt

    return adapt(source, kernels)
