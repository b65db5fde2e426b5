"""Time the compiler's candidates again, the way they run in a program, and check their results.

PyTorch times each candidate by itself, including the host's part of a call. That part costs ATen some microseconds more
than a template, but in a program it hides behind other work, so PyTorch gives small products to templates that are
slower. Here all candidates multiply the same numbers, CUDA graphs launch them without the host, weights are read from
memory as in a model, and a candidate whose result differs from ATen's is rejected. Flexible attention is timed with
half of its key blocks, as under a causal mask.

The tilings of pointwise and reduction kernels are timed in the same way: in a program such a kernel reads what the
previous kernel has just written, and launches do not wait for the host. A kernel that cannot be timed this way is timed
by PyTorch. If nothing may be measured, the compiler's first tiling that does not spill registers is taken.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.gpu.pinning import replace_function

_ROUNDS = 7  # timed rounds; the median counts
_GRAPH_MS = 0.2  # target length of one timed CUDA graph
_MIN_LAUNCHES, _MAX_LAUNCHES = 4, 64  # per graph
_CACHE_BYTES = 128 << 20  # over twice the L2 cache of an H200: copies of the weights rotate through it
_MAX_OPERAND_SETS = 12
# A template must beat ATen by both: rounds differ by less than 2 %, and templates that were 0.2 us faster here on calls
# of a few microseconds were hardly faster in a program.
_MIN_GAIN, _MIN_GAIN_MS = 0.02, 1e-4
_MAX_ROUNDING = 1 / 64  # of an element's size: 16-bit results may differ by so much
Run = Callable[[], Any]


@dataclass(frozen=True)
class RunnableChoice:
    """A candidate of the compiler that is ready to run, with one call per set of operands."""

    choice: Any
    runs: tuple[Run, ...]
    result: Any = None
    is_aten: bool = False


def rebenchmark(torch: Any, timings: Mapping[Any, float]) -> dict[Any, float]:
    """Time again, interleaved, the candidates that PyTorch could run; return milliseconds, infinite for wrong results.

    The result is empty if fewer than two choices can be timed. `timings` are PyTorch's own milliseconds.
    """
    choices = [choice for choice, ms in timings.items() if 0 < ms < math.inf]
    if len(choices) < 2 or any(getattr(choice, "bmreq", None) is None for choice in choices):
        return {}
    # Graphs cannot be captured on the default stream; the side stream waits for pending work on it.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        candidates = _prepare_choices(torch, choices)
        stream.synchronize()
        # The result to compare with is ATen's, else that of the first candidate, PyTorch's default tiling.
        first = candidates[0].result if torch.isfinite(candidates[0].result).all() else None
        reference = next((one.result for one in candidates if one.is_aten), first)
        right = [one for one in candidates if reference is None or is_close(torch, one.result, reference)]
        times = time_interleaved(torch, right)
    return _prefer_default({one.choice: times.get(one.choice, math.inf) for one in candidates}, candidates)


def _prefer_default(times: dict[Any, float], candidates: Sequence[RunnableChoice]) -> dict[Any, float]:
    """Increase the times (ms) of templates not clearly faster than ATen, or the first candidate, to above its time."""
    defaults = {one.choice for one in candidates if one.is_aten} or {candidates[0].choice}
    default_ms = min(times[choice] for choice in defaults)
    threshold = default_ms * (1 - _MIN_GAIN) - _MIN_GAIN_MS
    behind = {one for one, ms in times.items() if one not in defaults and threshold < ms <= default_ms}
    return {choice: default_ms * 1.001 if choice in behind else ms for choice, ms in times.items()}


def is_close(torch: Any, result: Any, expected: Any) -> bool:
    """Tell whether two 16-bit results differ in no element by more than rounding."""
    result, expected = result.float(), expected.float()
    # Relative to the element and to the root mean square, for elements that cancel to almost zero.
    bound = (expected.abs() + expected.square().mean().sqrt()) * _MAX_ROUNDING
    return bool(((result - expected).abs() <= bound).all())


def _prepare_choices(torch: Any, choices: Sequence[Any]) -> list[RunnableChoice]:
    """Run every candidate once per set of operands; return those that succeed, with their calls and first results."""
    input_metas = [choice.bmreq.input_tensor_meta for choice in choices]
    operand_sets = _random_storages(torch, input_metas)
    candidates = []
    for choice, metas in zip(choices, input_metas, strict=True):
        request = choice.bmreq
        out_meta, runs, result = request.output_tensor_meta, [], None
        for number, storages in enumerate(operand_sets):
            inputs = [
                torch.as_strided(storage, meta.sizes, meta.strides, meta.offset)
                for storage, meta in zip(storages, metas, strict=True)
            ]
            # NaN shows elements that a template does not write.
            out = torch.empty(_storage_length(out_meta), dtype=out_meta.dtype, device=out_meta.device).fill_(math.nan)
            out = torch.as_strided(out, out_meta.sizes, out_meta.strides, out_meta.offset)
            run = request.make_run_fn(*inputs, out=out)
            returned = run()
            if number == 0:
                result = out if getattr(request, "has_out_variant", True) else returned
            runs.append(run)
        is_aten = getattr(request, "callable_path", None) is not None
        candidates.append(RunnableChoice(choice, tuple(runs), result, is_aten))
    return candidates


def _storage_length(meta: Any) -> int:
    """Return the number of elements of storage that a strided tensor spans."""
    extent = sum((size - 1) * stride for size, stride in zip(meta.sizes, meta.strides, strict=True))
    return int(meta.offset + 1 + extent)


def _random_storages(torch: Any, input_metas: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Allocate several sets of random operands, each large enough for every candidate's view of it.

    The last operand, the weights, differs between the sets, so that no cache holds all of them.
    """
    operands = range(len(input_metas[0]))
    lengths = [max(_storage_length(metas[i]) for metas in input_metas) for i in operands]
    generator = torch.Generator(device=input_metas[0][0].device).manual_seed(0)
    kinds = [(meta.dtype, meta.device) for meta in input_metas[0]]
    block_lists = _block_lists(torch, input_metas[0])

    def draw(i: int) -> Any:
        """Draw operand `i` as a flat tensor."""
        dtype, device = kinds[i]
        if i in block_lists:
            return block_lists[i].to(device)
        return torch.randn(lengths[i], generator=generator, dtype=dtype, device=device)

    # Activations are the previous kernel's output and may be cached; weights come from memory.
    first = [draw(i) for i in operands]
    weight_bytes = max(1, lengths[-1] * first[-1].element_size())
    sets = 1 if block_lists else min(_MAX_OPERAND_SETS, max(1, math.ceil(_CACHE_BYTES / weight_bytes)))
    return [first, *([*first[:-1], draw(len(first) - 1)] for _ in range(sets - 1))]


