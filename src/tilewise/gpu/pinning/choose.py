"""Choose a configuration of a Triton kernel without measuring: a pure function of kernel, problem, device and model.

The lock file's choice comes first. Otherwise the configurations are ordered: by the cost model of matrix products, if
the kernel's arguments are named like one's; else by the work in its intermediate representation (`ranker.py`); and in
the kernel's own order if that cannot be read. The first that compiles and fits the device is chosen; of a kernel that
was ranked by its work, the first few are compiled and ranked again by their machine code. Measurements of earlier runs
are not consulted: they differ from machine to machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.costmodel.models.files import shipped_file
from tilewise.gpu.devices import H200_CAPABILITY, Device, find_device
from tilewise.gpu.pinning import active_lock
from tilewise.gpu.pinning.ir import lower, summarize, with_equal_totals
from tilewise.gpu.pinning.machine_code import describe_compiled
from tilewise.gpu.pinning.ranker import TOO_LARGE, shipped_ranker
from tilewise.gpu.pinning.work_features import RankedCandidate
from tilewise.gpu.triton_kernel import (
    config_of,
    element_types,
    jit_function,
    key_values,
    match_matmul,
    matmul_exceeds_limits,
    settings_of,
    source_digest,
    this_gpu,
)
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.scores import ModelScores, shipped_scores

# Errors of Triton that mean "this configuration does not fit"; any other error concerns the call itself.
_MISFIT_ERRORS = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError", "OutOfMemoryError")
MAX_SPILLS = 64  # registers that a thread spills to memory; configurations with more were 3 to 6 times slower
MAX_COMPILED = 8  # configurations to compile for a choice; with 5 or 16 held-out kernels were as fast within 0.3 %
_mutex = threading.RLock()  # choices are made one at a time: the model's caches are not made for threads
_announced: set[str] = set()  # sentences that were said before
Say = Callable[[str], None]


@dataclass(frozen=True)
class ConfigRanking:
    """An order of configurations, the costs that it results from, and the name of the model."""

    order: Sequence[int]
    costs: Sequence[float] | None = None
    model: str = ""
    reason: str = "the kernel's own order: no model could rank it"
    candidates: Sequence[RankedCandidate] = ()  # if they were ranked by their work


def choose_config(autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any], say: Say | None = None) -> Any:
    """Return the `triton.Config` for a call of an autotuned kernel, chosen by a model without measuring.

    `autotuner.nargs` are the positional arguments by name; `kwargs` are the others, with the grid.
    """
    arguments = _arguments(autotuner, kwargs)
    dtypes = {f"dtype{number}": dtype for number, dtype in enumerate(element_types(arguments.values()))}
    name, key = autotuner.base_fn.__name__, {name: arguments[name] for name in autotuner.keys if name in arguments}
    problem, kernel = Problem(key_values({**key, **dtypes})), f"{name}:{source_digest(autotuner.fn)}"
    candidates = [config_of(settings_of(config)) for config in configs]
    with _mutex:
        device, lock = _device_name(), active_lock()
        locked = None if lock is None else lock.find(kernel, problem, device)
        if locked is not None and locked.config in candidates:
            return configs[candidates.index(locked.config)]
        ranking = _rank(autotuner, configs, kwargs, device)
        if not ranking.model:
            _announce(f"{name} keeps its first configuration that fits: no model could rank it", say)
        index = _choose_compiled(autotuner, configs, kwargs, ranking, device)
        if lock is not None:
            from tilewise.gpu.pinning.lock import LockedChoice

            choice = LockedChoice(
                kernel=kernel,
                problem=problem,
                device=device,
                config=candidates[index],
                predicted=None if ranking.costs is None else float(ranking.costs[index]),
                model=ranking.model,
                reason=ranking.reason,
                candidates=tuple(candidates) if ranking.model == model_digest() else (),
            )
            lock.add(choice)
        return configs[index]


def _arguments(autotuner: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel's arguments in a call by name, without launch settings such as the grid."""
    values = {**autotuner.nargs, **kwargs}
    return {name: value for name, value in values.items() if name in autotuner.arg_names}


