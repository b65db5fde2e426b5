"""What the service does: answers questions, and takes in measurements.

A choice that is known is answered from memory by the event loop; everything that needs the store goes through the desk.
A measurement is acknowledged when it is in the store, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tilewise.errors import Rejected, UnavailableError
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.web.bodies import Lists, parse, read_body
from tilewise.web.rates import Rates
from tilewise_fleet.service import checks
from tilewise_fleet.service.answers import PROGRAM, Answer, Answers, Known, Question, can_be_measured, look_up
from tilewise_fleet.service.desk import Desk
from tilewise_fleet.service.tokens import Holder, holder_of

_SECONDS_FOR_STORE, _SECONDS_TOKEN, _SECONDS_TO_QUEUE = 10.0, 10.0, 0.2
_MOST_TO_QUEUE = 2000


class Meters:
    """What Prometheus is told."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        count = Counter("tilewise_choices", "Choices given", ["source"], registry=self.registry)
        self.choices = {source: count.labels(source) for source in ("measured", "model", "default")}
        self.timings = Counter("tilewise_timings", "Timings taken", registry=self.registry)
        self.refused = Counter("tilewise_refused", "Requests refused", ["code"], registry=self.registry)
        self.queued = Counter("tilewise_queued", "Problems queued for the fleet", ["why"], registry=self.registry)
        self.seconds = Histogram(
            "tilewise_choose_seconds", "Seconds of a request for choices", registry=self.registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
        )  # fmt: skip
        self.waiting = Gauge("tilewise_store_backlog", "Requests that wait for the store", registry=self.registry)


class Service:
    """What the routes do."""

    def __init__(self, where: str, rate: float, tokens: bool) -> None:
        self.desk, self.answers, self.meters = Desk(where), Answers(), Meters()
        self._rates, self._tokens = Rates(rate, 4 * rate), tokens
        self._holders: dict[str, tuple[float, Holder | None]] = {}
        self._runs: dict[tuple[str, str], int] = {}  # of the desk's thread
        self._lists = Lists()
        self._to_queue: list[_Wanted] = []

    async def from_store(self, work: Any) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.desk.put(work)), _SECONDS_FOR_STORE)
        except TimeoutError:
            raise UnavailableError("the store does not answer; try again in a moment") from None

    # Choosing

    async def choose(self, request: Request) -> bytes:
        """The answers to the questions in a body, as JSON."""
        start = time.perf_counter()
        questions = self._questions(self._lists.parse(await read_body(request)))
        known = await self._known(questions)
        choices: list[bytes] = []
        for question, of in zip(questions, known, strict=True):
            if choices and question.number not in of.answers:
                await asyncio.sleep(0)  # working out a choice takes a millisecond: others want theirs
            choices.append(self._choice(question, of).text)
        self.meters.seconds.observe(time.perf_counter() - start)
        return b'{"choices": [%s]}' % b", ".join(choices)

    def _questions(self, content: Mapping[str, Any]) -> list[Question]:
        unknown = content.keys() - {"device", "problem", "problems", "configs"}
        if unknown:
            raise Rejected(
                "schema", f"a question has a device, problem or problems, and configs; not {min(unknown)[:40]!r}"
            )
        machine, facts = checks.device_of(content.get("device"))
        one, several = content.get("problem"), content.get("problems")
        if (one is None) == (several is None):
            raise Rejected("schema", "give a problem, or a list of problems")
        given = [one] if several is None else checks.items_of(several, "problems", checks.MOST_PROBLEMS)
        features, found = checks.features_of(facts), []
        for item in given:
            problem = checks.problem_of(item)
            number, configs = self.answers.configs(content.get("configs"), machine, problem, facts)
            found.append(Question(machine, problem, configs, number, features))
        return found

    async def _known(self, questions: Sequence[Question]) -> list[Known]:
        """What is known of each problem; the store is asked once for all that nobody asked about before."""
        found = {question: self.answers.remembered(question) for question in questions}
        new = [question for question, known in found.items() if known is None or known.until < 0]
        if new:
            looked = await self.from_store(lambda store: [look_up(store, q.machine, q.problem) for q in new])
            for question, measured in zip(new, looked, strict=True):
                found[question] = self.answers.remember(question, measured)
        now = time.monotonic()
        for question, known in found.items():
            if known is not None and 0 < known.until < now:
                self._look_again(question, known)
        return [known for known in found.values() if known is not None]

    def _choice(self, question: Question, known: Known) -> Answer:
        answer = self.answers.answer(question, known)
        self.meters.choices[answer.source].inc()
        why = self.answers.wants_measuring(question, known, answer)
        if why is not None:
            self._queue(question, known, why)
        return answer

    def _look_again(self, question: Question, known: Known) -> None:
        """Ask the store behind whoever asks now; the next one is told."""
        known.until = time.monotonic() + _SECONDS_FOR_STORE
        loop = asyncio.get_running_loop()

        def take(future: Future[Any]) -> None:
            if future.exception() is None:
                loop.call_soon_threadsafe(self.answers.remember, question, future.result())

        with contextlib.suppress(UnavailableError):
            self.desk.put(lambda store: look_up(store, question.machine, question.problem)).add_done_callback(take)

    def _queue(self, question: Question, known: Known, why: str) -> None:
        """Have a problem measured. Those of a moment are written together: each by itself would wait for the disk."""
        known.queued = True
        if len(self._to_queue) >= _MOST_TO_QUEUE or not can_be_measured(question.machine.kind, [question.problem]):
            return
        self.meters.queued.labels(why).inc()
        if not self._to_queue:
            asyncio.get_running_loop().call_later(_SECONDS_TO_QUEUE, self._write_queue)
        self._to_queue.append((question.machine, question.problem, 1.0 + known.asked, why))

    def _write_queue(self) -> None:
        wanted, self._to_queue = self._to_queue, []
        if wanted:
            with contextlib.suppress(UnavailableError):
                self.desk.put(lambda store: _plan(store, wanted))

    def close(self) -> None:
        """Finish what was begun."""
        self._write_queue()
        self.desk.close()

    # Measurements

    async def measurements(self, request: Request) -> Response:
        holder = await self._holder(request)
        if not self._rates.take(holder.id):
            raise Rejected("rate", "these are too many requests in a short time; try again in a moment")
        content = parse(await read_body(request))
        if content.keys() - {"device", "batches"}:
            raise Rejected("schema", "measurements are a device and batches")
        machine, _ = checks.device_of(content.get("device"))
        if not holder.may_write(machine.partition):
            raise Rejected("machine", f"this token is for {holder.machine}, and these are of {machine.partition}")
        batches = [_batch(item) for item in checks.items_of(content.get("batches"), "batches", checks.MOST_PROBLEMS)]
        await self.from_store(lambda store: self._add(store, machine, holder, batches))
        for batch in batches:
            self.answers.forget(machine, batch[1])
        timings = sum(len(batch[3]) for batch in batches)
        self.meters.timings.inc(timings)
        return JSONResponse({"batches": len(batches), "timings": timings}, 201)

    def _add(self, store: Store, machine: Machine, holder: Holder, batches: list[_Batch]) -> None:
        """On the desk: a run of this token and machine, and the batches in it."""
        key = (holder.id, json.dumps([machine.kind, machine.identity, dict(machine.details)], sort_keys=True))
        if key not in self._runs:
            self._runs[key] = store.begin(machine, 0, {"service": True, "token": holder.id})
        store.choose_partition(machine)
        for uid, problem, default_ns, timings in batches:
            store.add_batch(self._runs[key], Kernel(PROGRAM, problem), 0, default_ns, timings, uid=f"{holder.id}/{uid}")

    async def _holder(self, request: Request) -> Holder:
        if not self._tokens:
            return Holder("local", "*")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(token) <= 200:
            raise Rejected("token", "this needs a token of the store: Authorization: Bearer tw_…")
        until, holder = self._holders.get(token, (0.0, None))
        if until < time.monotonic():
            holder = await self.from_store(lambda store: holder_of(store, token))
            if len(self._holders) > 4096:
                self._holders.clear()
            self._holders[token] = (time.monotonic() + _SECONDS_TOKEN, holder)
        if holder is None:
            raise Rejected("token", "the store does not know this token, or it was revoked")
        return holder


