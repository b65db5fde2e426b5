"""Flexible attention in tilewise's words, and which of its tilings to measure: by the cost model of `attention`.

The family's kernel walks keys as PyTorch's template does, without the caller's score and mask functions: an order of
tilings to try, not a promise of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise.tune.choose.scores import ModelScores, shipped_scores
from tilewise.tune.families.triton.attention import Attention
from tilewise.tune.problem import Config, Problem

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_HEADS = (32, 64, 128)  # what the model knows; others are taken for the next
_SHARED_BYTES = 227 * 1024


@lru_cache(maxsize=1)
def _model() -> ModelScores | None:
    return shipped_scores("h200", "the H200", "triton")[0]


def attention_problem(node: Any) -> Problem | None:
    """The problem of a call of flexible attention in the compiler's graph; None where the model has nothing to say."""
    query, key = (node.args[place].meta["val"] for place in (0, 1))  # (batch, heads, length, head)
    dtype, head = _DTYPES.get(str(query.dtype)), int(query.shape[-1])
    known = next((size for size in _HEADS if head <= size), None)
    if dtype is None or known is None or query.shape[1] % key.shape[1]:
        return None
    sizes = {"batch": query.shape[0], "heads": query.shape[1], "kv_heads": key.shape[1], "queries": query.shape[2],
             "keys": key.shape[2]}  # fmt: skip
    return Problem.of("attention", dtype=dtype, head=known, causal=0, **{k: int(v) for k, v in sizes.items()})


def likely(problem: Problem, configs: Sequence[Config], count: int) -> list[int]:
    """The places of the `count` tilings that the model likes best, of those that fit."""
    model = _model()
    usual = Attention().configs(problem)
    fitting = [place for place, config in enumerate(configs) if _fits(problem, config)]
    if model is None or not fitting:
        return []
    scores = model.scores(problem, [usual[0], *(configs[place] for place in fitting)])[1:]
    return [fitting[int(i)] for i in np.argsort(scores, kind="stable")[:count]]


def _fits(problem: Problem, config: Config) -> bool:
    """Scores and output in registers, staged keys and values in shared memory; a stage alone has no pipeline."""
    head, (rows, keys) = problem.size("head"), (config.size("block_m"), config.size("block_n"))
    per_thread = rows * (keys + head) // (32 * config.size("warps"))
    staged = 2 * keys * head * 2 * config.size("stages") + rows * head * 2
    return 8 <= per_thread <= 192 and staged <= _SHARED_BYTES and config.size("stages") > 1
