"""Select the templates of matrix products and flexible attention that PyTorch's compiler should benchmark.

A template with its parameters becomes a configuration of the kind that the runtime model knows; ATen's call counts as
cuBLAS. The few templates with the shortest predicted time are benchmarked together with ATen. If an earlier process
measured the product, its winner is the only one left; if every template is predicted slower than ATen beyond the
uncertainty of the predictions, ATen is. A list without ATen, because the user excluded it, keeps the few templates.
With a budget of 0 nothing is benchmarked: one template, or ATen, is left.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.gpu.devices import H200
from tilewise.gpu.families.attention import TritonAttention
from tilewise.gpu.products.family import supports_tma
from tilewise.gpu.products.roofline import (
    CUBLAS,
    CUBLAS_FUSED_BIAS,
    SPLIT_K,
    TRANSPOSED,
    Columns,
    Numbers,
    columns,
    is_cublas,
    max_accumulators,
    sustained_rates,
)
from tilewise.gpu.products.runtime_model import RuntimeModel, required_gain
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.scores import ModelScores, shipped_scores

FAMILY = "inductor"
OPERATIONS = ("mm", "addmm", "bmm")
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
# Fields of a configuration and the template parameter that each one comes from.
_PARAMETERS = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "warps": "num_warps",
               "stages": "num_stages", "group": "GROUP_M"}  # fmt: skip
_NO_TILE: Mapping[str, Any] = dict.fromkeys(_PARAMETERS.values(), 0)
_parameter_values = operator.itemgetter(*_PARAMETERS.values())
_TMA_SETUP_SECONDS = 2e-6  # PyTorch's TMA templates write their descriptors on the GPU; our kernels do not
# Limits for benchmarking a template, as a logarithm of the time ratio to ATen.
_MAX_LOSS = 0.08  # templates predicted to lose no more than this are benchmarked
_LONG_SECONDS = 20e-6  # above this, templates must be predicted to win by as much: ATen is hardly ever beaten
_SHORTLIST = 4  # templates that a lock file lists in addition to the choice; arbitrary
_MAX_SCREENED = 256  # templates that the screening network scores; 512 selected the same ones


class Reason(StrEnum):
    """Reasons for a selection; the values are the words that the decision log stores."""

    BENCHMARK = "measured"  # the selected templates are about to be benchmarked
    CERTAIN = "sure"  # the predictions leave no doubt; nothing is benchmarked
    EARLIER_WINNER = "remembered"  # an earlier process measured the product
    SERVICE = "measured elsewhere"  # another machine measured it and the service knows
    PINNED = "pinned"  # nothing may be benchmarked: the lock file's or the predictions' choice
    NO_MODEL = "no choice of tilewise's"  # the model knows none of the templates


@dataclass(frozen=True)
class Selection:
    """The candidates of a list to benchmark, by index, and the reason."""

    indices: tuple[int, ...]
    reason: Reason
    considered: int  # length of the list
    seconds: float  # time that selecting took
    predicted: float | None = None  # microseconds of an unmeasured choice
    candidates: tuple[int, ...] = ()  # what an unmeasured choice was made from: the best few, by their indices


@dataclass(frozen=True)
class Context:
    """Additional facts about a product for the selection of its templates."""

    best: Config | None = None  # the fastest configuration that was measured earlier
    epilogue_seconds: float = 0.0  # time that a template saves by fusing the next operation
    aten_elsewhere: bool = False  # ATen's call is in another list


_NO_CONTEXT = Context()


def problem_of(
    op: str, left: tuple[Sequence[int], Sequence[int]], right: tuple[Sequence[int], Sequence[int]], dtype: str
) -> Problem | None:
    """Describe the product of two operands, each given as (sizes, strides); None if the model does not cover it."""
    if op not in OPERATIONS or dtype not in _DTYPES:
        return None
    (*lead, m, k), (*_, n) = left[0], right[0]
    if min(m, n, k) < 1:
        return None
    # An operand is row-major if its last dimension is contiguous or has a single element.
    layout = "".join("n" if strides[-1] == 1 or sizes[-1] == 1 else "t" for sizes, strides in (left, right))
    words = {"op": op, "dtype": _DTYPES[dtype], "layout": layout, "epilogue": "bias" if op == "addmm" else "none"}
    return Problem.of(FAMILY, batch=lead[0] if lead else 1, m=m, n=n, k=k, **words)


def config_of(template: str, parameters: Mapping[str, Any]) -> Config | None:
    """Convert a template's parameters to a configuration of the model; None for a template that it does not know."""
    if "BLOCK_M" not in parameters:
        return _aten_config(template)
    tma = int("tma" in template)
    values = {field: int(parameters.get(parameter, 1)) for field, parameter in _PARAMETERS.items()}
    return Config({**values, "tma": tma, "persistent": tma, SPLIT_K: 1, TRANSPOSED: 0})


