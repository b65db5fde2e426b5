"""Select tilings of flexible attention to benchmark, ranked by the cost model of the family `attention`.

The family's kernel walks over keys as PyTorch's template does, but without the caller's score and mask functions. Its
model therefore orders tilings well and predicts times badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise.gpu.devices import H200
from tilewise.gpu.families.attention import TritonAttention
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.scores import ModelScores, shipped_scores

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_HEAD_SIZES = (32, 64, 128)  # in the training data; other sizes are rounded up
_CERTAIN_GAIN = 0.12  # predicted share of the runtime above which a tiling is taken without benchmarking


@lru_cache(maxsize=1)
def _model() -> ModelScores | None:
    return shipped_scores("h200", "the H200", "triton")[0]


def attention_problem(node: Any) -> Problem | None:
    """Describe a call of flexible attention in an FX graph; None if the model does not cover it."""
    query, key = (node.args[i].meta["val"] for i in (0, 1))  # (batch, heads, length, head size)
    dtype, head = _DTYPES.get(str(query.dtype)), int(query.shape[-1])
    rounded_head = next((size for size in _HEAD_SIZES if head <= size), None)
    if dtype is None or rounded_head is None or query.shape[1] % key.shape[1]:
        return None
    sizes = {"batch": query.shape[0], "heads": query.shape[1], "kv_heads": key.shape[1], "queries": query.shape[2],
             "keys": key.shape[2]}  # fmt: skip
    return Problem.of("attention", dtype=dtype, head=rounded_head, causal=0, **{k: int(v) for k, v in sizes.items()})


def rank_attention(problem: Problem, default: Config, tilings: Sequence[Config], count: int) -> tuple[list[int], bool]:
    """Rank the tilings that fit; return the indices of the first `count`, and whether the first is certain.

    A certain tiling is predicted so far ahead of the default that it need not be benchmarked. It must also need no more
    registers and shared memory than the default, because nothing tests it before the program runs it.
    """
    model = _model()
    fitting = [i for i, config in enumerate(tilings) if _fits(problem, config)]
    if model is None or not fitting:
        return [], False
    reference = TritonAttention().configs(problem)[0]  # scores are relative to the first configuration
    default_score, *scores = model.scores(problem, [reference, default, *(tilings[i] for i in fitting)])[1:]
    order = np.argsort(scores, kind="stable")
    first = tilings[fitting[int(order[0])]]
    resources = zip(_resources(problem, first), _resources(problem, default), strict=True)
    is_smaller = all(ours <= default_need for ours, default_need in resources)
    is_certain = is_smaller and bool(default_score - scores[int(order[0])] > _CERTAIN_GAIN)
    return [fitting[int(i)] for i in order[:count]], is_certain


def _resources(problem: Problem, config: Config) -> tuple[int, int]:
    """Compute the accumulators per thread (scores and output) and the bytes of staged queries, keys and values."""
    head, (rows, keys) = problem.size("head"), (config.size("block_m"), config.size("block_n"))
    shared_bytes = 2 * keys * head * 2 * config.size("stages") + rows * head * 2
    return rows * (keys + head) // (32 * config.size("warps")), shared_bytes


def _fits(problem: Problem, config: Config) -> bool:
    """Tell whether registers and shared memory suffice; a single stage has no pipeline and is excluded."""
    accumulators, shared_bytes = _resources(problem, config)
    return 8 <= accumulators <= 192 and shared_bytes <= H200.shared_bytes_per_block and config.size("stages") > 1
