"""The recipe `winners` (`tilewise tiles train --recipe winners`): an ensemble over seeds and program folds.

The best entries of the Kaggle competition on TpuGraphs trained several large networks on all configurations and
averaged their ranks. Here every member leaves out another fold of the programs and is stopped early by the scored
metric on it; its slates mix the fastest configurations with others. Trees trained with LambdaRank join them, and the
ranks of all are averaged. A run that was interrupted reads finished members and continues the unfinished one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tilewise.costmodel.confidence import calibrate
from tilewise.costmodel.data.dataset import Dataset, dataset_from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.models.blend import Blend
from tilewise.costmodel.models.files import BLEND, MODEL_FILE
from tilewise.costmodel.models.trained import load_model
from tilewise.costmodel.training.config import WINNERS
from tilewise.costmodel.training.loop import train
from tilewise.errors import ConfigurationError, TilewiseError

_TREE_WEIGHT = 0.5  # relative to all networks together; arbitrary, trees are the weaker part on large collections


def train_winners(
    dataset: Dataset,
    *,
    out_dir: str | Path,
    members: int = 4,
    seed: int = 0,
    resume: bool = True,
    device: str = "auto",
    **settings: Any,
) -> Blend:
    """Train the members in folders below `out_dir` and save their blend there; the valid split only calibrates it."""
    folder = Path(out_dir).expanduser()
    programs = sorted({kernel.program for kernel in dataset.train})
    if len(programs) < 2 or not dataset.train.labelled:
        raise ConfigurationError("The recipe winners needs a train split with runtimes and at least two programs.")
    members = min(members, len(programs))
    member_settings = WINNERS | {name: value for name, value in settings.items() if value is not None}
    # A time limit is shared by all members; the trees count as one.
    if member_settings.get("max_seconds"):
        member_settings["max_seconds"] = member_settings["max_seconds"] / (members + 1)
    models: list[Any] = []
    started = time.perf_counter()
    for number in range(members):
        held_out = set(programs[number::members])
        part = _without(dataset, held_out)
        target = folder / f"member_{number}"
        finished = resume and (target / MODEL_FILE).is_file() and not (target / "checkpoint.safetensors").is_file()
        options: dict[str, Any] = {"out_dir": target, "seed": seed + number, "resume": resume, "device": device}
        models.append(load_model(target) if finished else train(part, "TileRanker", **options, **member_settings))
        seconds_left = (time.perf_counter() - started) / (number + 1) * (members - number - 1)
        print(f"member {number + 1} of {members} is finished, about {seconds_left:.0f} s left", file=sys.stderr)
    weights = [1.0 / members] * members
    try:
        limit = {"max_seconds": member_settings.get("max_seconds", 0.0)}
        models.append(train(dataset, "GBDT", out_dir=folder / "trees", seed=seed, **limit))
        weights.append(_TREE_WEIGHT)
    except TilewiseError as error:
        print(f"The ensemble has no trees: {error}", file=sys.stderr)
    blend = Blend(models, weights, {"model": BLEND, "by_rank": True, "recipe": "winners"})
    blend.record["calibration"] = calibrate(blend, dataset.valid)
    blend.save(folder / MODEL_FILE)
    return blend


def _without(dataset: Dataset, programs: set[str]) -> Dataset:
    """Return the train kernels of other programs as train split and those of `programs` as valid split."""
    sides: tuple[list[Kernel], list[Kernel]] = ([], [])
    for kernel in dataset.train:
        sides[kernel.program in programs].append(kernel)
    return dataset_from_kernels(sides[0], sides[1], (), dataset.schema)
