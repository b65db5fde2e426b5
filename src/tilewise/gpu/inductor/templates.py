"""PyTorch's products and templates in tilewise's words, and which of the templates to keep; nothing of PyTorch in here.

A template with its parameters becomes a configuration of the kind that the model of runtimes knows; ATen's call is the
library. Of a list, the few with the shortest predicted time are kept and measured beside ATen. Where an earlier process
measured the product the winner alone is kept; where every template is behind beyond the predictions' doubt, ATen. A
list without ATen, which its user left out, keeps the same few.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.gpu.products.family import LIBRARY
from tilewise.gpu.products.roofline import Numbers, most_accumulators
from tilewise.gpu.products.runtimes import Runtimes
from tilewise.store.problem import Config, Problem

FAMILY = "inductor"
OPERATIONS = ("mm", "addmm", "bmm")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
_PARAMETERS = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "warps": "num_warps",
               "stages": "num_stages", "group": "GROUP_M"}  # fmt: skip
_NO_TILE: Mapping[str, Any] = dict.fromkeys(_PARAMETERS.values(), 0)
_read = operator.itemgetter(*_PARAMETERS.values())
_SHARED_BYTES = 227 * 1024
_BEHIND = 0.08  # a template predicted to lose no more than so much is still worth a look
_LONG = 20e-6  # seconds of a product from which on it must be predicted to win that much: ATen is hardly ever beaten
_MEMORY, _PASS = 4.3e12, 1.5e-6  # bytes a second, and seconds of a kernel that does next to nothing
BY_BIAS = Config.of(
    library=2
)  # ATen's product with a bias that is one row, in one kernel; otherwise the bias is copied
_MOST_RANKED = 256  # templates that a network sees; with twice as many the same ones were kept
NO_CHOICE = "no choice of tilewise's"
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
        return _library(template)
    tma = int("tma" in template)
    values = {name: int(parameters.get(given, 1)) for name, given in _PARAMETERS.items()}
    return Config({**values, "tma": tma, "persistent": tma, "parts": 1, "swapped": 0})


def _library(template: str) -> Config | None:
    if not template.startswith("aten"):
        return None
    return BY_BIAS if "bias" in template else LIBRARY


def pass_seconds(problem: Problem) -> float:
    """What a pass over the result costs, which a template saves where it takes the next operation in."""
    return problem.size("batch") * 4.0 * problem.size("m") * problem.size("n") / _MEMORY + _PASS


def columns_of(templates: Sequence[str], parameters: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """What `config_of` says of one, for all choices at once; a choice that has no tile has zeros."""
    count, wide = len(templates), {name: "tma" in name for name in set(templates)}
    try:
        values = np.fromiter(itertools.chain.from_iterable(map(_read, parameters)), np.int32, count * len(_PARAMETERS))
    except KeyError:  # ATen's call and some templates have no tile
        values = np.array([given.get(name, 0) for given in parameters for name in _PARAMETERS.values()], np.int32)
    found = dict(zip(_PARAMETERS, values.reshape(count, -1).T.astype(np.float64, "C"), strict=True))
    tma = np.fromiter(map(wide.__getitem__, templates), np.float64, count)
    ones, zeros = np.ones(count), np.zeros(count)
    found["group"] = np.maximum(found["group"], 1)
    return {**found, "tma": tma, "persistent": tma, "parts": ones, "swapped": zeros, "tail": zeros}


def fits(of: Mapping[str, Numbers], most: int = 128) -> npt.NDArray[np.bool_]:
    """Which templates can be expected to compile and to run without spilling; `most` sums a thread."""
    area = of["block_m"] * of["block_n"]
    per_thread = area / np.maximum(32 * of["warps"], 1)
    shared = (of["block_m"] + of["block_n"]) * of["block_k"] * 2 * of["stages"] + of["persistent"] * area
    found = (of["stages"] >= 2) & (per_thread >= 4) & (per_thread <= most) & (shared <= _SHARED_BYTES)
    return np.asarray(found, np.bool_)


@dataclass(frozen=True)
class Asked:
    """What is known beside the list: the fastest of an earlier process, what a template saves by taking the next
    operation in, and whether ATen's call stands in a list of its own."""

    best: Config | None = None
    saved: float = 0.0
    library_elsewhere: bool = False