def _block_lists(torch: Any, metas: Sequence[Any]) -> dict[int, Any]:
    """Fill flexible attention's lists of key blocks, by operand: the count for each query block, and the blocks.

    Attention has two pairs of lists, for partly masked and for full blocks, or the first pair only. As under a causal
    mask, each row gets one partly masked block and half of the blocks in full; with one pair, all blocks are in it.
    """
    integers = [i for i, meta in enumerate(metas) if not meta.dtype.is_floating_point]
    list_pairs = list(zip(integers[::2], integers[1::2], strict=False))
    if len(integers) not in (0, 2, 4) or any(len(metas[i].sizes) + 1 != len(metas[j].sizes) for i, j in list_pairs):
        raise ValueError("integer operands that are not lists of blocks")
    # Share of the key blocks that each pair of lists contains.
    lists = {}
    shares = (0.0, 0.5) if len(list_pairs) > 1 else (1.0,)
    for (counts, indices), share in zip(list_pairs, shares, strict=False):
        blocks = int(metas[indices].sizes[-1])
        lists[counts] = torch.full((math.prod(metas[counts].sizes),), max(1, math.ceil(share * blocks)),
                                   dtype=metas[counts].dtype)  # fmt: skip
        rows = math.prod(metas[indices].sizes[:-1])
        lists[indices] = torch.arange(blocks, dtype=metas[indices].dtype).repeat(rows)
    return lists


def time_interleaved(torch: Any, candidates: Sequence[RunnableChoice]) -> dict[Any, float]:
    """Measure the milliseconds of one launch of every candidate: the median over interleaved rounds of CUDA graphs."""
    # Launches per graph follow from the second reading of a short trial graph; the first one warms up.
    trial = _capture(torch, candidates[0], _MIN_LAUNCHES)
    estimates = [max(_elapsed_ms(torch, trial), 1e-3) / _MIN_LAUNCHES for _ in range(2)]
    launches = min(_MAX_LAUNCHES, max(_MIN_LAUNCHES, round(_GRAPH_MS / estimates[-1])))
    graphs = {one.choice: _capture(torch, one, launches) for one in candidates}
    times: dict[Any, list[float]] = {choice: [] for choice in graphs}
    for turn, choice in itertools.product(range(_ROUNDS + 1), graphs):
        elapsed = _elapsed_ms(torch, graphs[choice]) / launches
        if turn:  # the first round lets the clocks rise
            times[choice].append(elapsed)
    return {choice: statistics.median(rounds) for choice, rounds in times.items()}


