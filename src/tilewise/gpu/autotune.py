"""`autotune`: a drop-in for `triton.autotune` that measures a handful of configurations instead of all of them.

The call, the decorator and the results are those of Triton. For each new key it looks for a stored choice. Without one
it ranks the configurations: with the cost model shipped for this GPU if the kernel looks like a matrix product with
blocks along m, n and k, else by the work in the kernel's intermediate representation, else with what it learned about
this kernel from other keys. Tiles that cannot fit are left out before they are compiled. It measures in that order
until more measurements cannot pay, and stores every measurement. A key whose best configuration is certain is not
measured.

    @tilewise.tune.triton.autotune(configs=[...], key=["M", "N", "K"])
    @triton.jit
    def kernel(...): ...
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise import __version__
from tilewise.errors import ConfigurationError, TilewiseError
from tilewise.gpu.devices import find_device
from tilewise.gpu.pinning import is_unmeasured
from tilewise.gpu.triton_kernel import (
    config_of,
    element_types,
    match_matmul,
    matmul_exceeds_limits,
    problem_of,
    settings_of,
    source_digest,
    this_gpu,
)
from tilewise.store.problem import Config
from tilewise.tune.choose.cache import Decision, cache_folder
from tilewise.tune.choose.decide import FIRST_PROBLEMS, Scores, decide
from tilewise.tune.choose.memory import Memory
from tilewise.tune.choose.scores import UNCALIBRATED_GPU, ModelScores, shipped_scores
from tilewise.tune.measure import TrialResult

if TYPE_CHECKING:
    from tilewise.gpu.pinning.choose import ConfigRanking
    from tilewise.store.service import ServiceClient

PROGRAM = "autotuned"  # the program under which measurements are stored
# Without a model, measuring ends when the expected saving of the remaining configurations is below this share.
_MIN_EXPECTED_SAVING = 0.005
BUDGET = 5  # default number of configurations to measure for a new key, with a model


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

    Arguments besides Triton's own (unknown ones are passed on to Triton): `budget` is the number of configurations to
    measure for a new key if a model ranks the kernel; without a model it is twice as many, and four times as many for
    the first three keys. With a budget of 0, with deterministic algorithms or under `tilewise.pin()` nothing is
    measured. `cache` is the folder of choices and measurements. `service` is the address of a `tilewise
    serve`: measurements of this kernel by other machines are taken over, and those made here are sent there. `say`
    receives a line about each decision; by default nothing is printed.
    """
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise ConfigurationError(f"budget must be a whole number of at least 0, not {budget!r}.")

    def decorate(kernel: Any) -> Any:
        """Wrap a jitted Triton kernel in a `LearnedAutotuner`."""
        autotuner = _autotuner_class()(
            kernel, kernel.arg_names, list(configs), list(key), reset_to_zero, restore_value, pre_hook=pre_hook,
            post_hook=post_hook, prune_configs_by=prune_configs_by, **options,
        )  # fmt: skip
        autotuner.session = Session(
            name=autotuner.base_fn.__name__,
            source=source_digest(kernel),
            budget=budget,
            cache=cache,
            say=say or (lambda line: None),
            service=service,
        )
        return autotuner

    return decorate


