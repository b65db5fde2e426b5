"""The work of the service: it answers with configurations, and stores measurements.

The event loop answers from the cache. Everything that needs the store runs on the store's thread. A measurement is
acknowledged only after it is committed to the store.
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

from tilewise.errors import Rejected, TilewiseError, UnavailableError
from tilewise.store.problem import Config, Kernel, Problem
from tilewise.store.store import Machine, Store
from tilewise.web.health import Pulse
from tilewise.web.limits import HOLDER, Rates
from tilewise.web.routes import error_response, parse_object, read_json_text
from tilewise_fleet.service import checks
from tilewise_fleet.service.bodies import ListCache
from tilewise_fleet.service.choices import (
    PROGRAM,
    CachedProblem,
    ChoiceCache,
    ChoiceQuery,
    EncodedChoice,
    measurable_problems,
    read_runtimes,
)
from tilewise_fleet.service.store_thread import StoreThread
from tilewise_fleet.service.tokens import ANY_MACHINE, TokenOwner, find_owner

# All arbitrary: the longest wait for the store, how long a token stays cached, and how long problems are gathered
# before they are queued in one transaction.
_STORE_SECONDS, _TOKEN_SECONDS, _QUEUE_SECONDS = 10.0, 10.0, 0.2
_MAX_TO_QUEUE = 2000  # problems per transaction; arbitrary
_QUEUED_PER_HOUR = 500.0  # problems that one token may queue; arbitrary, a machine measures about a hundred


class Meters:
    """Prometheus metrics of the service."""

    def __init__(self) -> None:
        """Create the metrics in their own registry."""
        self.registry = CollectorRegistry()
        count = Counter("tilewise_choices", "Choices given", ["source"], registry=self.registry)
        self.choices = {source: count.labels(source) for source in ("measured", "model", "default")}
        self.timings = Counter("tilewise_timings", "Timings taken", registry=self.registry)
        self.rejections = Counter("tilewise_refused", "Requests refused", ["code"], registry=self.registry)
        self.queued = Counter("tilewise_queued", "Problems queued for the fleet", ["why"], registry=self.registry)
        self.seconds = Histogram(
            "tilewise_choose_seconds", "Seconds of a request for choices", registry=self.registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
        )  # fmt: skip
        self.waiting = Gauge("tilewise_store_backlog", "Requests that wait for the store", registry=self.registry)


class ChoiceService:
    """The work behind the HTTP routes: choices from cache and store, and new measurements."""

    def __init__(self, where: str, rate: float, tokens: bool) -> None:
        """Open the store at `where`; `rate` limits requests per token, unless `tokens` are off."""
        self.store_thread, self.cache, self.meters = StoreThread(where), ChoiceCache(), Meters()
        self._rates, self._tokens = Rates(rate, 4 * rate), tokens
        self._owners: dict[str, tuple[float, TokenOwner | None]] = {}  # token -> expiry, owner
        self._runs: dict[tuple[str, str], int] = {}  # used by the store's thread only
        self._lists = ListCache()
        self._queue_quota = Rates(_QUEUED_PER_HOUR / 3600, _QUEUED_PER_HOUR)
        self.pulse = Pulse(self._query_health, self._describe_health)
        self._to_queue: list[_QueueItem] = []

    async def from_store(self, work: Any) -> Any:
        """Run a function on the store's thread and wait for its result."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.store_thread.submit(work)), _STORE_SECONDS)
        except TimeoutError:
            raise UnavailableError("the store does not answer; try again in a moment") from None

    def _query_health(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.from_store(lambda store: store.database.read("SELECT 1")))

    def _describe_health(self, _: Any) -> dict[str, Any]:
        return {"status": "ok", "store": self.store_thread.name, "waiting": self.store_thread.backlog}

    async def choose(self, request: Request) -> bytes:
        """Answer a request for choices: return the JSON of a configuration for each of its problems.

        Only requests with a token can queue problems for the fleet, and count for how often a problem is requested.
        """
        start = time.perf_counter()
        queries = self._parse_queries(self._lists.parse(await read_json_text(request)))
        owner = self._owner(request)
        entries = await self._cached_problems(queries)
        choices: list[bytes] = []
        for query, entry in zip(queries, entries, strict=True):
            if choices and query.number not in entry.choices:
                await asyncio.sleep(0)  # a choice that is not cached takes a millisecond: let other requests run
            choices.append(self._choose_one(query, entry, owner).text)
        self.meters.seconds.observe(time.perf_counter() - start)
        return b'{"choices": [%s]}' % b", ".join(choices)

    def _parse_queries(self, content: Mapping[str, Any]) -> list[ChoiceQuery]:
        """Parse a request for choices into one query per problem; raise if it is invalid."""
        unknown = content.keys() - {"device", "problem", "problems", "configs"}
        if unknown:
            raise Rejected(
                "schema", f"a request has a device, problem or problems, and configs; not {min(unknown)[:40]!r}"
            )
        machine, facts = checks.parse_device(content.get("device"))
        one, several = content.get("problem"), content.get("problems")
        if (one is None) == (several is None):
            raise Rejected("schema", "give a problem, or a list of problems")
        items = [one] if several is None else checks.parse_list(several, "problems", checks.MAX_PROBLEMS)
        features, queries = checks.parse_features(facts), []
        for item in items:
            problem = checks.parse_problem(item)
            number, configs = self.cache.configs(content.get("configs"), machine, problem, facts)
            queries.append(ChoiceQuery(machine, problem, configs, number, features))
        return queries

    async def _cached_problems(self, queries: Sequence[ChoiceQuery]) -> list[CachedProblem]:
        """Return the cache entry of each query; missing ones are read from the store together."""
        entries = {query: self.cache.lookup(query) for query in queries}
        missing = [query for query, entry in entries.items() if entry is None or entry.expires < 0]
        if missing:
            rows = await self.from_store(lambda store: [read_runtimes(store, q.machine, q.problem) for q in missing])
            for query, runtimes in zip(missing, rows, strict=True):
                entries[query] = self.cache.update(query, runtimes)
        now = time.monotonic()
        for query, entry in entries.items():
            if entry is not None and 0 < entry.expires < now:
                self._refresh(query, entry)
        return [entry for entry in entries.values() if entry is not None]

    def _choose_one(self, query: ChoiceQuery, entry: CachedProblem, owner: TokenOwner | None) -> EncodedChoice:
        """Choose a configuration for a query, and queue its problem if it should be measured."""
        choice = self.cache.choose(query, entry)
        self.meters.choices[choice.source].inc()
        if owner is not None and owner.may_write(query.machine.partition):
            entry.requests += 1
            why = self.cache.reason_to_measure(query, entry, choice)
            if why is not None:
                self._queue(query, entry, owner, why)
        return choice

    def _refresh(self, query: ChoiceQuery, entry: CachedProblem) -> None:
        """Read an expired cache entry again in the background; the current request uses the old one."""
        entry.expires = time.monotonic() + _STORE_SECONDS
        loop = asyncio.get_running_loop()

        def on_done(future: Future[Any]) -> None:
            if future.exception() is None:
                loop.call_soon_threadsafe(self.cache.update, query, future.result())

        with contextlib.suppress(UnavailableError):
            future = self.store_thread.submit(lambda store: read_runtimes(store, query.machine, query.problem))
            future.add_done_callback(on_done)

    def _queue(self, query: ChoiceQuery, entry: CachedProblem, owner: TokenOwner, why: str) -> None:
        """Queue a problem for the fleet, within the quota of the token.

        Problems are gathered for a moment and written in one transaction, because each transaction waits for the disk.
        Their priorities are negative, below that of planned problems (0); the more requests, the higher.
        """
        if len(self._to_queue) >= _MAX_TO_QUEUE or not self._queue_quota.take(owner.id):
            return
        entry.queued = True
        if not measurable_problems(query.machine.kind, [query.problem]):
            return
        self.meters.queued.labels(why).inc()
        if not self._to_queue:
            asyncio.get_running_loop().call_later(_QUEUE_SECONDS, self._write_queue)
        self._to_queue.append((query.machine, query.problem, -1.0 / entry.requests, why))

    def _write_queue(self) -> None:
        """Write the problems gathered by `_queue` to the store; drop them if it is overloaded."""
        items, self._to_queue = self._to_queue, []
        if items:
            with contextlib.suppress(UnavailableError):
                self.store_thread.submit(lambda store: _queue_problems(store, items))

    def close(self) -> None:
        """Write the problems that wait to be queued, then close the store."""
        self._write_queue()
        self.store_thread.close()

    async def measurements(self, request: Request) -> Response:
        """Validate the measurements of a request, store them, and return their number."""
        owner = self._authenticate(request)
        if not self._rates.take(owner.id):
            raise Rejected("rate", "too many requests in a short time; try again in a moment")
        content = parse_object(await read_json_text(request))
        if content.keys() - {"device", "batches"}:
            raise Rejected("schema", "a request with measurements has a device and batches")
        machine, _ = checks.parse_device(content.get("device"))
        if not owner.may_write(machine.partition):
            raise Rejected(
                "machine", f"this token is for {owner.machine}, and these measurements are of {machine.partition}"
            )
        batches = [
            _parse_batch(item) for item in checks.parse_list(content.get("batches"), "batches", checks.MAX_PROBLEMS)
        ]
        await self.from_store(lambda store: self._add(store, machine, owner, batches))
        for batch in batches:
            self.cache.invalidate(machine, batch[1])
        timings = sum(len(batch[3]) for batch in batches)
        self.meters.timings.inc(timings)
        return JSONResponse({"batches": len(batches), "timings": timings}, 201)

    def _add(self, store: Store, machine: Machine, owner: TokenOwner, batches: list[_Batch]) -> None:
        """Add batches to the run of this machine and token; runs on the store's thread."""
        key = (owner.id, json.dumps([machine.kind, machine.identity, dict(machine.details)], sort_keys=True))
        if key not in self._runs:
            self._runs[key] = store.begin(machine, 0, {"service": True, "token": owner.id})
        store.choose_partition(machine)
        for uid, problem, default_ns, timings in batches:
            store.add_batch(self._runs[key], Kernel(PROGRAM, problem), 0, default_ns, timings, uid=f"{owner.id}/{uid}")

    def refuse(self, error: TilewiseError) -> Response:
        """Convert an error to a response, and count it in the metrics."""
        self.meters.rejections.labels(getattr(error, "code", "") or "refused").inc()
        return error_response(error)

    async def lookup(self, token: str) -> TokenOwner | None:
        """Return the owner of a token; None if it is unknown or revoked."""
        expires, owner = self._owners.get(token, (0.0, None))
        if expires < time.monotonic():
            owner = await self.from_store(lambda store: find_owner(store, token))
            if len(self._owners) > 4096:  # bounds the memory that invalid tokens can take
                self._owners.clear()
            self._owners[token] = (time.monotonic() + _TOKEN_SECONDS, owner)
        return owner

    def _owner(self, request: Request) -> TokenOwner | None:
        """Return the owner of the request's token, which `Limits` has looked up."""
        if not self._tokens:
            return TokenOwner("local", ANY_MACHINE)
        owner: TokenOwner | None = request.scope.get(HOLDER)
        return owner

    def _authenticate(self, request: Request) -> TokenOwner:
        """Return the owner of the request's token; raises an error if the token is missing or unknown."""
        owner = self._owner(request)
        if owner is None:
            unknown = bool(request.headers.get("authorization"))
            sentence = "this request needs a token of the store: Authorization: Bearer tw_…"
            raise Rejected("token", "the token is unknown or was revoked" if unknown else sentence)
        return owner