def _elapsed_ms(torch: Any, graph: Any) -> float:
    """Return the milliseconds of one replay of a CUDA graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _capture(torch: Any, candidate: RunnableChoice, launches: int) -> Any:
    """Capture `launches` calls of a candidate into a CUDA graph, without the garbage collection of PyTorch's helper."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for number in range(launches):
        candidate.runs[number % len(candidate.runs)]()
    graph.capture_end()
    return graph


# Pointwise and reduction kernels. PyTorch reduces rows of more than 1,024 elements in a loop, and a norm then reads its
# rows twice. Rows of up to 8,192 elements fit into the registers of a block (a persistent reduction), which is faster
# (docs/gpu.md has the table) and leaves no tiling to be timed.
_HEURISTICS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
_MAX_SPILLED_BYTES = 16  # PyTorch's own default for kernels that do not set a threshold
_MAX_ROW_ELEMENTS = 8192  # of one row that is kept in registers
_MAX_REGISTER_ELEMENTS = 131_072  # of one row of all operands and results together


def fits_registers(features: Any, devices: Sequence[str]) -> bool:
    """Tell whether the rows of a reduction on one of the devices are short enough to stay in registers."""
    config: Any = importlib.import_module("torch._inductor.config")
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    if not config.triton.persistent_reductions or graph.get_current_device_or_throw().type not in devices:
        return False
    # Registers hold one row of every buffer that the kernel reads or writes.
    elements = features.reduction_numel * len(features.buf_accesses())
    return features.get_reduction_hint().name == "INNER" and all(
        graph.sizevars.statically_known_leq(count, limit)
        for count, limit in ((features.reduction_numel, _MAX_ROW_ELEMENTS), (elements, _MAX_REGISTER_ELEMENTS))
    )


def patch_autotuner(
    changes: contextlib.ExitStack, on_error: Callable[[Exception], None], is_unmeasured: Callable[[], bool]
) -> None:
    """Patch Inductor's autotuner to choose tilings by interleaved timing, or by rank if `is_unmeasured()`.

    `changes` undoes the patch; `on_error` receives exceptions, after which PyTorch's own method is used.
    """
    torch: Any = importlib.import_module("torch")

    def benchmark_all_configs(original: Any, tuner: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the time of each tiling; replaces the autotuner's method of this name."""
        if is_unmeasured():
            return _rank_tilings(tuner)
        times: dict[Any, float] = {}
        try:
            times = time_tilings(torch, tuner, args, kwargs)
        except Exception as error:  # the program must get its kernel, whoever chooses the tiling
            on_error(error)
        return times or original(tuner, *args, **kwargs)

    autotuner: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    replace_function(changes, autotuner, "benchmark_all_configs", benchmark_all_configs)


def _rank_tilings(tuner: Any) -> dict[Any, float]:
    """Rank a kernel's tilings without running them; those that spill registers come last. Ranks act as times."""
    max_spills = tuner.inductor_meta.get("spill_threshold", _MAX_SPILLED_BYTES)
    return {
        launcher: float(position + len(tuner.launchers) * ((launcher.n_spills or 0) > max_spills))
        for position, launcher in enumerate(tuner.launchers)
    }


def time_tilings(torch: Any, tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, float]:
    """Time a kernel's tilings in milliseconds, infinite for those that spill registers.

    The result is empty if the kernel has to be timed by PyTorch.
    """
    max_spills = tuner.inductor_meta.get("spill_threshold", _MAX_SPILLED_BYTES)
    launchers = [launcher for launcher in tuner.launchers if (launcher.n_spills or 0) <= max_spills]
    if len(launchers) < 2 or not _is_repeatable(torch, tuner):
        return {}
    args, kwargs = tuner.clone_args(*args, **kwargs)  # copies of the operands that the kernel overwrites
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        runs = [functools.partial(launcher, *args, **kwargs, stream=stream.cuda_stream) for launcher in launchers]
        # One run outside of a graph loads each kernel, which a capture does not allow.
        for run in runs:
            run()
        stream.synchronize()
        candidates = [RunnableChoice(launcher, (run,)) for launcher, run in zip(launchers, runs, strict=True)]
        times = time_interleaved(torch, candidates)
    return {launcher: times.get(launcher, math.inf) for launcher in tuner.launchers}


def _is_repeatable(torch: Any, tuner: Any) -> bool:
    """Tell whether a kernel may be replayed in CUDA graphs: it is Inductor's own and needs no zeroed operand."""
    heuristic = getattr(tuner.heuristic_type, "name", "")
    own = not tuner.custom_kernel and not tuner.reset_to_zero_arg_names
    capturing = torch.cuda.is_current_stream_capturing
    return heuristic in _HEURISTICS and own and tuner.device_props.type == "cuda" and not capturing()
