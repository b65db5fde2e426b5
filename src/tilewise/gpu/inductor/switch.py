"""`enable()` and `disable()`: putting tilewise into PyTorch's compiler, and taking it out again.

The compiler's own settings say who chooses templates; they are set, and put back as they were. A PyTorch that lacks
what is needed, a GPU without a model or no GPU at all gets one sentence, and PyTorch's own choices as before.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.gpu.inductor.processes import one_assembler
from tilewise.gpu.inductor.records import Book
from tilewise.gpu.inductor.rest import time_in_turns
from tilewise.gpu.measure.gpu import HOPPER
from tilewise.gpu.products.runtimes import shipped_runtimes
from tilewise.store.service import ServiceClient

_OLDEST = (2, 11)
# What makes the compiler list every template there is; ranking them costs a millisecond, measuring them minutes.
_SETTINGS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_search_space": "EXHAUSTIVE",
    "triton.enable_persistent_tma_matmul": True,
}
_current: list[Enabled] = []


class Enabled:
    """What `enable()` gives: `active` or why not; a context manager that takes tilewise out at its end."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.advisor: Any = None
        self._undo: list[Any] = []

    @property
    def active(self) -> bool:
        return self.reason is None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self in _current:
            disable()

    def undo(self) -> None:
        """Everything as it was, the last change first."""
        while self._undo:
            self._undo.pop()()


def enable(
    budget: int = 3,
    *,
    records: Path | None = None,
    devices: tuple[str, ...] = ("cuda",),
    service: str | None = None,
    isolated: bool = True,
) -> Enabled:
    """Have `torch.compile` measure the `budget` most promising templates of each matrix product beside ATen's.

    Where that cannot be (an unknown PyTorch, a GPU without a model) a warning says so in one sentence and PyTorch
    chooses as it always does; `.reason` repeats it. Products measured before are not measured again. `service` is the
    address of a `tilewise serve`: what others measured with the same PyTorch is taken over, and it is told what was
    measured here; without an answer within 50 ms it is left alone, which is said once. A process of PyTorch's runs
    every template first, so that one that crashes or hangs costs that process alone; it is started when there is
    something to measure. `isolated=False` does without it.
    """
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ConfigurationError(f"The budget is a number of templates to measure, 1 or more; not {budget!r}.")
    disable()
    enabled = Enabled()
    try:
        enabled.reason = _why_not(devices)
        if enabled.reason is None:
            _put_in(enabled, budget, records, devices, service)
            if isolated:
                _isolate(enabled)
    except ConfigurationError:  # the caller's own mistake
        enabled.undo()
        raise
    except Exception as error:  # an unknown version may lack any name; PyTorch must go on as before
        enabled.undo()
        enabled.reason = f"this PyTorch does not offer what tilewise needs ({type(error).__name__}: {error})"
    if enabled.reason is not None:
        warnings.warn(f"tilewise.inductor: {enabled.reason}; PyTorch chooses by itself.", stacklevel=2)
        return enabled
    _current.append(enabled)
    return enabled


def disable() -> None:
    """Take tilewise out of PyTorch's compiler; its settings are as they were before."""
    while _current:
        _current.pop().undo()


def _why_not(devices: tuple[str, ...]) -> str | None:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "PyTorch is not installed"
    version = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
    if version < _OLDEST:
        return f"PyTorch {torch.__version__} is older than 2.11, whose compiler asks nobody"
    if shipped_runtimes() is None:
        return "no model of runtimes is installed"
    if "cuda" not in devices:
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    major, minor = torch.cuda.get_device_capability(0)
    if major * 10 + minor != HOPPER:
        return f"there is no model for {torch.cuda.get_device_name(0)}, only for the H200 and its like"
    return None


def _put_in(enabled: Enabled, budget: int, records: Path | None, devices: tuple[str, ...], service: str | None) -> None:
    choices = importlib.import_module("tilewise.gpu.inductor.choices")
    config = importlib.import_module("torch._inductor.config")
    select = importlib.import_module("torch._inductor.select_algorithm")
    virtualized = importlib.import_module("torch._inductor.virtualized")
    model = shipped_runtimes()
    client = None if service is None else ServiceClient(service, choices.gpu(), _say)
    advisor = choices.Advisor(model, budget, Book(choices.machine_name(), records), devices, client)
    enabled.advisor = choices.TilewiseChoices.advisor = advisor
    enabled._undo.append(lambda: setattr(choices.TilewiseChoices, "advisor", None))
    # A thread that compiled before holds PyTorch's own object already, whatever the settings say by now.
    handler = virtualized.V.set_choices_handler(choices.TilewiseChoices())
    handler.__enter__()
    enabled._undo.append(lambda: handler.__exit__(None, None, None))
    # Before 2.13 nothing but the tag tells the compiler's caches apart.
    caches = importlib.import_module("torch.compiler.config")
    tag = {"cache_key_tag": f"{caches.cache_key_tag}{advisor.key}"}
    settings = {**_SETTINGS, "inductor_choices_class": choices.TilewiseChoices}
    advisor.without = {name: functools.reduce(getattr, name.split("."), config) for name in _SETTINGS}
    _set(enabled, caches.patch(tag))
    _set(enabled, config.patch(settings))
    enabled._undo.append(_leave_others(config, advisor))
    enabled._undo.append(one_assembler())
    if "cuda" in devices:
        enabled._undo.append(time_in_turns(advisor.note))
    select.add_feedback_saver(advisor.measured)
    enabled._undo.append(lambda: _forget(select, advisor.measured))


def _leave_others(config: Any, advisor: Any) -> Callable[[], None]:
    """Have graphs that are on other devices compiled with the settings that they would have; gives what undoes it."""
    compiling: Any = importlib.import_module("torch._inductor.compile_fx")
    pytorchs = getattr(compiling, "_compile_fx_inner", None)
    if pytorchs is None:
        return lambda: None

    @functools.wraps(pytorchs)
    def compiled(graph: Any, *given: Any, **named: Any) -> Any:
        with config.patch({} if _is_on(graph, advisor.devices) else advisor.without):
            return pytorchs(graph, *given, **named)

    compiling._compile_fx_inner = compiled
    return lambda: setattr(compiling, "_compile_fx_inner", pytorchs)


def _is_on(graph: Any, devices: tuple[str, ...]) -> bool:
    """Whether a tensor of a graph is on one of the devices."""
    values = [getattr(node, "meta", {}).get("val") for node in graph.graph.nodes]
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    return any(one.device.type in devices for one in flat if hasattr(one, "device"))


def _isolate(enabled: Enabled) -> None:
    _set(enabled, importlib.import_module("torch._inductor.config").patch({"autotune_in_subproc": True}))
    enabled.advisor.isolated = True


def _set(enabled: Enabled, patch: Any) -> None:
    """Settings that are put back when tilewise is taken out."""
    patch.__enter__()
    enabled._undo.append(functools.partial(patch.__exit__, None, None, None))


def _say(line: str) -> None:
    warnings.warn(f"tilewise.inductor: {line}.", stacklevel=2)


def _forget(select: Any, saver: Any) -> None:
    """Take one function off the compiler's list; it only offers to clear all."""
    savers = select.get_algorithm_selector_cache().feedback_saver_fns
    if saver in savers:
        savers.remove(saver)
