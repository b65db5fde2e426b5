"""Choice of configurations: the fastest measured one, or else the one that the cost model ranks first.

Each choice has a confidence (`sure` in JSON): the probability that it is within one per cent of the best of the
candidate configurations. Choices are cached per problem. A problem whose choice has a low confidence, or that is
requested often but was never measured, is queued for the fleet, so that later choices are better. Cached entries are
refreshed from the store in the background, so a cached choice never waits for the store.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import statistics
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.costmodel.confidence import confidence
from tilewise.errors import ConfigurationError, Rejected, TilewiseError
from tilewise.gpu.devices import H200
from tilewise.gpu.inductor.templates import FAMILY as COMPILER
from tilewise.store.aggregate import measured_problem
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.tune.choose.decide import Scores, decide
from tilewise.tune.choose.scores import ModelScores, shipped_scores
from tilewise.tune.families.registry import find_family
from tilewise_fleet.service.bodies import KnownList
from tilewise_fleet.service.checks import parse_configs

PROGRAM = "asked"  # stored as the program of kernels that the service queues
# An unmeasured problem is queued below this confidence, or after this many requests; both arbitrary.
LOW_CONFIDENCE, POPULAR_REQUESTS = 0.5, 20
_MAX_PROBLEMS, _MAX_LISTS = 200_000, 64  # cached entries; arbitrary
REFRESH_SECONDS = 5.0  # age after which a cached problem is read again from the store; arbitrary


@dataclass(frozen=True)
class MeasuredRuntimes:
    """Measured runtimes of one problem, and whether all of its configurations were measured."""

    runtime_ns: Mapping[Config, float]
    default_ns: float | None
    complete: bool  # every planned configuration was measured


@dataclass(frozen=True)
class EncodedChoice:
    """A response's choice as JSON text, with the fields that the service itself needs."""

    text: bytes
    source: str
    confidence: float | None


@dataclass
class CachedProblem:
    """The cached measurements and choices of one problem on one kind of machine."""

    runtimes: MeasuredRuntimes | None
    expires: float  # time of the next read from the store; negative: read before the next choice
    requests: int = 0  # with a token
    queued: bool = False
    choices: dict[int, EncodedChoice] = field(default_factory=dict)  # by the number of the list of configurations


@dataclass(eq=False)
class ChoiceQuery:
    """One problem of a request, with the candidate configurations."""

    machine: Machine
    problem: Problem
    configs: tuple[Config, ...]
    number: int  # identifies the list of configurations
    features: Mapping[str, int]

    @property
    def key(self) -> tuple[str, str]:
        """Key of the problem in the cache."""
        return self.machine.partition, self.problem.key


def read_runtimes(store: Store, machine: Machine, problem: Problem) -> MeasuredRuntimes | None:
    """Read a problem's measured runtimes on a machine from the store; None if it was not measured."""
    store.choose_partition(machine)
    kernel = Kernel(PROGRAM, problem)
    if not store.has_kernel(kernel) or (not store.shared and machine.partition not in store.partitions()):
        return None
    default = store.default_config(kernel)
    finished = measured_problem(store, kernel, default) if default is not None else None
    if finished is not None:
        times = {timing.config: timing.runtime_ns for timing in finished.timings}
        return MeasuredRuntimes(times, finished.default_ns, True)
    # The kernel is not finished: use the medians of the batches so far.
    samples: dict[Config, list[float]] = {}
    defaults = []
    for batch in store.batches(kernel):
        defaults.append(batch.default_ns)
        for key, runtime_ns in batch.runtime_ns.items():
            samples.setdefault(store.config_of(key), []).append(runtime_ns)
    if not samples:
        return None
    medians = {config: statistics.median(times) for config, times in samples.items()}
    return MeasuredRuntimes(medians, statistics.median(defaults), False)


