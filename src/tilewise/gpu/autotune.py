"""`autotune`: a drop-in for `triton.autotune` that measures a handful of configurations instead of all of them.

Same call, same decorator, same results. For each new key it asks the choices on disk; then the cost model shipped for
this GPU, where the kernel is recognisably one of the families that were measured (a matrix product with blocks along m,
n and k); else what it has learned about this kernel from other keys. It measures until going on cannot pay, keeps every
measurement on disk, and takes a new key without measuring when what it knows leaves no doubt.

    @tilewise.tune.triton.autotune(configs=[...], key=["M", "N", "K"])
    @triton.jit
    def kernel(...): ...
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.gpu.measure.gpu import COLLECTIONS, NEAREST
from tilewise.store.problem import Config, Kernel, Problem, Value
from tilewise.store.service import ServiceClient
from tilewise.store.store import Machine
from tilewise.tune.choose.cache import Decision, cache_folder
from tilewise.tune.choose.decide import FIRST_PROBLEMS, decide
from tilewise.tune.choose.memory import Memory
from tilewise.tune.choose.scores import ModelScores, shipped_scores
from tilewise.tune.measure.trial import Timed
from tilewise.tune.search.gaussian_process import Hyperparameters, Numbers

PROGRAM = "autotuned"
_WORTH = 0.005  # expected saving of what is left, below which measuring a kernel without a model ends
BUDGET = 5
_LAUNCH_SETTINGS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_FAMILY_FIELDS = {"block_m", "block_n", "block_k", "warps", "stages"}
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32"}


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    *,
    budget: int = BUDGET,
    cache: str | os.PathLike[str] | None = None,
    service: str | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Callable[[Any], Any]:
    """Decorate a jitted kernel as `triton.autotune` does.

    Beyond Triton's own arguments (others are passed on): `budget` is how many configurations a new key may cost where
    a model knows the kernel; twice as many where none does, and four times for its first three keys. `cache` is the
    folder of choices and measurements. `service` is the address of a `tilewise serve`: what others measured of this
    kernel is taken over, and what is measured here is sent there. `say` hears what was decided; by default nothing is
    said.
    """
    if not isinstance(budget, int) or budget < 1:
        raise ConfigurationError(f"budget must be a whole number of at least 1, not {budget!r}.")

    def decorate(kernel: Any) -> Any:
        tuned = _autotuner_class()(
            kernel, kernel.arg_names, list(configs), list(key), reset_to_zero, restore_value, pre_hook=pre_hook,
            post_hook=post_hook, prune_configs_by=prune_configs_by, **options,
        )  # fmt: skip
        heard = say or (lambda line: None)
        tuned.learned = Session(tuned.base_fn.__name__, _source(kernel), budget, cache, heard, service)
        return tuned

    return decorate


def _autotuner_class() -> Any:
    """Triton's Autotuner with another way to fill its cache; made late, since Triton may be absent."""
    from triton.runtime.autotuner import Autotuner

    class LearnedAutotuner(Autotuner):  # type: ignore[misc, unused-ignore]
        """Fills Triton's own cache of best configurations before Triton looks into it."""

        learned: Session

        def run(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.configs) > 1:
                given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
                known = {name: value for name, value in given.items() if name in self.arg_names}
                dtypes = [str(value.dtype) for value in known.values() if hasattr(value, "dtype")]
                tuning_key = (*(known[name] for name in self.keys if name in known), *dtypes)
                if tuning_key not in self.cache:
                    self._choose(tuning_key, known, dtypes, args, kwargs)
            return super().run(*args, **kwargs)

        def _choose(self, tuning_key: Any, known: Any, dtypes: list[str], args: Any, kwargs: Any) -> None:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            start = time.time()
            pruned = self.prune_configs(kwargs)
            timings: dict[Any, Any] = {}

            def measure(config: Any) -> float | None:
                taken = self._bench(*args, config=config, **kwargs)
                timings[config] = taken
                middle = taken[0] if isinstance(taken, list | tuple) else taken
                return float(middle) * 1e6 if 0 < float(middle) < float("inf") else None

            sizes = {name: known[name] for name in self.keys if name in known}
            chosen = self.learned.choose(pruned, sizes, dtypes, measure)
            self.cache[tuning_key] = chosen
            self.configs_timings, self.bench_time = timings, time.time() - start
            if timings:
                self.pre_hook({**self.nargs, **kwargs, **chosen.all_kwargs()}, reset_only=True)

    return LearnedAutotuner


def _source(kernel: Any) -> str:
    """Digits that change with the kernel's code."""
    while kernel is not None and not hasattr(kernel, "cache_key"):
        kernel = getattr(kernel, "fn", None)
    return str(getattr(kernel, "cache_key", ""))[:16] or "unknown"


