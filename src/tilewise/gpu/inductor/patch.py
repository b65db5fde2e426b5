"""`enable()` and `disable()`: install tilewise in PyTorch's compiler, and remove it again.

The compiler's own settings name the class that chooses templates; `enable` sets them and `disable` restores them. If
PyTorch is too old, the GPU has no model or there is no GPU, a warning says so in one sentence and PyTorch chooses by
itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewise.errors import ConfigurationError
from tilewise.gpu.devices import model_collection
from tilewise.gpu.inductor.decision_log import DecisionLog
from tilewise.gpu.inductor.rebenchmark import patch_autotuner
from tilewise.gpu.pinning import replace_function
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.service import ServiceClient

_MIN_PYTORCH = (2, 11)  # the first version with a class for template choices
# Settings that make the compiler list every template: ranking them takes a millisecond, benchmarking them minutes.
_SETTINGS = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_search_space": "EXHAUSTIVE",
    "triton.enable_persistent_tma_matmul": True,
}
# Settings with which the compiler benchmarks nothing and reads no choice that an earlier process has measured. A
# version of PyTorch need not have all of them.
_UNMEASURED_SETTINGS = {
    "deterministic": True,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    "coordinate_descent_tuning": False,
    "benchmark_fusion": False,
    "benchmark_combo_kernel": False,
    "benchmark_epilogue_fusion": False,
}
_enabled: list[Enabled] = []


class Enabled:
    """The result of `enable()`: whether tilewise is active and, if not, why; a context manager that disables it."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.advisor: Any = None
        self.changes = contextlib.ExitStack()  # closing it undoes every change, the last one first

    @property
    def active(self) -> bool:
        return self.reason is None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self in _enabled:
            disable()


def enable(
    budget: int = 3,
    *,
    records: Path | None = None,
    devices: tuple[str, ...] = ("cuda",),
    service: str | None = None,
    isolated: bool = True,
) -> Enabled:
    """Have `torch.compile` benchmark the `budget` most promising templates of each matrix product, and ATen.

    With a budget of 0, with `torch.use_deterministic_algorithms` or the compiler's deterministic mode, and under
    `tilewise.pin()` nothing is benchmarked: every choice follows from the predictions alone, the same in every process.
    If that is not possible (an older PyTorch, a GPU without a model), a warning says so in one sentence, PyTorch
    chooses by itself, and `.reason` repeats the sentence. Products that were measured before are not measured again;
    `records` is the folder of the measurements. `service` is the address of a tuning service: measurements of other
    machines with the same PyTorch are taken over, and those made here are sent there. A service that does not answer
    within 50 ms is ignored from then on, with one warning. With `isolated`, a separate process runs every template
    first, so that a template that crashes or hangs ends that process alone.
    """
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise ConfigurationError(f"budget must be a number of templates, 0 or more, not {budget!r}.")
    disable()
    enabled = Enabled()
    try:
        enabled.reason = _unsupported_reason(devices)
        if enabled.reason is None:
            _install(enabled, budget, records, devices, service)
            if isolated and not enabled.advisor.is_unmeasured:
                # PyTorch then tests every template in a separate process.
                settings: Any = importlib.import_module("torch._inductor.config")
                enabled.changes.enter_context(settings.patch({"autotune_in_subproc": True}))
                enabled.advisor.isolated = True
    except ConfigurationError:  # a wrong argument, which the caller must see
        enabled.changes.close()
        raise
    except Exception as error:  # an unknown version may lack any name; PyTorch must go on as before
        enabled.changes.close()
        enabled.reason = f"this PyTorch does not offer what tilewise needs ({type(error).__name__}: {error})"
    if enabled.reason is not None:
        warnings.warn(f"tilewise.inductor: {enabled.reason}; PyTorch chooses by itself.", stacklevel=2)
        return enabled
    _enabled.append(enabled)
    return enabled


def disable() -> None:
    """Remove tilewise from PyTorch's compiler and restore the compiler's settings."""
    while _enabled:
        _enabled.pop().changes.close()


