"""`--learn`: fine-tune the cost model on the tuner's measurements of this machine.

A few measurements must not outweigh the large collection that a model was trained on. A neural network therefore is
unchanged and gets an additive correction, as by `tilewise tiles adapt`; the CPU's ridge model is fitted to its
collection and the new measurements together. The result is saved only if it orders held-out measurements (every fourth
problem) better than the current model.
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
from tilewise.costmodel.models.files import read_model_file, shipped_file
from tilewise.costmodel.models.ridge import ridge_scorer
from tilewise.costmodel.models.scorer import RIDGE
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.store.store import Store
from tilewise.tune.choose.memory import measurements
from tilewise.tune.choose.scores import as_kernel, file_scores
from tilewise.tune.choose.tuner import Tuner
from tilewise.tune.families.registry import find_family
from tilewise.tune.search.confidence import load_calibration, save_calibration

MIN_CONFIGS, MIN_PROBLEMS = 3, 8  # per problem, and in all; arbitrary
_OWN_WEIGHT = 8  # copies of each kernel of this machine in the training set; arbitrary


@dataclass(frozen=True)
class Learned:
    """Result of fine-tuning: the share of correctly ordered pairs of held-out problems, before and after."""

    problems: int
    measurements: int
    before: float
    after: float
    improved: bool
    path: Path

    def __str__(self) -> str:
        what = f"{self.measurements} measurements of {self.problems} problems"
        accuracy = f"{self.before:.3f} of the held-out pairs in the right order before, {self.after:.3f} after"
        return f"learned from {what}: {accuracy}; " + (f"kept as {self.path}" if self.improved else "not kept")


def learn(tuner: Tuner, say: Callable[[str], None] = lambda line: None) -> Learned:
    """Fine-tune the model of a tuner's machine on all measurements in its store."""
    if tuner.device.collection is None:
        raise UnavailableError(
            f"No model is shipped for {tuner.device.machine.identity}, so there is none to fine-tune; "
            "`tilewise collect` and `tilewise tiles train` make one."
        )
    source = shipped_file(tuner.device.collection)  # from which every fine-tuning starts
    current = tuner.learned_file if tuner.learned_file.is_file() else source
    kernels = measured_kernels(tuner)
    if len(kernels) < MIN_PROBLEMS:
        raise ConfigurationError(
            f"There are {len(kernels)} problems with at least {MIN_CONFIGS} measured configurations; learning needs "
            f"{MIN_PROBLEMS}. Tune more shapes first."
        )
    held_out = kernels[3::4]
    own = [kernel for index, kernel in enumerate(kernels) if index % 4 != 3]
    say(f"learning from {len(own)} problems, checking on {len(held_out)}")
    if read_model_file(source).record["model"] == RIDGE:
        trained = _refit(source, own)
    else:
        from tilewise.costmodel.models.adapted import adapt

        trained = adapt(source, own)
    # Mean share of the pairs that a model orders rightly.
    before, after = (
        float(np.nanmean([opa(kernel.runtime.astype(np.float64), model.score(kernel)) for kernel in held_out]))
        for model in (file_scores(current, tuner.device.kind).model, trained)
    )
    improved = after > before
    if improved:
        trained.save(tuner.learned_file)
        hyper = load_calibration(source)
        if hyper is not None:
            save_calibration(tuner.learned_file, hyper)
    total = sum(kernel.n_configs for kernel in kernels)
    return Learned(len(kernels), total, before=before, after=after, improved=improved, path=tuner.learned_file)


def measured_kernels(tuner: Tuner) -> list[Kernel]:
    """Return the well-measured problems of the tuner's store as labelled kernels of the cost model."""
    if tuner.model is None or not tuner.store_file.is_file():
        return []
    kernels = []
    own = tuner.model.columns[24:]
    with Store(tuner.store_file) as store:
        for family in sorted({kernel.problem.family for kernel in store.kernels()}):
            for problem, times in measurements(store, family).items():
                if len(times) >= MIN_CONFIGS:
                    default, machine = tuner.device.default(problem), tuner.model.machine
                    kernel = as_kernel(
                        find_family(tuner.device.kind, family), problem, list(times), own, machine, default
                    )
                    runtime = np.array([max(1, round(ns)) for ns in times.values()], np.int64)
                    normalizer = np.full_like(runtime, runtime.min())
                    kernels.append(dataclasses.replace(kernel, runtime=runtime, normalizer=normalizer))
    return kernels


def _refit(source: Path, kernels: Sequence[Kernel]) -> Any:
    """Fit the CPU's model to its collection and to `kernels`, each weighted `_OWN_WEIGHT` times."""
    record, collection = read_model_file(source).record, read_collection(find_collection("cpu"))
    collection_kernels = [labeled.kernel for split in ("train", "valid") for labeled in collection.splits[split]]
    model = ridge_scorer(
        [*collection_kernels, *list(kernels) * _OWN_WEIGHT], collection.schema, int(record.get("seed", 0))
    )
    model.record = {**record, "learned": len(kernels)}
    return model
