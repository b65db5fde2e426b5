"""PyTorch's products and templates in tilewise's words, and which of the templates to keep; nothing of PyTorch in here.

A template with its parameters becomes a configuration of the kind that the model of runtimes knows; ATen's call is the
library. Of a list, the few with the shortest predicted time are kept and measured beside ATen. Where an earlier process
measured the product the winner alone is kept, and where the model is sure that no template is faster, ATen alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.tune.choose.runtimes import Runtimes
from tilewise.tune.families.triton.product import LIBRARY
from tilewise.tune.problem import Config, Problem

FAMILY = "inductor"
OPERATIONS = ("mm", "addmm", "bmm")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_SHARED_BYTES = 227 * 1024
_SURE = 1.12  # ATen alone, where the best template is predicted to take so much longer


@dataclass(frozen=True)
class Kept:
    """Which choices of a list stay, by their places, and why: measured, sure, remembered, or none of tilewise's."""

    places: tuple[int, ...]
    why: str
    considered: int
    seconds: float


def problem_of(
    op: str, left: tuple[Sequence[int], Sequence[int]], right: tuple[Sequence[int], Sequence[int]], dtype: str
) -> Problem | None:
    """The product of two operands given as (sizes, strides); None where tilewise has no model for it."""
    if op not in OPERATIONS or dtype not in _DTYPES:
        return None
    (*lead, m, k), (*_, n) = left[0], right[0]
    if min(m, n, k) < 1:
        return None
    layout = "".join("n" if strides[-1] == 1 or sizes[-1] == 1 else "t" for sizes, strides in (left, right))
    words = {"op": op, "dtype": _DTYPES[dtype], "layout": layout, "epilogue": "bias" if op == "addmm" else "none"}
    return Problem.of(FAMILY, batch=lead[0] if lead else 1, m=m, n=n, k=k, **words)


def config_of(template: str, parameters: Mapping[str, Any]) -> Config | None:
    """A template's parameters as a configuration; ATen's as the library; None for a template nobody knows here."""
    if "BLOCK_M" not in parameters:
        return LIBRARY if template.startswith("aten") else None
    tma = int("tma" in template)
    names = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "warps": "num_warps",
             "stages": "num_stages", "group": "GROUP_M"}  # fmt: skip
    values = {name: int(parameters.get(given, 1)) for name, given in names.items()}
    return Config({**values, "tma": tma, "persistent": tma, "parts": 1, "swapped": 0, "template": 1})


def fits(config: Config) -> bool:
    """Whether a template can be expected to compile, and to run without spilling; known before anything is built."""
    if "library" in config:
        return True
    rows, cols, depth = config.size("block_m"), config.size("block_n"), config.size("block_k")
    stages, threads = config.size("stages"), 32 * config.size("warps")
    shared = (rows + cols) * depth * 2 * stages + config.size("persistent") * rows * cols
    return stages >= 2 and 4 <= rows * cols // threads <= 128 and shared <= _SHARED_BYTES


def keep(
    model: Runtimes, problem: Problem, configs: Sequence[Config | None], budget: int, best: Config | None = None
) -> Kept:
    """The places to keep of a list of choices; `best` is what an earlier process measured as the fastest."""
    start = time.perf_counter()
    library = [place for place, config in enumerate(configs) if config == LIBRARY]
    if best is not None and best in configs:
        return Kept((configs.index(best),), "remembered", len(configs), time.perf_counter() - start)
    known = [place for place, config in enumerate(configs) if config is not None and config != LIBRARY and fits(config)]
    if not library or not known:
        return Kept(tuple(range(len(configs))), "no choice of tilewise's", len(configs), time.perf_counter() - start)
    asked = tuple(config for place in known if (config := configs[place]) is not None)
    predicted = model.predict(problem, (*asked, LIBRARY), problem.size("batch"))
    order = np.argsort(predicted.seconds[:-1], kind="stable")
    ahead = predicted.seconds[order[0]] / predicted.seconds[-1]
    doubt = 2 * (predicted.deviation[order[0]] + predicted.deviation[-1])
    sure = ahead > _SURE + doubt
    places = library if sure else [*library, *(known[int(i)] for i in order[:budget])]
    return Kept(tuple(places), "sure" if sure else "measured", len(configs), time.perf_counter() - start)
