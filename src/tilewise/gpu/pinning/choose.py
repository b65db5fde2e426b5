"""Choose a configuration of a Triton kernel without measuring: a pure function of kernel, problem, device and model.

The lock file's choice comes first. Otherwise the configurations are ordered: by the cost model of matrix products, if
the kernel's arguments are named like one's; else by the work in its intermediate representation (`ranker.py`); and in
the kernel's own order if that cannot be read. The first that compiles and fits the device is chosen. Measurements of
earlier runs are not consulted: they differ from machine to machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.costmodel.models.files import shipped_file
from tilewise.gpu.devices import H200_CAPABILITY, Device, find_device
from tilewise.gpu.pinning.candidates import describe_candidates
from tilewise.gpu.pinning.ranker import MAX_ACCUMULATORS, TOO_LARGE, RankedCandidate, shipped_ranker
from tilewise.gpu.pinning.state import active_lock
from tilewise.gpu.triton_kernel import (
    config_of,
    element_types,
    match_matmul,
    problem_of,
    settings_of,
    source_digest,
    this_gpu,
)
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.scores import ModelScores, shipped_scores

# Errors of Triton that mean "this configuration does not fit"; any other error concerns the call itself.
_MISFIT_ERRORS = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError", "OutOfMemoryError")
_MAX_SPILLS = 64  # registers that a thread spills to memory; configurations with more were 3 to 6 times slower
_mutex = threading.RLock()  # choices are made one at a time: the model's caches are not made for threads
_announced: set[str] = set()  # sentences that were said before
Say = Callable[[str], None]


@dataclass(frozen=True)
class ConfigRanking:
    """An order of candidates, the costs that it comes from, and the model behind them."""

    order: Sequence[int]
    costs: Sequence[float] | None = None
    model: str = ""
    reason: str = "the kernel's own order: no model could rank it"


def choose_config(autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any], say: Say | None = None) -> Any:
    """Return the triton.Config for a call of an autotuned kernel, as `Autotuner.prune_configs` receives it.

    `autotuner.nargs` are the positional arguments by name; `kwargs` are the others, with the grid.
    """
    values = {**autotuner.nargs, **kwargs}
    arguments = {name: value for name, value in values.items() if name in autotuner.arg_names}
    dtypes = element_types(arguments.values())
    key = {name: arguments[name] for name in autotuner.keys if name in arguments}
    call = KernelCall(
        name=autotuner.base_fn.__name__,
        source=source_digest(autotuner.fn),
        key={**key, **{f"dtype{number}": dtype for number, dtype in enumerate(dtypes)}},
        sizes={name: value for name, value in arguments.items() if isinstance(value, int)},
        dtypes=dtypes,
        uses_tma=any(hasattr(value, "block_shape") for value in arguments.values()),
    )
    index = choose_index(
        call,
        configs,
        fits=lambda config: _fits(autotuner, config, kwargs),
        describe=lambda: describe_candidates(autotuner.fn, arguments, configs, kwargs["grid"], _capability()),
        say=say,
    )
    return configs[index]


def rank_configs(autotuner: Any, configs: Sequence[Any], kwargs: Mapping[str, Any]) -> ConfigRanking | None:
    """Order the configurations of a call by the work of the kernel; None if it cannot be read or the GPU is unknown."""
    device = find_device(_device_name())
    if device is None or len(configs) < 2:
        return None
    values = {**autotuner.nargs, **kwargs}
    arguments = {name: value for name, value in values.items() if name in autotuner.arg_names}
    try:
        return rank_by_work(
            describe_candidates(autotuner.fn, arguments, configs, kwargs["grid"], _capability()), device
        )
    except Exception:  # the interpreter's kernels cannot be lowered, and Triton's front end raises many types
        return None


@dataclass(frozen=True)
class KernelCall:
    """The inputs of a choice: the kernel, the values of its key, all its integers and the dtypes of its tensors."""

    name: str
    source: str
    key: Mapping[str, Any]
    sizes: Mapping[str, Any]
    dtypes: Sequence[str]
    uses_tma: bool = False  # some arguments are TMA descriptors

    @property
    def kernel(self) -> str:
        return f"{self.name}:{self.source}"

    @property
    def problem(self) -> Problem:
        """The key as a problem, without the kernel's name."""
        return Problem({name: value for name, value in problem_of("", "", self.key).items() if name != "family"})


def choose_index(
    call: KernelCall,
    configs: Sequence[Any],
    *,
    fits: Callable[[Any], bool],
    describe: Callable[[], Sequence[RankedCandidate]],
    say: Say | None = None,
) -> int:
    """Return the index of the configuration to launch.

    `fits` tells whether one compiles and can be loaded; `describe` lowers the kernel for the ranker.
    """
    with _mutex:
        device, problem, lock = _device_name(), call.problem, active_lock()
        settings = [settings_of(config) for config in configs]
        candidates = [config_of(values) for values in settings]
        locked = None if lock is None else lock.find(call.kernel, problem, device)
        if locked is not None and locked.config in candidates:
            return candidates.index(locked.config)
        ranking = _rank(call, settings, device, describe)
        if not ranking.model:
            _announce(f"{call.name} keeps its first configuration that fits: no model could rank it", say)
        # Without any that fits, Triton raises its own error for the first.
        index = next((i for i in ranking.order if fits(configs[i])), ranking.order[0])
        if lock is not None:
            from tilewise.gpu.pinning.lock import LockedChoice

            choice = LockedChoice(
                kernel=call.kernel,
                problem=problem,
                device=device,
                config=candidates[index],
                predicted=None if ranking.costs is None else float(ranking.costs[index]),
                model=ranking.model,
                reason=ranking.reason,
                candidates=tuple(candidates) if ranking.model == model_digest() else (),
            )
            lock.add(choice)
        return int(index)


