"""PyTorch's products and templates in tilewise's words, and which of the templates to keep; nothing of PyTorch in here.

A template with its parameters becomes a configuration of the kind that the model of runtimes knows; ATen's call is the
library. Of a list, the few with the shortest predicted time are kept and measured beside ATen. Where an earlier process
measured the product the winner alone is kept; where no template is ahead by more than the predictions' doubt, ATen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.tune.choose.products import DOUBTS, MARGIN
from tilewise.tune.families.triton.product import LIBRARY
from tilewise.tune.families.triton.roofline import Numbers, most_accumulators
from tilewise.tune.families.triton.runtimes import Runtimes
from tilewise.tune.problem import Config, Problem

FAMILY = "inductor"
OPERATIONS = ("mm", "addmm", "bmm")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_PARAMETERS = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "warps": "num_warps",
               "stages": "num_stages", "group": "GROUP_M"}  # fmt: skip
_SHARED_BYTES = 227 * 1024
_DESCRIPTORS = 2e-6  # seconds that templates with descriptors take to write them, which tilewise's own kernels do not


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
    values = {name: int(parameters.get(given, 1)) for name, given in _PARAMETERS.items()}
    return Config({**values, "tma": tma, "persistent": tma, "parts": 1, "swapped": 0})


def columns_of(templates: Sequence[str], parameters: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """What `config_of` says of one, for all choices at once; a choice that has no tile has zeros."""
    found = {name: np.array([of.get(given, 0) for of in parameters], np.float64) for name, given in _PARAMETERS.items()}
    tma = np.array([float("tma" in template) for template in templates])
    ones = np.ones(len(templates))
    found["group"] = np.maximum(found["group"], 1)
    return {**found, "tma": tma, "persistent": tma, "parts": ones, "swapped": 0 * ones,
            "tail": 0 * ones}  # fmt: skip


def fits(of: Mapping[str, Numbers], most: int = 128) -> npt.NDArray[np.bool_]:
    """Which templates can be expected to compile and to run without spilling; `most` sums a thread."""
    area = of["block_m"] * of["block_n"]
    per_thread = area / np.maximum(32 * of["warps"], 1)
    shared = (of["block_m"] + of["block_n"]) * of["block_k"] * 2 * of["stages"] + of["persistent"] * area
    found = (of["stages"] >= 2) & (per_thread >= 4) & (per_thread <= most) & (shared <= _SHARED_BYTES)
    return np.asarray(found, np.bool_)


def keep(
    model: Runtimes,
    problem: Problem,
    choices: tuple[Sequence[str], Sequence[Mapping[str, Any]]],
    budget: int,
    best: Config | None = None,
) -> Kept:
    """The places to keep of choices (templates' names, their parameters); `best` is what was measured before."""
    start = time.perf_counter()
    templates, parameters = choices
    of = columns_of(templates, parameters)
    library = [place for place, name in enumerate(templates) if name.startswith("aten")]
    remembered = _place_of(best, of, library)
    known = np.flatnonzero(fits(of, most_accumulators(problem)))
    if remembered is not None:
        places, why = [remembered], "remembered"
    elif not library or not len(known):
        places, why = list(range(len(templates))), "no choice of tilewise's"
    else:
        batch = problem.size("batch")
        found = model.kernels(problem, {name: column[known] for name, column in of.items()}, batch)
        aten = model.library(problem, batch)
        seconds = found.seconds + _DESCRIPTORS * of["tma"][known]
        order = np.argsort(seconds, kind="stable")
        # A library call is timed with its host's time in it, and loses to templates it beats in a program: where none
        # is ahead for sure, none is tried. Of batched products the library's time is not known well enough.
        doubt = math.hypot(found.deviation[order[0]], aten.deviation[0])
        gain = math.log(aten.seconds[0] / seconds[order[0]])
        sure = batch == 1 and gain < MARGIN + DOUBTS * doubt
        places = library if sure else [*library, *(int(known[i]) for i in order[:budget])]
        why = "sure" if sure else "measured"
    return Kept(tuple(places), why, len(templates), time.perf_counter() - start)


def _place_of(best: Config | None, of: Mapping[str, Numbers], library: Sequence[int]) -> int | None:
    """Where a configuration that was the fastest before stands in a list; None where it does not."""
    if best is None:
        return None
    if "library" in best:
        return library[0] if library else None
    same = np.ones(len(of["tma"]), np.bool_)
    for name in (*_PARAMETERS, "tma"):
        same &= of[name] == best.get(name, 0)
    found = np.flatnonzero(same)
    return int(found[0]) if len(found) else None
