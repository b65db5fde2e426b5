"""The application: choices and measurements over one store.

A choice that is known is answered from memory by the event loop; everything that needs the store goes through the desk.
A measurement is acknowledged when it is in the store, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

from tilewise.errors import TilewiseError, UnavailableError

try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from starlette.exceptions import HTTPException

    from tilewise.bench.server.rates import Rates
except ImportError as error:
    raise UnavailableError(f"a service needs {error.name}: pip install 'tilewise[server]'") from None

from tilewise.bench.errors import Rejected
from tilewise.fleet.service import checks, models
from tilewise.fleet.service.answers import PROGRAM, Answers, Known, Question, can_be_measured, look_up
from tilewise.fleet.service.desk import Desk
from tilewise.fleet.service.tokens import Holder, holder_of
from tilewise.tune.measure.store import Machine, Store
from tilewise.tune.problem import Config, Kernel, Problem

MOST_BODY = 1 << 20
_STATUS = {"token": 401, "machine": 403, "too large": 413, "rate": 429}
_SECONDS_FOR_STORE, _SECONDS_FOR_BODY, _SECONDS_TOKEN = 10.0, 20.0, 10.0
_ABOUT = "Which configuration a kernel should use: from what the fleet has measured, else from the cost model."
_SPELLED = {
    400: "not understood",
    401: "no token, or one that is not known",
    403: "another machine's token",
    413: "too large",
    429: "too much at once",
    503: "the store does not answer now",
}


def create_app(where: str, *, rate: float = 50.0, tokens: bool = True) -> FastAPI:
    """The service over the store at `where`. `rate` is how many requests a second one token may send measurements
    with; without `tokens` anybody may send them, which is for trying things on one machine."""
    service = Service(where, rate, tokens)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.desk.close()

    app = FastAPI(title="tilewise service", description=_ABOUT, version="1", lifespan=lifespan, redoc_url=None)
    _route(app, service)
    app.add_exception_handler(TilewiseError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    return app


def _refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": models.Refusal, "description": _SPELLED[code]} for code in codes}


def _takes(model: type[Any], secured: bool = False) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body} | ({"security": [{"token": []}]} if secured else {})


def _route(app: FastAPI, service: Service) -> None:
    @app.post("/choose", response_model=models.Choices, responses=_refusals(400, 413, 503),
              openapi_extra=_takes(models.ChooseRequest))  # fmt: skip
    async def choose(request: Request) -> Response:
        """The configuration to use, at once: measured, or what the model expects; and how sure that is."""
        return await service.choose(request)

    @app.post("/measurements", response_model=models.Taken, status_code=201,
              responses=_refusals(400, 401, 403, 413, 429, 503),
              openapi_extra=_takes(models.Measurements, secured=True))  # fmt: skip
    async def measurements(request: Request) -> Response:
        """Add what was measured. Answered when it is in the store."""
        return await service.measurements(request)

    @app.get("/health", response_model=models.Health, responses=_refusals(503))
    async def health() -> models.Health:
        """Whether the store answers, and how much waits for it."""
        await service.from_store(lambda store: store.home.read("SELECT 1"))
        return models.Health(status="ok", store=service.desk.name, waiting=service.desk.backlog)

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def metrics() -> Response:
        """For Prometheus."""
        service.meters.waiting.set(service.desk.backlog)
        return Response(generate_latest(service.meters.registry), media_type=CONTENT_TYPE_LATEST)

    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        parts = document.setdefault("components", {})
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for model in (models.ChooseRequest, models.Measurements):
            for name, schema in model.model_json_schema(ref_template="#/components/schemas/{model}")["$defs"].items():
                parts.setdefault("schemas", {}).setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


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
        self._behind: set[Future[Any]] = set()

    async def from_store(self, work: Any) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.desk.put(work)), _SECONDS_FOR_STORE)
        except TimeoutError:
            raise UnavailableError("the store does not answer; try again in a moment") from None

    # Choosing

    async def choose(self, request: Request) -> Response:
        start = time.perf_counter()
        content = _parsed(await _body(request))
        questions = self._questions(content)
        choices = [await self._choice(question) for question in questions]
        self.meters.seconds.observe(time.perf_counter() - start)
        return Response(json.dumps({"choices": choices}), media_type="application/json")

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

    async def _choice(self, question: Question) -> dict[str, Any]:
        known = self.answers.remembered(question)
        if known is None or known.until < 0:
            measured = await self.from_store(lambda store: look_up(store, question.machine, question.problem))
            known = self.answers.remember(question, measured)
        elif known.until < time.monotonic():
            self._look_again(question, known)
        answer = self.answers.answer(question, known)
        self.meters.choices[answer["source"]].inc()
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
        known.queued = True
        machine, problems = question.machine, can_be_measured(question.machine.kind, [question.problem])
        if not problems:
            return
        self.meters.queued.labels(why).inc()

        def work(store: Store) -> None:
            if not store.shared and machine.part not in store.parts():
                return
            store.choose_part(machine)
            store.plan([Kernel(PROGRAM, problem) for problem in problems], priority=1.0 + known.asked, why=why)

        with contextlib.suppress(UnavailableError):
            self.desk.put(work)

    # Measurements

    async def measurements(self, request: Request) -> Response:
        holder = await self._holder(request)
        if not self._rates.take(holder.id):
            raise Rejected("rate", "these are too many requests in a short time; try again in a moment")
        content = _parsed(await _body(request))
        if content.keys() - {"device", "batches"}:
            raise Rejected("schema", "measurements are a device and batches")
        machine, _ = checks.device_of(content.get("device"))
        if not holder.may_write(machine.part):
            raise Rejected("machine", f"this token is for {holder.machine}, and these are of {machine.part}")
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
        store.choose_part(machine)
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


async def _body(request: Request) -> bytes:
    """The body, refused before it is read where it says that it is too long, and cut off where it does not say."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Rejected("schema", "this takes application/json")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 9 or int(declared) > MOST_BODY:
        raise Rejected("too large", f"a request may bring {MOST_BODY:,} bytes at most")
    content = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS_FOR_BODY):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BODY:
                    break
            else:
                return bytes(content)
    raise Rejected("too large", f"a request may bring {MOST_BODY:,} bytes at most, and soon")


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Rejected("schema", "the body is a JSON object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(name)


async def _on_error(request: Request, error: Exception) -> Response:
    code = getattr(error, "code", "")
    status = 503 if isinstance(error, UnavailableError) else _STATUS.get(code, 400)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status in (429, 503):
        headers["Retry-After"] = "2"
    if status == 413:
        headers["Connection"] = "close"
    return JSONResponse({"detail": str(error), "code": code or "refused"}, status, headers)


async def _on_invalid(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": "the request is not understood", "code": "schema"}, 400)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": str(error.detail), "code": str(error.status_code)}, error.status_code, error.headers)
