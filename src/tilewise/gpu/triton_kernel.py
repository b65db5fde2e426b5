"""Describe a Triton kernel, a call of it and its configurations in tilewise's own terms.

Triton and PyTorch are imported only where a function needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewise.gpu.devices import NEAREST_COLLECTION, Device, exceeds_limits, model_collection
from tilewise.store.problem import Config, Machine, Problem, Value

_LAUNCH_SETTINGS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_MATMUL_FIELDS = {"block_m", "block_n", "block_k", "warps", "stages"}
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32"}


def config_of(settings: Mapping[str, Any]) -> Config:
    """Convert a Triton configuration's settings to a `Config` of integers.

    Integers keep their value; every other value becomes a field of its own that is 1.
    """
    values: dict[str, int] = {}
    for name, value in settings.items():
        if isinstance(value, bool | int):
            values[name] = int(value)
        elif value is not None:
            values[f"{name}={value}"] = 1
    return Config(values)


def problem_of(kernel: str, source: str, key: Mapping[str, Any]) -> Problem:
    """Describe a kernel and the values of its autotuning key as a problem; `source` is a digest of its code."""
    return Problem({**key_values(key), "family": f"{kernel}:{source}"})


def key_values(key: Mapping[str, Any]) -> dict[str, Value]:
    """Convert the values of an autotuning key to integers and short words."""
    return {
        re.sub(r"\W", "_", name): int(value) if isinstance(value, bool | int) else str(value)
        for name, value in key.items()
    }


def settings_of(config: Any) -> dict[str, Any]:
    """Return all settings of a `triton.Config` by name, with warps and stages."""
    settings = dict(config.kwargs)
    for name in _LAUNCH_SETTINGS:
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    return settings


def element_types(arguments: Iterable[Any]) -> list[str]:
    """List the dtypes of a call's tensors; a TMA descriptor has the dtype of the tensor that it describes."""
    tensors: list[Any] = [value if hasattr(value, "dtype") else getattr(value, "base", None) for value in arguments]
    return [str(tensor.dtype) for tensor in tensors if hasattr(tensor, "dtype")]


def match_matmul(
    settings: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any], dtypes: Sequence[str]
) -> tuple[Problem, list[Config]] | None:
    """Interpret a kernel as a matrix product if the names of its block sizes and key are those of one; else None."""
    key_sizes = {name.lower(): value for name, value in sizes.items() if isinstance(value, int)}
    dtype = _DTYPES.get(dtypes[0]) if dtypes else None
    if not {"m", "n", "k"} <= set(key_sizes) or dtype is None or min(key_sizes[n] for n in "mnk") < 1:
        return None
    configs = []
    for values in settings:
        fields = {_field(name): value for name, value in values.items() if isinstance(value, int)}
        if not fields.keys() >= _MATMUL_FIELDS:
            return None
        configs.append(Config({**{name: fields[name] for name in _MATMUL_FIELDS}, "group": fields.get("group", 1)}))
    problem = Problem.of(
        "matmul", dtype=dtype, m=key_sizes["m"], n=key_sizes["n"], k=key_sizes["k"], epilogue="none", layout="nn"
    )
    return problem, configs


def matmul_exceeds_limits(problem: Problem, config: Config, device: Device) -> bool:
    """Tell whether a matrix product's tile needs more shared memory or registers than a device has."""
    block_m, block_n, block_k = (config.size(name) for name in ("block_m", "block_n", "block_k"))
    element_bytes = 4 if problem.word("dtype") == "tf32" else 2
    shared = (block_m + block_n) * block_k * element_bytes * max(config.size("stages") - 1, 1)
    return exceeds_limits(device, shared, block_m * block_n / (32 * config.size("warps")))


def _field(name: str) -> str:
    """Normalise a setting's name: BLOCK_SIZE_M and BLOCK_M become block_m, GROUP_SIZE_M becomes group."""
    plain = re.sub(r"_SIZE|SIZE_", lambda match: "_" if match.group() == "SIZE_" else "", name.upper()).lower()
    plain = plain.replace("__", "_").removeprefix("num_")
    return "group" if plain.startswith("group") else plain


def this_gpu() -> tuple[Machine, str, str | None]:
    """Return the GPU in use, Triton's version, and the collection whose model fits (None without a GPU)."""
    import torch
    import triton

    if not torch.cuda.is_available():
        return Machine("autotune", "no GPU", {}), str(triton.__version__), None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    collection = model_collection(properties.major * 10 + properties.minor) or NEAREST_COLLECTION
    return Machine("autotune", str(properties.name), {}), str(triton.__version__), collection


def jit_function(kernel: Any) -> Any:
    """Return the jitted function that autotuners and heuristics wrap; the kernel itself if nothing does."""
    inner = kernel
    while inner is not None and not hasattr(inner, "src"):
        inner = getattr(inner, "fn", None)
    return kernel if inner is None else inner


def source_digest(kernel: Any) -> str:
    """Return a digest of the kernel's source and of the jitted functions that it calls.

    Triton's own key also contains the line number, so that it changes with every edit further up in the file.
    """
    pending: list[Any] = [jit_function(kernel)]
    sources: list[str] = []
    while pending:
        function = pending.pop()
        plain: Any = getattr(function, "fn", None)
        source = getattr(function, "src", None)
        if not source:  # a function that Triton's interpreter runs
            with contextlib.suppress(OSError, TypeError):
                source = inspect.getsource(plain)
        if source is None or source in sources:
            continue
        sources.append(source)
        names = getattr(getattr(plain, "__code__", None), "co_names", ())
        scope = getattr(plain, "__globals__", {})
        pending += [scope[name] for name in sorted(names) if hasattr(scope.get(name), "src")]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:16] if sources else "unknown"
