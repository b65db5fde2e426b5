"""Fit the confidence bounds of the shipped models ("within 5 %") on kernels that they were not trained on.

    python -m tools.ship_confidence [--test]

The GPU's model was trained on the train split, so the valid split can be used as it is. The CPU's was trained on both:
for it, each fifth of the programs is scored by a model of the other four fifths. The bounds are written into the
calibrations next to the models; nothing else there changes. The test split is evaluated with `--test` only.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.files import shipped_file, shipped_names
from tilewise.costmodel.models.ridge import ridge_scorer
from tilewise.costmodel.models.scorer import RIDGE, shipped_scorer
from tilewise.tune.search.calibration import (
    claims_text,
    error_groups,
    evaluate_claims,
    fit_confidence_bounds,
    make_case,
)
from tilewise.tune.search.confidence import calibration_path, load_calibration, save_calibration

FOLDS = 5


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A model that returns stored scores by the name of a kernel."""

    scores: Mapping[str, Any]
    calibration = None

    def score(self, kernel: Kernel) -> Any:
        return self.scores[kernel.name]


def out_of_fold(data: Dataset, seed: int) -> tuple[Recorded, list[Kernel]]:
    """Score every kernel of train and valid by a model that was trained without its program."""
    kernels = [*data.train, *data.valid]
    programs = sorted({program_of(kernel) for kernel in kernels})
    fold = {p: i % FOLDS for i, p in enumerate(np.random.default_rng(0).permutation(programs))}
    scores = {}
    for number in range(FOLDS):
        model = ridge_scorer([k for k in kernels if fold[program_of(k)] != number], data.schema, seed)
        scores |= {k.name: model.score(k) for k in kernels if fold[program_of(k)] == number}
    return Recorded(scores), kernels


def program_of(kernel: Kernel) -> str:
    """Return the program of a kernel without the machine it was measured on."""
    return kernel.program.partition(".")[0]


def ship(name: str) -> None:
    """Fit the bounds of one shipped model and store them in its calibration."""
    path, data, model = shipped_file(name), load_dataset(name), shipped_scorer(name)
    hyper, names = load_calibration(path), data.schema.config_features
    if hyper is None:
        raise SystemExit(f"{path.name} has no calibration; `tilewise tiles replay {name} --calibrate` makes one.")
    unseen: tuple[Any, Sequence[Kernel]] = (model, list(data.valid))
    if model.name == RIDGE:
        unseen = out_of_fold(data, int(model.record.get("seed", 0)))
    cases = [make_case(unseen[0], kernel, names) for kernel in unseen[1]]
    groups = error_groups([case.name for case in cases], data.train.names)
    hyper = dataclasses.replace(hyper, confidence_bounds=fit_confidence_bounds(cases, hyper, groups))
    save_calibration(path, hyper, calibration_path(path))
    print(name, hyper.confidence_bounds, "fitted:", claims_text(evaluate_claims(cases, hyper)))
    if "--test" in sys.argv:
        print(
            name,
            "test:",
            claims_text(evaluate_claims([make_case(model, kernel, names) for kernel in data.test], hyper)),
        )


if __name__ == "__main__":
    for shipped in shipped_names():
        ship(shipped)