def _rank(autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any], device: str) -> ConfigRanking:
    """Order the configurations by a model, fastest first; in the listed order if no model fits kernel or device."""
    arguments, record = _arguments(autotuner, kwargs), find_device(device)
    if record is None:
        _announce(f"there is no record of {device}, so its kernels keep their first configuration that fits", None)
        return ConfigRanking(range(len(configs)))
    as_matmul = None
    # The model of matrix products was trained on kernels that load through pointers, not by TMA descriptors.
    if not any(hasattr(value, "block_shape") for value in arguments.values()):
        sizes = {name: value for name, value in arguments.items() if isinstance(value, int)}
        as_matmul = match_matmul([settings_of(c) for c in configs], sizes, element_types(arguments.values()))
    try:
        model = shipped_model(device) if as_matmul is not None else None
        if as_matmul is not None and model is not None:
            return rank_matmul(model, *as_matmul, record)
        ranking = _rank_by_work(autotuner, configs, kwargs, record)
    except Exception as error:  # Triton's front end raises many types; the launch will raise what concerns the call
        _announce(f"{autotuner.base_fn.__name__} cannot be ranked ({type(error).__name__}: {str(error)[:200]})", None)
        ranking = None
    return ranking or ConfigRanking(range(len(configs)))


def rank_configs(autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any]) -> ConfigRanking | None:
    """Order a call's configurations by the amount of work in the kernel's code; None if code or GPU is unknown."""
    device = find_device(_device_name())
    if device is None or len(configs) < 2:
        return None
    try:
        return _rank_by_work(autotuner, configs, kwargs, device)
    except Exception:  # the interpreter's kernels cannot be lowered, and Triton's front end raises many types
        return None


def _rank_by_work(
    autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any], device: Device
) -> ConfigRanking | None:
    """Order configurations by the work in the kernel's intermediate representation; None without a ranker."""
    ranker, arguments = shipped_ranker(), _arguments(autotuner, kwargs)
    if ranker is None:
        return None
    candidates = describe_candidates(autotuner.fn, arguments, configs, kwargs["grid"], _capability())
    scores = ranker.scores(candidates, device)
    order = [int(index) for index in np.argsort(scores, kind="stable")]
    reason = f"first of {len(candidates)} by the work of the kernel"
    return ConfigRanking(order, scores.tolist(), ranker.name, reason, candidates)


def rank_matmul(model: ModelScores, problem: Problem, configs: Sequence[Config], device: Device) -> ConfigRanking:
    """Order the configurations of a matrix product by the model's scores; ties keep their order.

    Those that exceed shared memory or registers come last: the model was trained on configurations that fit.
    """
    too_large = [matmul_exceeds_limits(problem, config, device) for config in configs]
    scores = model.scores(problem, configs) + TOO_LARGE * np.array(too_large)
    order = [int(index) for index in np.argsort(scores, kind="stable")]
    return ConfigRanking(order, scores.tolist(), model_digest(), f"first of {len(configs)} by the cost model")


@functools.cache
def model_digest() -> str:
    """Identify the shipped model of Triton kernels by name and eight hexadecimal digits of its hash."""
    return f"h200 {hashlib.sha256(shipped_file('h200').read_bytes()).hexdigest()[:8]}"


@functools.cache
def shipped_model(device: str) -> ModelScores | None:
    """Load the model of matrix products that serves a device."""
    return shipped_scores("h200", device, "triton", 0.0)[0]


def _device_name() -> str:
    """Return the name of this machine's GPU, or "no GPU" without PyTorch or a GPU."""
    try:
        return this_gpu()[0].identity
    except ImportError:
        return "no GPU"


def _capability() -> int:
    """Return the compute capability that kernels are lowered for: this GPU's, or the H200's without one."""
    cuda: Any = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return H200_CAPABILITY
    major, minor = cuda.get_device_capability()
    return int(major) * 10 + int(minor)


def _choose_compiled(
    autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any], ranking: ConfigRanking, device: str
) -> int:
    """Return the index of the first configuration that fits; of a few that fit, the best by their machine code.

    Without any that fits, the first is returned, and Triton raises its own error for it.
    """
    kernels: dict[int, Any] = {}
    for index in ranking.order:
        kernel = _compile(autotuner, configs[index], kwargs)
        if kernel is not None:
            kernels[index] = kernel
        if len(kernels) >= (MAX_COMPILED if ranking.candidates else 1):
            break
    indices = list(kernels)
    if len(indices) < 2:
        return indices[0] if indices else ranking.order[0]
    ranker, record = shipped_ranker(), find_device(device)
    assert ranker is not None and record is not None  # they ranked the candidates
    try:
        works = [describe_compiled(kernel) for kernel in kernels.values()]
    except (AttributeError, KeyError):  # an interpreted kernel, or a cache without PTX
        return indices[0]
    scores = ranker.scores([ranking.candidates[index] for index in indices], record, works)
    return indices[int(np.argmin(scores))]