_QueueItem = tuple[Machine, Problem, float, str]  # machine, problem, priority, reason
_Batch = tuple[str, Problem, float, list[tuple[Config, float]]]  # uid, problem, default ns, timings


def _parse_batch(content: Any) -> _Batch:
    """Validate one batch of measurements."""
    if not isinstance(content, dict) or content.keys() - {"uid", "problem", "default_ns", "timings"}:
        raise Rejected("schema", "a batch has a uid, a problem, default_ns and timings")
    uid, problem = checks.parse_uid(content.get("uid")), checks.parse_problem(content.get("problem"))
    default_ns = checks.parse_runtime(content.get("default_ns"), problem, "default_ns")
    timings = []
    for item in checks.parse_list(content.get("timings"), "timings", checks.MAX_TIMINGS):
        if not isinstance(item, dict) or item.keys() - {"config", "runtime_ns"}:
            raise Rejected("schema", "a timing has a config and runtime_ns")
        runtime_ns = checks.parse_runtime(item.get("runtime_ns"), problem, "runtime_ns")
        checks.check_ratio(runtime_ns, default_ns)
        timings.append((checks.parse_config(item.get("config")), runtime_ns))
    return uid, problem, default_ns, timings


def _queue_problems(store: Store, items: Sequence[_QueueItem]) -> None:
    """Queue problems to be measured (called on the store's thread); skip those of another kind of machine."""
    partitions = None if store.shared else store.partitions()
    groups: dict[tuple[str, float, str], tuple[Machine, list[Kernel]]] = {}
    for machine, problem, priority, why in items:
        if partitions is None or machine.partition in partitions:
            group = groups.setdefault((machine.partition, priority, why), (machine, []))
            group[1].append(Kernel(PROGRAM, problem))
    for (_, priority, why), (machine, kernels) in groups.items():
        store.choose_partition(machine)
        store.plan(kernels, priority=priority, why=why)