NOTHING = Asked()


def keep(
    model: Runtimes,
    problem: Problem,
    choices: tuple[Sequence[str], Sequence[Mapping[str, Any]]],
    budget: int,
    asked: Asked = NOTHING,
) -> Kept:
    """The places to keep of choices (templates' names, their parameters)."""
    start = time.perf_counter()
    templates, parameters = choices
    atens = {name for name in set(templates) if name.startswith("aten")}
    library = np.flatnonzero(np.fromiter(map(atens.__contains__, templates), np.bool_, len(templates))).tolist()
    of = columns_of(templates, [*parameters] if not library else _with_tiles(parameters, library))
    remembered = _place_of(asked.best, of, {_library(templates[place]): place for place in library})
    known = _known(problem, of)
    if remembered is not None:
        places, why = [remembered], "remembered"
    elif asked.library_elsewhere and asked.best is not None and "library" in asked.best:
        places, why = [], "remembered"
    elif not len(known):
        places, why = list(range(len(templates))), NO_CHOICE
    else:
        saved = asked.saved if library or asked.library_elsewhere else math.inf  # without ATen a template has to do
        promising = _promising(model, problem, {name: column[known] for name, column in of.items()}, saved)
        places = [*library, *(int(known[i]) for i in promising[:budget])]
        why = "measured" if len(promising) else "sure"
    return Kept(tuple(places), why, len(templates), time.perf_counter() - start)


def _known(problem: Problem, of: Mapping[str, Numbers]) -> npt.NDArray[np.intp]:
    """The places of templates that can be expected to run well. PyTorch's template for batches does so with four warps
    and three stages or more; with others it is further from the kernels that the model learned from than they are from
    each other."""
    fitting = fits(of, most_accumulators(problem))
    usual = fitting & (of["warps"] == 4) & (of["stages"] >= 3)
    return np.flatnonzero(usual if problem.size("batch") > 1 and usual.any() else fitting)


def _with_tiles(parameters: Sequence[Mapping[str, Any]], library: Sequence[int]) -> list[Mapping[str, Any]]:
    """ATen's calls with a tile of nothing, so that all can be read alike."""
    found = list(parameters)
    for place in library:
        found[place] = _NO_TILE
    return found


def _promising(model: Runtimes, problem: Problem, of: Mapping[str, Numbers], saved: float) -> npt.NDArray[np.intp]:
    """Templates by their predicted time; none where the first is behind ATen beyond doubt. Of batched products the
    library's time is not known well enough for that."""
    batch = problem.size("batch")
    found, aten = model.kernels(problem, of, batch, _MOST_RANKED), model.library(problem, batch)
    seconds = found.seconds + _DESCRIPTORS * of["tma"]
    order = np.argsort(seconds, kind="stable")
    doubt = math.hypot(found.deviation[order[0]], aten.deviation[0])
    gain = math.log((aten.seconds[0] + saved) / seconds[order[0]])
    needed = -max(_BEHIND, doubt) if aten.seconds[0] < _LONG else _BEHIND
    return order if batch > 1 or gain > needed else order[:0]


def _place_of(best: Config | None, of: Mapping[str, Numbers], library: Mapping[Config | None, int]) -> int | None:
    """Where a configuration that was the fastest before stands in a list; None where it does not."""
    if best is None or "library" in best:
        return library.get(best) if best is not None else None
    same = np.ones(len(of["tma"]), np.bool_)
    for name in (*_PARAMETERS, "tma"):
        same &= of[name] == best.get(name, 0)
    found = np.flatnonzero(same)
    return int(found[0]) if len(found) else None
