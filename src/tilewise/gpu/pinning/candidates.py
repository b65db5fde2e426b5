"""Describe the configurations of a call to the ranker: lower the kernel, count its work, evaluate its grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.gpu.devices import H200_CAPABILITY
from tilewise.gpu.pinning.ir import lower, summarize
from tilewise.gpu.pinning.ranker import RankedCandidate
from tilewise.gpu.triton_kernel import jit_function, source_digest

_texts: dict[Any, str] = {}  # lowered kernels; equal for configurations that differ in warps and stages alone
_MAX_TEXTS = 4096  # arbitrary


@dataclass(frozen=True)
class _CallFacts:
    """Facts that all configurations of a call have in common."""

    kernel: Any  # as it was decorated
    function: Any  # the jitted function inside
    source: str  # digest
    unique_bytes: float
    capability: int


def describe_candidates(
    kernel: Any, arguments: Mapping[str, Any], configs: Sequence[Any], grid: Any, capability: int = H200_CAPABILITY
) -> list[RankedCandidate]:
    """Describe every configuration of a call; raises whatever Triton's front end raises for one it cannot lower."""
    function = jit_function(kernel)
    tensors = [getattr(value, "base", value) for value in arguments.values()]
    unique = sum(float(t.numel() * t.element_size()) for t in tensors if hasattr(t, "element_size"))
    facts = _CallFacts(kernel, function, source_digest(function), unique, capability)
    return [_describe(facts, arguments, config, grid) for config in configs]


def _describe(facts: _CallFacts, arguments: Mapping[str, Any], config: Any, grid: Any) -> RankedCandidate:
    """Describe one configuration."""
    function = facts.function
    if config.pre_hook is not None:  # sets the block shapes of TMA descriptors
        config.pre_hook({**arguments, **config.all_kwargs()})
    settings = dict(config.kwargs)
    # `triton.heuristics` computes further compile-time values from the arguments.
    layer = facts.kernel
    while layer is not function and layer is not None:
        for name, rule in getattr(layer, "values", {}).items():
            settings[name] = rule({**arguments, **settings})
        layer = getattr(layer, "fn", None)
    constants = {p.name: settings.get(p.name, arguments.get(p.name)) for p in function.params if p.is_constexpr}
    text = _lowered(facts, arguments, constants)
    values = {name: int(v) for name, v in {**arguments, **settings}.items() if isinstance(v, bool | int)}
    launch = grid({**arguments, **settings}) if callable(grid) else grid
    launch = (*(int(n) for n in launch), 1, 1)[:3]
    work = summarize(text, values, [size // 2 for size in launch])
    return RankedCandidate(work, math.prod(launch), int(config.num_warps), int(config.num_stages), facts.unique_bytes)


def _lowered(facts: _CallFacts, arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """Return the lowered kernel, from memory if only sizes, warps or stages differ."""
    shapes = [getattr(value, "block_shape", None) for value in arguments.values()]
    dtypes = [str(getattr(getattr(v, "base", v), "dtype", type(v).__name__)) for v in arguments.values()]
    key = (facts.source, str(sorted(constants.items())), str(dtypes), str(shapes), facts.capability)
    if key not in _texts:
        if len(_texts) >= _MAX_TEXTS:
            _texts.clear()
        _texts[key] = lower(facts.function, arguments, constants, facts.capability)
    return _texts[key]
