"""Scores from a torch model: a kernel's configurations in chunks, so that memory stays bounded at any count.

Nothing in a model looks from one configuration to another, so chunks change nothing but rounding.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tilewise.costmodel.features.scaling import ModelInputs
from tilewise.costmodel.models.torch.fused import kernel_threads
from tilewise.costmodel.models.torch.ragged import collate

PAIRS_AT_ONCE = 1 << 13  # (node, configuration) pairs of an early join that stay in cache
MOST_AT_ONCE = 4096
FEW = 1024  # configurations that one thread of torch scores as quickly as several


def score_prepared(model: nn.Module, part: ModelInputs, device: str = "cpu") -> npt.NDArray[np.float32]:
    """One score per configuration, lower is faster."""
    pairs = PAIRS_AT_ONCE if device == "cpu" else PAIRS_AT_ONCE * 64
    early = getattr(model, "early", False)
    joined = early and not (device == "cpu" and getattr(model, "compiled", False))
    chunk = min(MOST_AT_ONCE, max(16, pairs // max(1, len(part.node)))) if joined else MOST_AT_ONCE
    scores = np.empty(len(part.config), np.float32)
    alone = early or len(scores) <= FEW
    with torch.inference_mode(), kernel_threads(model, device) if alone else nullcontext():
        for start in range(0, len(scores), chunk):
            piece = part.with_config(part.config[start : start + chunk])
            scores[start : start + chunk] = model(collate([piece], device=device))[0].float().cpu().numpy()
    return scores