class Session:
    """The choices of one decorated kernel. Opened at the first launch, when the GPU is known."""

    def __init__(
        self,
        name: str,
        source: str,
        budget: int,
        cache: str | os.PathLike[str] | None,
        say: Callable[[str], None],
        service: str | None = None,
    ) -> None:
        self._service_url = service
        self._service: ServiceClient | None = None
        self.name, self.source, self.budget, self.say = name, source, budget, say
        self.folder = Path(cache).expanduser() if cache is not None else cache_folder()
        self._memory: Memory | None = None
        self._machine: Machine | None = None
        self._model: ModelScores | None = None
        self.last: Decision | None = None  # how the last new key was decided

    def _open(self) -> tuple[Memory, Machine]:
        if self._memory is None or self._machine is None:
            self._machine, version, collection = this_gpu()
            words = re.sub(r"\W+", "-", f"{self._machine.kind}-{self._machine.identity}").strip("-").lower()
            version = f"{__version__}, triton {version}"
            self._memory = Memory(self.folder, self._machine, version, self.folder / f"{words}.sqlite", self.say)
            for note in self._memory.choices.notes:
                self.say(note)
            known = collection is None or collection in self._machine.identity.lower()
            self._model, _ = shipped_scores(collection, self._machine.identity, "triton", 0.0, own=known)
            if self._service_url is not None:
                self._service = ServiceClient(self._service_url, self._machine, self.say)
        return self._memory, self._machine

    def choose(
        self,
        configs: Sequence[Any],
        sizes: Mapping[str, Any],
        dtypes: Sequence[str],
        measure: Callable[[Any], float | None],
    ) -> Any:
        """The triton.Config to launch with."""
        memory, machine = self._open()
        settings = [settings_of(config) for config in configs]
        own = tuple(config_of(values) for values in settings)
        problem = problem_of(self.name, self.source, {**sizes, **{f"dtype{i}": d for i, d in enumerate(dtypes)}})
        elsewhere = self._measured_elsewhere(memory, problem, own)
        if elsewhere is not None:
            return configs[own.index(elsewhere)]
        model = self._scores(settings, sizes, dtypes)
        launches = _Launches(
            dict(zip(own, configs, strict=True)), measure, lambda line: self.say(f"{self.name}: {line}")
        )
        known = 0 if model is not None else len(memory.measured(problem.family))
        # Where nothing is known of a kernel, its first keys teach those that come after.
        budget = self.budget if model is not None else 4 * self.budget if known < FIRST_PROBLEMS else 2 * self.budget
        worth = 0.0 if model is not None else _WORTH
        found = self.last = decide(problem, own, model, memory, launches, budget=budget, worth=worth, least=0)
        if found.source == "cache":
            self.say(f"{self.name} {dict(sizes)}: chosen before")
        elif found.measurements and not launches.times:
            raise TilewiseError(f"none of the {len(configs)} configurations of {self.name} could be run; try others.")
        else:
            self._keep(memory, machine, problem, found, launches.times)
            self.say(f"{self.name} {dict(sizes)}: {found.measurements} of {len(configs)} measured; {found.reason}")
        return configs[own.index(found.config)]

    def _measured_elsewhere(self, memory: Memory, problem: Problem, own: Sequence[Config]) -> Config | None:
        """What the service's others measured of this very kernel, unless this machine has a choice of its own."""
        if self._service is None or memory.kept(problem, own) is not None:
            return None
        found = self._service.choose(problem, own)
        if found is None or found.source != "measured":
            return None
        self.say(f"{self.name}: measured elsewhere, says the service")
        return found.config

    def _keep(
        self, memory: Memory, machine: Machine, problem: Problem, found: Decision, times: Mapping[Config, float]
    ) -> None:
        """What cannot be kept is said, and costs the next process its measurements, not this one its run."""
        if not times or found.runtime_ns is None:
            return
        try:
            with memory.open_store() as store:
                run = store.begin(machine, 0, {"autotune": True})
                store.add_batch(run, Kernel(PROGRAM, problem), 0, min(times.values()), list(times.items()))
            if self._service is not None:
                self._service.report(problem, min(times.values()), list(times.items()))
            memory.choices.put(found)
        except (TilewiseError, OSError) as error:
            self.say(str(error))

    def _scores(
        self, settings: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any], dtypes: Sequence[str]
    ) -> _ProductScores | None:
        """The shipped model's scores where the kernel looks like a matrix product; None elsewhere."""
        recognised = None if self._model is None else matmul_like(settings, sizes, dtypes)
        if recognised is None or self._model is None:
            return None
        while self._model.notes:  # once: the first product is the first that the model is used for
            warnings.warn(self._model.notes.pop(), stacklevel=2)
        try:
            return _ProductScores(self._model.hyper, self._model.scores(*recognised))
        except TilewiseError as error:
            warnings.warn(f"the shipped model cannot rank {self.name}: {error}", stacklevel=2)
            return None


