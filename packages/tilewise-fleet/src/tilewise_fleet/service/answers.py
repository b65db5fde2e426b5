"""Which configuration to use: what the store knows, else what the model expects, each with how sure that is.

`sure` is a probability: that the choice is within one per cent of the best of the configurations given. What was asked
for is remembered; a problem whose answer is unsure, or that many ask for and nobody has measured, is queued for the
fleet, and once that has measured it the next answer is better. The store is looked into again behind whoever asks, so
that an answer that is known never waits.
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
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import FixedScores, ModelScores, shipped_scores
from tilewise.tune.families.registry import find_family
from tilewise_fleet.service.checks import configs_of

PROGRAM = "asked"
UNSURE, POPULAR = 0.5, 20  # below such a probability, and from so many questions on, a problem is queued
_MOST_KNOWN, _MOST_LISTS = 200_000, 64
SECONDS_KNOWN = 5.0  # before the store is looked into again


@dataclass(frozen=True)
class Measured:
    """What a store says of one problem."""

    runtime_ns: Mapping[Config, float]
    default_ns: float | None
    whole: bool  # every planned configuration was measured


@dataclass(frozen=True)
class Answer:
    """A choice as it is sent, and what the service itself wants to know of it."""

    text: bytes  # JSON
    source: str
    sure: float | None


@dataclass
class Known:
    """One problem of one kind of machine, as far as it was looked into."""

    measured: Measured | None
    until: float  # when the store is asked again
    asked: int = 0
    queued: bool = False
    answers: dict[int, Answer] = field(default_factory=dict)  # by list of configurations


@dataclass(eq=False)
class Question:
    machine: Machine
    problem: Problem
    configs: tuple[Config, ...]
    number: int  # of the list of configurations
    features: Mapping[str, int]

    @property
    def key(self) -> tuple[str, str]:
        return self.machine.partition, self.problem.key


def look_up(store: Store, machine: Machine, problem: Problem) -> Measured | None:
    """The runtimes of a problem in the store; None where it has none."""
    store.choose_partition(machine)
    kernel = Kernel(PROGRAM, problem)
    if not store.has_kernel(kernel) or (not store.shared and machine.partition not in store.partitions()):
        return None
    default = store.default_config(kernel)
    found = measured_problem(store, kernel, default) if default is not None else None
    if found is not None:
        times = {timing.config: timing.runtime_ns for timing in found.timings}
        return Measured(times, found.default_ns, True)
    taken: dict[Config, list[float]] = {}
    defaults = []
    for batch in store.batches(kernel):
        defaults.append(batch.default_ns)
        for key, runtime_ns in batch.runtime_ns.items():
            taken.setdefault(store.config_of(key), []).append(runtime_ns)
    if not taken:
        return None
    return Measured({c: statistics.median(times) for c, times in taken.items()}, statistics.median(defaults), False)


class Answers:
    """What is known, and the models. Used by one thread, the event loop's."""

    def __init__(self, most_known: int = _MOST_KNOWN) -> None:
        self.known: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self._most = most_known
        self._lists: OrderedDict[bytes, tuple[int, tuple[Config, ...]]] = OrderedDict()
        self._objects: dict[int, tuple[Any, tuple[int, Any]]] = {}  # lists that came before as the very same object
        self._count = 0
        self._models: dict[tuple[Any, ...], ModelScores | None] = {}

    # Questions

    def configs(self, given: Any, machine: Machine, problem: Problem, facts: Mapping[str, Any]) -> tuple[int, Any]:
        """A list of configurations, the same object for the same list; a number stands for it."""
        if given is None:
            return self._family_list(machine, problem, facts)
        last = self._objects.get(id(given))
        if last is not None and last[0] is given:
            return last[1]
        if len(self._objects) >= _MOST_LISTS:
            self._objects.clear()
        self._objects[id(given)] = given, self._equal_list(given)
        return self._objects[id(given)][1]

    def _equal_list(self, given: Any) -> tuple[int, Any]:
        try:
            key = marshal.dumps(given, 2)  # without references: equal lists have equal bytes
        except ValueError:
            raise Rejected("schema", "configs is a list of configurations, the default first") from None
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = self._numbered(configs_of(given))
            if len(self._lists) > _MOST_LISTS:
                self._lists.popitem(last=False)
        return found

    def _numbered(self, configs: tuple[Config, ...]) -> tuple[int, tuple[Config, ...]]:
        self._count += 1
        return self._count, configs

    def _family_list(self, machine: Machine, problem: Problem, facts: Mapping[str, Any]) -> tuple[int, Any]:
        """Every configuration of a family. A CPU's depend on its instruction set, a compiler's templates on its
        version: there, those that were measured."""
        if machine.kind == "cpu" or problem.family == COMPILER:
            return 0, ()
        try:
            family = find_family(machine.kind, problem.family)
            problem = family.problem(dict(problem))
            every = family.configs(problem)
        except ConfigurationError as error:
            raise Rejected("schema", str(error)) from None
        shared_bytes = facts.get("shared_bytes", H200.shared_bytes_per_block)
        if type(shared_bytes) is not int:
            raise Rejected("schema", "device.shared_bytes is a whole number")
        fits_by = tuple(problem[name] for name in getattr(family, "fits_by", problem))
        key = marshal.dumps(("family", problem.family, fits_by, shared_bytes), 2)
        if key not in self._lists:
            fitting = tuple(c for c in every if family.misfit(problem, c, shared_bytes) is None)
            if not fitting:
                raise Rejected("schema", f"no configuration of {problem.family} fits so little shared memory")
            self._lists[key] = self._numbered(fitting)
        return self._lists[key]

    def remembered(self, question: Question) -> Known | None:
        found = self.known.get(question.key)
        if found is not None:
            found.asked += 1
        return found

    def remember(self, question: Question, measured: Measured | None) -> Known:
        """Take in what the store said a moment ago."""
        now = time.monotonic()
        found = self.known.get(question.key)
        if found is None:
            found = self.known[question.key] = Known(measured, now + SECONDS_KNOWN, 1)
            if len(self.known) > self._most:
                self.known.popitem(last=False)
        elif found.measured != measured:
            found.measured, found.answers = measured, {}
            found.queued = found.queued and measured is None
        found.until = now + SECONDS_KNOWN
        return found

    def forget(self, machine: Machine, problem: Problem) -> None:
        """Something was measured: the next question waits for what the store says now."""
        found = self.known.get((machine.partition, problem.key))
        if found is not None:
            found.until = -1.0

    # Answers

    def answer(self, question: Question, known: Known) -> Answer:
        found = known.answers.get(question.number)
        if found is None:
            found = self._decided(question, known.measured)
            if len(known.answers) >= 4:
                known.answers.clear()
            known.answers[question.number] = found
        return found

    def wants_measuring(self, question: Question, known: Known, answer: Answer) -> str | None:
        """Why a problem should be measured, if it should and nobody has been told yet."""
        if known.queued or known.measured is not None or len(question.configs) < 2:
            return None
        if answer.sure is None or answer.sure < UNSURE:
            return "unsure"
        return "popular" if known.asked >= POPULAR else None

    def _decided(self, question: Question, measured: Measured | None) -> Answer:
        configs, times = question.configs, {} if measured is None else measured.runtime_ns
        here = [(times[config], config) for config in configs or times if config in times] if times else []
        scores, model = self._scored(question)
        if here and measured is not None:
            runtime_ns, best = min(here, key=lambda pair: pair[0])
            whole = measured.whole or len(here) == len(configs)
            sure = 1.0 if whole else self._sure(scores, model, 5 if len(here) >= 5 else 1)
            return _told(best, "measured", sure, len(here), runtime_ns, measured.default_ns)
        if not configs:
            return _told(Config({}), "default", None, 0, None, None)
        if scores is None or model is None:
            return _told(configs[0], "default", None, 0, None, None)
        decision = decide(question.problem, configs, FixedScores(model.hyper, scores, model.margin))
        return _told(decision.config, decision.source, self._sure(scores, model, 1), 0, None, None)

    @staticmethod
    def _sure(scores: Any, model: ModelScores | None, k: int) -> float | None:
        if scores is None or model is None:
            return None
        found = confidence(scores, getattr(model.model, "calibration", None), k)
        return None if found is None else round(found, 3)

    def _scored(self, question: Question) -> tuple[Any, ModelScores | None]:
        if len(question.configs) < 2:
            return None, None
        model = self._model(question)
        if model is None:
            return None, None
        try:
            return model.scores(question.problem, question.configs), model
        except (TilewiseError, LookupError, TypeError, ValueError, ArithmeticError):  # not a problem that it knows
            return None, None

    def _model(self, question: Question) -> ModelScores | None:
        kind = question.machine.kind
        key = (kind, tuple(sorted(question.features.items())))
        if key not in self._models:
            margin: dict[str, Any] = {} if kind == "cpu" else {"margin": 0.0}
            found, _ = shipped_scores({"cpu": "cpu"}.get(kind, "h200"), question.machine.identity, kind, **margin)
            if found is not None and kind == "cpu":
                columns = dict.fromkeys((name for name in found.columns if name.startswith("machine_")), 0)
                found = dataclasses.replace(found, machine=columns | dict(question.features) if columns else {})
            if len(self._models) > _MOST_LISTS:
                self._models.clear()
            self._models[key] = found
        return self._models[key]


def _told(
    config: Config,
    source: str,
    sure: float | None,
    measurements: int,
    runtime_ns: float | None,
    default_ns: float | None,
) -> Answer:
    found: dict[str, Any] = {"config": dict(config), "source": source, "sure": sure, "measurements": measurements}
    text = json.dumps(found | {"runtime_ns": runtime_ns, "default_ns": default_ns})
    return Answer(text.encode(), source, sure)


def can_be_measured(kind: str, problems: Sequence[Problem]) -> list[Problem]:
    """Those that the fleet knows how to run: of a family that comes with tilewise, and described in full."""
    found = []
    for problem in problems:
        try:
            if find_family(kind, problem.family).problem(dict(problem)) == problem:
                found.append(problem)
        except TilewiseError:
            continue
    return found
