"""Kernels of PyTorch's compiler that are no products, sums over rows and elementwise ones: how to run them.

PyTorch times every tiling by itself, with emptied caches and the host's part of a launch. In a program such a kernel
reads what the one before it has just written, and launches do not wait for the host. Here tilings take turns as graphs
do (`fair`). Whatever cannot be timed so is timed by PyTorch.

Sums along rows of more than 1,024 elements PyTorch takes in steps, and a norm then reads its rows twice. Rows of up to
8,192 fit into a program's registers, which is faster (docs/gpu.md has the table) and leaves nothing to be timed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewise.gpu.inductor.fair import Ready, in_turns

_KINDS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
_MOST_SPILLS = 16  # as PyTorch has it where the kernel does not say
_LONGEST_ROW, _MOST_ELEMENTS = 8192, 131_072  # in registers: of one row, and of a row of everything read and written


def in_registers(features: Any, devices: Sequence[str]) -> bool:
    """Whether a sum of the compiler's goes along rows that fit into registers, on one of the devices."""
    config: Any = importlib.import_module("torch._inductor.config")
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    if not config.triton.persistent_reductions or graph.get_current_device_or_throw().type not in devices:
        return False
    elements = features.reduction_numel * len(features.buf_accesses())
    return features.get_reduction_hint().name == "INNER" and all(
        graph.sizevars.statically_known_leq(count, most)
        for count, most in ((features.reduction_numel, _LONGEST_ROW), (elements, _MOST_ELEMENTS))
    )


def time_in_turns(note: Callable[[Exception], None]) -> Callable[[], None]:
    """Have PyTorch choose tilings by times that are taken in turns; gives what undoes it. `note` is told of errors."""
    torch: Any = importlib.import_module("torch")
    owner: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    pytorchs = owner.benchmark_all_configs

    @functools.wraps(pytorchs)
    def benchmark_all_configs(tuner: Any, *given: Any, **named: Any) -> Any:
        found: dict[Any, float] = {}
        try:
            found = timed(torch, tuner, given, named)
        except Exception as error:  # the kernel is owed to the program, however it was chosen
            note(error)
        return found or pytorchs(tuner, *given, **named)

    owner.benchmark_all_configs = benchmark_all_configs
    return lambda: setattr(owner, "benchmark_all_configs", pytorchs)


def timed(torch: Any, tuner: Any, given: Sequence[Any], named: Mapping[str, Any]) -> dict[Any, float]:
    """Milliseconds of a kernel's tilings, infinite for those that spill registers; empty where they are PyTorch's."""
    most = tuner.inductor_meta.get("spill_threshold", _MOST_SPILLS)
    launchers = [launcher for launcher in tuner.launchers if (launcher.n_spills or 0) <= most]
    if len(launchers) < 2 or not _takes_turns(torch, tuner):
        return {}
    given, named = tuner.clone_args(*given, **named)  # a copy of what it writes to and reads again
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        runs = [functools.partial(one, *given, **named, stream=stream.cuda_stream) for one in launchers]
        for run in runs:
            run()
        stream.synchronize()
        spent = in_turns(torch, [Ready(one, (run,), None, False) for one, run in zip(launchers, runs, strict=True)])
    return {launcher: spent.get(launcher, math.inf) for launcher in tuner.launchers}


def _takes_turns(torch: Any, tuner: Any) -> bool:
    """Whether a kernel can be run again and again by graphs: one of the compiler's own that needs no zeros first."""
    kind = getattr(tuner.heuristic_type, "name", "")
    own = not tuner.custom_kernel and not tuner.reset_to_zero_arg_names
    return kind in _KINDS and own and tuner.device_props.type == "cuda" and not torch.cuda.is_current_stream_capturing()
