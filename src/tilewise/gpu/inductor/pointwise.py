"""Tune the pointwise and reduction kernels that PyTorch's compiler generates.

PyTorch times each tiling by itself, with flushed caches and with the host's launch overhead. In a program such a kernel
reads what the previous kernel has just written, and launches do not wait for the host. Here the tilings of a kernel are
timed interleaved, as CUDA graphs (`rebenchmark.py`). A kernel that cannot be timed this way is timed by PyTorch. If
nothing may be measured, the compiler's first tiling that does not spill registers is taken.

PyTorch reduces rows of more than 1,024 elements in a loop, and a norm then reads its rows twice. Rows of up to 8,192
elements fit into the registers of a block (a persistent reduction), which is faster (docs/gpu.md has the table) and
leaves no tiling to be timed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.gpu.inductor.rebenchmark import RunnableChoice, time_interleaved

_HEURISTICS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
_MAX_SPILLED_BYTES = 16  # PyTorch's own default for kernels that do not set a threshold
_MAX_ROW_ELEMENTS = 8192  # of one row that is kept in registers
_MAX_REGISTER_ELEMENTS = 131_072  # of one row of all operands and results together


def fits_registers(features: Any, devices: Sequence[str]) -> bool:
    """Tell whether a reduction runs along rows that fit into registers, on one of the devices."""
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
    on_error: Callable[[Exception], None], is_unmeasured: Callable[[], bool] = lambda: False
) -> Callable[[], None]:
    """Have PyTorch choose tilings by interleaved times, or without any; return the function that restores its own."""
    torch: Any = importlib.import_module("torch")
    autotuner: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    original = autotuner.benchmark_all_configs

    @functools.wraps(original)
    def benchmark_all_configs(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unmeasured():
            return _rank_tilings(tuner)
        times: dict[Any, float] = {}
        try:
            times = time_tilings(torch, tuner, args, kwargs)
        except Exception as error:  # the program must get its kernel, whoever chooses the tiling
            on_error(error)
        return times or original(tuner, *args, **kwargs)

    autotuner.benchmark_all_configs = benchmark_all_configs
    return lambda: setattr(autotuner, "benchmark_all_configs", original)


def _rank_tilings(tuner: Any) -> dict[Any, float]:
    """Order a kernel's tilings without running them: in the compiler's order, those that spill registers last."""
    max_spills = tuner.inductor_meta.get("spill_threshold", _MAX_SPILLED_BYTES)
    return {
        launcher: float(position + len(tuner.launchers) * ((launcher.n_spills or 0) > max_spills))
        for position, launcher in enumerate(tuner.launchers)
    }


def time_tilings(torch: Any, tuner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, float]:
    """Measure the milliseconds of a kernel's tilings, infinite for those that spill registers.

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
    """Tell whether CUDA graphs can run a kernel repeatedly: it is the compiler's own and needs no zeroed operand."""
    heuristic = getattr(tuner.heuristic_type, "name", "")
    own = not tuner.custom_kernel and not tuner.reset_to_zero_arg_names
    capturing = torch.cuda.is_current_stream_capturing
    return heuristic in _HEURISTICS and own and tuner.device_props.type == "cuda" and not capturing()