def _rank(
    call: KernelCall,
    settings: Sequence[Mapping[str, Any]],
    device: str,
    describe: Callable[[], Sequence[RankedCandidate]],
) -> ConfigRanking:
    """Order the configurations by a model; in their own order if none knows the kernel or the device."""
    # The model of matrix products was trained on kernels that load through pointers.
    record = find_device(device)
    as_matmul = None if call.uses_tma else match_matmul(settings, call.sizes, call.dtypes)
    if record is None:
        _announce(f"there is no record of {device}, so its kernels keep their first configuration that fits", None)
        return ConfigRanking(range(len(settings)))
    try:
        model = shipped_model(device) if as_matmul is not None else None
        if as_matmul is not None and model is not None:
            return rank_matmul(model, *as_matmul, record)
        ranking = rank_by_work(describe(), record)
    except Exception as error:  # Triton's front end raises many types; the launch will raise what concerns the call
        _announce(f"{call.name} cannot be ranked ({type(error).__name__}: {str(error)[:200]})", None)
        ranking = None
    return ranking or ConfigRanking(range(len(settings)))


def rank_by_work(candidates: Sequence[RankedCandidate], device: Device) -> ConfigRanking | None:
    """Order configurations by the work in the kernel's intermediate representation; None without a ranker."""
    ranker = shipped_ranker()
    if ranker is None:
        return None
    scores = ranker.scores(candidates, device)
    order = [int(index) for index in np.argsort(scores, kind="stable")]
    return ConfigRanking(order, scores.tolist(), ranker.name, f"first of {len(candidates)} by the work of the kernel")


def rank_matmul(model: ModelScores, problem: Problem, configs: Sequence[Config], device: Device) -> ConfigRanking:
    """Order configurations of a matrix product by the model's scores; equal ones keep their order.

    Those that exceed shared memory or registers come last: the model was trained on configurations that fit.
    """
    element_bytes = 4 if problem.word("dtype") == "tf32" else 2
    too_large = [_is_too_large(config, element_bytes, device) for config in configs]
    scores = model.scores(problem, configs) + TOO_LARGE * np.array(too_large)
    order = [int(index) for index in np.argsort(scores, kind="stable")]
    return ConfigRanking(order, scores.tolist(), model_digest(), f"first of {len(configs)} by the cost model")


def _is_too_large(config: Config, element_bytes: int, device: Device) -> bool:
    """Tell whether a tile's accumulators exceed a thread's registers, or its pipeline exceeds shared memory."""
    block_m, block_n, block_k = (config.size(name) for name in ("block_m", "block_n", "block_k"))
    shared = (block_m + block_n) * block_k * element_bytes * max(config.size("stages") - 1, 1)
    accumulators = block_m * block_n / (32 * config.size("warps"))
    return shared > device.shared_bytes_per_block or accumulators > MAX_ACCUMULATORS


@functools.cache
def model_digest() -> str:
    """Name the shipped model of Triton kernels, with eight hexadecimal digits of its content."""
    return f"h200 {hashlib.sha256(shipped_file('h200').read_bytes()).hexdigest()[:8]}"


@functools.cache
def shipped_model(device: str) -> ModelScores | None:
    """Load the model of matrix products that serves a device."""
    return shipped_scores("h200", device, "triton", 0.0)[0]


def _device_name() -> str:
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


def _fits(autotuner: Any, config: Any, kwargs: Mapping[str, Any]) -> bool:
    """Compile a configuration without launching it, and tell whether the device can load it."""
    kernel = getattr(autotuner.fn, "fn", autotuner.fn)
    if "Interpreted" in type(kernel).__name__ or "Interpreted" in type(autotuner.fn).__name__:
        return True  # the interpreter has no device
    settings = {**kwargs, **config.all_kwargs()}
    try:
        # The hook sets the block shapes of TMA descriptors, which are part of the compiled kernel.
        if config.pre_hook is not None:
            config.pre_hook({**autotuner.nargs, **settings})
        compiled = autotuner.fn.run(*autotuner.nargs.values(), **{**settings, "warmup": True})
        if hasattr(compiled, "_init_handles"):
            compiled._init_handles()
        if (getattr(compiled, "n_spills", 0) or 0) > _MAX_SPILLS:
            return False
    except Exception as error:  # Triton raises many types; those that are not about resources reappear at the launch
        return type(error).__name__ not in _MISFIT_ERRORS
    return True


def _announce(sentence: str, say: Say | None) -> None:
    """Say a sentence once in this process: to `say`, else as a warning."""
    if sentence not in _announced:
        _announced.add(sentence)
        if say is not None:
            say(sentence)
        else:
            warnings.warn(f"tilewise.pin: {sentence}.", stacklevel=3)