def _autotuner_class() -> Any:
    """Define and return the subclass of Triton's Autotuner; done on demand, as Triton may be missing."""
    from triton.runtime.autotuner import Autotuner

    class LearnedAutotuner(Autotuner):  # type: ignore[misc, unused-ignore]
        """Triton's Autotuner, whose cache of best configurations a `Session` fills in advance."""

        session: Session

        def run(self, *args: Any, **kwargs: Any) -> Any:
            """Choose a configuration if the call's key is new, then launch as Triton does."""
            if len(self.configs) > 1 and not self._is_unmeasured():
                values = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
                arguments = {name: value for name, value in values.items() if name in self.arg_names}
                dtypes = [str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")]
                sizes = {name: arguments[name] for name in self.keys if name in arguments}
                # The key must equal the one that Triton builds.
                tuning_key = (*(sizes[name] for name in self.keys if name in sizes), *dtypes)
                if tuning_key not in self.cache:
                    self._choose(tuning_key, sizes, element_types(arguments.values()), args, kwargs)
            return super().run(*args, **kwargs)

        def _is_unmeasured(self) -> bool:
            return not self.session.budget or is_unmeasured()

        def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
            """Keep only the choice by prediction if measuring is off; else prune as Triton does."""
            pruned: list[Any] = super().prune_configs(kwargs)
            if len(pruned) > 1 and self._is_unmeasured():
                from tilewise.gpu.pinning.choose import choose_config

                return [choose_config(self, pruned, kwargs, self.session.say)]
            return pruned

        def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
            """Time a configuration as Triton does; skip timing if measuring is off."""
            return [0.0] * 3 if self._is_unmeasured() else super()._bench(*args, config=config, **meta)

        def _choose(self, tuning_key: Any, sizes: Any, dtypes: list[str], args: Any, kwargs: Any) -> None:
            """Choose a configuration for a new autotuning key and store it in Triton's cache."""
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            start = time.time()
            pruned = self.prune_configs(kwargs)
            timings: dict[Any, Any] = {}

            def measure(config: Any) -> float | None:
                """Time a configuration with Triton's own benchmark, in nanoseconds; None if it fails."""
                result = self._bench(*args, config=config, **kwargs)  # milliseconds, or quantiles of them
                timings[config] = result
                median = result[0] if isinstance(result, list | tuple) else result
                return float(median) * 1e6 if 0 < float(median) < float("inf") else None

            def rank_by_work() -> ConfigRanking | None:
                """Order the configurations by the work in the kernel's code; late, as products need none of it."""
                from tilewise.gpu.pinning.choose import rank_configs

                return rank_configs(self, pruned, kwargs)

            best = self.session.choose(pruned, sizes, dtypes, measure, rank_by_work)
            self.cache[tuning_key] = best
            self.configs_timings, self.bench_time = timings, time.time() - start
            if timings:
                self.pre_hook({**self.nargs, **kwargs, **best.all_kwargs()}, reset_only=True)

    return LearnedAutotuner


@dataclass(eq=False)
class Session:
    """The choices of one decorated kernel. Files are opened at the first launch, when the GPU is known."""

    name: str
    source: str
    budget: int
    cache: str | os.PathLike[str] | None
    say: Callable[[str], None]
    service: str | None = None
    last: Decision | None = None  # the decision for the last new key

    @functools.cached_property
    def _state(self) -> tuple[Memory, ModelScores | None, ServiceClient | None]:
        """Load the cached choices, the cost model and the service's client for this GPU, at the first use."""
        (machine, version, collection), service = this_gpu(), None
        folder = Path(self.cache).expanduser() if self.cache is not None else cache_folder()
        file_name = re.sub(r"\W+", "-", f"{machine.kind}-{machine.identity}").strip("-").lower()
        version = f"{__version__}, triton {version}"
        memory = Memory(folder, machine, version, folder / f"{file_name}.sqlite", self.say)
        for note in memory.choices.notes:
            self.say(note)
        is_own_model = collection is None or collection in machine.identity.lower()
        model, _ = shipped_scores(collection, machine.identity, "triton", 0.0, own=is_own_model)
        if self.service is not None:
            from tilewise.store.service import ServiceClient

            service = ServiceClient(self.service, machine, self.say)
        return memory, model, service

    def choose(
        self,
        configs: Sequence[Any],
        sizes: Mapping[str, Any],
        dtypes: Sequence[str],
        measure: Callable[[Any], float | None],
        rank: Callable[[], ConfigRanking | None] = lambda: None,
    ) -> Any:
        """Return the `triton.Config` to launch a call with, from the cache or by measuring a few.

        `measure` times a configuration in nanoseconds (None if it fails); `rank` orders them by the kernel's amount of
        work.
        """
        memory, matmul_model, service = self._state
        configs, model = self._score(configs, matmul_model, memory.machine.identity, sizes, dtypes, rank)
        candidates = tuple(config_of(settings_of(config)) for config in configs)
        problem = problem_of(self.name, self.source, {**sizes, **{f"dtype{i}": d for i, d in enumerate(dtypes)}})
        if service is not None and memory.cached_choice(problem, candidates) is None:
            answer = service.choose(problem, candidates)
            if answer is not None and answer.source == "measured":
                self.say(f"{self.name}: measured elsewhere, says the service")
                return configs[candidates.index(answer.config)]
        launches = _Launches(
            dict(zip(candidates, configs, strict=True)), measure, lambda line: self.say(f"{self.name}: {line}")
        )
        budget, min_saving = self.budget, 0.0
        if model is None:
            # Without a model the first keys of a kernel are measured more thoroughly: they teach the later ones.
            is_first = len(memory.runtimes(problem.family)) < FIRST_PROBLEMS
            budget, min_saving = (4 if is_first else 2) * self.budget, _MIN_EXPECTED_SAVING
        decision = decide(problem, candidates, model, memory, launches, budget=budget, worth=min_saving, least=0)
        self.last = decision
        if decision.source == "cache":
            self.say(f"{self.name} {dict(sizes)}: chosen before")
        elif decision.measurements and not launches.times:
            raise TilewiseError(f"none of the {len(configs)} configurations of {self.name} could be run; try others.")
        else:
            self._store(memory, service, decision, launches.times)
            count = f"{decision.measurements} of {len(configs)} measured"
            self.say(f"{self.name} {dict(sizes)}: {count}; {decision.reason}")
        return configs[candidates.index(decision.config)]

    def _store(
        self, memory: Memory, service: ServiceClient | None, decision: Decision, times: Mapping[Config, float]
    ) -> None:
        """Write measurements (nanoseconds per configuration) to disk and send them to the service, if there is one.

        A failure is only a message, because this process keeps the choice in memory anyway.
        """
        if not times or decision.runtime_ns is None:
            return
        try:
            memory.add(PROGRAM, decision, times, min(times.values()), {"autotune": True})
            if service is not None:
                service.report(decision.problem, min(times.values()), list(times.items()))
        except (TilewiseError, OSError) as error:
            self.say(str(error))

    def _score(
        self,
        configs: Sequence[Any],
        model: ModelScores | None,
        device: str,
        sizes: Mapping[str, Any],
        dtypes: Sequence[str],
        rank: Callable[[], ConfigRanking | None],
    ) -> tuple[Sequence[Any], Scores | None]:
        """Return the configurations that fit the device and their scores, which are None if nothing can rank them.

        The shipped model scores a kernel that looks like a matrix product, `rank` every other. A tile that exceeds
        shared memory or registers is not even compiled.
        """
        as_matmul = None if model is None else match_matmul([settings_of(config) for config in configs], sizes, dtypes)
        if as_matmul is not None and model is not None:
            problem, record = as_matmul[0], find_device(device)
            pairs = list(zip(configs, as_matmul[1], strict=True))
            if record is not None:
                pairs = [pair for pair in pairs if not matmul_exceeds_limits(problem, pair[1], record)] or pairs
            while model.notes:  # show each note once, when the model is first used
                warnings.warn(model.notes.pop(), stacklevel=2)
            try:
                return [config for config, _ in pairs], model.rank(problem, [tile for _, tile in pairs])
            except TilewiseError as error:
                warnings.warn(f"the shipped model cannot rank {self.name}: {error}", stacklevel=2)
        ranking = rank()
        if ranking is None or ranking.costs is None:
            return configs, None
        from tilewise.gpu.pinning.ranker import TOO_LARGE

        costs = np.array(ranking.costs)
        fits = costs < costs.min() + TOO_LARGE / 2
        return list(itertools.compress(configs, fits)), Scores(UNCALIBRATED_GPU, costs[fits])


class _Launches:
    """Times configurations of a kernel by launching it; an error rules out one configuration only."""

    def __init__(
        self, launches: Mapping[Config, Any], time: Callable[[Any], float | None], say: Callable[[str], None]
    ) -> None:
        self._launches, self._time, self._say = launches, time, say
        self.times: dict[Config, float] = {}

    def measure(self, config: Config) -> TrialResult:
        """Check and time one configuration of the kernel on the call's own arguments."""
        try:
            runtime_ns = self._time(self._launches[config])
        except ValueError:  # a mistake in the call, such as a meta-parameter that is passed twice
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            self._say(f"{self._launches[config]} is left out: {reason}")
            return TrialResult(None, None, "failed", reason)
        if runtime_ns is None or not 0 < runtime_ns < math.inf:
            return TrialResult(None, None, "failed", "Triton returned no valid time")
        self.times[config] = runtime_ns
        return TrialResult(runtime_ns, None)

    def remeasure(self, configs: Sequence[Config]) -> Sequence[float | None]:
        """Time configurations a second time; return the geometric mean of both times in ns for each."""
        before = [self.times[config] for config in configs]
        again = [self.measure(config).runtime_ns for config in configs]
        return [None if b is None else math.sqrt(a * b) for a, b in zip(before, again, strict=True)]
