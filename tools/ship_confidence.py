"""Fit the confidence bounds of the shipped models ("within 5 %") on kernels that they were not trained on.

    python -m tools.ship_confidence [--test]
    python -m tools.ship_confidence --elsewhere FOLDER ...   # imported records of devices that h200 was not trained on

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

from tilewise.costmodel.data.columns import select_columns
from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.files import shipped_file, shipped_names
from tilewise.costmodel.models.ridge import ridge_scorer
from tilewise.costmodel.models.scorer import RIDGE, shipped_scorer
from tilewise.tune.search.calibration import (
    NEVER,
    STAGES,
    WRONG,
    claims_text,
    error_groups,
    evaluate_claims,
    fit_confidence_bounds,
    make_case,
    replay_stages,
)
from tilewise.tune.search.confidence import WITHIN, calibration_path, load_calibration, save_calibration

FOLDS = 5
ELSEWHERE = 300  # kernels per folder, to bound the time


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


def ship_elsewhere(folders: Sequence[str]) -> None:
    """Fit the bounds of the h200 model on other devices: the lowest at which every folder has few wrong claims.

    Folders are collections of one device each or of different programs. Claims on a new device are less reliable than
    on these, so that half of the allowed share may be wrong.
    """
    path, model = shipped_file("h200"), shipped_scorer("h200")
    hyper = load_calibration(path)
    assert hyper is not None
    stages = []
    for folder in folders:
        data, _ = select_columns(load_dataset(folder), model.schema)
        order = np.random.default_rng(0).permutation(len(data.test))[:ELSEWHERE]
        cases = [make_case(model, data.test[int(i)], model.schema.config_features) for i in order]
        stages.append([np.array(rows) for rows in zip(*(replay_stages(case, hyper) for case in cases), strict=True)])
    bounds = {}
    for stage, count in enumerate(STAGES):
        for bound in (*np.arange(0.4, 1.0, 0.05), 0.99, NEVER):
            claims = [chances[:, stage] >= bound for chances, _ in stages]
            wrong = [(slower[:, stage] > WITHIN)[s].sum() for s, (_, slower) in zip(claims, stages, strict=True)]
            if bound == NEVER or all(
                s.sum() >= 20 and w <= WRONG / 2 * s.sum() for s, w in zip(claims, wrong, strict=True)
            ):
                bounds[count] = round(float(bound), 2)
                break
    hyper = dataclasses.replace(hyper, bounds_elsewhere=bounds)
    save_calibration(path, hyper, calibration_path(path))
    print("h200 elsewhere:", bounds)


if __name__ == "__main__":
    if "--elsewhere" in sys.argv:
        ship_elsewhere(sys.argv[sys.argv.index("--elsewhere") + 1 :])
    else:
        for shipped in shipped_names():
            ship(shipped)