def _unsupported_reason(devices: tuple[str, ...]) -> str | None:
    """Return why tilewise cannot be enabled here, or None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "PyTorch is not installed"
    version = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
    if version < _MIN_PYTORCH:
        return f"PyTorch {torch.__version__} is older than 2.11, the first version that lets others choose templates"
    if shipped_runtime_model() is None:
        return "no model of runtimes is installed"
    if "cuda" not in devices:
        return None
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    major, minor = torch.cuda.get_device_capability(0)
    if model_collection(major * 10 + minor) is None:
        return f"there is no model for {torch.cuda.get_device_name(0)}, only for the H200 and similar GPUs"
    return None


def _install(
    enabled: Enabled, budget: int, records: Path | None, devices: tuple[str, ...], service: str | None
) -> None:
    """Create the advisor and hook it into the compiler; `enabled` collects how to undo each change."""
    changes = enabled.changes
    choices = importlib.import_module("tilewise.gpu.inductor.choices")
    config = importlib.import_module("torch._inductor.config")
    select_algorithm = importlib.import_module("torch._inductor.select_algorithm")
    virtualized = importlib.import_module("torch._inductor.virtualized")
    client = None if service is None else ServiceClient(service, choices.current_gpu(), _warn)
    log = DecisionLog(choices.machine_name(), records)
    advisor = choices.Advisor(shipped_runtime_model(), budget, log, devices, client)
    enabled.advisor = choices.TilewiseChoices.advisor = advisor
    changes.callback(setattr, choices.TilewiseChoices, "advisor", None)
    # A thread that has compiled before already holds PyTorch's own handler and no longer reads the setting.
    changes.enter_context(virtualized.V.set_choices_handler(choices.TilewiseChoices()))
    # Before PyTorch 2.13 only this tag separates the entries of the compiler's caches.
    compiler_config = importlib.import_module("torch.compiler.config")
    advisor.original_settings = {name: functools.reduce(getattr, name.split("."), config) for name in _SETTINGS}
    changes.enter_context(compiler_config.patch({"cache_key_tag": f"{compiler_config.cache_key_tag}{advisor.key}"}))
    changes.enter_context(config.patch({**_SETTINGS, "inductor_choices_class": choices.TilewiseChoices}))
    _restrict_to_devices(changes, config, advisor)
    changes.callback(share_assembler())
    _pick_pinned_choices(changes, select_algorithm, advisor)
    if "cuda" in devices or not budget:
        patch_autotuner(changes, advisor.note, lambda: advisor.is_unmeasured)
    # PyTorch calls it with the benchmarked times of every choice.
    select_algorithm.add_feedback_saver(advisor.on_feedback)
    changes.callback(_remove_feedback, select_algorithm, advisor.on_feedback)


def _restrict_to_devices(changes: contextlib.ExitStack, config: Any, advisor: Any) -> None:
    """Patch the compiler so that tilewise's settings apply only to graphs on the advisor's devices.

    With a budget of 0, they also switch benchmarking off. They are set inside of those of a mode such as
    "max-autotune", which would override them.
    """

    def compile_inner(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile a graph with the settings for its device; replaces Inductor's function."""
        settings = advisor.original_settings
        if _uses_device(graph, advisor.devices):
            settings = {}
            if advisor.is_unmeasured:
                settings = {name: value for name, value in _UNMEASURED_SETTINGS.items() if hasattr(config, name)}
        with config.patch(settings):
            return original(graph, *args, **kwargs)

    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    if hasattr(compile_fx, "_compile_fx_inner"):
        replace_function(changes, compile_fx, "_compile_fx_inner", compile_inner)


def _pick_pinned_choices(changes: contextlib.ExitStack, select_algorithm: Any, advisor: Any) -> None:
    """Patch the compiler's deterministic mode to take tilewise's choice where it would always take ATen."""

    def pick(original: Any, selector: Any, choices: Any) -> Any:
        pinned = [choice for choice in choices if advisor.is_pinned_choice(choice)]
        return pinned[-1] if pinned else original(selector, choices)

    selector_class = select_algorithm.AlgorithmSelectorCache
    if hasattr(selector_class, "pick_deterministic_choice"):
        replace_function(changes, selector_class, "pick_deterministic_choice", pick)


def _uses_device(graph: Any, devices: tuple[str, ...]) -> bool:
    """Tell whether any tensor of an FX graph is on one of the devices."""
    values = [getattr(node, "meta", {}).get("val") for node in graph.graph.nodes]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]
    return any(item.device.type in devices for item in flat if hasattr(item, "device"))


def _warn(line: str) -> None:
    warnings.warn(f"tilewise.inductor: {line}.", stacklevel=2)


def _remove_feedback(select_algorithm: Any, callback: Any) -> None:
    """Remove one callback from the compiler's list, of which PyTorch can only clear all."""
    callbacks = select_algorithm.get_algorithm_selector_cache().feedback_saver_fns
    if callback in callbacks:
        callbacks.remove(callback)


# Processes that the compiler starts. Its compile workers use the PTX assembler that PyTorch 2.11 brings, while the main
# process uses Triton's. Triton's cache key contains the assembler's version, so every template would be compiled a
# second time before it is timed. The process that tests templates takes some seconds to start, and PyTorch keeps it
# after a template has corrupted its CUDA context, when every later template would fail in it.
_ASSEMBLER_VARIABLE = "TRITON_PTXAS_PATH"


def share_assembler() -> Callable[[], None]:
    """Make Triton in this process use the ptxas of PyTorch's compile workers; return a function that undoes it."""
    before = os.environ.get(_ASSEMBLER_VARIABLE)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        tasks: Any = importlib.import_module("torch._inductor.runtime.compile_tasks")
        tasks._set_triton_ptxas_path.__wrapped__()  # the workers call the cached wrapper, which runs only once
    forget_assembler_version()

    def restore_assembler() -> None:
        if before is None:
            os.environ.pop(_ASSEMBLER_VARIABLE, None)
        forget_assembler_version()

    return restore_assembler


def forget_assembler_version() -> None:
    """Clear Triton's cached assembler version, which it otherwise reads once."""
    with contextlib.suppress(ImportError, AttributeError):
        compiler: Any = importlib.import_module("triton.backends.nvidia.compiler")
        compiler.get_ptxas_version.cache_clear()


def start_test_process() -> None:
    """Start the process that tests templates and create its CUDA context, without waiting for it."""
    with contextlib.suppress(AttributeError, OSError):  # without the pool PyTorch starts the process itself, later
        pool = _test_pool()
        pool.executor.submit(_initialise_cuda, pool)


def _initialise_cuda(pool: Any) -> None:
    """Synchronise the GPU in an idle test process, so that its CUDA context exists before the first test."""
    cuda: Any = importlib.import_module("torch.cuda")
    process = pool.process_queue.get()
    try:
        process.put(cuda.synchronize)
        process.get()
    except Exception:  # if something is wrong with it, testing a template fails in the same way
        process.kill()
    finally:
        pool.process_queue.put(process)


def restart_test_process() -> None:
    """Stop the processes that test-run templates; PyTorch starts new ones on demand."""
    for process in _test_pool().processes:
        process.kill()


def _test_pool() -> Any:
    """Return PyTorch's pool of test processes, starting it if necessary."""
    autotune_process: Any = importlib.import_module("torch._inductor.autotune_process")
    return autotune_process.get_tuning_process_pool()
