"""Choose a configuration of a Triton kernel without measuring: a pure function of kernel, problem, device and model.

The lock file's choice comes first. Otherwise the configurations are ordered by the cost model, if the kernel looks like
a matrix product with blocks along m, n and k, else they keep the kernel's own order. The first that compiles and fits
the device is chosen. Measurements of earlier runs are not consulted: they differ from machine to machine.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.costmodel.models.shipped import shipped_file
from tilewise.errors import TilewiseError
from tilewise.gpu.devices import find_device
from tilewise.gpu.pinning.lock import LockedChoice
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
_mutex = threading.RLock()  # choices are made one at a time: the model's caches are not made for threads
_announced: set[str] = set()  # sentences that were said before
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ranking:
    """An order of candidates, the costs that it comes from, and the model behind them."""

    order: Sequence[int]
    costs: Sequence[float] | None = None
    model: str = ""
    reason: str = "the kernel's own order: the cost model does not know this kernel"


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
    )
    index = choose_index(call, configs, lambda config: _fits(autotuner, config, kwargs), say)
    return configs[index]


@dataclass(frozen=True)
class KernelCall:
    """What a choice depends on: the kernel, the values of its key, all its integers and the dtypes of its tensors."""

    name: str
    source: str
    key: Mapping[str, Any]
    sizes: Mapping[str, Any]
    dtypes: Sequence[str]

    @property
    def kernel(self) -> str:
        return f"{self.name}:{self.source}"

    @property
    def problem(self) -> Problem:
        """The key as a problem, without the kernel's name."""
        return Problem({name: value for name, value in problem_of("", "", self.key).items() if name != "family"})


def choose_index(call: KernelCall, configs: Sequence[Any], fits: Callable[[Any], bool], say: Say | None = None) -> int:
    """Return the index of the configuration to launch; `fits` tells whether one compiles and can be loaded."""
    with _mutex:
        device, problem, lock = _device_name(), call.problem, active_lock()
        settings = [settings_of(config) for config in configs]
        candidates = [config_of(values) for values in settings]
        locked = None if lock is None else lock.find(call.kernel, problem, device)
        if locked is not None and locked.config in candidates:
            return candidates.index(locked.config)
        ranking = _rank(call, settings, device)
        if not ranking.model:
            _announce(f"{call.name} keeps its first configuration that fits: the cost model does not know it", say)
        # Without any that fits, Triton raises its own error for the first.
        index = next((i for i in ranking.order if fits(configs[i])), ranking.order[0])
        if lock is not None:
            choice = LockedChoice(
                kernel=call.kernel,
                problem=problem,
                device=device,
                config=candidates[index],
                predicted=None if ranking.costs is None else float(ranking.costs[index]),
                model=ranking.model,
                reason=ranking.reason,
                candidates=tuple(candidates) if ranking.model else (),
            )
            lock.add(choice)
        return int(index)


def _rank(call: KernelCall, settings: Sequence[Mapping[str, Any]], device: str) -> Ranking:
    """Order the configurations by the cost model; in their own order if it does not know the kernel."""
    as_matmul = match_matmul(settings, call.sizes, call.dtypes)
    model = shipped_model(device) if as_matmul is not None else None
    if as_matmul is None or model is None:
        return Ranking(range(len(settings)))
    try:
        return rank_matmul(model, *as_matmul)
    except TilewiseError as error:
        _announce(f"the cost model cannot rank {call.name}: {error}", None)
        return Ranking(range(len(settings)))


def rank_matmul(model: ModelScores, problem: Problem, configs: Sequence[Config]) -> Ranking:
    """Order configurations of a matrix product by the model's scores; equal ones keep their order."""
    scores = model.scores(problem, configs)
    order = [int(index) for index in np.argsort(scores, kind="stable")]
    return Ranking(order, scores.tolist(), model_digest(), f"first of {len(configs)} by the cost model")


@functools.cache
def model_digest() -> str:
    """Name the shipped model of Triton kernels, with eight hexadecimal digits of its content."""
    return f"h200 {hashlib.sha256(shipped_file('h200').read_bytes()).hexdigest()[:8]}"


@functools.cache
def shipped_model(device: str) -> ModelScores | None:
    """Load the model that serves a device; None, said once, for a device without a record."""
    if find_device(device) is None:
        _announce(f"there is no record of {device}, so its kernels keep their first configuration that fits", None)
        return None
    return shipped_scores("h200", device, "triton", 0.0)[0]


def _device_name() -> str:
    try:
        return this_gpu()[0].identity
    except ImportError:
        return "no GPU"


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