def _aten_config(template: str) -> Config | None:
    """Map an ATen candidate of Inductor to our cuBLAS configuration; None for other templates."""
    if not template.startswith("aten"):
        return None
    return CUBLAS_FUSED_BIAS if "bias" in template else CUBLAS


def epilogue_seconds(problem: Problem) -> float:
    """Estimate the seconds of an elementwise pass over the product's result, which fusing would save."""
    bytes_moved = problem.size("batch") * 4.0 * problem.size("m") * problem.size("n")  # 2 bytes read, 2 written
    rates = sustained_rates(H200)
    return bytes_moved / rates.memory_bandwidth + rates.empty_kernel_seconds


def template_columns(templates: Sequence[str], parameters: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """Convert all candidates to columns of settings (one array per setting); zeros for candidates without a tile."""
    count, uses_tma = len(templates), {name: "tma" in name for name in set(templates)}
    try:
        flat = itertools.chain.from_iterable(map(_parameter_values, parameters))
        values = np.fromiter(flat, np.int32, count * len(_PARAMETERS))
    except KeyError:  # ATen's call and some templates have no tile
        values = np.array([row.get(name, 0) for row in parameters for name in _PARAMETERS.values()], np.int32)
    of = dict(zip(_PARAMETERS, values.reshape(count, -1).T.astype(np.float64, "C"), strict=True))
    tma = np.fromiter(map(uses_tma.__getitem__, templates), np.float64, count)
    ones, zeros = np.ones(count), np.zeros(count)
    of["group"] = np.maximum(of["group"], 1)
    return {**of, "tma": tma, "persistent": tma, "split_k": ones, "transposed": zeros, "stream_k": zeros}


def fits(of: Columns, accumulator_limit: int = 128) -> npt.NDArray[np.bool_]:
    """Tell, for each candidate, whether it compiles without spilling (at most this many accumulators per thread)."""
    area = of["block_m"] * of["block_n"]
    accumulators = area / np.maximum(32 * of["warps"], 1)  # per thread
    shared = (of["block_m"] + of["block_n"]) * of["block_k"] * 2 * of["stages"] + of["persistent"] * area
    in_registers = (accumulators >= 4) & (accumulators <= accumulator_limit)
    return np.asarray((of["stages"] >= 2) & in_registers & (shared <= H200.shared_bytes_per_block), np.bool_)


def select_templates(
    model: RuntimeModel,
    problem: Problem,
    choices: tuple[Sequence[str], Sequence[Mapping[str, Any]]],
    budget: int,
    context: Context = _NO_CONTEXT,
) -> Selection:
    """Select at most `budget` templates, and ATen, from candidates (template names, parameters) by predicted time.

    With a budget of 0 one choice is selected by the predictions, or none if it is ATen in another list.
    """
    start = time.perf_counter()
    templates, parameters = choices
    # Lists have up to two thousand choices, so that names are tested once each and parameters read as one array.
    aten_names = {name for name in set(templates) if name.startswith("aten")}
    aten = np.flatnonzero(np.fromiter(map(aten_names.__contains__, templates), np.bool_, len(templates))).tolist()
    rows = list(parameters)
    for i in aten:  # a tile of zeros, so that all choices have the same parameters
        rows[i] = _NO_TILE
    of = template_columns(templates, rows)
    best = _index_of(context.best, of, {_aten_config(templates[i]): i for i in aten})
    usable = _predictable_candidates(problem, of)
    # An earlier measurement decides alone; ATen may have won in a list that does not contain it.
    if best is not None:
        indices, reason = [best], Reason.EARLIER_WINNER
    elif context.aten_elsewhere and context.best is not None and is_cublas(context.best):
        indices, reason = [], Reason.EARLIER_WINNER
    elif not len(usable):
        indices, reason = list(range(len(templates))), Reason.NO_MODEL
    else:
        # Without ATen one of the templates has to run, however slow.
        advantage = context.epilogue_seconds if aten or context.aten_elsewhere else math.inf
        if not budget:
            usable_columns = {name: column[usable] for name, column in of.items()}
            best_template, candidates, microseconds = _choose_unmeasured(model, problem, usable_columns, advantage)
            indices = aten[:1] if best_template is None else [int(usable[best_template])]
            return Selection(
                tuple(indices), Reason.PINNED, len(templates), time.perf_counter() - start,
                predicted=microseconds, candidates=(*aten[:1], *(int(usable[i]) for i in candidates)),
            )  # fmt: skip
        ranking = _rank_candidates(model, problem, {name: column[usable] for name, column in of.items()}, advantage)
        indices = [*aten, *(int(usable[i]) for i in ranking[:budget])]
        reason = Reason.BENCHMARK if len(ranking) else Reason.CERTAIN
    return Selection(tuple(indices), reason, len(templates), time.perf_counter() - start)


def _predictable_candidates(problem: Problem, of: Columns) -> npt.NDArray[np.intp]:
    """Return the indices of candidates that the model predicts reliably.

    PyTorch's template for batched products does so with four warps and at least three stages. With other settings it
    differs from the kernels that the model was trained on by more than those differ from each other.
    """
    fitting = fits(of, max_accumulators(problem))
    usual = fitting & (of["warps"] == 4) & (of["stages"] >= 3)
    return np.flatnonzero(usual if problem.size("batch") > 1 and usual.any() else fitting)


@dataclass(frozen=True)
class _Comparison:
    """Candidates ordered by predicted time, and the fastest compared with ATen."""

    order: npt.NDArray[np.intp]
    seconds: Numbers
    aten_seconds: float
    gain: float  # of the first template over ATen, a logarithm
    deviation: float  # of the gain


def _compare_with_aten(model: RuntimeModel, problem: Problem, of: Columns, advantage: float) -> _Comparison:
    """Predict the times of all candidates and ATen; `advantage` is the seconds that fusing the epilogue saves."""
    batch = problem.size("batch")
    kernels, aten = model.predict_kernels(problem, of, batch, _MAX_SCREENED), model.predict_cublas(problem, batch)
    # PyTorch's TMA templates pay for their descriptors, which the model's kernels do not.
    seconds = kernels.seconds + _TMA_SETUP_SECONDS * of["tma"]
    order = np.argsort(seconds, kind="stable")
    # The errors of both predictions are independent, so their deviations add up in squares.
    deviation = math.hypot(kernels.deviation[order[0]], aten.deviation[0])
    aten_seconds = float(aten.seconds[0])
    gain = math.log((aten_seconds + advantage) / seconds[order[0]])
    return _Comparison(order, seconds, aten_seconds, gain, deviation)


def _rank_candidates(model: RuntimeModel, problem: Problem, of: Columns, advantage: float) -> npt.NDArray[np.intp]:
    """Order candidates by predicted time; empty if even the fastest is certainly slower than ATen.

    Some products are always ranked, because cuBLAS's time is not predicted well enough: batched ones, those of one row
    or one column, and those whose rows are not whole 16-byte loads.
    """
    compared = _compare_with_aten(model, problem, of, advantage)
    # A short product is worth a benchmark even if it may lose a little; a long one only if it is expected to win.
    required = -max(_MAX_LOSS, compared.deviation) if compared.aten_seconds < _LONG_SECONDS else _MAX_LOSS
    is_single_row = min(problem.size("m"), problem.size("n")) == 1
    is_uncertain = problem.size("batch") > 1 or is_single_row or not supports_tma(problem)
    return compared.order if is_uncertain or compared.gain > required else compared.order[:0]


def _choose_unmeasured(
    model: RuntimeModel, problem: Problem, of: Columns, advantage: float
) -> tuple[int | None, list[int], float]:
    """Choose by prediction: (template's index or None for ATen, indices of the best few, microseconds)."""
    compared = _compare_with_aten(model, problem, of, advantage)
    shortlist = [int(index) for index in compared.order[:_SHORTLIST]]
    if compared.gain > required_gain(supports_tma(problem), compared.deviation):
        return shortlist[0], shortlist, float(compared.seconds[shortlist[0]]) * 1e6
    return None, shortlist, compared.aten_seconds * 1e6


def choose_among(
    model: RuntimeModel, problem: Problem, templates: Sequence[Config], fuses: bool
) -> tuple[Config, float]:
    """Choose between `templates` and ATen by predicted time; return the choice and its microseconds.

    `fuses` tells whether a template would fuse an elementwise epilogue.
    """
    advantage = epilogue_seconds(problem) if fuses else 0.0
    best, _, microseconds = _choose_unmeasured(model, problem, columns(templates), advantage)
    return (CUBLAS if best is None else templates[best]), microseconds


def _index_of(config: Config | None, of: Columns, aten: Mapping[Config | None, int]) -> int | None:
    """Return the position of a configuration among the candidates; None if it is not one of them."""
    if config is None or is_cublas(config):
        return aten.get(config) if config is not None else None
    # Compare all choices field by field; the columns hold every setting that distinguishes them.
    equal = np.ones(len(of["tma"]), np.bool_)
    for name in (*_PARAMETERS, "tma"):
        equal &= of[name] == config.get(name, 0)
    matches = np.flatnonzero(equal)
    return int(matches[0]) if len(matches) else None


# Epilogues: fusing elementwise operations into a template saves a pass over the result. Those in front of a reduction
# are fused into the reduction's kernel instead, so they save nothing here.
_VIEW_OPS = frozenset({"view", "_unsafe_view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "clone"})
_REDUCTION_OPS = frozenset({"var_mean", "mean", "sum", "amax", "max", "amin", "var", "_softmax", "native_layer_norm"})
_MAX_NODES = 24  # nodes to visit; an arbitrary bound on the search


def has_fusible_epilogue(node: Any) -> bool:
    """Tell whether the node of an FX graph is followed by elementwise operations and not by a reduction."""
    # Breadth-first over the users; views are followed because they do not stop a fusion.
    queue, visits, any_elementwise = list(getattr(node, "users", ())), 0, False
    while queue and visits < _MAX_NODES:
        user, visits = queue.pop(0), visits + 1
        name = str(getattr(user.target, "overloadpacket", "")).rpartition(".")[2]
        if name in _REDUCTION_OPS:
            return False
        elementwise = any(getattr(tag, "name", "") == "pointwise" for tag in getattr(user.target, "tags", ()))
        any_elementwise |= elementwise
        if elementwise or name in _VIEW_OPS:
            queue += list(user.users)
    return any_elementwise


# Flexible attention, ranked by the cost model of the family `attention`. The family's kernel walks over keys as
# PyTorch's template does, but without the caller's score and mask functions, so its model orders tilings well and
# predicts times badly.
_HEAD_SIZES = (32, 64, 128)  # in the training data; other sizes are rounded up
_CERTAIN_GAIN = 0.12  # predicted share of the runtime above which a tiling is taken without benchmarking


@lru_cache(maxsize=1)
def _model() -> ModelScores | None:
    return shipped_scores("h200", "the H200", "triton")[0]


def attention_problem(node: Any) -> Problem | None:
    """Describe a flexible-attention node of an FX graph as a problem; None if the model does not cover it."""
    query, key = (node.args[i].meta["val"] for i in (0, 1))  # (batch, heads, length, head size)
    dtype, head = _DTYPES.get(str(query.dtype)), int(query.shape[-1])
    rounded_head = next((size for size in _HEAD_SIZES if head <= size), None)
    if dtype is None or rounded_head is None or query.shape[1] % key.shape[1]:
        return None
    sizes = {"batch": query.shape[0], "heads": query.shape[1], "kv_heads": key.shape[1], "queries": query.shape[2],
             "keys": key.shape[2]}  # fmt: skip
    return Problem.of("attention", dtype=dtype, head=rounded_head, causal=0, **{k: int(v) for k, v in sizes.items()})


def rank_attention(problem: Problem, default: Config, tilings: Sequence[Config], count: int) -> tuple[list[int], bool]:
    """Rank the tilings that fit; return the indices of the best `count`, and whether the first needs no benchmark.

    It needs none if it is predicted far ahead of the default and uses no more registers and shared memory than that,
    because nothing tests it before the program runs it.
    """
    model = _model()
    fitting = [i for i, config in enumerate(tilings) if _tiling_fits(problem, config)]
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
    """Estimate a tiling's accumulators per thread (scores and output) and its bytes of shared memory."""
    head, (rows, keys) = problem.size("head"), (config.size("block_m"), config.size("block_n"))
    shared_bytes = 2 * keys * head * 2 * config.size("stages") + rows * head * 2
    return rows * (keys + head) // (32 * config.size("warps")), shared_bytes


def _tiling_fits(problem: Problem, config: Config) -> bool:
    """Tell whether a tiling fits into registers and shared memory; single-stage tilings are excluded."""
    accumulators, shared_bytes = _resources(problem, config)
    return 8 <= accumulators <= 192 and shared_bytes <= H200.shared_bytes_per_block and config.size("stages") > 1