class ChoiceCache:
    """Caches measured problems, lists of configurations and cost models; used by the event loop's thread only."""

    def __init__(self, max_problems: int = _MAX_PROBLEMS) -> None:
        """Start with empty caches, of at most `max_problems` problems."""
        self.problems: OrderedDict[tuple[str, str], CachedProblem] = OrderedDict()
        self._max_problems = max_problems
        self._lists: OrderedDict[bytes, tuple[int, tuple[Config, ...]]] = OrderedDict()
        self._count = 0
        self._models: dict[tuple[Any, ...], ModelScores | None] = {}

    def configs(self, content: Any, machine: Machine, problem: Problem, facts: Mapping[str, Any]) -> tuple[int, Any]:
        """Return a request's configurations (default: the family's) and a number that equal lists share."""
        if content is None:
            return self._family_list(machine, problem, facts)
        if isinstance(content, KnownList) and content.entry is not None:
            return content.entry
        plain = list(content) if isinstance(content, KnownList) else content
        try:
            key = marshal.dumps(plain, 2)  # format 2 has no references: equal lists have equal bytes
        except ValueError:
            raise Rejected("schema", "configs is a list of configurations, the default first") from None
        entry = self._lists.get(key)
        if entry is None:
            entry = self._lists[key] = self._assign_number(parse_configs(content))
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)
        if isinstance(content, KnownList):
            content.entry = entry
        return entry

    def _assign_number(self, configs: tuple[Config, ...]) -> tuple[int, tuple[Config, ...]]:
        self._count += 1
        return self._count, configs

    def _family_list(self, machine: Machine, problem: Problem, facts: Mapping[str, Any]) -> tuple[int, Any]:
        """Return all configurations of the problem's family that fit the device's shared memory, with their number.

        The list is empty, which means the measured configurations, for a CPU, where they depend on the instruction set,
        and for the templates of a compiler, which depend on its version.
        """
        if machine.kind == "cpu" or problem.family == COMPILER:
            return 0, ()
        try:
            family = find_family(machine.kind, problem.family)
            problem = family.problem(dict(problem))
            configs = family.configs(problem)
        except ConfigurationError as error:
            raise Rejected("schema", str(error)) from None
        shared_bytes = facts.get("shared_bytes", H200.shared_bytes_per_block)
        if type(shared_bytes) is not int:
            raise Rejected("schema", "device.shared_bytes must be an integer")
        fits_by = tuple(problem[name] for name in getattr(family, "fits_by", problem))
        key = marshal.dumps(("family", problem.family, fits_by, shared_bytes), 2)
        if key not in self._lists:
            fitting = tuple(c for c in configs if family.misfit(problem, c, shared_bytes) is None)
            if not fitting:
                raise Rejected(
                    "schema", f"no configuration of {problem.family} fits into the shared memory of this device"
                )
            self._lists[key] = self._assign_number(fitting)
        return self._lists[key]

    def lookup(self, query: ChoiceQuery) -> CachedProblem | None:
        """Return the cached problem of a query; None if it is not cached."""
        return self.problems.get(query.key)

    def update(self, query: ChoiceQuery, runtimes: MeasuredRuntimes | None) -> CachedProblem:
        """Cache a problem's measurements, just read from the store, and return the entry."""
        now = time.monotonic()
        entry = self.problems.get(query.key)
        if entry is None:
            entry = self.problems[query.key] = CachedProblem(runtimes, now + REFRESH_SECONDS)
            if len(self.problems) > self._max_problems:
                self.problems.popitem(last=False)
        elif entry.runtimes != runtimes:
            entry.runtimes, entry.choices = runtimes, {}
            entry.queued = entry.queued and runtimes is None
        entry.expires = now + REFRESH_SECONDS
        return entry

    def invalidate(self, machine: Machine, problem: Problem) -> None:
        """Make the next query about a problem read the store, which has new measurements of it."""
        entry = self.problems.get((machine.partition, problem.key))
        if entry is not None:
            entry.expires = -1.0

    def choose(self, query: ChoiceQuery, entry: CachedProblem) -> EncodedChoice:
        """Return the choice for a query as JSON, cached per problem and list of configurations."""
        choice = entry.choices.get(query.number)
        if choice is None:
            choice = self._decide(query, entry.runtimes)
            if len(entry.choices) >= 4:  # a problem is rarely requested with more than one list of configurations
                entry.choices.clear()
            entry.choices[query.number] = choice
        return choice

    def reason_to_measure(self, query: ChoiceQuery, entry: CachedProblem, choice: EncodedChoice) -> str | None:
        """Return why a problem should be queued for measuring; None if it should not or is."""
        if entry.queued or entry.runtimes is not None or len(query.configs) < 2:
            return None
        if choice.confidence is None or choice.confidence < LOW_CONFIDENCE:
            return "unsure"
        return "popular" if entry.requests >= POPULAR_REQUESTS else None

    def _decide(self, query: ChoiceQuery, runtimes: MeasuredRuntimes | None) -> EncodedChoice:
        """Choose the fastest measured configuration, else the model's choice, else the default (the first)."""
        configs, times = query.configs, {} if runtimes is None else runtimes.runtime_ns
        candidates = [(times[config], config) for config in configs or times if config in times] if times else []
        scores, model = self._score(query)
        if candidates and runtimes is not None:
            runtime_ns, best = min(candidates, key=lambda pair: pair[0])
            complete = runtimes.complete or len(candidates) == len(configs)
            # The confidence of an incomplete measurement is that of the model's top five, or of its first choice.
            sure = 1.0 if complete else self._confidence(scores, model, 5 if len(candidates) >= 5 else 1)
            return _encode(best, "measured", sure, len(candidates), runtime_ns, runtimes.default_ns)
        if not configs:
            return _encode(Config({}), "default", None)
        if scores is None or model is None:
            return _encode(configs[0], "default", None)
        decision = decide(query.problem, configs, Scores(model.hyper, scores, model.margin))
        return _encode(decision.config, decision.source, self._confidence(scores, model, 1))

    @staticmethod
    def _confidence(scores: Any, model: ModelScores | None, k: int) -> float | None:
        """Return the calibrated probability that the best of the model's top `k` is within one per cent."""
        if scores is None or model is None:
            return None
        probability = confidence(scores, getattr(model.model, "calibration", None), k)
        return None if probability is None else round(probability, 3)

    def _score(self, query: ChoiceQuery) -> tuple[Any, ModelScores | None]:
        """Return the scores of a query's configurations, and the model; (None, None) if there is none."""
        if len(query.configs) < 2:
            return None, None
        model = self._model(query)
        if model is None:
            return None, None
        try:
            return model.scores(query.problem, query.configs), model
        except (
            TilewiseError,
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
        ):  # a problem outside the model's schema
            return None, None

    def _model(self, query: ChoiceQuery) -> ModelScores | None:
        """Load the shipped cost model for a kind of device and its features; None if there is none."""
        kind = query.machine.kind
        key = (kind, tuple(sorted(query.features.items())))
        if key not in self._models:
            margin: dict[str, Any] = {} if kind == "cpu" else {"margin": 0.0}
            model, _ = shipped_scores({"cpu": "cpu"}.get(kind, "h200"), query.machine.identity, kind, **margin)
            if model is not None and kind == "cpu":
                columns = dict.fromkeys((name for name in model.columns if name.startswith("machine_")), 0)
                model = dataclasses.replace(model, machine=columns | dict(query.features) if columns else {})
            if len(self._models) > _MAX_LISTS:
                self._models.clear()
            self._models[key] = model
        return self._models[key]


def _encode(
    config: Config,
    source: str,
    sure: float | None,
    measurements: int = 0,
    runtime_ns: float | None = None,
    default_ns: float | None = None,
) -> EncodedChoice:
    """Encode a choice as JSON, as `models.Choice` describes it."""
    content: dict[str, Any] = {"config": dict(config), "source": source, "sure": sure, "measurements": measurements}
    text = json.dumps(content | {"runtime_ns": runtime_ns, "default_ns": default_ns})
    return EncodedChoice(text.encode(), source, sure)


def measurable_problems(kind: str, problems: Sequence[Problem]) -> list[Problem]:
    """Return those of the problems that the fleet can measure: complete, and of a shipped family."""
    measurable = []
    for problem in problems:
        try:
            if find_family(kind, problem.family).problem(dict(problem)) == problem:
                measurable.append(problem)
        except TilewiseError:
            continue
    return measurable
