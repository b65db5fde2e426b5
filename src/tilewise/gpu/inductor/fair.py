"""What PyTorch's compiler is about to choose among, timed as it runs in a program and checked: in turns, by graphs.

The compiler times each choice by itself with the host's part of its call, which costs ATen some microseconds more than
a template and hides behind other work in a program; small products are then given to templates that are slower. Here
all choices multiply the same numbers, launches follow each other without the host, weights come from memory as they do
in a model, and a result that is not ATen's counts as no result. Flexible attention is timed with half of the blocks of
keys, as a causal mask leaves them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TURNS, _UNIT_MS, _FEW, _CACHE_BYTES, _MOST_SETS = 7, 0.2, 4, 128 << 20, 12
# What a template has to be faster by than ATen's call, a share of it and milliseconds: turns differ by less than the
# share, and of calls of some microseconds templates timed 0.2 of one faster here were hardly faster in a program.
_AHEAD, _AHEAD_MS = 0.02, 1e-4
Run = Callable[[], Any]


@dataclass(frozen=True)
class Ready:
    """A choice that can be started: once for each set of operands, and what it computed of the first."""

    choice: Any
    runs: tuple[Run, ...]
    result: Any
    library: bool


def retime(torch: Any, timings: Mapping[Any, float]) -> dict[Any, float]:
    """Milliseconds of what the compiler could run, infinite for a wrong result; empty for fewer than two choices."""
    choices = [choice for choice, ms in timings.items() if 0 < ms < math.inf]
    if len(choices) < 2 or any(getattr(choice, "bmreq", None) is None for choice in choices):
        return {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        ready = _prepare(torch, choices)
        stream.synchronize()
        expected = _expected(torch, ready)
        right = [one for one in ready if expected is None or near(torch, one.result, expected)]
        spent = in_turns(torch, right)
    return _usual_first({one.choice: spent.get(one.choice, math.inf) for one in ready}, ready)


def _expected(torch: Any, ready: Sequence[Ready]) -> Any:
    """What every choice has to compute: what ATen's call does, or the usual tiling, which comes first."""
    library = next((one.result for one in ready if one.library), None)
    if library is not None:
        return library
    return ready[0].result if torch.isfinite(ready[0].result).all() else None


def _usual_first(spent: dict[Any, float], ready: Sequence[Ready]) -> dict[Any, float]:
    """A template that is not clearly ahead of ATen, or of the first where there is no ATen, counts as just behind."""
    usual = {one.choice for one in ready if one.library} or {ready[0].choice}
    least = min(spent[choice] for choice in usual)
    needed = least * (1 - _AHEAD) - _AHEAD_MS
    behind = {one for one, ms in spent.items() if one not in usual and needed < ms <= least}
    return {choice: least * 1.001 if choice in behind else ms for choice, ms in spent.items()}


def near(torch: Any, result: Any, expected: Any) -> bool:
    """Whether two results in 16 bits differ by no more than rounding, in every element."""
    result, expected = result.float(), expected.float()
    bound = (expected.abs() + expected.square().mean().sqrt()) / 64
    return bool(((result - expected).abs() <= bound).all())


def _prepare(torch: Any, choices: Sequence[Any]) -> list[Ready]:
    metas = [choice.bmreq.input_tensor_meta for choice in choices]
    operands = _storages(torch, metas)
    found = []
    for choice, wanted in zip(choices, metas, strict=True):
        request, library = choice.bmreq, getattr(choice.bmreq, "callable_path", None) is not None
        meta, runs, result = request.output_tensor_meta, [], None
        for number, storages in enumerate(operands):
            inputs = [
                torch.as_strided(storage, one.sizes, one.strides, one.offset)
                for storage, one in zip(storages, wanted, strict=True)
            ]
            out = torch.empty(_length(meta), dtype=meta.dtype, device=meta.device).fill_(math.nan)
            out = torch.as_strided(out, meta.sizes, meta.strides, meta.offset)
            run = request.make_run_fn(*inputs, out=out)
            given = run()
            if number == 0:
                result = out if getattr(request, "has_out_variant", True) else given
            runs.append(run)
        found.append(Ready(choice, tuple(runs), result, library))
    return found


def _length(meta: Any) -> int:
    return int(
        meta.offset + 1 + sum((size - 1) * stride for size, stride in zip(meta.sizes, meta.strides, strict=True))
    )


def _storages(torch: Any, metas: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Random numbers for each operand, long enough for every choice; several of the last, so that no cache holds it."""
    lengths = [max(_length(of[place]) for of in metas) for place in range(len(metas[0]))]
    generator = torch.Generator(device=metas[0][0].device).manual_seed(0)
    kinds = [(one.dtype, one.device) for one in metas[0]]
    lists = _block_lists(torch, metas[0])

    def made(place: int) -> Any:
        dtype, device = kinds[place]
        if place in lists:
            return lists[place].to(device)
        return torch.randn(lengths[place], generator=generator, dtype=dtype, device=device)

    first = [made(place) for place in range(len(lengths))]
    last = max(1, lengths[-1] * first[-1].element_size())
    sets = 1 if lists else min(_MOST_SETS, max(1, math.ceil(_CACHE_BYTES / last)))
    return [first, *([*first[:-1], made(len(first) - 1)] for _ in range(sets - 1))]


def _block_lists(torch: Any, metas: Sequence[Any]) -> dict[int, Any]:
    """What stands in attention's lists of blocks of keys: how many for each block of queries, and which. As under a
    causal mask, a block of each row is cut by the mask and half of them are whole; without whole ones, all are cut."""
    places = [place for place, one in enumerate(metas) if not one.dtype.is_floating_point]
    pairs = list(zip(places[::2], places[1::2], strict=False))
    if len(places) not in (0, 2, 4) or any(len(metas[i].sizes) + 1 != len(metas[j].sizes) for i, j in pairs):
        raise ValueError("operands of whole numbers that are no lists of blocks")
    found = {}
    shares = (0.0, 0.5) if len(pairs) > 1 else (1.0,)
    for (counts, which), share in zip(pairs, shares, strict=False):
        blocks = int(metas[which].sizes[-1])
        found[counts] = torch.full((math.prod(metas[counts].sizes),), max(1, math.ceil(share * blocks)),
                                   dtype=metas[counts].dtype)  # fmt: skip
        rows = math.prod(metas[which].sizes[:-1])
        found[which] = torch.arange(blocks, dtype=metas[which].dtype).repeat(rows)
    return found


def in_turns(torch: Any, ready: Sequence[Ready]) -> dict[Any, float]:
    """Milliseconds a launch, the median over turns."""
    first = _captured(torch, ready[0], _FEW)
    rough = [max(_elapsed(torch, first), 1e-3) / _FEW for _ in range(2)]
    launches = min(64, max(_FEW, round(_UNIT_MS / rough[-1])))
    graphs = {one.choice: _captured(torch, one, launches) for one in ready}
    taken: dict[Any, list[float]] = {choice: [] for choice in graphs}
    for turn, choice in itertools.product(range(_TURNS + 1), graphs):
        spent = _elapsed(torch, graphs[choice]) / launches
        if turn:  # the first is for the clocks to rise
            taken[choice].append(spent)
    return {choice: statistics.median(times) for choice, times in taken.items()}


def _elapsed(torch: Any, graph: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _captured(torch: Any, one: Ready, launches: int) -> Any:
    """A graph of launches in a row; by hand, since PyTorch's context would collect garbage first."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for number in range(launches):
        one.runs[number % len(one.runs)]()
    graph.capture_end()
    return graph