def _compile(autotuner: Any, config: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compile a configuration without launching it; None if it exceeds the device's limits."""
    kernel = getattr(autotuner.fn, "fn", autotuner.fn)
    if "Interpreted" in type(kernel).__name__ or "Interpreted" in type(autotuner.fn).__name__:
        return kernel  # the interpreter has no device
    settings = {**kwargs, **config.all_kwargs()}
    try:
        # The hook sets the block shapes of TMA descriptors, which are part of the compiled kernel.
        if config.pre_hook is not None:
            config.pre_hook({**autotuner.nargs, **settings})
        compiled = autotuner.fn.run(*autotuner.nargs.values(), **{**settings, "warmup": True})
        if hasattr(compiled, "_init_handles"):
            compiled._init_handles()
    except Exception as error:  # Triton raises many types; those that are not about resources reappear at the launch
        return None if type(error).__name__ in _MISFIT_ERRORS else kernel
    return None if (getattr(compiled, "n_spills", 0) or 0) > MAX_SPILLS else compiled


def _announce(sentence: str, say: Say | None) -> None:
    """Pass a sentence to `say`, or issue it as a warning, at most once per process."""
    if sentence not in _announced:
        _announced.add(sentence)
        if say is not None:
            say(sentence)
        else:
            warnings.warn(f"tilewise.pin: {sentence}.", stacklevel=3)


_texts: dict[Any, str] = {}  # lowered kernels
_MAX_TEXTS = 4096  # arbitrary


def describe_candidates(
    kernel: Any, arguments: Mapping[str, Any], configs: Sequence[Any], grid: Any, capability: int = H200_CAPABILITY
) -> list[RankedCandidate]:
    """Describe each configuration of a call to the ranker: the work per program in its lowered code, and its grid.

    Raises whatever Triton's front end raises for a configuration that it cannot lower.
    """
    function = jit_function(kernel)
    tensors = [getattr(value, "base", value) for value in arguments.values()]
    unique_bytes = sum(float(t.numel() * t.element_size()) for t in tensors if hasattr(t, "element_size"))
    dtypes = str([str(getattr(tensor, "dtype", type(tensor).__name__)) for tensor in tensors])
    digest, works, programs = source_digest(function), [], []
    for config in configs:
        if config.pre_hook is not None:  # sets the block shapes of TMA descriptors
            config.pre_hook({**arguments, **config.all_kwargs()})
        settings = dict(config.kwargs)
        # `triton.heuristics` computes further compile-time values from the arguments.
        layer = kernel
        while layer is not function and layer is not None:
            for name, rule in getattr(layer, "values", {}).items():
                settings[name] = rule({**arguments, **settings})
            layer = getattr(layer, "fn", None)
        constants = {p.name: settings.get(p.name, arguments.get(p.name)) for p in function.params if p.is_constexpr}
        # Configurations that differ in warps and stages alone have the same text.
        shapes = str([getattr(value, "block_shape", None) for value in arguments.values()])
        lowered = digest, str(sorted(constants.items())), dtypes, shapes, capability
        if lowered not in _texts:
            if len(_texts) >= _MAX_TEXTS:
                _texts.clear()
            _texts[lowered] = lower(function, arguments, constants, capability)
        values = {name: int(v) for name, v in {**arguments, **settings}.items() if isinstance(v, bool | int)}
        launch = grid({**arguments, **settings}) if callable(grid) else grid
        launch = (*(int(n) for n in launch), 1, 1)[:3]
        works.append(summarize(_texts[lowered], values, launch))
        programs.append(math.prod(launch))
    return [
        RankedCandidate(work, count, int(config.num_warps), int(config.num_stages), unique_bytes)
        for work, count, config in zip(with_equal_totals(works, programs), programs, configs, strict=True)
    ]