@dataclass(frozen=True, eq=False)
class _ProductScores:
    """Scores of a kernel that was recognised as a product, in the order of its configurations."""

    hyper: Hyperparameters
    values: Numbers
    margin: float = 0.0

    def scores(self, problem: Problem, configs: Sequence[Config]) -> Numbers:
        return self.values


class _Launches:
    """Times configurations by launching the kernel; what one raises is its own verdict."""

    def __init__(
        self, launches: Mapping[Config, Any], time: Callable[[Any], float | None], say: Callable[[str], None]
    ) -> None:
        self._launches, self._time, self._say = launches, time, say
        self.times: dict[Config, float] = {}

    def measure(self, config: Config) -> Timed:
        try:
            runtime_ns = self._time(self._launches[config])
        except ValueError:  # a mistake in the call, such as a meta-parameter that is given twice
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            self._say(f"{self._launches[config]} is left out: {reason}")
            return Timed(None, None, "failed", reason)
        if runtime_ns is None or not 0 < runtime_ns < math.inf:
            return Timed(None, None, "failed", "it gave no time")
        self.times[config] = runtime_ns
        return Timed(runtime_ns, None)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """The mean of both readings, in logarithms."""
        before = [self.times[config] for config in configs]
        again = [self.measure(config).runtime_ns for config in configs]
        return [None if b is None else math.sqrt(a * b) for a, b in zip(before, again, strict=True)]


def config_of(settings: Mapping[str, Any]) -> Config:
    """A launch's settings as a configuration: whole numbers as they are, anything else as a switch of its own."""
    values: dict[str, int] = {}
    for name, value in settings.items():
        if isinstance(value, bool | int):
            values[name] = int(value)
        elif value is not None:
            values[f"{name}={value}"] = 1
    return Config(values)


def problem_of(kernel: str, source: str, key: Mapping[str, Any]) -> Problem:
    """A kernel and the values of its key; `source` changes with its code."""
    values: dict[str, Value] = {}
    for name, value in key.items():
        values[re.sub(r"\W", "_", name)] = int(value) if isinstance(value, bool | int) else str(value)
    return Problem({**values, "family": f"{kernel}:{source}"})


def settings_of(config: Any) -> dict[str, Any]:
    """Everything a triton.Config fixes, by name."""
    settings = dict(config.kwargs)
    for name in _LAUNCH_SETTINGS:
        value = getattr(config, name, None)
        if value is not None:
            settings[name] = value
    return settings


def matmul_like(
    settings: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any], dtypes: Sequence[str]
) -> tuple[Problem, list[Config]] | None:
    """The matrix product a kernel seems to be, by the names of its blocks and of its key; None if it does not."""
    wanted = {name.lower(): value for name, value in sizes.items() if isinstance(value, int)}
    dtype = _DTYPES.get(dtypes[0]) if dtypes else None
    if not {"m", "n", "k"} <= set(wanted) or dtype is None or min(wanted[n] for n in "mnk") < 1:
        return None
    configs = []
    for values in settings:
        fields = {_field(name): value for name, value in values.items() if isinstance(value, int)}
        if not fields.keys() >= _FAMILY_FIELDS:
            return None
        configs.append(Config({**{name: fields[name] for name in _FAMILY_FIELDS}, "group": fields.get("group", 1)}))
    problem = Problem.of(
        "matmul", dtype=dtype, m=wanted["m"], n=wanted["n"], k=wanted["k"], epilogue="none", layout="nn"
    )
    return problem, configs


def _field(name: str) -> str:
    """BLOCK_SIZE_M, BLOCK_M and block_m are one; GROUP_SIZE_M is the group."""
    plain = re.sub(r"_SIZE|SIZE_", lambda match: "_" if match.group() == "SIZE_" else "", name.upper()).lower()
    plain = plain.replace("__", "_").removeprefix("num_")
    return "group" if plain.startswith("group") else plain


def this_gpu() -> tuple[Machine, str, str | None]:
    """The GPU in use, Triton's version, and the collection whose model fits."""
    import torch
    import triton

    if not torch.cuda.is_available():
        return Machine("autotune", "no GPU", {}), str(triton.__version__), None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    collection = COLLECTIONS.get(properties.major * 10 + properties.minor, NEAREST)
    return Machine("autotune", str(properties.name), {}), str(triton.__version__), collection
