"""Training settings: one flat record that is written into every file of a training run.

The baselines use the course's defaults; TileRanker has its own, with more configurations per kernel and fewer epochs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import ConfigurationError

COURSE_LOSSES = "ListMLELoss:1,MSE:0.02"
_WARM_UP = 0.05  # share of a run in which the learning rate rises
_FIRST_RATE = 0.002  # added to the share, so that the first step has a positive learning rate
_MAX_COUNT = 10_000_000
SELECTABLE = ("opa", "top1", "top5", "tau", "top")


@dataclass(frozen=True)
class TrainSettings:
    """Everything besides the data that determines the trained weights."""

    model: str = "TileRanker"
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    epochs: int = 100
    early_stop: int = 20
    losses: str = COURSE_LOSSES
    learning_rate: float = 1e-3
    clip_norm: float | None = 1e-3
    configs: int = 10
    batch: int = 10
    seed: int = 0
    select: str = "opa"
    eval_every: int = 1
    validate_batches: int = -1
    weight_decay: float = 0.0
    schedule: str = "constant"
    average: float = 0.0  # decay of the moving average of the weights, which is then validated; 0 is no average
    settled: float = 0.0  # share of a run before which a checkpoint is replaced by the first later one
    least_steps: int = 0  # minimum steps of an epoch; small collections are passed several times
    fastest: float = 0.0  # share of the sampled configurations that are the fastest ones; the others are random
    max_seconds: float = 0.0  # 0 is no limit; a limited run is not reproducible bit for bit

    def __post_init__(self) -> None:
        """Raise `ConfigurationError` for an invalid setting."""
        # Counts, then rates, then names.
        for name, least in (("epochs", 1), ("configs", 1), ("batch", 1), ("eval_every", 1), ("least_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= _MAX_COUNT:
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        for name in ("learning_rate", "weight_decay", "max_seconds", "average", "settled", "fastest"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"{name} must be a number of at least 0, not {value!r}.")
        for name in ("average", "fastest"):
            if getattr(self, name) >= 1:
                raise ConfigurationError(f"{name} must be below 1, not {getattr(self, name)!r}.")
        if self.settled > 1:
            raise ConfigurationError(f"settled must be between 0 and 1, not {self.settled!r}.")
        if self.select not in SELECTABLE:
            raise ConfigurationError(f"select must be one of {', '.join(SELECTABLE)}, not {self.select!r}.")
        if self.schedule not in ("constant", "cosine"):
            raise ConfigurationError(f"schedule must be constant or cosine, not {self.schedule!r}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigurationError(f"clip_norm must be above 0, not {self.clip_norm!r}.")

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def share_done(self, epoch: float, seconds: float) -> float:
        """Return the completed share of training, 0 to 1: by epochs or time, whichever is larger."""
        return max(epoch / self.epochs, seconds / self.max_seconds if self.max_seconds else 0.0)

    def passes(self, batches: int) -> int:
        """Return the passes over all kernels in one epoch, given the number of steps (`batches`) of a pass."""
        return max(1, -(-self.least_steps // max(batches, 1)))

    def learning_rate_at(self, share: float) -> float:
        """Return the learning rate after `share` (0 to 1) of training: constant, or cosine with warm-up."""
        if self.schedule == "constant":
            return self.learning_rate
        # Warm-up: Adam's moments are unreliable in the first steps.
        if share < _WARM_UP:
            return self.learning_rate * (share + _FIRST_RATE) / (_WARM_UP + _FIRST_RATE)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - _WARM_UP) / (1 - _WARM_UP))))


RANKER_DEFAULTS: dict[str, Any] = {
    "epochs": 30,
    "early_stop": 1000,
    "losses": "FastestFirst:1,LogMSE:0.3",
    "learning_rate": 4e-3,
    "clip_norm": 1.0,
    "configs": 96,
    "batch": 6,
    "weight_decay": 0.02,
    "schedule": "cosine",
    "average": 0.98,
    "select": "top",
    "settled": 0.75,
    "eval_every": 6,
    "least_steps": 32,
}
# The recipe `winners`, on top of RANKER_DEFAULTS: wider, on nearly all configurations, stopped by the scored metric.
WINNERS: dict[str, Any] = {
    "model_kwargs": {"hidden_dim": 192, "num_blocks": 3},
    "epochs": 60,
    "early_stop": 18,
    "eval_every": 3,
    "configs": 512,
    "fastest": 0.25,
    "select": "top5",
}


def budget(model: str, kernels: int, has_estimate: bool) -> dict[str, Any]:
    """Return the settings of a TileRanker that depend on the number of train kernels: width and epochs.

    Many kernels support a wider network. On a TPU (`has_estimate`) the network starts from an estimate of the runtime,
    so a small collection is not passed more often than a large one, which would only memorize its kernels.
    """
    if model != "TileRanker":
        return {}
    widths = [width for least, width in ((1000, 128), (4000, 192)) if kernels >= least]
    wider = {"model_kwargs": {"hidden_dim": widths[-1]}} if widths else {}
    return wider | ({"least_steps": 0} if has_estimate else {})


def default_settings(model: str, **overrides: Any) -> TrainSettings:
    """Return the default settings of a model, with the overrides that are not None."""
    names = {f.name for f in dataclasses.fields(TrainSettings)}
    # Misspelled settings must not be ignored.
    unknown = sorted(set(overrides) - names)
    if unknown:
        raise ConfigurationError(f"There is no training setting {unknown[0]!r}; there are {', '.join(sorted(names))}.")
    base = RANKER_DEFAULTS if model == "TileRanker" else {}
    return TrainSettings(model=model, **(base | {k: v for k, v in overrides.items() if v is not None}))


def parse_kwargs(kwargs: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return model arguments as a dict; they may be a mapping or JSON text."""
    parsed: Any = kwargs or {}
    if isinstance(kwargs, str):
        try:
            parsed = json.loads(kwargs or "{}")
        except (ValueError, RecursionError) as error:
            raise ConfigurationError('The model\'s arguments must be JSON, as in {"hidden_dim": 128}.') from error
    if not isinstance(parsed, Mapping):
        raise ConfigurationError('The model\'s arguments must be a JSON object, as in {"hidden_dim": 128}.')
    return dict(parsed)
