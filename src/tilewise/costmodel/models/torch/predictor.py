"""Scoring with a torch model, a chunk of configurations at a time, so that memory stays bounded.

Models score configurations independently of each other, so chunks change nothing but rounding.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.models.torch.fused import kernel_threads
from tilewise.costmodel.models.torch.ragged import collate

CHUNK_PAIRS = 1 << 13  # (node, configuration) pairs of an early join that stay in a CPU's cache
GPU_CHUNK_FACTOR = 64  # a GPU needs larger chunks to be busy
MAX_CHUNK = 4096  # configurations
MIN_CHUNK = 16
SINGLE_THREAD_CONFIGS = 1024  # one thread of torch scores this many configurations as fast as several threads


def score_inputs(model: nn.Module, inputs: ModelInputs, device: str = "cpu") -> npt.NDArray[np.float32]:
    """Return one score per configuration; lower is faster."""
    pairs = CHUNK_PAIRS if device == "cpu" else CHUNK_PAIRS * GPU_CHUNK_FACTOR
    early = getattr(model, "early", False)
    # The compiled kernels never hold all (node, configuration) pairs, so they need no small chunks.
    materializes_pairs = early and not (device == "cpu" and getattr(model, "compiled", False))
    chunk = min(MAX_CHUNK, max(MIN_CHUNK, pairs // max(1, len(inputs.node)))) if materializes_pairs else MAX_CHUNK
    scores = np.empty(len(inputs.config), np.float32)
    # Waking torch's threads costs more than it saves on small lists.
    single_thread = early or len(scores) <= SINGLE_THREAD_CONFIGS
    with torch.inference_mode(), kernel_threads(model, device) if single_thread else nullcontext():
        for start in range(0, len(scores), chunk):
            chunk_inputs = inputs.with_config(inputs.config[start : start + chunk])
            scores[start : start + chunk] = model(collate([chunk_inputs], device=device))[0].float().cpu().numpy()
    return scores
