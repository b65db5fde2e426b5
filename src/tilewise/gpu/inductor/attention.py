"""Flexible attention in tilewise's words, and which of its tilings to measure: by the cost model of `attention`.

The family's kernel walks keys as PyTorch's template does, without the caller's score and mask functions: an order of
tilings to try, not a promise of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tilewise.gpu.families.attention import Attention
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.scores import ModelScores, shipped_scores

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_HEADS = (32, 64, 128)  # what the model knows; others are taken for the next
_SHARED_BYTES = 227 * 1024
_SURE = 0.12  # of its time that a tiling has to save, as predicted, to be taken without measuring


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


def likely(problem: Problem, usual: Config, others: Sequence[Config], count: int) -> tuple[list[int], bool]:
    """The places of the `count` tilings that the model likes best, of those that fit; and whether the first of them is
    so far ahead of the usual one that it need not be measured. Then it takes no more registers and shared memory, too:
    nothing tries it before the program does."""
    model = _model()
    fitting = [place for place, config in enumerate(others) if _fits(problem, config)]
    if model is None or not fitting:
        return [], False
    reference = Attention().configs(problem)[0]
    ours, *scores = model.scores(problem, [reference, usual, *(others[place] for place in fitting)])[1:]
    order = np.argsort(scores, kind="stable")
    first = others[fitting[int(order[0])]]
    smaller = all(a <= b for a, b in zip(_needs(problem, first), _needs(problem, usual), strict=True))
    sure = smaller and bool(ours - scores[int(order[0])] > _SURE)
    return [fitting[int(i)] for i in order[:count]], sure


def _needs(problem: Problem, config: Config) -> tuple[int, int]:
    """Numbers a thread holds, scores and output; bytes of shared memory, staged keys and values."""
    head, (rows, keys) = problem.size("head"), (config.size("block_m"), config.size("block_n"))
    staged = 2 * keys * head * 2 * config.size("stages") + rows * head * 2
    return rows * (keys + head) // (32 * config.size("warps")), staged


def _fits(problem: Problem, config: Config) -> bool:
    """Whether registers and shared memory are enough; a stage alone has no pipeline."""
    numbers, staged = _needs(problem, config)
    return 8 <= numbers <= 192 and staged <= _SHARED_BYTES and config.size("stages") > 1