_Wanted = tuple[Machine, Problem, float, str]
_Batch = tuple[str, Problem, float, list[tuple[Config, float]]]


def _batch(given: Any) -> _Batch:
    if not isinstance(given, dict) or given.keys() - {"uid", "problem", "default_ns", "timings"}:
        raise Rejected("schema", "a batch has a uid, a problem, default_ns and timings")
    uid, problem = checks.uid_of(given.get("uid")), checks.problem_of(given.get("problem"))
    default_ns = checks.runtime_of(given.get("default_ns"), problem, "default_ns")
    timings = []
    for item in checks.items_of(given.get("timings"), "timings", checks.MOST_TIMINGS):
        if not isinstance(item, dict) or item.keys() - {"config", "runtime_ns"}:
            raise Rejected("schema", "a timing has a config and runtime_ns")
        runtime_ns = checks.runtime_of(item.get("runtime_ns"), problem, "runtime_ns")
        checks.ratio_checked(runtime_ns, default_ns)
        timings.append((checks.config_of(item.get("config")), runtime_ns))
    return uid, problem, default_ns, timings


def _plan(store: Store, wanted: Sequence[_Wanted]) -> None:
    """On the desk: queue problems for the fleet. A file has one machine's kernels alone."""
    parts = None if store.shared else store.partitions()
    groups: dict[tuple[str, float, str], tuple[Machine, list[Kernel]]] = {}
    for machine, problem, priority, why in wanted:
        if parts is None or machine.partition in parts:
            group = groups.setdefault((machine.partition, priority, why), (machine, []))
            group[1].append(Kernel(PROGRAM, problem))
    for (_, priority, why), (machine, kernels) in groups.items():
        store.choose_partition(machine)
        store.plan(kernels, priority=priority, why=why)
